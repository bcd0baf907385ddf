//! The lists of tests: those that run on every device, those that run on two devices, and those that are left out.

use dsv4_kv::device::{Backend, Device};

use crate::{attention, compress, decode, device, gather, indexer, linear, router, step, window};

/// A test of the suite: its name, and a function that panics if it fails.
pub type Case<B> = (&'static str, fn(&Device<B>));
/// A test of two devices of one kind: on one GPU, or both emulated.
pub type Pair<B> = (&'static str, fn(&Device<B>, &Device<B>));

/// Tests that take two devices.
pub fn pairs<B: Backend>() -> Vec<Pair<B>> {
    vec![
        (
            "device::identity::foreign_objects_are_refused",
            device::identity::foreign_objects_are_refused,
        ),
        ("device::identity::threads_on_two_devices", device::identity::threads_on_two_devices),
        (
            "step::moved_kinds::caches_refuse_what_they_cannot_hold",
            step::moved_kinds::caches_refuse_what_they_cannot_hold,
        ),
    ]
}

macro_rules! suite {
    ($(#[$doc:meta])* $name:ident: $($group:ident::$file:ident { $($test:ident,)* })*) => {
        $(#[$doc])*
        pub fn $name<B: Backend>() -> Vec<Case<B>> {
            vec![$( $( (
                concat!(stringify!($group), "::", stringify!($file), "::", stringify!($test)),
                $group::$file::$test::<B>,
            ), )* )*]
        }
    };
}

mod left_out;

pub use left_out::{by_hand, large, long};

suite! {
    /// Tests that run on every device.
    suite:
    device::memory {
        copies_bring_back_what_they_took,
        ranges_outside_a_buffer_are_refused,
        buffers_of_an_arena_are_aligned_and_apart,
        exhausted_memory_is_a_typed_error,
        staged_updates_arrive_in_order,
        events_time_what_lies_between_them,
    }
    device::digests {
        sections_have_the_digests_of_their_bytes,
        sections_beyond_the_payload_are_refused,
    }
    device::host_units {
        what_is_stored_comes_back,
        wrong_sizes_of_units_are_refused,
        what_is_dropped_in_a_capture_comes_back,
    }
    device::capture {
        allocating_or_waiting_is_refused,
        a_swallowed_refusal_still_fails_the_capture,
        memory_must_be_retained,
        a_graph_keeps_its_memory,
        captures_do_not_nest,
    }
    device::rules {
        casts_keep_every_byte,
        sizes_of_any_kind_are_typed_errors,
        misaligned_operands_are_refused,
        outputs_that_overlap_are_refused,
        a_panic_ends_the_capture,
        what_is_dropped_in_a_capture_is_freed_after_it,
        a_stream_waits_for_an_event,
        threads_replay_one_graph,
    }
    attention::decode {
        windows_equal_the_oracle,
        lists_equal_the_oracle,
        lists_end_where_entries_do,
        all_entries_equal_the_oracle,
        many_tiles_equal_the_oracle,
        a_query_has_the_same_bits_in_every_batch,
        wrong_entries_are_counted,
        negative_positions_are_refused,
        no_queries_are_nothing,
    }
    attention::needles {
        every_key_can_dominate,
        every_own_row_can_dominate,
        own_rows_equal_the_oracle,
    }
    attention::splits {
        splits_equal_the_oracle,
        keys_of_every_split_can_dominate,
        splits_have_the_same_bits_in_every_batch,
        a_split_may_be_lost_or_nan,
        raw_queries_and_own_rows_have_splits,
        splits_without_memory_are_refused,
    }
    attention::consecutive {
        a_chunk_has_the_same_bits,
        other_queries_have_the_same_bits,
        a_query_that_is_not_valid_follows_nobody,
        every_key_of_a_follower_can_dominate,
        results_near_zero_have_the_same_bits,
        the_new_row_may_be_nan_or_wide,
        random_steps_have_the_same_bits,
    }
    attention::spread {
        spread_queries_have_the_same_bits,
        far_scores_have_the_same_bits,
        scores_far_below_have_the_same_bits,
        results_near_zero_have_the_same_bits,
        a_nan_in_either_half_is_not_hidden,
    }
    attention::mixed {
        queries_that_are_not_valid_change_no_bit,
    }
    attention::queries {
        raw_queries_are_normed_and_rotated,
        no_number_reaches_another_head,
    }
    attention::refusals {
        what_does_not_fit_is_refused_by_name,
    }
    attention::values {
        no_number_reaches_another_request,
        a_nan_code_is_a_nan,
        every_scale_equals_the_oracle,
        scores_may_rise_by_any_power,
        an_infinite_sum_stays_in_its_channel,
    }
    attention::steps {
        steps_equal_the_oracle,
        a_query_has_the_same_bits_in_every_step,
        long_contexts_change_no_bit,
        no_number_reaches_another_request,
        bad_calls_are_refused,
        some_batches_have_the_same_bits,
    }
    window::swa {
        append_writes_the_golden_rows,
        append_equals_the_oracle_on_random_and_special_rows,
        append_rounds_every_bf16_value_as_the_oracle,
        append_leaves_padding_and_other_rows_alone,
        append_counts_rows_out_of_range,
        gather_decodes_every_code_under_every_scale,
        gather_equals_the_oracle_in_decode,
        gather_equals_the_oracle_in_prefill,
        gather_leaves_padding_alone,
        gather_counts_slots_out_of_range,
        gather_counts_negative_positions,
    }
    compress::entries {
        work_lists_name_every_closing_token,
        entries_equal_transformers,
        the_wrong_rotation_does_not_pass,
        entries_equal_the_oracle_and_no_cut_matters,
        a_chunk_writes_the_rows_that_steps_need,
        a_nan_spoils_its_window_alone,
        rejected_tokens_change_no_entry,
        requests_in_one_step_do_not_mix,
    }
    compress::flush {
        flush_writes_the_golden_rows,
        flush_equals_the_oracle_in_every_format,
        flush_of_hca_entries_equals_the_oracle,
        flush_counts_windows_without_a_block,
        flush_counts_windows_without_their_tokens,
    }
    compress::refusals {
        short_rings_are_refused,
    }
    compress::state {
        a_view_shows_the_state,
        rows_move_to_their_phase,
    }
    compress::values {
        main_rows_equal_the_oracle,
        indexer_keys_equal_the_oracle,
    }
    decode::one_launch {
        one_launch_equals_the_separate_kernels,
        drafts_across_every_boundary,
        a_second_token_of_a_request_is_refused,
    }
    decode::early {
        the_step_is_what_the_launch_before_leaves,
    }
    decode::refusals {
        what_does_not_fit_is_refused_by_name,
    }
    gather::lists {
        lists_equal_the_oracle,
        a_long_list_equals_the_oracle,
        lists_count_what_they_refuse,
        a_table_that_is_too_narrow_is_counted,
        all_equals_the_oracle,
        all_counts_what_it_cannot_give,
        far_positions_equal_the_oracle,
        entry_counts_equal_the_oracle,
        a_pool_over_4_gib_equals_the_oracle,
        wrong_shapes_are_refused,
    }
    indexer::query {
        queries_equal_the_oracle,
        queries_of_distant_groups_equal_the_oracle,
    }
    indexer::query_product {
        one_launch_equals_two,
        one_launch_of_many_tokens_equals_two,
        wrong_weights_are_refused,
    }
    indexer::batches {
        scores_and_lists_have_the_same_bits,
    }
    indexer::scores {
        scores_equal_the_oracle,
        few_heads_equal_the_oracle,
        scores_count_what_they_refuse,
        blocks_of_many_tiles_equal_the_oracle,
        long_rows_equal_the_oracle,
        runs_of_queries_equal_the_oracle,
        distant_groups_equal_the_oracle,
        a_score_does_not_depend_on_keys_beside_it,
        scales_of_any_size_are_exact,
    }
    indexer::extremes {
        small_products_keep_the_fp8_limit,
        very_distant_groups_count_as_zero,
    }
    indexer::topk {
        lists_equal_a_stable_sort,
        long_rows_equal_a_stable_sort,
        short_uses_of_long_rows_equal_a_stable_sort,
        crowds_equal_a_stable_sort,
        lists_of_many_queries_equal_a_stable_sort,
        rows_shorter_than_lists_are_listed_in_order,
        golden_scores_give_the_golden_lists,
        a_refused_selection_writes_no_maxima,
        wrong_sizes_are_refused,
    }
    indexer::score_topk {
        lists_equal_a_stable_sort,
        long_rows_equal_a_stable_sort,
        crowds_equal_a_stable_sort,
        distant_queries_equal_a_stable_sort,
        bad_input_is_refused,
    }
    indexer::refusals {
        numbers_out_of_range_are_refused_by_name,
    }
    indexer::loaded {
        an_indexer_is_exact_and_padded,
        an_indexer_in_nvfp4_stays_so,
        compressors_are_loaded,
    }
    indexer::select {
        lists_equal_the_oracle,
        lists_by_four_bit_weights_equal_the_oracle,
        one_launch_lists_as_two,
        queries_that_share_keys_list_as_alone,
        threads_share_a_workspace,
        bad_input_is_refused,
    }
    linear::bf16 {
        products_equal_the_oracle,
        products_of_integers_are_exact,
        a_token_has_the_same_bits_in_every_batch,
        what_is_no_number_stays_in_its_row,
        wrong_sizes_are_refused,
    }
    linear::product {
        products_equal_the_oracle,
        every_code_under_every_scale_is_exact,
        a_token_has_the_same_bits_in_every_batch,
        what_is_no_number_stays_in_its_row,
        wrong_sizes_are_refused,
    }
    linear::quantise {
        quantisation_equals_the_oracle,
        decoded_weights_are_quantised_to_themselves,
        wrong_weights_are_refused,
    }
    router::selection {
        selection_equals_the_golden_rows,
        hash_equals_the_golden_rows,
        selection_equals_the_oracle,
        hash_equals_the_oracle,
        equal_scores_go_to_the_lower_expert,
        what_is_no_number_ranks_last_and_is_counted,
        padding_and_unknown_tokens_get_no_expert,
        wrong_shapes_are_refused,
    }
    router::decode {
        decode_equals_the_oracle,
        hashed_decode_equals_the_oracle,
        released_widths_equal_the_oracle,
        exact_logits_give_the_same_bits,
        padding_in_a_batch_gets_no_expert,
        wrong_shapes_are_refused,
    }
    router::batches {
        a_token_has_the_same_bits_in_every_batch,
    }
    router::api {
        batches_of_every_size_equal_the_oracle,
        products_end_where_the_matrices_do,
        captured_routing_equals_eager,
        streams_follow_each_other,
        wrong_files_are_refused,
        wrong_calls_are_refused,
    }
    step::manager {
        any_chunking_gives_the_same_rows,
        rejected_drafts_leave_no_trace,
        interleaved_requests_do_not_mix,
        memory_is_what_the_schema_says,
        faults_name_every_kernel,
        fused_layers_count_ring_rows_out_of_range,
        nothing_behind_a_steps_sections_is_read,
        a_step_out_of_range_is_refused,
    }
    step::layers {
        every_layer_holds_what_the_history_says,
        gathers_equal_the_oracle,
        a_captured_step_equals_eager_steps,
        a_captured_fused_step_equals_eager_steps,
        rejected_drafts_leave_no_trace,
    }
    step::checkpoints {
        a_copy_moves_every_byte_it_names,
        a_restored_request_goes_on_as_if_alone,
        stale_rows_are_found,
        a_leaked_step_is_rejected_before_a_restore,
        a_block_of_rejected_drafts_does_not_prevent_a_restore,
        what_cannot_be_copied_changes_nothing,
        jobs_out_of_range_are_counted,
        copies_without_memory_are_refused,
        rows_that_no_checkpoint_has_are_refused,
    }
    step::reuse {
        reuse_equals_computing,
        the_next_turn_goes_on_from_the_answer,
        a_branch_point_is_reused_by_the_third,
        the_same_prompt_twice_at_once,
        a_request_goes_on_from_its_own_checkpoint,
        a_save_evicts_what_nobody_uses,
        what_is_evicted_is_computed_again,
    }
    step::exact {
        some_boundaries,
        some_triples,
    }
    step::tiers {
        what_the_device_lost_comes_back,
        what_the_device_has_is_not_moved,
        host_memory_evicts_what_nobody_uses,
        draft_windows_come_back_if_they_were_saved,
    }
    step::saves {
        any_cut_saves_the_same,
        only_what_is_committed_is_saved,
        draft_windows_that_were_not_saved_are_zero,
        draft_windows_that_are_overwritten_are_not_saved,
    }
    step::forks {
        forks_go_on_by_themselves,
        a_suspended_request_goes_on_elsewhere,
        forks_and_suspended_requests_share_the_tree,
        what_cannot_fork_changes_nothing,
    }
    step::small_steps {
        long_tables_are_entered,
    }
    step::moves {
        a_request_moves_at_every_phase,
        blocks_go_in_rounds,
        what_cannot_move_changes_nothing,
        reserved_room_is_nobodys,
        rejected_tokens_do_not_move,
        refused_imports_evict_nothing,
    }
    step::moved_kinds {
        requests_of_every_format_move,
        forks_move,
        requests_with_shared_prefixes_move,
    }
    step::moved_prefixes {
        prompts_go_on_from_what_came,
        what_is_here_stays,
        what_came_goes_to_host_memory,
        prefixes_go_back_and_forth,
        what_cannot_come_changes_nothing,
    }
    step::cuts {
        some_lengths,
    }
    step::histories {
        some_rollbacks_leave_no_trace,
        some_interleavings_do_not_mix,
    }
    step::rotary {
        entries_turn_by_the_models_frequencies,
    }
    step::draft {
        drafts_run_ahead_of_an_open_step,
        groups_are_kept_apart,
        a_step_is_told_its_own_faults,
    }
    step::capture {
        a_step_takes_its_own_graph_once,
        what_exceeds_a_bucket_is_refused,
        queueing_a_step_again_changes_nothing,
    }
    step::refusals {
        bad_input_changes_no_pool,
        windows_of_a_long_chunk_are_gathered_before_its_append,
        results_do_not_replace_the_steps_rows,
    }
    step::recorded {
        rows_that_are_only_recorded_are_refused,
        reads_that_are_only_recorded_are_refused,
        a_step_queues_its_recorded_reads,
        a_replay_that_is_refused_changes_nothing,
    }
    step::poison {
        what_nobody_wrote_is_named,
        a_chunk_reads_every_row_of_its_windows,
        what_is_freed_becomes_poison,
        without_poison_nothing_is_looked_at,
    }
    step::poison_keys {
        scores_of_what_nobody_wrote_are_named,
        scores_of_what_another_held_are_named,
    }
    step::pro_step {
        replays_equal_eager_steps,
    }
    step::million {
        entries_lie_where_they_should,
    }
}

//! One suite, run on every device: the CPU always, a GPU wherever one is found.
//!
//! Without a GPU the CUDA half is listed as ignored, with the reason; `DSV4_REQUIRE_GPU=1` makes
//! that a failure.

mod capture;
mod compress;
mod cuts;
mod decode;
mod decode_early;
mod embedder;
mod entries;
mod gather;
mod gathered;
mod histories;
mod index_list;
mod indexer;
mod indexer_query;
mod layers;
mod manager;
mod memory;
mod million;
mod poison;
mod poison_keys;
mod pro_step;
mod refusals;
mod router;
mod router_gate;
mod router_type;
mod select;
mod state;
mod swa;
mod tensors;
mod topk;
mod values;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use dsv4_kv::device::{CudaDevice, CudaOptions, Device, DeviceError, EmuDevice, EmuOptions};
use dsv4_kv_tests::{inputs, model, rings, stories};
use libtest_mimic::{Arguments, Trial};

/// A test of the suite: panics if it fails.
type Case<D> = (&'static str, fn(&D));
/// A test that compares the two devices.
type Comparison = (&'static str, fn(&CudaDevice, &EmuDevice));

macro_rules! suite {
    ($name:ident: $($module:ident { $($test:ident,)* })*) => {
        fn $name<D: Device>() -> Vec<Case<D>> {
            vec![$( $( (concat!(stringify!($module), "::", stringify!($test)), $module::$test::<D>), )* )*]
        }
    };
}

suite! { suite:
    memory {
        copies_bring_back_what_they_took,
        ranges_outside_a_buffer_are_refused,
        exhausted_memory_is_a_typed_error,
        staged_updates_arrive_in_order,
        events_time_what_lies_between_them,
    }
    swa {
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
    }
    gather {
        lists_equal_the_oracle,
        a_long_list_equals_the_oracle,
        lists_count_what_they_refuse,
        a_table_that_is_too_narrow_is_counted,
        all_equals_the_oracle,
        all_counts_what_it_cannot_give,
        far_positions_equal_the_oracle,
        valid_lens_equal_the_oracle,
        a_pool_over_4_gib_equals_the_oracle,
        wrong_shapes_are_refused,
    }
    compress {
        work_lists_name_every_closing_token,
        entries_equal_transformers,
        the_wrong_rotation_does_not_pass,
        entries_equal_the_oracle_and_no_cut_matters,
        a_nan_spoils_its_window_alone,
        rejected_tokens_change_no_entry,
        requests_in_one_step_do_not_mix,
        flush_writes_the_golden_rows,
        flush_equals_the_oracle_in_every_format,
        flush_of_hca_entries_equals_the_oracle,
        flush_counts_windows_without_a_block,
    }
    decode {
        one_launch_equals_the_separate_kernels,
        shares_of_several_tokens_equal_the_separate_kernels,
        a_request_with_two_tokens_is_refused,
    }
    decode_early {
        the_step_is_what_the_launch_before_leaves,
    }
    state {
        a_view_shows_the_tails,
        rows_move_to_their_phase,
    }
    capture {
        replays_equal_eager_steps,
        allocating_or_waiting_is_refused,
        a_swallowed_refusal_still_fails_the_capture,
        memory_must_be_retained,
        a_graph_keeps_its_memory,
        captures_do_not_nest,
        a_graph_replays_only_what_it_was_captured_for,
        what_does_not_fit_is_refused,
    }
    manager {
        any_chunking_gives_the_same_rows,
        rejected_drafts_leave_no_trace,
        interleaved_requests_do_not_mix,
        memory_is_what_the_schema_says,
        faults_name_the_kernel,
        a_step_out_of_range_is_refused,
    }
    layers {
        every_layer_holds_what_the_history_says,
        gathers_equal_the_oracle,
        a_captured_step_equals_eager_steps,
        a_captured_fused_step_equals_eager_steps,
        rejected_drafts_leave_no_trace,
    }
    cuts {
        some_lengths,
    }
    pro_step {
        replays_equal_eager_steps,
    }
    million {
        entries_lie_where_they_should,
    }
    histories {
        some_rollbacks_leave_no_trace,
        some_interleavings_do_not_mix,
        replaying_a_step_again_changes_nothing,
    }
    poison {
        what_nobody_wrote_is_named,
        what_is_freed_becomes_poison,
        without_poison_nothing_is_looked_at,
    }
    poison_keys {
        scores_of_what_nobody_wrote_are_named,
        scores_of_what_another_held_are_named,
    }
    values {
        main_rows_equal_the_oracle,
        indexer_keys_equal_the_oracle,
    }
    indexer_query {
        queries_equal_the_oracle,
        queries_of_distant_groups_equal_the_oracle,
    }
    indexer {
        projections_are_exact_on_integers,
        scores_equal_the_oracle,
        few_heads_equal_the_oracle,
        scores_count_what_they_refuse,
        blocks_of_many_tiles_equal_the_oracle,
        long_rows_equal_the_oracle,
        distant_groups_equal_the_oracle,
        scales_of_any_size_are_exact,
        wrong_sizes_are_refused,
    }
    topk {
        lists_equal_a_stable_sort,
        long_rows_equal_a_stable_sort,
        short_uses_of_long_rows_equal_a_stable_sort,
        crowds_equal_a_stable_sort,
        golden_scores_give_the_golden_lists,
        wrong_sizes_are_refused,
    }
    index_list {
        lists_equal_a_stable_sort,
        long_rows_equal_a_stable_sort,
        crowds_equal_a_stable_sort,
        distant_queries_equal_a_stable_sort,
        bad_input_is_refused,
    }
    select {
        lists_equal_the_oracle,
        one_launch_lists_as_two,
        bad_input_is_refused,
    }
    refusals {
        bad_input_changes_no_pool,
    }
    router {
        selection_equals_the_golden_rows,
        hash_equals_the_golden_rows,
        selection_equals_the_oracle,
        hash_equals_the_oracle,
        equal_scores_go_to_the_lower_expert,
        what_is_no_number_ranks_last_and_is_counted,
        padding_and_unknown_tokens_get_no_expert,
        wrong_shapes_are_refused,
    }
    router_gate {
        decode_equals_the_oracle,
        hashed_decode_equals_the_oracle,
        released_widths_equal_the_oracle,
        exact_logits_give_the_same_bits,
        padding_in_a_batch_gets_no_expert,
        wrong_shapes_are_refused,
    }
    router_type {
        batches_of_every_size_equal_the_oracle,
        products_end_where_the_matrices_do,
        captured_routing_equals_eager,
        wrong_files_are_refused,
        wrong_calls_are_refused,
    }
}

/// Every way to cut a prompt, by size of chunk and quarter of the lengths. Run by hand, on either
/// device: `cargo test -p dsv4-kv-tests --test devices -- --ignored cpu::cuts`.
fn by_hand<D: Device>() -> Vec<Case<D>> {
    macro_rules! chunks_of {
        ($($chunk:literal)*) => {
            vec![$(
                (concat!("cuts::chunks_of_", $chunk, "_a"), cuts::every_length::<D, $chunk, 0>),
                (concat!("cuts::chunks_of_", $chunk, "_b"), cuts::every_length::<D, $chunk, 1>),
                (concat!("cuts::chunks_of_", $chunk, "_c"), cuts::every_length::<D, $chunk, 2>),
                (concat!("cuts::chunks_of_", $chunk, "_d"), cuts::every_length::<D, $chunk, 3>),
            )*]
        };
    }
    chunks_of!(1 2 3 4 5 127 128 129 257)
}

// Minutes on either device, run by hand: `.. --test devices -- --ignored cpu::histories`.
suite! { long:
    histories {
        every_rollback_leaves_no_trace,
        ten_thousand_interleavings_do_not_mix,
    }
}

// A matter of seconds on a GPU, and of hours on the emulator: there it runs by hand.
suite! { large:
    topk {
        very_many_rows_equal_a_stable_sort,
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials: Vec<_> = suite().into_iter().map(cpu_trial).collect();
    let by_hand = by_hand().into_iter().chain(long()).chain(large());
    trials.extend(by_hand.map(cpu_trial).map(left_out));
    match CudaDevice::new(CudaOptions::default()) {
        Ok(device) => trials.extend(cuda_trials(&device)),
        Err(error) => trials.extend(no_cuda_trials(&error)),
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn emulated() -> EmuDevice {
    EmuDevice::new(EmuOptions { memory: 8 << 30, seed: 1 })
}

/// A test on the CPU, with a device of its own: tests run side by side.
fn cpu_trial((test, run): Case<EmuDevice>) -> Trial {
    Trial::test(format!("cpu::{test}"), move || {
        run(&emulated());
        Ok(())
    })
}

/// The same test, left out unless it is asked for.
fn left_out(trial: Trial) -> Trial {
    trial.with_ignored_flag(true).with_kind("long")
}

/// The suite on the GPU, one test at a time: a capture forbids other threads to allocate.
fn cuda_trials(device: &CudaDevice) -> Vec<Trial> {
    let turn = Arc::new(Mutex::new(()));
    let alone = |name: String, run: Box<dyn Fn() + Send>| {
        let turn = Arc::clone(&turn);
        Trial::test(name, move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            run();
            Ok(())
        })
    };
    let trial = |(test, run): Case<CudaDevice>| {
        let device = device.clone();
        alone(format!("cuda::{test}"), Box::new(move || run(&device)))
    };
    let mut trials: Vec<_> = suite().into_iter().chain(large()).map(trial).collect();
    trials.extend(by_hand().into_iter().chain(long()).map(trial).map(left_out));
    let both: [Comparison; 2] = [
        ("cuda::swa::both_devices_give_equal_bytes", swa::both_devices_give_equal_bytes),
        ("cuda::router::both_devices_give_equal_bytes", router::both_devices_give_equal_bytes),
    ];
    for (test, run) in both {
        let device = device.clone();
        trials.push(alone(test.into(), Box::new(move || run(&device, &emulated()))));
    }
    let embedder = Box::new(embedder::its_context_and_stream_are_used);
    trials.push(alone("cuda::embedder::its_context_and_stream_are_used".into(), embedder));
    trials
}

/// What stands for the CUDA half where there is no usable GPU.
fn no_cuda_trials(error: &DeviceError) -> Vec<Trial> {
    let reason = error.to_string();
    if std::env::var_os("DSV4_REQUIRE_GPU").is_some_and(|value| value == "1") {
        let failed = move || Err(format!("DSV4_REQUIRE_GPU=1, but: {reason}").into());
        return vec![Trial::test("cuda::device", failed)];
    }
    eprintln!("The CUDA half of this suite is ignored: {reason}");
    suite::<CudaDevice>()
        .into_iter()
        .chain(large())
        .map(|(test, _)| {
            Trial::test(format!("cuda::{test}"), || Err("there is no GPU".into()))
                .with_ignored_flag(true)
                .with_kind("no GPU")
        })
        .collect()
}

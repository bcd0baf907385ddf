//! Tests that are left out on the emulator, or on every device, unless they are requested.

use dsv4_kv::device::Backend;

use super::Case;
use crate::{attention, indexer, router, step, window};

/// Every way to cut a prompt, by size of chunk and quarter of the lengths. Left out on both devices; run them by `cargo
/// test -p dsv4-kv-tests --test devices -- --ignored cpu::step::cuts`.
pub fn by_hand<B: Backend>() -> Vec<Case<B>> {
    macro_rules! chunks_of {
        ($($chunk:literal)*) => {
            vec![$(
                (concat!("step::cuts::chunks_of_", $chunk, "_a"), step::cuts::every_length::<B, $chunk, 0>),
                (concat!("step::cuts::chunks_of_", $chunk, "_b"), step::cuts::every_length::<B, $chunk, 1>),
                (concat!("step::cuts::chunks_of_", $chunk, "_c"), step::cuts::every_length::<B, $chunk, 2>),
                (concat!("step::cuts::chunks_of_", $chunk, "_d"), step::cuts::every_length::<B, $chunk, 3>),
            )*]
        };
    }
    chunks_of!(1 2 3 4 5 127 128 129 257)
}

suite! {
    /// Tests that take minutes on both devices, or on a GPU alone. Left out on both devices; run them by hand, for
    /// example with `-- --ignored cpu::step::histories`.
    long:
    step::exact {
        boundaries_to_1024_without_drafts,
        boundaries_to_1024_with_1_to_4_drafts,
        boundaries_to_1024_with_5_to_8_drafts,
        boundaries_to_8192_without_drafts,
        boundaries_to_8192_with_1_to_4_drafts,
        boundaries_to_8192_with_5_to_8_drafts,
        ten_thousand_triples,
    }
    attention::forms {
        random_layers_have_the_same_bits,
    }
    attention::mixed {
        many_queries_that_are_not_valid_change_no_bit,
    }
    attention::steps {
        ten_thousand_batches_have_the_same_bits,
        ten_thousand_batches_have_the_same_bits_in_one_block,
    }
    step::histories {
        every_rollback_leaves_no_trace,
        ten_thousand_interleavings_do_not_mix,
    }
}

suite! {
    /// Tests that take seconds on a GPU, where they run, and much longer on the emulator, where they are left out.
    large:
    attention::needles {
        every_key_of_a_list_can_dominate,
        every_key_of_many_can_dominate,
    }
    attention::splits {
        splits_of_many_heads_equal_the_oracle,
    }
    attention::mixed {
        more_queries_that_are_not_valid_change_no_bit,
    }
    attention::consecutive {
        many_random_steps_have_the_same_bits,
    }
    attention::spread {
        more_spread_queries_have_the_same_bits,
        the_most_keys_have_the_same_bits,
    }
    attention::steps {
        chunks_in_graphs_have_the_same_bits,
        a_long_chunk_has_the_bits_of_short_ones,
    }
    router::batches {
        every_shape_has_the_same_bits_in_every_batch,
    }
    indexer::topk {
        very_many_rows_equal_a_stable_sort,
    }
    window::swa {
        gather_equals_the_oracle_for_every_query,
    }
}

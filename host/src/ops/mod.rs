//! The operations, as functions that check their arguments. [`Stream::launch`](crate::device::Stream::launch) checks
//! arguments and lengths against the kernel table. The functions here check everything else that a kernel relies on.
//!
//! Work in one stream runs in order. If two streams use the same buffer, the caller must order them with
//! [`Stream::wait_for`](crate::device::Stream::wait_for): no other work may read or write what a launch writes, or write what it
//! reads, before the launch is done. A missing order gives wrong numbers, but no access outside a buffer: kernels check every index that
//! they read (fuzz target `kernels`). [`KvCacheManager`](crate::KvCacheManager) orders all uses of the memory of a cache.
//!
//! Some operations are unsafe because they rely on that order: each of their threads reads the same numbers of the step
//! for itself, and these decide at which barriers it waits. They are [`attend`], [`compress`], [`decode_csa`],
//! [`decode_hca`], [`flush_hca`], [`index_score`], [`index_score_chunk`], [`index_topk`], [`index_score_topk`] and
//! [`topk_select`]. In the other operations at most one warp reads each such number, by one load, so that its
//! threads cannot disagree.

mod attention;
mod attention_exchange;
mod attention_form;
mod block_table;
mod checkpoint_rows;
mod compress;
mod decode;
mod digest;
mod flush;
mod gather;
mod hca;
mod index_list;
mod indexer;
mod poison;
mod poison_keys;
mod pools;
mod query_product;
mod split_workspace;
mod state;
mod state_copy;
mod step_tokens;
mod swa;

pub(crate) use attention::reset_arrivals;
pub use attention::{
    Attended, AttendedEntries, Attention, MULTIPROCESSORS, OwnRows, QueryForm, attend, check_attend,
};
pub use attention_exchange::{AttentionExchange, SPREAD_CLUSTERS, exchange_elements};
pub use block_table::{BlockTable, TableUpdate, update_table};
pub use checkpoint_rows::{CheckpointRows, LayerImage};
pub use compress::{
    Compression, PoolingWeights, StateUpdate, compress, write_state, write_state_saving,
};
pub use decode::{CsaDecode, DecodeCompressor, DecodeStep, HcaDecode, decode_csa, decode_hca};
pub use digest::{DIGEST_RECORD, SectionRecords, digest, digest_secret, digest_sections};
pub use flush::{Flush, KeyFlush, flush_csa};
pub use gather::{EntryCounts, EntryGather, count_entries, gather_all, gather_entries};
pub(crate) use hca::{HCA_LAUNCHES, compress_hca_part};
pub use hca::{HcaCompression, HcaFlush, compress_hca, flush_hca, run_capacity};
pub use index_list::{ScoreSelection, index_score_topk, one_launch_is_faster};
pub(crate) use indexer::check_selected;
pub use indexer::{
    EntrySelection, IndexQueries, KeyScores, QueryQuantisation, RowSelection, Scores, index_query,
    index_score, index_score_chunk, index_topk, maxima_len, most_maxima, shared_keys_are_faster,
    topk_select,
};
pub use poison::{GatheredRows, PoisonSearch, find_poison};
pub use poison_keys::{PoisonedKeySearch, Scored, find_poisoned_keys};
pub use pools::{Entries, IndexKeys, StateRing, SwaRing};
pub use query_product::{QueryProduct, bf16_index_query, nvfp4_index_query};
pub use split_workspace::{SplitWorkspace, split_elements};
pub use state::{StateMove, StatePart, StateSlot, StateSource, reset_state, rotate_state};
pub use state_copy::{
    BlockCopy, CheckpointCopy, CopyArena, CopyDirection, CopyPieces, JobWords, SlotCopy,
    StateCopies, copy_state,
};
pub(crate) use state_copy::{COPY_GRANULE, JOB};
pub use step_tokens::{
    StepProjections, StepQueries, StepTokens, WorkList, WorkLists, list_closing_tokens,
    window_capacity,
};
pub use swa::{WindowAppend, WindowGather, append_swa, append_swa_saving, gather_swa};

use crate::device::DeviceError;
use crate::device::shape::check_length;

/// Refuses a number above `most`.
fn check_most(what: &'static str, value: u64, most: u32) -> Result<(), DeviceError> {
    if value == 0 { Ok(()) } else { check_argument(what, value, 1, most) }
}

/// Refuses a number that is 0, above `most`, or no multiple of `multiple`.
pub(crate) fn check_argument(
    what: &'static str,
    value: impl Into<u64>,
    multiple: u32,
    most: u32,
) -> Result<(), DeviceError> {
    let [multiple, most] = [multiple, most].map(u64::from);
    let value = value.into();
    if value == 0 || value > most || !value.is_multiple_of(multiple) {
        return Err(DeviceError::Argument { what, value, multiple, most });
    }
    Ok(())
}

/// Refuses a number other than `needed`.
pub(crate) fn check_equal(
    what: &'static str,
    value: impl Into<u64>,
    needed: impl Into<u64>,
) -> Result<(), DeviceError> {
    let (value, needed) = (value.into(), needed.into());
    if value == needed {
        return Ok(());
    }
    Err(DeviceError::Argument { what, value, multiple: needed, most: needed })
}

#[cfg(test)]
mod tests {
    use super::{check_argument, check_most};

    #[test]
    fn a_number_out_of_range_is_named_with_its_range() {
        let says =
            |checked: Result<(), crate::device::DeviceError>| checked.unwrap_err().to_string();
        let beyond = u64::from(u32::MAX) + 1;
        assert!((0..=7).all(|value| check_most("rows", value, 7).is_ok()));
        assert_eq!(says(check_most("rows", 8, 7)), "rows is 8; it must be from 1 to 7");
        assert!(check_most("rows", beyond, u32::MAX).is_err());
        assert!(check_argument("rows", 6_u32, 3, 7).is_ok());
        let of_three = "it must be a multiple of 3 from 3 to 7";
        for value in [0, 4, 9, beyond] {
            let expected = format!("rows is {value}; {of_three}");
            assert_eq!(says(check_argument("rows", value, 3, 7)), expected);
        }
    }
}

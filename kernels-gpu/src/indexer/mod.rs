//! The indexer: selects the compressed entries that a query attends to. See docs/specification.md, section 12.
//!
//! | module | what it holds |
//! |---|---|
//! | [`score`] | queries, keys, and the scores of all entries that a query sees |
//! | [`select`] | the k largest scores of a row, exactly, in order |
//! | [`score_topk`] | scores of a short row, and the k largest, by one block |

pub mod score;
pub mod score_topk;
pub mod select;

use kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, INDEX_DIM};
use simt::mem::Global;

use crate::block_table::TableRow;
use crate::fault_injection;

/// Entries of a block of the cache: a tile of the scores.
pub const TILE: u32 = BLOCK_TOKENS / CSA_RATIO;
/// Channels of a query or key.
pub const CHANNELS: u32 = INDEX_DIM;

/// The slot of a token, and the number of entries that its query sees, none at a negative position; `None` for padding.
///
/// # Safety
/// `position` and `slot` hold the token.
#[inline(always)]
#[must_use]
pub unsafe fn visible(position: Global<i32>, slot: Global<i32>, token: u64) -> Option<(u32, u32)> {
    // SAFETY: by this function's own contract.
    let (slot, position) = unsafe { (slot.load(token), position.load(token)) };
    let seen = fault_injection::visible((position.max(-1) as u32).wrapping_add(1) / CSA_RATIO);
    (slot >= 0).then_some((slot as u32, seen))
}

/// The row of the block table for a request's keys.
#[inline(always)]
#[must_use]
pub fn keys_of(table: Global<i32>, slot: u32, max_blocks: u32, num_blocks: u32) -> TableRow {
    TableRow::of_slot(table, slot, max_blocks, num_blocks, TILE.trailing_zeros())
}

//! The indexer: which compressed entries a query attends to. Source: spec section 5.
//!
//! | module | what it holds |
//! |---|---|
//! | [`project`] | queries and weights of the heads, from activations |
//! | [`query`] | rotation, Hadamard transform and quantisation of a query |
//! | [`keys`] | indexer keys as operands of a matrix product, by format |
//! | [`weights`] | the heads' weights, and what they make of products |
//! | [`tiles`] | tiles of a query's entries, scored |
//! | [`score`] | scores of all entries that a query sees, in memory |
//! | [`maxima`] | the largest score of each group of 8 or 32 |
//! | [`topk`] | the k largest scores of a row, exactly, in order |
//! | [`score_topk`] | scores of a short row, and the k largest, by one block |
//! | [`row`] | a row of scores, and what of it a block holds |
//! | [`arena`] | what a block that selects keeps in shared memory |
//! | [`bins`] | values counted by bin, the bin of the largest first |
//! | [`candidates`] | the scores of a long row that may be among its k largest |
//! | [`search`] | the k-th largest score of a row whatever its scores are |
//! | [`list`] | a list of records in shared memory, and how it is sorted |

pub mod arena;
pub mod bins;
pub mod candidates;
pub mod keys;
pub mod list;
pub mod maxima;
pub mod project;
pub mod query;
pub mod row;
pub mod score;
pub mod score_topk;
pub mod search;
pub mod tiles;
pub mod topk;
pub mod weights;

use kv_layout::geometry::CSA_RATIO;
use simt::mem::Global;

use crate::block_table::TableRow;
use crate::mistake::{self, Mistake};

/// Entries of a block of the cache: a tile of the scores.
pub const TILE: u32 = 32;
/// Channels of a query or key.
pub const CHANNELS: u32 = 128;

/// How many entries a query sees; `None` for padding.
///
/// # Safety
/// `position` and `slot` hold the token.
#[inline(always)]
#[must_use]
pub unsafe fn visible(position: Global<i32>, slot: Global<i32>, token: u64) -> Option<(u32, u32)> {
    // SAFETY: by this function's own contract.
    let (slot, position) = unsafe { (slot.load(token), position.load(token)) };
    let seen = (position as u32).wrapping_add(1) / CSA_RATIO
        + u32::from(mistake::made(Mistake::Visibility));
    (slot >= 0).then_some((slot as u32, seen))
}

/// Where a request's keys are.
#[inline(always)]
#[must_use]
pub fn keys_of(table: Global<i32>, slot: u32, max_blocks: u32, num_blocks: u32) -> TableRow {
    let start = u64::from(slot) * u64::from(max_blocks);
    TableRow { table, start, max_blocks, num_blocks, block_shift: TILE.trailing_zeros() }
}

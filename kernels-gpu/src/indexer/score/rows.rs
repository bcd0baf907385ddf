//! The kernel that writes the scores of all entries that each query sees, and the maximum of each group.

use crate::args::IndexScore;
use crate::params::IndexScoreParams;
use simt::mem::GlobalMut;
use simt::{math, thread, warp};

use super::keys::{Keys, ScoreMemory};
use super::tiles::{self, Operands, Sink, Tiles};
use crate::indexer::{TILE, keys_of, visible};
use crate::{fault, rank};

/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = ScoreMemory::BYTES;

/// Writes the scores of each query's entries, and the largest of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 32 /
/// tiles rounded up, tokens)` call it.
#[inline(always)]
pub unsafe fn score<K: Keys>(args: IndexScore) {
    let params = args.params;
    let (chunk, row) = (thread::block_idx_x(), thread::block_idx_y());
    let first = chunk * params.tiles;
    // SAFETY: by this function's own contract; every branch with a barrier is the block's, every
    // other the warp's.
    unsafe {
        let token = u64::from(params.first + row);
        let Some((slot, seen)) = visible(args.token_position, args.token_slot, token) else {
            return;
        };
        let refused = slot >= params.slots;
        if chunk == 0 && thread::warp_id() == 0 {
            let wrong = u32::from(refused || seen > params.columns);
            fault::count(args.faults, thread::lane_id(), wrong);
        }
        let seen = seen.min(params.columns);
        let tiles = seen.div_ceil(TILE);
        if refused || seen <= params.skip || first >= tiles {
            return;
        }
        let request = keys_of(args.table, slot, params.max_blocks, params.num_blocks);
        let end = tiles.min(first + params.tiles);
        let operands = Operands {
            query: args.query,
            weight: args.weight,
            code: args.index_code,
            scale: args.index_scale,
            row,
            heads: params.heads,
        };
        let rows = Rows { scores: args.scores, maxima: args.maxima, row, params };
        let missing = tiles::score::<K, _, 1>(operands, Tiles { request, first, end, seen }, rows);
        fault::count(args.faults, thread::lane_id(), missing.count_ones());
    }
}

/// Rows of scores and of group maxima in global memory.
#[derive(Clone, Copy)]
struct Rows {
    scores: GlobalMut<f32>,
    maxima: GlobalMut<f32>,
    row: u32,
    params: IndexScoreParams,
}

impl Sink for Rows {
    #[inline(always)]
    unsafe fn take(self, entry: u32, score: f32, is_seen: bool) {
        let Self { scores, maxima, row, params } = self;
        let at = |width: u32, i: u32| u64::from(row) * u64::from(width) + u64::from(i);
        let (shape, lane) = ((params.columns, params.group_log2), thread::lane_id());
        // SAFETY: by this function's own contract.
        unsafe { store((scores, maxima), shape, lane, (entry, score, is_seen), at) }
    }
}

/// Stores the scores of a tile, and the largest of each of its groups. Element `i` of the query's row of `width` elements is
/// element `at(width, i)` of `scores` or `maxima`; a row of scores has `columns` elements, a group `1 << group_log2`. `lane` is
/// the lane, entry, score and `is_seen` as of [`Sink::take`].
///
/// # Safety
/// The elements exist; all lanes of the warp call it together.
#[inline(always)]
pub unsafe fn store(
    (scores, maxima): (GlobalMut<f32>, GlobalMut<f32>),
    (columns, group_log2): (u32, u32),
    lane: u32,
    (entry, score, is_seen): (u32, f32, bool),
    at: impl Fn(u32, u32) -> u64,
) {
    // SAFETY: a score of the row, and a group of it; branches with collectives are the warp's.
    unsafe {
        if is_seen {
            scores.store(at(columns, entry), score);
        }
        let (lanes, maximum) = if group_log2 == 3 {
            let two = math::max(score, warp::shuffle_xor_f32(score, 4));
            let four = math::max(two, warp::shuffle_xor_f32(two, 8));
            (4, math::max(four, warp::shuffle_xor_f32(four, 16)))
        } else {
            (1, rank::score(warp::reduce_max_u32(rank::key(score))))
        };
        // Lane `t` has the first key of the `t`-th group of 8.
        if lane < lanes && is_seen {
            maxima.store(at(columns >> group_log2, entry >> group_log2), maximum);
        }
    }
}

//! Scores of a query with MXFP4 keys, and the list of the k largest, fused in one block: the scores stay in shared
//! memory.

use crate::args::IndexScoreTopk;
use crate::params::IndexScoreTopkParams;
use simt::shared::Shared;
use simt::{copy, thread};

use super::score::keys::s8::Mxfp4Keys;
use super::score::keys::{self, ScoreMemory};
use super::score::tiles::{self, Operands, Sink, Tiles};
use super::select::memory::SelectMemory;
use super::select::order::{Selection, bins_of};
use super::select::row::{Held, Row};
use super::{TILE, keys_of, visible};
use crate::fault;

/// Warpgroups of a block.
const GROUPS: u32 = 2;
/// Threads of a block.
pub const THREADS: u32 = GROUPS * keys::THREADS;
/// Number of bins that a thread sums up; also the number of scores that it holds.
const EACH: usize = 8;
/// Number of scores of the longest row.
const MAX_SCORES: u32 = THREADS * EACH as u32;

/// The block's row of scores.
type Scores = Shared<f32, { MAX_SCORES as usize }>;
/// Byte offset of the row, after the memory of scoring, which the selection then reuses.
const SCORES_AT: u32 = GROUPS * ScoreMemory::BYTES;

/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = SCORES_AT + Scores::BYTES;
const _: () = assert!(SelectMemory::<THREADS, EACH>::BYTES <= SCORES_AT);

/// Lists the entries of the largest scores of each query, from rows of at most 2048 columns.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of one block a query call it.
#[inline(always)]
pub unsafe fn list(args: IndexScoreTopk) {
    let IndexScoreTopkParams { first, heads, k, columns, slots, max_blocks, num_blocks, .. } =
        args.params;
    let number = thread::block_idx_x();
    // SAFETY: by this function's own contract; branches with barriers are uniform in the block.
    unsafe {
        let scores = Scores::at(SCORES_AT);
        let seen = visible(args.token_position, args.token_slot, u64::from(first + number));
        let (slot, seen) = seen.unwrap_or((0, 0));
        let refused = slot >= slots;
        if thread::warp_id() == 0 {
            fault::count(args.faults, thread::lane_id(), u32::from(refused || seen > columns));
        }
        let length = if refused { 0 } else { seen.min(columns) };
        // The selection reads whole tiles, so whole tiles are written.
        let tiles = length.div_ceil(TILE);
        let row = Row { scores, number, columns: TILE * tiles, group_log2: 0, length };
        let selection = Selection { row, k, selected: args.selected };
        if length <= k {
            return selection.list_all();
        }
        let operands = Operands {
            query: args.query,
            weight: args.weight,
            code: args.index_code,
            scale: args.index_scale,
            row: number,
            heads,
        };
        let request = keys_of(args.table, slot, max_blocks, num_blocks);
        let of_request = Tiles { request, first: 0, end: tiles, seen: length };
        let sink = SharedRow { scores, end: row.columns };
        let missing = tiles::score::<Mxfp4Keys, _, GROUPS>(operands, of_request, sink);
        fault::count(args.faults, thread::lane_id(), missing.count_ones());
        copy::wait_for_groups::<0>();
        thread::sync_threads();
        selection.list();
    }
}

/// The block's row of scores in shared memory, as the sink of the tiles' scores.
#[derive(Clone, Copy)]
struct SharedRow {
    scores: Scores,
    /// One past the last tile's entries.
    end: u32,
}

impl Sink for SharedRow {
    #[inline(always)]
    unsafe fn take(self, entry: u32, score: f32, _: bool) {
        if entry < self.end {
            // SAFETY: in the row, which has room for all tiles; each entry is one lane's.
            unsafe { self.scores.store(entry, score) }
        }
    }
}

impl Selection<THREADS, EACH, Scores> {
    /// Lists the largest of the block's scores.
    ///
    /// # Safety
    /// All threads of the block call it together, with a barrier since the scores were written; there are
    /// more than `k`, and the rest of shared memory is free.
    #[inline(always)]
    unsafe fn list(self) {
        // SAFETY: by this function's own contract; branches are uniform in the block.
        unsafe {
            let memory = SelectMemory::new();
            memory.clear(self.cleared());
            let held: Held<EACH> = self.row.hold(self.row.fetch::<{ EACH / 4 }>());
            let bins = bins_of(memory, held);
            if !self.order(memory, held, bins) {
                self.search(memory);
            }
        }
    }
}

//! Scores of the entries that a query sees, on tensor cores.
//!
//! A warp scores the 32 entries of one block of the cache at a time, four warps together. Blocks are
//! copied to shared memory ahead of time; lanes unpack their keys straight into the layout of the matrix
//! product's left side, while the right side, the query of all heads, stays in shared memory.

use kv_layout::index_row::IndexFormat;
use kv_layout::params::IndexScoreParams;
use simt::mem::{Global, GlobalMut};
use simt::{copy, math, thread, warp, warpgroup};

use super::keys::{Arena, Block, Keys};
use super::weights::Weights;
use super::{TILE, keys_of, visible};
use crate::table::TableRow;
use crate::{fault, rank};

const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// Writes the scores of each query's entries, and the largest of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 32 /
/// tiles rounded up, tokens)` call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn score<K: Keys>(
    query: Global<u8>,
    weight: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    table: Global<i32>,
    code: Global<u8>,
    scale: Global<u8>,
    scores: GlobalMut<f32>,
    maxima: GlobalMut<f32>,
    faults: GlobalMut<u32>,
    params: IndexScoreParams,
) {
    let (chunk, row) = (thread::block_idx_x(), thread::block_idx_y());
    let first = chunk * params.tiles;
    // SAFETY: by this function's own contract; every branch with a barrier is the block's, every
    // other the warp's.
    unsafe {
        let token = u64::from(params.first + row);
        let Some((slot, seen)) = visible(token_position, token_slot, token) else { return };
        let refused = slot >= params.slots;
        if chunk == 0 && thread::warp_id() == 0 {
            let wrong = u32::from(refused || seen > params.columns);
            fault::count(faults, thread::lane_id(), wrong);
        }
        let seen = seen.min(params.columns);
        let tiles = seen.div_ceil(TILE);
        if refused || seen <= params.skip || first >= tiles {
            return;
        }
        let request = keys_of(table, slot, params.max_blocks, params.num_blocks);
        let end = tiles.min(first + params.tiles);
        let arena = Arena::at(0);
        let planes = Planes { code, scale, arena };
        let blocks = Blocks::load(request, first, end);
        let rounds = (end - first).div_ceil(WARPS);
        // Of the first group of copies, with the first keys.
        copy_query::<K>(arena, query, row);
        let words = TILE * K::FORMAT.row_bytes() as u32 / 4;
        let ring = K::FORMAT.query_bytes() / 4 + words * K::STAGES * thread::warp_id();
        const {
            let keys = WARPS * K::STAGES * TILE * K::FORMAT.row_bytes() as u32;
            assert!(K::FORMAT.query_bytes() + keys + Weights::BYTES <= Arena::BYTES);
        }
        let (mut at, mut last) = (ring, ring);
        let mut round = 0;
        while round < K::STAGES - 1 {
            planes.start_copy::<K>(blocks, round, rounds, last);
            last += words;
            round += 1;
        }
        let weights = Weights::at(Arena::BYTES - Weights::BYTES);
        weights.store::<K>(weight, row, params.heads);
        let lane_tile = first + WARPS * thread::lane_id() + thread::warp_id();
        let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
        K::wait_for_oldest();
        warpgroup::fence_shared();
        thread::sync_threads();
        let writer = Writer { scores, maxima, first, end, missing, row, seen, params };
        // Half a block at a time, so that the compiler cannot mix two of them and run out of registers.
        let (mut half, mut upper) = (0, [0.0; 2]);
        while half < 2 * rounds {
            let (round, is_first) = (half / 2, half % 2 == 0);
            if is_first {
                K::wait_for_oldest();
                // All lanes have what they copied for each other, and are done with the last block.
                warp::sync_warp();
                planes.start_copy::<K>(blocks, round + K::STAGES - 1, rounds, last);
            }
            let block = Block { arena, at };
            let sums = K::sums(block, half % 2 * 16, arena, weights);
            if is_first {
                upper = sums;
            } else {
                let [[a, b], [c, d]] = [upper, sums];
                writer.write(round, [a, b, c, d], K::factor(block, own_key()));
                last = at;
                at = if at == ring + words * (K::STAGES - 1) { ring } else { at + words };
            }
            half += 1;
        }
        fault::count(faults, thread::lane_id(), missing.count_ones());
    }
}

/// The key of a tile whose score a lane has.
#[inline(always)]
fn own_key() -> u32 {
    let lane = thread::lane_id();
    8 * (lane % 4) + lane / 4
}

/// Stands for a block that a request does not have.
const NO_BLOCK: u32 = u32::MAX;

/// The blocks of a warp's tiles, a round each; lane `i` knows that of round `i`.
#[derive(Clone, Copy)]
struct Blocks(u32);

impl Blocks {
    /// # Safety
    /// The table holds the request's row; no warp has more than 32 rounds.
    #[inline(always)]
    unsafe fn load(request: TableRow, first: u32, end: u32) -> Self {
        let tile = first + WARPS * thread::lane_id() + thread::warp_id();
        // SAFETY: by this function's own contract.
        let row = unsafe { request.plane_row(TILE * tile, tile < end) };
        Self(row.map_or(NO_BLOCK, |row| (row / u64::from(TILE)) as u32))
    }

    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn of_round(self, round: u32) -> u32 {
        // SAFETY: by this function's own contract.
        unsafe { warp::shuffle_idx_u32(self.0, round) }
    }
}

/// Starts the copy of a query to shared memory.
///
/// # Safety
/// `query` holds the row; all threads of the block call it.
#[inline(always)]
unsafe fn copy_query<K: Keys>(arena: Arena, query: Global<u8>, row: u32) {
    let first = u64::from(row) * u64::from(IndexFormat::MOST_QUERY_BYTES);
    let copy = |i: u32| {
        let vector = THREADS * i + thread::thread_idx_x();
        if 16 * vector < K::FORMAT.query_bytes() {
            // SAFETY: 16 bytes of the row, once.
            unsafe { arena.copy_from(4 * vector, query, first + 16 * u64::from(vector)) }
        }
    };
    const { assert!(8 * 16 * THREADS == IndexFormat::MOST_QUERY_BYTES) };
    copy(0);
    copy(1);
    copy(2);
    copy(3);
    copy(4);
    copy(5);
    copy(6);
    copy(7);
}

/// Where keys are, and where they are copied to.
#[derive(Clone, Copy)]
struct Planes {
    code: Global<u8>,
    scale: Global<u8>,
    arena: Arena,
}

impl Planes {
    /// Starts the copy of a round's block to word `to`, the first one in place of a missing one; a
    /// group, empty after the last round.
    ///
    /// # Safety
    /// The planes hold the blocks, and one at least; no lane reads the round's place in shared memory;
    /// all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn start_copy<K: Keys>(self, blocks: Blocks, round: u32, rounds: u32, to: u32) {
        let lane = thread::lane_id();
        let (code_bytes, scale_bytes) = (K::FORMAT.code_bytes(), K::FORMAT.scale_bytes());
        // SAFETY: by this function's own contract: the block's rows, all of them.
        unsafe {
            let block = blocks.of_round(round);
            if round < rounds {
                let row = u64::from(TILE) * u64::from(if block == NO_BLOCK { 0 } else { block });
                let (code_vectors, scale_vectors) = (2 * code_bytes as u32, 2 * scale_bytes as u32);
                let (codes, scales) = (row * code_bytes, row * scale_bytes);
                let code = |vector: u32| {
                    if vector < code_vectors {
                        let place = to + 4 * K::place(vector);
                        self.arena.copy_from(place, self.code, codes + 16 * u64::from(vector));
                    }
                };
                code(lane);
                code(lane + 32);
                code(lane + 64);
                code(lane + 96);
                code(lane + 128);
                code(lane + 160);
                code(lane + 192);
                code(lane + 224);
                if lane < scale_vectors {
                    let place = to + 4 * (code_vectors + lane);
                    self.arena.copy_from(place, self.scale, scales + 16 * u64::from(lane));
                }
            }
        }
        copy::close_group();
    }
}

/// Where a warp's scores go.
#[derive(Clone, Copy)]
struct Writer {
    scores: GlobalMut<f32>,
    maxima: GlobalMut<f32>,
    /// Tiles of the block.
    first: u32,
    end: u32,
    /// A bit for each round whose tile has no block.
    missing: u32,
    row: u32,
    seen: u32,
    params: IndexScoreParams,
}

impl Writer {
    /// Writes the scores of a round's tile and its groups' maxima, as far as the query sees them, from the
    /// lanes' sums over their heads for keys `g`, `g + 8`, `g + 16` and `g + 24`.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn write(self, round: u32, [a, b, c, d]: [f32; 4], factor: f32) {
        let Self { scores, maxima, row, seen, params, .. } = self;
        let IndexScoreParams { columns, group_log2, .. } = params;
        let lane = thread::lane_id();
        let tile = self.first + WARPS * round + thread::warp_id();
        if tile >= self.end {
            return;
        }
        let entry = TILE * tile + own_key();
        let is_seen = entry < seen;
        // SAFETY: a score of the row, and a group of it; branches with collectives are the warp's.
        unsafe {
            // Each step gives half of the sums away for the other half of the partner's.
            let give = |bit: u32, low: f32, high: f32| {
                let upper = lane & bit != 0;
                let (keep, send) = if upper { (high, low) } else { (low, high) };
                keep + warp::shuffle_xor_f32(send, bit)
            };
            let score = give(1, give(2, a, c), give(2, b, d)) * factor;
            let is_there = self.missing >> round & 1 == 0;
            let score = if is_there && is_seen { score } else { f32::NAN };
            if is_seen {
                scores.store(u64::from(row) * u64::from(columns) + u64::from(entry), score);
            }
            let (lanes, largest) = if group_log2 == 3 {
                let two = math::max(score, warp::shuffle_xor_f32(score, 4));
                let four = math::max(two, warp::shuffle_xor_f32(two, 8));
                (4, math::max(four, warp::shuffle_xor_f32(four, 16)))
            } else {
                (1, rank::score(warp::reduce_max_u32(rank::key(score))))
            };
            // Lane `t` has the first key of the `t`-th eight.
            if lane < lanes && is_seen {
                let groups = u64::from(columns >> group_log2);
                maxima.store(u64::from(row) * groups + u64::from(entry >> group_log2), largest);
            }
        }
    }
}

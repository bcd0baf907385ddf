//! Scores of the entries that a query sees, on tensor cores.
//!
//! A warp scores the 32 entries of one block of the cache at a time, four warps together. Blocks are
//! copied to shared memory ahead of time; lanes unpack their keys straight into the layout of the matrix
//! product's left side, while the right side, the query of all heads, stays in shared memory.
//!
//! Half a block is multiplied at a time. While its product is under way, a warp unpacks the next half, and
//! writes the scores of the block before.

use kv_layout::index_row::IndexFormat;
use kv_layout::params::IndexScoreParams;
use simt::mem::{Global, GlobalMut};
use simt::{copy, math, thread, warp, warpgroup};

use super::keys::{Arena, Block, Half, Keys};
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
        let prepared = K::FORMAT.query_bytes() / 4;
        const {
            let keys = 4 * WARPS * K::STAGES * words::<K>();
            let needed = K::FORMAT.query_bytes() + 4 * K::PREPARED_WORDS + keys + Weights::BYTES;
            assert!(needed <= Arena::BYTES);
        }
        let ring = prepared + K::PREPARED_WORDS + words::<K>() * K::STAGES * thread::warp_id();
        let mut round = 0;
        while round < K::STAGES - 1 {
            planes.start_copy::<K>(blocks, round, rounds, ring + words::<K>() * round);
            round += 1;
        }
        K::prepare(arena, prepared);
        let weights = Weights::at(Arena::BYTES - Weights::BYTES);
        weights.store::<K>(weight, row, params.heads);
        let lane_tile = first + WARPS * thread::lane_id() + thread::warp_id();
        let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
        K::wait_for_oldest();
        warpgroup::fence_shared();
        thread::sync_threads();
        let own_entry = TILE * (first + thread::warp_id()) + own_key();
        let seen = seen.min(TILE * end);
        let writer = Writer { scores, maxima, seen, missing, row, params };
        let warp = Warp { planes, blocks, rounds, own_entry, ring, weights, writer };
        let far = warp.score_all::<K>();
        warp.score_far::<K>(far);
        fault::count(faults, thread::lane_id(), missing.count_ones());
    }
}

/// Words of shared memory that a block's keys take.
const fn words<K: Keys>() -> u32 {
    TILE * K::FORMAT.row_bytes() as u32 / 4
}

/// A warp's share of a block's tiles.
#[derive(Clone, Copy)]
struct Warp {
    planes: Planes,
    blocks: Blocks,
    rounds: u32,
    /// The entry whose score the lane has in round 0.
    own_entry: u32,
    /// The first word of the places in shared memory that its keys take in turn.
    ring: u32,
    weights: Weights,
    writer: Writer,
}

impl Warp {
    /// Scores a tile each round. Which rounds had keys of no use for products, a bit each.
    ///
    /// # Safety
    /// Query and weights are there, and copies of the first `STAGES - 1` blocks have been started and the
    /// first was waited for; all threads of the block call it together.
    #[inline(always)]
    unsafe fn score_all<K: Keys>(self) -> u32 {
        let Self { planes, blocks, rounds, own_entry, ring, weights, writer } = self;
        let arena = planes.arena;
        let last_place = ring + words::<K>() * (K::STAGES - 1);
        let (mut at, mut last) = (ring, last_place);
        let mut scored = Scored { entry: NO_ENTRY, round: 0, sums: [0.0; 4], factor: 0.0 };
        let mut far = 0;
        let mut round = 0;
        // SAFETY: by this function's own contract; no branch holds a product.
        unsafe {
            let mut left = K::unpack(Half { block: Block { arena, at }, first: 0 });
            while round < rounds {
                let block = Block { arena, at };
                let (upper, lower) = (Half { block, first: 0 }, Half { block, first: 16 });
                let (upper, second) = K::sums(upper, left, weights, || {
                    let second = K::unpack(lower);
                    writer.write(scored);
                    // All lanes are done with the last block.
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, round + K::STAGES - 1, rounds, last);
                    second
                });
                let upper = upper.map(thread::hold_f32);
                far |= u32::from(K::are_far(left) || K::are_far(second)) << round;
                last = at;
                at = if at == last_place { ring } else { at + words::<K>() };
                let (lower, (next, factor)) = K::sums(lower, second, weights, || {
                    K::wait_for_oldest();
                    // All lanes have what they copied for each other.
                    warp::sync_warp();
                    // Behind the last block: one that nobody needs.
                    let next = K::unpack(Half { block: Block { arena, at }, first: 0 });
                    (next, thread::hold_f32(K::factor(block, own_key())))
                });
                let [[a, b], [c, d]] = [upper, lower];
                let entry = own_entry + TILE * WARPS * round;
                scored = Scored { entry, round, sums: [a, b, c, d], factor };
                left = next;
                round += 1;
            }
            writer.write(scored);
        }
        far
    }

    /// Scores the tiles of rounds with a bit in `far` once more, or all of them if the query is far.
    ///
    /// # Safety
    /// As [`Self::score_all`], of the warp, but for the copies.
    #[inline(always)]
    unsafe fn score_far<K: Keys>(self, far: u32) {
        let Self { planes, blocks, rounds, own_entry, ring, weights, writer } = self;
        let block = Block { arena: planes.arena, at: ring };
        // SAFETY: by this function's own contract; the branches are the warp's.
        unsafe {
            let all = K::is_far(planes.arena);
            if !warp::any(far != 0 || all) {
                return;
            }
            copy::wait_for_groups::<0>();
            let mut round = 0;
            while round < rounds {
                if warp::any(far >> round & 1 != 0 || all) {
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, round, rounds, ring);
                    copy::wait_for_groups::<0>();
                    warp::sync_warp();
                    let sums = |first: u32| K::far_sums(Half { block, first }, weights);
                    let [[a, b], [c, d]] = [sums(0), sums(16)];
                    let factor = K::factor(block, own_key());
                    let entry = own_entry + TILE * WARPS * round;
                    writer.write(Scored { entry, round, sums: [a, b, c, d], factor });
                }
                round += 1;
            }
        }
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

/// Stands for an entry that nobody sees.
const NO_ENTRY: u32 = u32::MAX;

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
            // One more, as that is unpacked with the last: a block that no other warp reads.
            let is_there = round <= rounds;
            let block = blocks.of_round(round.min(rounds - 1));
            let row = u64::from(TILE) * u64::from(if block == NO_BLOCK { 0 } else { block });
            let (code_vectors, scale_vectors) = (2 * code_bytes as u32, 2 * scale_bytes as u32);
            let (codes, scales) = (row * code_bytes, row * scale_bytes);
            let code = |vector: u32| {
                if vector < code_vectors {
                    let (place, at) = (to + 4 * K::place(vector), codes + 16 * u64::from(vector));
                    self.arena.copy_from_if(is_there, place, self.code, at);
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
            let (place, at) = (to + 4 * (code_vectors + lane), scales + 16 * u64::from(lane));
            self.arena.copy_from_if(is_there && lane < scale_vectors, place, self.scale, at);
        }
        copy::close_group();
    }
}

/// A tile that was scored.
#[derive(Clone, Copy)]
struct Scored {
    /// The entry whose score the lane has.
    entry: u32,
    round: u32,
    /// The lanes' sums over their heads for keys `g`, `g + 8`, `g + 16` and `g + 24`.
    sums: [f32; 4],
    /// What the score of the lane's own key is to be multiplied by.
    factor: f32,
}

/// Where a warp's scores go.
#[derive(Clone, Copy)]
struct Writer {
    scores: GlobalMut<f32>,
    maxima: GlobalMut<f32>,
    /// A bit for each round whose tile has no block.
    missing: u32,
    row: u32,
    /// Behind the last entry that the query sees of those before the end of the block's tiles.
    seen: u32,
    params: IndexScoreParams,
}

impl Writer {
    /// Writes the scores of a tile and its groups' maxima, as far as the query sees them.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn write(self, scored: Scored) {
        let Scored { entry, round, sums: [a, b, c, d], factor } = scored;
        let Self { scores, maxima, row, seen, params, .. } = self;
        let IndexScoreParams { columns, group_log2, .. } = params;
        let lane = thread::lane_id();
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

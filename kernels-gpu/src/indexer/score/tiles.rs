//! Scores of a query's entries on tensor cores, in tiles of 32 entries.
//!
//! Each warp of a warpgroup scores the 32 entries of one cache block at a time. Blocks are copied to
//! shared memory ahead of time. Lanes unpack keys into fragments of A in registers; B, the query of all
//! heads, stays in shared memory.
//!
//! A product takes the 16 keys of half a block. While it is in flight, the warp unpacks the next half and writes the
//! scores of the block before: a software pipeline.

use kv_layout::index_row::IndexFormat;
use simt::mem::Global;
use simt::{copy, thread, warp, warpgroup};

use super::keys::{Block, Half, Keys, ScoreMemory, THREADS, WARPS, own_thread};
use super::weights::Weights;
use crate::block_table::TableRow;
use crate::indexer::TILE;

/// The destination of the scores of tiles.
pub trait Sink: Copy {
    /// Writes the scores of a tile, one a lane: `score` of `entry`. The score is NaN where the block is missing or the
    /// query does not see the entry (`is_seen`). Entries after the last tile are passed too, as not seen.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    unsafe fn take(self, entry: u32, score: f32, is_seen: bool);
}

/// Query and keys of a scoring.
#[derive(Clone, Copy)]
pub struct Operands {
    /// `[rows, 16384]`, of `index_query`.
    pub query: Global<u8>,
    /// `[rows, heads]`, of `index_query`.
    pub weight: Global<f32>,
    /// The code plane.
    pub code: Global<u8>,
    /// The scale plane.
    pub scale: Global<u8>,
    /// Row of the query.
    pub row: u32,
    /// Heads of the query.
    pub heads: u32,
}

/// A range of tiles of a request.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// The request's blocks.
    pub request: TableRow,
    /// The first tile.
    pub first: u32,
    /// One past the last tile.
    pub end: u32,
    /// Entries that the query sees.
    pub seen: u32,
}

/// Scores tiles by a block of `GROUPS` warpgroups. Returns a bit for each tile of the warp whose cache block
/// is missing. Each warpgroup has a [`ScoreMemory`], one after the other from byte 0 on. Has a barrier. The
/// memory is free after `wait_for_groups::<0>` and another barrier.
///
/// # Safety
/// The operands have their shapes; all threads of the block call it together, with at least one tile and
/// at most 32 for each warp.
#[inline(always)]
pub unsafe fn score<K: Keys, S: Sink, const GROUPS: u32>(
    Operands { query, weight, code, scale, row, heads }: Operands,
    Tiles { request, first, end, seen }: Tiles,
    sink: S,
) -> u32 {
    let (group, in_group) = match GROUPS {
        1 => (0, thread::warp_id()),
        _ => (thread::warp_id() / WARPS, thread::warp_id() % WARPS),
    };
    // SAFETY: by this function's own contract; every branch with a barrier is the block's, every other
    // the warp's.
    unsafe {
        let memory = ScoreMemory::at(ScoreMemory::BYTES * group);
        let planes = Planes { code, scale, memory };
        let stride = Warp::<S, GROUPS>::STRIDE;
        let lane_tile = first + stride * thread::lane_id() + thread::warp_id();
        let blocks = Blocks::load(request, lane_tile, end);
        let rounds = (end - first).div_ceil(stride);
        // The query is in the first copy group, with the first keys.
        copy_query::<K>(memory, query, row);
        let prepared = K::FORMAT.query_bytes() / 4;
        const {
            let keys = 4 * WARPS * K::STAGES * words::<K>();
            let needed = K::FORMAT.query_bytes() + 4 * K::PREPARED_WORDS + keys + Weights::BYTES;
            assert!(needed <= ScoreMemory::BYTES);
        }
        let ring = prepared + K::PREPARED_WORDS + words::<K>() * K::STAGES * in_group;
        let mut round = 0;
        while round < K::STAGES - 1 {
            planes.start_copy::<K>(blocks, round, rounds, ring + words::<K>() * round);
            round += 1;
        }
        K::prepare(memory, prepared);
        let weights = Weights::at(ScoreMemory::BYTES * group + ScoreMemory::BYTES - Weights::BYTES);
        weights.store(K::UNIT, weight, row, heads);
        let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
        K::wait_for_oldest();
        warpgroup::fence_shared();
        thread::sync_threads();
        let own_entry = TILE * (first + thread::warp_id()) + own_key();
        let seen = seen.min(TILE * end);
        let warp = Warp::<S, GROUPS> {
            planes,
            blocks,
            rounds,
            own_entry,
            ring,
            weights,
            missing,
            seen,
            sink,
        };
        let by_group = warp.score_all::<K>();
        warp.score_by_group::<K>(by_group);
        missing
    }
}

/// Words of a cache block's keys in shared memory.
const fn words<K: Keys>() -> u32 {
    TILE * K::FORMAT.row_bytes() as u32 / 4
}

/// A warp's share of a block's tiles.
#[derive(Clone, Copy)]
struct Warp<S, const GROUPS: u32> {
    planes: Planes,
    blocks: Blocks,
    rounds: u32,
    /// The lane's entry in round 0.
    own_entry: u32,
    /// First word of the warp's ring of `STAGES` blocks in shared memory.
    ring: u32,
    weights: Weights,
    /// A bit for each round whose cache block is missing.
    missing: u32,
    /// One past the last entry of the block's tiles that the query sees.
    seen: u32,
    sink: S,
}

impl<S: Sink, const GROUPS: u32> Warp<S, GROUPS> {
    /// Distance from a warp's tile to its next one.
    const STRIDE: u32 = WARPS * GROUPS;

    /// Scores a tile each round. Returns a bit for each round whose keys need [`Self::score_by_group`].
    ///
    /// # Safety
    /// Query and weights are in shared memory; the copies of the first `STAGES - 1` blocks were started and
    /// the first was waited for; all threads of the block call it together.
    #[inline(always)]
    unsafe fn score_all<K: Keys>(self) -> u32 {
        let Self { planes, blocks, rounds, own_entry, ring, weights, .. } = self;
        let memory = planes.memory;
        let last_place = ring + words::<K>() * (K::STAGES - 1);
        let (mut at, mut last) = (ring, last_place);
        let mut scored = Scored { entry: NO_ENTRY, round: 0, sums: [0.0; 4], factor: 0.0 };
        let mut by_group = 0;
        let mut round = 0;
        // SAFETY: by this function's own contract; no branch holds a product.
        unsafe {
            let mut left = K::unpack(Half { block: Block { memory, at }, first: 0 });
            while round < rounds {
                let block = Block { memory, at };
                let (upper, lower) = (Half { block, first: 0 }, Half { block, first: 16 });
                let (upper, second) = K::sums(upper, left, weights, || {
                    let second = K::unpack(lower);
                    self.write(scored);
                    // All lanes have read the block before.
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, round + K::STAGES - 1, rounds, last);
                    second
                });
                let upper = upper.map(thread::hold_f32);
                by_group |=
                    u32::from(K::needs_group_scaling(left) || K::needs_group_scaling(second))
                        << round;
                last = at;
                at = if at == last_place { ring } else { at + words::<K>() };
                let (lower, (next, factor)) = K::sums(lower, second, weights, || {
                    K::wait_for_oldest();
                    // The copies of all lanes are visible to the warp.
                    warp::sync_warp();
                    // After the last round this unpacks a copy that is not used.
                    let next = K::unpack(Half { block: Block { memory, at }, first: 0 });
                    (next, thread::hold_f32(K::factor(block, own_key())))
                });
                let [[a, b], [c, d]] = [upper, lower];
                let entry = own_entry + TILE * Self::STRIDE * round;
                scored = Scored { entry, round, sums: [a, b, c, d], factor };
                left = next;
                round += 1;
            }
            self.write(scored);
        }
        by_group
    }

    /// Scores the tiles of rounds with a bit in `by_group` again, group by group; all rounds if the query
    /// requires it.
    ///
    /// # Safety
    /// As [`Self::score_all`], by all lanes of the warp; no copies are needed.
    #[inline(always)]
    unsafe fn score_by_group<K: Keys>(self, by_group: u32) {
        let Self { planes, blocks, rounds, own_entry, ring, weights, .. } = self;
        let block = Block { memory: planes.memory, at: ring };
        // SAFETY: by this function's own contract; the branches are the warp's.
        unsafe {
            let all = K::query_needs_group_scaling(planes.memory);
            if !warp::any(by_group != 0 || all) {
                return;
            }
            copy::wait_for_groups::<0>();
            let mut round = 0;
            while round < rounds {
                if warp::any(by_group >> round & 1 != 0 || all) {
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, round, rounds, ring);
                    copy::wait_for_groups::<0>();
                    warp::sync_warp();
                    let sums = |first: u32| K::sums_by_group(Half { block, first }, weights);
                    let [[a, b], [c, d]] = [sums(0), sums(16)];
                    let factor = K::factor(block, own_key());
                    let entry = own_entry + TILE * Self::STRIDE * round;
                    self.write(Scored { entry, round, sums: [a, b, c, d], factor });
                }
                round += 1;
            }
        }
    }

    /// Adds up a tile's scores over the lanes and passes them to the sink.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn write(self, scored: Scored) {
        let Scored { entry, round, sums: [a, b, c, d], factor } = scored;
        let lane = thread::lane_id();
        let is_seen = entry < self.seen;
        // SAFETY: by this function's own contract.
        unsafe {
            // Butterfly reduction: each step sends half of the sums and receives the other half.
            let give = |bit: u32, low: f32, high: f32| {
                let upper = lane & bit != 0;
                let (keep, send) = if upper { (high, low) } else { (low, high) };
                keep + warp::shuffle_xor_f32(send, bit)
            };
            let score = give(1, give(2, a, c), give(2, b, d)) * factor;
            let is_there = self.missing >> round & 1 == 0;
            let score = if is_there && is_seen { score } else { f32::NAN };
            self.sink.take(entry, score, is_seen);
        }
    }
}

/// Index of the lane's key in a tile.
#[inline(always)]
fn own_key() -> u32 {
    let lane = thread::lane_id();
    8 * (lane % 4) + lane / 4
}

/// Marks a missing block.
const NO_BLOCK: u32 = u32::MAX;

/// Marks no entry: no query sees it.
const NO_ENTRY: u32 = u32::MAX;

/// The cache blocks of a warp's tiles; lane `i` holds the block of round `i`.
#[derive(Clone, Copy)]
struct Blocks(u32);

impl Blocks {
    /// Loads the block of `tile`, the warp's tile in round `lane_id()`, if it is before `end`.
    ///
    /// # Safety
    /// The table holds the request's row; no warp has more than 32 rounds.
    #[inline(always)]
    unsafe fn load(request: TableRow, tile: u32, end: u32) -> Self {
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
/// `query` holds the row; all threads of the warpgroup call it.
#[inline(always)]
unsafe fn copy_query<K: Keys>(memory: ScoreMemory, query: Global<u8>, row: u32) {
    let first = u64::from(row) * u64::from(IndexFormat::MAX_QUERY_BYTES);
    let copy = |i: u32| {
        let vector = THREADS * i + own_thread();
        if 16 * vector < K::FORMAT.query_bytes() {
            // SAFETY: 16 bytes of the row, once.
            unsafe { memory.copy_from(4 * vector, query, first + 16 * u64::from(vector)) }
        }
    };
    const { assert!(8 * 16 * THREADS == IndexFormat::MAX_QUERY_BYTES) };
    copy(0);
    copy(1);
    copy(2);
    copy(3);
    copy(4);
    copy(5);
    copy(6);
    copy(7);
}

/// The planes of the keys, and the memory that they are copied to.
#[derive(Clone, Copy)]
struct Planes {
    code: Global<u8>,
    scale: Global<u8>,
    memory: ScoreMemory,
}

impl Planes {
    /// Starts the copy of a round's block to word `to` and commits it as a group, which is empty after the last
    /// round. For a missing block it copies block 0.
    ///
    /// # Safety
    /// The planes hold the blocks, at least one; no lane reads the words from `to` on;
    /// all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn start_copy<K: Keys>(self, blocks: Blocks, round: u32, rounds: u32, to: u32) {
        let lane = thread::lane_id();
        let (code_bytes, scale_bytes) = (K::FORMAT.code_bytes(), K::FORMAT.scale_bytes());
        // SAFETY: by this function's own contract: the block's rows, all of them.
        unsafe {
            // One block more than there are rounds: the last round unpacks it, but does not use it.
            let is_there = round <= rounds;
            let block = blocks.of_round(round.min(rounds - 1));
            let row = u64::from(TILE) * u64::from(if block == NO_BLOCK { 0 } else { block });
            let (code_vectors, scale_vectors) = (2 * code_bytes as u32, 2 * scale_bytes as u32);
            let (codes, scales) = (row * code_bytes, row * scale_bytes);
            let code = |vector: u32| {
                if vector < code_vectors {
                    let (place, at) = (to + 4 * K::place(vector), codes + 16 * u64::from(vector));
                    self.memory.copy_from_if(is_there, place, self.code, at);
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
            self.memory.copy_from_if(is_there && lane < scale_vectors, place, self.scale, at);
        }
        copy::commit_group();
    }
}

/// The sums of a tile, before they are added up over the lanes.
#[derive(Clone, Copy)]
struct Scored {
    /// The lane's entry.
    entry: u32,
    round: u32,
    /// The lane's sums over its heads for keys `g`, `g + 8`, `g + 16` and `g + 24`.
    sums: [f32; 4],
    /// Factor of the score of the lane's key.
    factor: f32,
}

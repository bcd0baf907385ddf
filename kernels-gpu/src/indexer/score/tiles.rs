//! Scores of a query's entries on tensor cores, in tiles of 32 entries.
//!
//! Each warp of a warpgroup scores the 32 entries of one cache block at a time. Blocks are copied to
//! shared memory ahead of time. Lanes unpack keys into fragments of A in registers; B, the query of all
//! heads, stays in shared memory.
//!
//! A product takes the 16 keys of half a block. While it is in flight, the warp unpacks the next half and writes the
//! scores of the block before: a software pipeline.

use simt::mem::Global;
use simt::{copy, thread, warp, warpgroup};

use super::blocks::{Blocks, NO_BLOCK, Planes, own_key, words};
use super::keys::{Block, Half, Keys, Query, ScoreMemory, THREADS, WARPS, own_thread};
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
        let to = Query { byte: ScoreMemory::BYTES * group };
        let tables = K::FORMAT.query_bytes() / 4;
        const {
            let keys = 4 * WARPS * K::STAGES * words::<K>();
            let needed = K::FORMAT.query_bytes() + 4 * K::PREPARED_WORDS + keys + Weights::BYTES;
            assert!(needed <= ScoreMemory::BYTES);
        }
        // The query is in the first copy group, with the first keys.
        to.start_copy::<K, THREADS>(query, row, own_thread);
        let ring = tables + K::PREPARED_WORDS + words::<K>() * K::STAGES * in_group;
        let mut round = 0;
        while round < K::STAGES - 1 {
            let is_wanted = round <= rounds;
            planes.start_copy::<K>(blocks, (round, rounds), is_wanted, ring + words::<K>() * round);
            round += 1;
        }
        K::prepare(memory, tables);
        let weights = Weights::at(ScoreMemory::BYTES * group + ScoreMemory::BYTES - Weights::BYTES);
        weights.store(K::UNIT, weight, row, heads, own_thread());
        let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
        K::wait_for_oldest();
        warpgroup::fence_proxy_async();
        thread::sync_threads();
        let own_entry = TILE * (first + thread::warp_id()) + own_key();
        let seen = seen.min(TILE * end);
        let warp = Warp::<S, GROUPS> {
            planes,
            blocks,
            rounds,
            own_entry,
            ring,
            query: to,
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
    query: Query,
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
        let Self { planes, blocks, rounds, own_entry, ring, query, weights, .. } = self;
        let (memory, tables) = (planes.memory, K::FORMAT.query_bytes() / 4);
        let last_place = ring + words::<K>() * (K::STAGES - 1);
        let (mut at, mut last) = (ring, last_place);
        let mut scored = Scored { entry: NO_ENTRY, round: 0, sums: [0.0; 4], factor: 0.0 };
        let mut by_group = 0;
        let mut round = 0;
        // SAFETY: by this function's own contract; no branch holds a product.
        unsafe {
            let mut left = K::unpack(Half { block: Block { memory, tables, at }, first: 0 });
            while round < rounds {
                let block = Block { memory, tables, at };
                let lower = Half { block, first: 16 };
                let (upper, second) = K::weighted(left, query, weights, || {
                    let second = K::unpack(lower);
                    self.write(scored);
                    // All lanes have read the block before.
                    warp::sync_warp();
                    let ahead = round + K::STAGES - 1;
                    // One block more than there are rounds: the last round unpacks it, but does not use it.
                    planes.start_copy::<K>(blocks, (ahead, rounds), ahead <= rounds, last);
                    second
                });
                let upper = upper.map(thread::opt_barrier_f32);
                by_group |=
                    u32::from(K::needs_group_scaling(left) || K::needs_group_scaling(second))
                        << round;
                last = at;
                at = if at == last_place { ring } else { at + words::<K>() };
                let (lower, (next, factor)) = K::weighted(second, query, weights, || {
                    K::wait_for_oldest();
                    // The copies of all lanes are visible to the warp.
                    warp::sync_warp();
                    // After the last round this unpacks a copy that is not used.
                    let next = K::unpack(Half { block: Block { memory, tables, at }, first: 0 });
                    (next, thread::opt_barrier_f32(K::factor(block, own_key())))
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
        let Self { planes, blocks, rounds, own_entry, ring, query, weights, .. } = self;
        let block = Block { memory: planes.memory, tables: K::FORMAT.query_bytes() / 4, at: ring };
        // SAFETY: by this function's own contract; the branches are the warp's.
        unsafe {
            let all = K::query_needs_group_scaling(query);
            if !warp::any(by_group != 0 || all) {
                return;
            }
            copy::wait_for_groups::<0>();
            let mut round = 0;
            while round < rounds {
                if warp::any(by_group >> round & 1 != 0 || all) {
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, (round, rounds), true, ring);
                    copy::wait_for_groups::<0>();
                    warp::sync_warp();
                    let sums = |first: u32| K::sums_by_group(Half { block, first }, query, weights);
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
        let Scored { entry, round, sums, factor } = scored;
        let is_seen = entry < self.seen;
        // SAFETY: by this function's own contract.
        unsafe {
            let score = sum_of_lanes(sums) * factor;
            let is_there = self.missing >> round & 1 == 0;
            let score = if is_there && is_seen { score } else { f32::NAN };
            self.sink.take(entry, score, is_seen);
        }
    }
}

/// The sum over the lanes of the four whose sums are of the lane's key ([`own_key`]). A lane has sums for keys `g`, `g +
/// 8`, `g + 16` and `g + 24`, with `g = lane_id() / 4`.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn sum_of_lanes([a, b, c, d]: [f32; 4]) -> f32 {
    let lane = thread::lane_id();
    // Butterfly reduction: each step sends half of the sums and receives the other half.
    let give = |bit: u32, low: f32, high: f32| {
        let upper = lane & bit != 0;
        let (keep, send) = if upper { (high, low) } else { (low, high) };
        // SAFETY: by this function's own contract.
        keep + unsafe { warp::shuffle_xor_f32(send, bit) }
    };
    give(1, give(2, a, c), give(2, b, d))
}

/// Marks no entry: no query sees it.
pub const NO_ENTRY: u32 = u32::MAX;

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

//! Scores of a chunk's queries: consecutive queries of one request see the same entries, all but the newest. A block takes
//! several queries. A warp unpacks the keys of a cache block once, into registers, and multiplies them by one query
//! after another.
//!
//! Scores have the same bits as those of [`rows`], but for those of a NaN: the same products and sums, in the
//! same order.

use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use simt::mem::GlobalMut;
use simt::{copy, thread, warp, warpgroup};

use super::blocks::{Blocks, NO_BLOCK, Planes, own_key, words};
use super::keys::{Block, Half, Keys, Query, ScoreMemory, WARPS};
use super::rows;
use super::tiles::{NO_ENTRY, sum_of_lanes};
use super::weights::Weights;
use crate::args::IndexScoreChunk;
use crate::fault;
use crate::indexer::{TILE, keys_of, visible};
use crate::params::IndexScoreChunkParams;

/// Warpgroups of a block.
const GROUPS: u32 = 2;
/// Threads of a block.
pub const THREADS: u32 = 32 * STRIDE;
/// Distance from a warp's tile to its next one: the warps of a block.
pub const STRIDE: u32 = WARPS * GROUPS;
/// Blocks of a multiprocessor.
pub const BLOCKS: u32 = 2;

/// Most queries of a block.
#[must_use]
pub const fn queries(format: IndexFormat) -> u32 {
    match format {
        IndexFormat::Mxfp4 => 10,
        IndexFormat::Nvfp4 => 5,
        IndexFormat::Fp8 => 8,
    }
}

/// Bytes for the tables of any format. Keys and queries lie at multiples of it: the size of a core matrix.
const TABLE_BYTES: u32 = 128;

/// Byte offset of the queries: behind the tables and a cache block of keys for each warp.
const fn queries_at(format: IndexFormat) -> u32 {
    TABLE_BYTES + STRIDE * TILE * format.row_bytes() as u32
}

/// Bytes of shared memory.
#[must_use]
pub const fn shared_bytes(format: IndexFormat) -> u32 {
    queries_at(format) + queries(format) * (format.query_bytes() + Weights::BYTES)
}

/// The `i`-th query of the block, and its weights, in shared memory.
///
/// # Safety
/// `i < queries(K::FORMAT)`.
#[inline(always)]
unsafe fn operand<K: Keys>(i: u32) -> (Query, Weights) {
    let first = queries_at(K::FORMAT);
    let weights = first + queries(K::FORMAT) * K::FORMAT.query_bytes();
    let query = Query { byte: first + i * K::FORMAT.query_bytes() };
    // SAFETY: by this function's own contract.
    (query, unsafe { Weights::at(weights + i * Weights::BYTES) })
}

/// The block's queries; lane `i` has what is known of query `i`.
#[derive(Clone, Copy)]
struct BlockQueries {
    /// Row of the first query.
    first: u32,
    /// Number of queries.
    count: u32,
    /// Slot of the lane's query, [`NO_SLOT`] if it has none.
    slot: u32,
    /// One past the last entry to score, 0 if the query is left out.
    seen: u32,
}

/// Marks no request.
const NO_SLOT: u32 = u32::MAX;

/// Consecutive queries of one request.
#[derive(Clone, Copy)]
struct Run {
    /// Index of the first query in the block.
    from: u32,
    /// One past the last.
    to: u32,
    /// Slot of the request.
    slot: u32,
    /// One past the last entry to score for any query.
    most: u32,
}

impl BlockQueries {
    /// The block's queries; with `counts`, inputs that are refused are counted.
    ///
    /// # Safety
    /// As [`score`].
    #[inline(always)]
    unsafe fn load(args: IndexScoreChunk, counts: bool) -> Self {
        let params = args.params;
        let first = thread::block_idx_y() * params.block_queries;
        let count = params.block_queries.min(params.tokens - first);
        let lane = thread::lane_id();
        // SAFETY: by this function's own contract: a token of the launch.
        unsafe {
            let query = if lane < count {
                visible(
                    args.token_position,
                    args.token_slot,
                    u64::from(params.first + first + lane),
                )
            } else {
                None
            };
            let (slot, seen) = query.unwrap_or((NO_SLOT, 0));
            let is_refused = query.is_some() && slot >= params.slots;
            if counts {
                let wrong = warp::ballot(is_refused || seen > params.columns);
                fault::count(args.faults, lane, wrong.count_ones());
            }
            let is_scored = !is_refused && seen.min(params.columns) > params.skip;
            let most = params.columns.min(TILE * (thread::block_idx_x() + 1) * params.tiles);
            let seen = if is_scored { seen.min(most) } else { 0 };
            Self { first, count, slot, seen }
        }
    }

    /// The run of queries from `from` on.
    ///
    /// # Safety
    /// `from < count`; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn run(self, from: u32) -> Run {
        let lane = thread::lane_id();
        // SAFETY: by this function's own contract.
        unsafe {
            let slot = warp::shuffle_idx_u32(self.slot, from);
            let others = warp::ballot(lane >= self.count || self.slot != slot) >> from;
            let to = (from + others.trailing_zeros()).min(self.count);
            let is_of_run = from <= lane && lane < to;
            let most = warp::reduce_max_u32(if is_of_run { self.seen } else { 0 });
            Run { from, to, slot, most }
        }
    }
}

/// Writes the scores of each query's entries, and the largest of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; a block has at most [`queries`] queries; all threads of a launch of grid
/// `(columns / 32 / tiles rounded up, tokens / block_queries rounded up)` call it.
#[inline(always)]
pub unsafe fn score<K: Keys>(args: IndexScoreChunk) {
    let IndexScoreChunkParams { tiles, slots, max_blocks, num_blocks, .. } = args.params;
    let first_tile = thread::block_idx_x() * tiles;
    // SAFETY: by this function's own contract; every branch with a barrier is the block's, every other the warp's.
    unsafe {
        let counts = thread::block_idx_x() == 0 && thread::warp_id() == 0;
        let queries = BlockQueries::load(args, counts);
        if TILE * first_tile >= warp::reduce_max_u32(queries.seen) {
            return;
        }
        load_queries::<K>(args, queries);
        let rows = Rows::new(args, queries.first);
        let mut from = 0;
        while from < queries.count {
            let run = queries.run(from);
            from = run.to;
            if TILE * first_tile >= run.most || run.slot >= slots {
                continue;
            }
            let end = run.most.div_ceil(TILE);
            let request = keys_of(args.table, run.slot, max_blocks, num_blocks);
            let lane_tile = first_tile + STRIDE * thread::lane_id() + thread::warp_id();
            let blocks = Blocks::load(request, lane_tile, end);
            let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
            let memory = ScoreMemory::at(0);
            let warp = Warp {
                queries,
                run,
                rows,
                planes: Planes { code: args.index_code, scale: args.index_scale, memory },
                blocks,
                rounds: (end - first_tile).div_ceil(STRIDE),
                own_entry: TILE * (first_tile + thread::warp_id()) + own_key(),
                ring: TABLE_BYTES / 4 + words::<K>() * thread::warp_id(),
                missing,
            };
            let by_group = warp.score_all::<K>();
            warp.score_by_group::<K>(by_group);
            warp.count_missing(args.faults, lane_tile);
        }
    }
}

/// Copies the block's queries that have a slot, and their weights, to shared memory, and prepares the tables. Has a
/// barrier. Rows of the others may never have been written.
///
/// # Safety
/// As [`score`].
#[inline(always)]
unsafe fn load_queries<K: Keys>(args: IndexScoreChunk, queries: BlockQueries) {
    let thread = thread::thread_idx_x();
    let heads = args.params.heads;
    const {
        assert!(4 * K::PREPARED_WORDS <= TABLE_BYTES);
        // Tables and keys are reached through a `ScoreMemory` at byte 0.
        assert!(queries_at(K::FORMAT) <= ScoreMemory::BYTES);
        assert!(queries_at(K::FORMAT).is_multiple_of(TABLE_BYTES));
        assert!(K::FORMAT.query_bytes().is_multiple_of(TABLE_BYTES));
        // As much as each of two blocks of a multiprocessor can have.
        assert!(shared_bytes(K::FORMAT) <= 115_712);
    }
    // SAFETY: by this function's own contract: rows of queries, and memory for each. Two warps copy the weights of a query.
    unsafe {
        let has_slot = warp::ballot(queries.slot < args.params.slots);
        let mut i = 0;
        while i < queries.count {
            if has_slot >> i & 1 != 0 {
                operand::<K>(i).0.start_copy::<K, THREADS>(
                    args.query,
                    queries.first + i,
                    thread::thread_idx_x,
                );
            }
            i += 1;
        }
        copy::commit_group();
        let mut i = thread / QUERY_HEADS;
        while i < queries.count {
            if has_slot >> i & 1 != 0 {
                let (_, weights) = operand::<K>(i);
                weights.store(K::UNIT, args.weight, queries.first + i, heads, thread % QUERY_HEADS);
            }
            i += THREADS / QUERY_HEADS;
        }
        if thread < 32 * WARPS {
            K::prepare(ScoreMemory::at(0), 0);
        }
        copy::wait_for_groups::<0>();
        warpgroup::fence_proxy_async();
        thread::sync_threads();
    }
}

/// The rows of the block's queries in global memory.
#[derive(Clone, Copy)]
struct Rows {
    /// `[queries, columns]` f32.
    scores: GlobalMut<f32>,
    /// `[queries, columns >> group_log2]` f32.
    maxima: GlobalMut<f32>,
    params: IndexScoreChunkParams,
    lane: u32,
}

impl Rows {
    /// The rows from row `first` on.
    #[inline(always)]
    fn new(args: IndexScoreChunk, first: u32) -> Self {
        let IndexScoreChunkParams { columns, group_log2, .. } = args.params;
        let skipped = |width: u32| u64::from(first) * u64::from(width);
        Self {
            scores: args.scores.skip(skipped(columns)),
            maxima: args.maxima.skip(skipped(columns >> group_log2)),
            params: args.params,
            lane: thread::opt_barrier_u32(thread::lane_id()),
        }
    }

    /// Writes the scores of a tile for query `row` of the block, one a lane: `score` of `entry`, NaN if the query does
    /// not see it (`is_seen`).
    ///
    /// # Safety
    /// All lanes of the warp call it together; `row` is below the number of queries.
    #[inline(always)]
    unsafe fn take(self, row: u32, entry: u32, score: f32, is_seen: bool) {
        let Self { scores, maxima, params, lane } = self;
        // At most ten rows of at most 2^18 columns.
        let at = |width: u32, i: u32| u64::from(row * width + i);
        let shape = (params.columns, params.group_log2);
        // SAFETY: by this function's own contract.
        unsafe { rows::store((scores, maxima), shape, lane, (entry, score, is_seen), at) }
    }
}

/// Factor of the sums of the lane's key: NaN if its block is missing.
///
/// # Safety
/// The block is in shared memory.
#[inline(always)]
unsafe fn factor<K: Keys>(block: Block, is_missing: bool) -> f32 {
    // SAFETY: by this function's own contract.
    let factor = unsafe { K::factor(block, own_key()) };
    if is_missing { f32::NAN } else { factor }
}

/// A warp's share of the tiles of a run.
#[derive(Clone, Copy)]
struct Warp {
    queries: BlockQueries,
    run: Run,
    /// The rows of the block's queries.
    rows: Rows,
    planes: Planes,
    blocks: Blocks,
    rounds: u32,
    /// The lane's entry in round 0.
    own_entry: u32,
    /// First word of the warp's cache block in shared memory.
    ring: u32,
    /// A bit for each round whose cache block is missing.
    missing: u32,
}

/// The sums of a tile for a query, before they are added up over the lanes.
#[derive(Clone, Copy)]
struct Scored {
    query: u32,
    entry: u32,
    sums: [f32; 4],
    factor: f32,
}

impl Warp {
    /// Scores a tile each round. Returns a bit for each round whose keys need [`Self::score_by_group`].
    ///
    /// # Safety
    /// Queries and weights are in shared memory; all threads of the block call it together.
    #[inline(always)]
    unsafe fn score_all<K: Keys>(self) -> u32 {
        let Self { planes, blocks, rounds, own_entry, ring, run, .. } = self;
        let block = Block { memory: planes.memory, tables: 0, at: ring };
        let mut by_group = 0;
        let mut round = 0;
        let mut scored = Scored { query: run.from, entry: NO_ENTRY, sums: [0.0; 4], factor: 0.0 };
        // SAFETY: by this function's own contract; no branch holds a product.
        unsafe {
            // All lanes have read the block of the run before.
            warp::sync_warp();
            planes.start_copy::<K>(blocks, (0, rounds), true, ring);
            while round < rounds {
                copy::wait_for_groups::<0>();
                // The copies of all lanes are visible to the warp.
                warp::sync_warp();
                let upper = K::unpack(Half { block, first: 0 });
                let lower = K::unpack(Half { block, first: 16 });
                let factor =
                    thread::opt_barrier_f32(factor::<K>(block, self.missing >> round & 1 != 0));
                let needs = K::needs_group_scaling(upper) || K::needs_group_scaling(lower);
                by_group |= u32::from(needs) << round;
                // All lanes have read the block.
                warp::sync_warp();
                planes.start_copy::<K>(blocks, (round + 1, rounds), round + 1 < rounds, ring);
                let entry = own_entry + TILE * STRIDE * round;
                let mut query = run.from;
                while query < run.to {
                    let (right, weights) = operand::<K>(query);
                    let ([a, b], [c, d]) = if K::ARE_IN_FLIGHT {
                        let (products, weights) = K::product(upper, right, || {
                            self.write(scored);
                            [0, 1, 2, 3].map(|i| weights.of_sixteen(i))
                        });
                        let upper = K::sums(products, |i| weights[i]).map(thread::opt_barrier_f32);
                        let (products, ()) = K::product(lower, right, || ());
                        (upper, K::sums(products, |i| weights[i]))
                    } else {
                        let (upper, ()) = K::weighted(upper, right, weights, || self.write(scored));
                        let upper = upper.map(thread::opt_barrier_f32);
                        (upper, K::weighted(lower, right, weights, || ()).0)
                    };
                    scored = Scored { query, entry, sums: [a, b, c, d], factor };
                    query += 1;
                }
                round += 1;
            }
            self.write(scored);
        }
        by_group
    }

    /// Scores the tiles of rounds with a bit in `by_group` again, group by group, and all rounds of queries that require
    /// it.
    ///
    /// # Safety
    /// As [`Self::score_all`], by all lanes of the warp.
    #[inline(always)]
    unsafe fn score_by_group<K: Keys>(self, by_group: u32) {
        let Self { planes, blocks, rounds, own_entry, ring, run, .. } = self;
        let block = Block { memory: planes.memory, tables: 0, at: ring };
        // SAFETY: by this function's own contract; the branches are the warp's.
        unsafe {
            let mut all = 0;
            let mut query = run.from;
            while query < run.to {
                all |= u32::from(K::query_needs_group_scaling(operand::<K>(query).0)) << query;
                query += 1;
            }
            let mut round = 0;
            while round < rounds {
                let of_keys = warp::any(by_group >> round & 1 != 0);
                if of_keys || all != 0 {
                    warp::sync_warp();
                    planes.start_copy::<K>(blocks, (round, rounds), true, ring);
                    copy::wait_for_groups::<0>();
                    warp::sync_warp();
                    let factor = factor::<K>(block, self.missing >> round & 1 != 0);
                    let entry = own_entry + TILE * STRIDE * round;
                    let mut query = run.from;
                    while query < run.to {
                        if of_keys || all >> query & 1 != 0 {
                            let (right, weights) = operand::<K>(query);
                            let sums =
                                |first| K::sums_by_group(Half { block, first }, right, weights);
                            let [[a, b], [c, d]] = [sums(0), sums(16)];
                            self.write(Scored { query, entry, sums: [a, b, c, d], factor });
                        }
                        query += 1;
                    }
                }
                round += 1;
            }
        }
    }

    /// Adds up a tile's scores over the lanes and writes them to the query's row.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn write(self, Scored { query, entry, sums, factor }: Scored) {
        // SAFETY: by this function's own contract; a row of the launch.
        unsafe {
            let is_seen = entry < warp::shuffle_idx_u32(self.queries.seen, query);
            let score = sum_of_lanes(sums) * factor;
            let score = if is_seen { score } else { f32::NAN };
            self.rows.take(query, entry, score, is_seen);
        }
    }

    /// Counts the missing tiles of each query.
    ///
    /// # Safety
    /// All lanes of the warp call it together; `lane_tile` is the warp's tile in round `lane_id()`.
    #[inline(always)]
    unsafe fn count_missing(self, faults: GlobalMut<u32>, lane_tile: u32) {
        let Self { queries, run, missing, .. } = self;
        if missing == 0 {
            return;
        }
        let lane = thread::lane_id();
        let mut query = run.from;
        // SAFETY: by this function's own contract.
        unsafe {
            while query < run.to {
                let tiles = warp::shuffle_idx_u32(queries.seen, query).div_ceil(TILE);
                let of_query = warp::ballot(lane_tile < tiles) & missing;
                fault::count(faults, lane, of_query.count_ones());
                query += 1;
            }
        }
    }
}

//! Scores of the entries that a query sees, on tensor cores.
//!
//! A warp scores the 32 entries of one block of the cache at a time, four warps together. Its lanes
//! load the keys straight into the layout of the matrix product's left side and unpack them to BF16,
//! which holds every value of every format exactly; products are exact in f32, and so the only
//! rounding is that of sums over 128 channels and 64 heads. The right side, the query of all heads,
//! waits in shared memory.

use kv_layout::index_row::{QUERY_ELEMENTS, QUERY_HEADS};
use kv_layout::params::IndexScoreParams;
use simt::copy;
use simt::math::{self, mul_add};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::warpgroup::{self, Fragments, Left, Pending};
use simt::{hold, thread, warp};

use super::keys::{Keys, RING_WORDS, Ring};
use super::{CHANNELS, TILE, visible};
use crate::table::TableRow;
use crate::{fault, rank};

const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// The query of all heads, as right side of products over all channels.
type Stage = Shared<u32, { QUERY_ELEMENTS as usize / 2 }>;
/// Where the second half of the channels begins.
const SECOND_HALF: u32 = warpgroup::EIGHTH * (CHANNELS / 2 / 8);

/// Writes the scores of each query's entries, and the largest of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 32 /
/// tiles rounded up, tokens)` call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn score<K: Keys>(
    query: Global<u16>,
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
        let request = TableRow {
            table,
            start: u64::from(slot) * u64::from(params.max_blocks),
            max_blocks: params.max_blocks,
            num_blocks: params.num_blocks,
            block_shift: TILE.trailing_zeros(),
        };
        let end = tiles.min(first + params.tiles);
        let planes = Planes { code, scale, ring: Shared::at(Stage::BYTES) };
        let blocks = Blocks::load(request, first, end);
        let rounds = (end - first).div_ceil(WARPS);
        let stage = Stage::at(0);
        // Of the first group of copies, with the first keys.
        copy_query(stage, query, row);
        let mut round = 0;
        while round < K::STAGES - 1 {
            planes.start_copy::<K>(blocks, round, rounds);
            round += 1;
        }
        let weights = Weights(Shared::at(Stage::BYTES + Ring::BYTES));
        weights.store::<K>(weight, row, params.heads);
        let lane_tile = first + WARPS * thread::lane_id() + thread::warp_id();
        let missing = warp::ballot(lane_tile < end && blocks.0 == NO_BLOCK);
        K::wait_for_oldest();
        warpgroup::fence_shared();
        thread::sync_threads();
        let writer = Writer { scores, maxima, first, end, missing, row, seen, params };
        let (mut sums, mut factor) = ([0.0; 4], 1.0);
        round = 0;
        while round < rounds {
            K::wait_for_oldest();
            // All lanes have what they copied for each other, and are done with the last block.
            warp::sync_warp();
            let [k, l] = planes.read::<K>(round, 0);
            // While a product is computed, the last round's scores are written, the next left side is
            // unpacked, or the last product summed up; held there, as the compiler would do it later.
            let product = Pending::start(first_half(k, l), stage, 0);
            let product = product.add(second_half(k, l), stage, SECOND_HALF);
            planes.start_copy::<K>(blocks, round + K::STAGES - 1, rounds);
            if round > 0 {
                writer.write(round - 1, sums, factor);
            }
            factor = planes.factor::<K>(round);
            let [m, n] = planes.read::<K>(round, 16);
            let next = first_half(m, n).map(|step| step.map(hold));
            let sixteen = product.wait();
            let product = Pending::start(next, stage, 0);
            let [a, b] = weights.sums(sixteen).map(|sum| f32::from_bits(hold(sum.to_bits())));
            let product = product.add(second_half(m, n), stage, SECOND_HALF);
            let [c, d] = weights.sums(product.wait());
            sums = [a, b, c, d];
            round += 1;
        }
        writer.write(rounds - 1, sums, factor);
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

/// Starts the copy of a query to shared memory, where it is the right side of products.
///
/// # Safety
/// `query` holds the row; all threads of the block call it.
#[inline(always)]
unsafe fn copy_query(stage: Stage, query: Global<u16>, row: u32) {
    let first = u64::from(row) * u64::from(QUERY_ELEMENTS);
    let copy = |i: u32| {
        let vector = THREADS * i + thread::thread_idx_x();
        // SAFETY: eight elements of the row, once.
        unsafe { stage.copy_from(4 * vector, query, first + 8 * u64::from(vector)) }
    };
    const { assert!(8 * 8 * THREADS == QUERY_ELEMENTS) };
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
    ring: Ring,
}

impl Planes {
    /// The word in shared memory where the block of a round begins.
    #[inline(always)]
    fn block<K: Keys>(round: u32) -> u32 {
        let words = TILE * (K::FORMAT.code_bytes() + K::FORMAT.scale_bytes()) as u32 / 4;
        const { assert!(WARPS * K::STAGES * (TILE * K::FORMAT.row_bytes() as u32 / 4) <= RING_WORDS) };
        words * (K::STAGES * thread::warp_id() + round % K::STAGES)
    }

    /// Starts the copy of a round's block, the first one in place of a missing one; a group, empty after
    /// the last round.
    ///
    /// # Safety
    /// The planes hold the blocks, and one at least; no lane reads the round's place in shared memory;
    /// all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn start_copy<K: Keys>(self, blocks: Blocks, round: u32, rounds: u32) {
        let lane = thread::lane_id();
        let to = Self::block::<K>(round);
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
                        self.ring.copy_from(place, self.code, codes + 16 * u64::from(vector));
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
                    self.ring.copy_from(place, self.scale, scales + 16 * u64::from(lane));
                }
            }
        }
        copy::close_group();
    }

    /// A lane's part of 16 of a round's keys.
    ///
    /// # Safety
    /// The round's block has been copied.
    #[inline(always)]
    unsafe fn read<K: Keys>(self, round: u32, first: u32) -> [K; 2] {
        let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
        let block = Self::block::<K>(round);
        // SAFETY: by this function's own contract.
        let read =
            |eight: u32| unsafe { K::read(self.ring, block, first + 8 * eight + group, quarter) };
        [read(0), read(1)]
    }

    /// What the product with [`own_key`] is to be multiplied by.
    ///
    /// # Safety
    /// As [`Self::read`].
    #[inline(always)]
    unsafe fn factor<K: Keys>(self, round: u32) -> f32 {
        // SAFETY: by this function's own contract.
        unsafe { K::factor(self.ring, Self::block::<K>(round), own_key()) }
    }
}

/// The first half of two keys' channels as the lane's part of a left side.
#[inline(always)]
fn first_half<K: Keys>(upper: K, lower: K) -> Left {
    let [a, b] = two_steps(upper.pairs::<0>(), lower.pairs::<0>());
    let [c, d] = two_steps(upper.pairs::<1>(), lower.pairs::<1>());
    [a, b, c, d]
}

/// The other half.
#[inline(always)]
fn second_half<K: Keys>(upper: K, lower: K) -> Left {
    let [a, b] = two_steps(upper.pairs::<2>(), lower.pairs::<2>());
    let [c, d] = two_steps(upper.pairs::<3>(), lower.pairs::<3>());
    [a, b, c, d]
}

/// Two rows' pairs of a word as left sides of 16 columns.
#[inline(always)]
fn two_steps([a, b, c, d]: [u32; 4], [e, f, g, h]: [u32; 4]) -> [[u32; 4]; 2] {
    [[a, e, b, f], [c, g, d, h]]
}

/// Half the weights of all heads, in shared memory: by quarter `t` of a warp's lanes those of heads
/// `8 i + 2 t` and `8 i + 2 t + 1`, one quarter at word `20 t`, so that all are read at once.
#[derive(Clone, Copy)]
struct Weights(Shared<f32, 80>);

impl Weights {
    /// Puts them there; to be followed by a barrier.
    ///
    /// # Safety
    /// `weight` holds the row; all threads of the block call it.
    #[inline(always)]
    unsafe fn store<K: Keys>(self, weight: Global<f32>, row: u32, heads: u32) {
        let head = thread::thread_idx_x();
        if head >= QUERY_HEADS {
            return;
        }
        // SAFETY: a head of the row; each one's place once.
        unsafe {
            let at = u64::from(row) * u64::from(heads) + u64::from(head);
            let weight = if head < heads { 0.5 * K::UNIT * weight.load(at) } else { 0.0 };
            self.0.store(20 * (head / 2 % 4) + head / 8 * 2 + head % 2, weight);
        }
    }

    /// The weighted sums of the positive parts of two keys' products with the lane's heads.
    ///
    /// # Safety
    /// The weights are there.
    #[inline(always)]
    unsafe fn sums(self, products: Fragments) -> [f32; 2] {
        // Twice the positive part, exactly, and cheaper than the larger of the value and zero: the
        // units that add are idle, those that compare are not.
        let positive = |x: f32| x + x.abs();
        let quarter = 20 * (thread::lane_id() % 4);
        // Spelt out: an array walked by a loop would live in local memory.
        let add_two = |i: usize, [w, x, y, z]: [f32; 4]| {
            // SAFETY: four weights of the quarter.
            let weights = unsafe { self.0.load_u32x4(quarter + 4 * i as u32) };
            let [p, q, r, s] = weights.map(f32::from_bits);
            let ([a, b, c, d], [e, f, g, h]) =
                (products[2 * i].map(positive), products[2 * i + 1].map(positive));
            let (w, x) = (mul_add(r, e, mul_add(p, a, w)), mul_add(s, f, mul_add(q, b, x)));
            [w, x, mul_add(r, g, mul_add(p, c, y)), mul_add(s, h, mul_add(q, d, z))]
        };
        let [a, b, c, d] = add_two(3, add_two(2, add_two(1, add_two(0, [0.0; 4]))));
        [a + b, c + d]
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

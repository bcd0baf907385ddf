//! Scores of the entries that a query sees, on tensor cores.
//!
//! A warp scores the 32 entries of one block of the cache at a time. Its lanes load the keys straight
//! into the layout of the matrix product's right side and unpack them to BF16, which holds every
//! value of every format exactly; products are exact in f32, and so the only rounding is that of sums
//! over 128 channels and 64 heads. The left side, the query of all heads, waits in shared memory.

use kv_layout::params::IndexScoreParams;
use simt::math::{self, max_or_nan, mul_add};
use simt::mem::{Global, GlobalMut};
use simt::mma::bf16_m16n8k16;
use simt::shared::Shared;
use simt::{thread, warp};

use super::keys::Keys;
use super::{CHANNELS, TILE, visible};
use crate::fault;
use crate::table::TableRow;

/// Heads that are scored; missing ones count as zero.
const HEADS: u32 = 64;
/// Heads of one product.
const PRODUCT_HEADS: u32 = 16;
/// Products over all heads.
const HEAD_TILES: usize = (HEADS / PRODUCT_HEADS) as usize;
/// Keys of one product.
const PRODUCT_KEYS: u32 = 8;
/// Products over a tile of keys.
const KEY_TILES: usize = (TILE / PRODUCT_KEYS) as usize;
/// Steps of a product over all channels.
const STEPS: u32 = CHANNELS / 16;
const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// Products of 16 heads with a tile's keys: by eight keys, a lane's four elements.
type Sums = [[f32; 4]; KEY_TILES];
/// A lane's part of the scores of a tile: by eight keys, two of them.
type Parts = [[f32; 2]; KEY_TILES];

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
        let planes = Planes { code, scale, request };
        let end = tiles.min(first + params.tiles);
        let mut tile = first + thread::warp_id();
        // On their way while the query is staged; a warp without a tile takes another's.
        let mut keys = planes.load::<K>(tile.min(end - 1));
        let stage: Shared<u32, 4096> = Shared::at(0);
        stage_query(stage, query, row, params.heads);
        let weights = Weights::load::<K>(weight, row, params.heads);
        thread::sync_threads();
        let writer = Writer { scores, maxima, row, seen, params };
        let mut missing = 0;
        while tile < end {
            let next = tile + WARPS;
            let next_keys = planes.load::<K>(next.min(end - 1));
            let sums = scored(stage, &keys, weights);
            writer.write::<K>(tile, keys.row, sums, planes);
            missing += u32::from(keys.row.is_none());
            (tile, keys) = (next, next_keys);
        }
        fault::count(faults, thread::lane_id(), missing);
    }
}

/// Puts a query into shared memory as left sides of products: 16 heads by 16 channels at a time, the
/// four registers of each lane together. For the order of channels see [`super::keys`].
///
/// # Safety
/// `query` holds the row; all threads of the block call it, and a barrier follows.
#[inline(always)]
unsafe fn stage_query(stage: Shared<u32, 4096>, query: Global<u16>, row: u32, heads: u32) {
    let mut item = thread::thread_idx_x();
    while item < HEADS / PRODUCT_HEADS * (CHANNELS / 32) * 32 {
        let (lane, word, tile) = (item % 32, item / 32 % 4, item / 128);
        let (group, quarter) = (lane / 4, lane % 4);
        let channel = 32 * quarter + 8 * word;
        let load = |head: u32| {
            if head < heads {
                let vector = u64::from(row) * u64::from(heads) + u64::from(head);
                let at = vector * u64::from(CHANNELS) + u64::from(channel);
                // SAFETY: eight channels of a head of the row.
                unsafe { query.load_u32x4(at) }
            } else {
                [0; 4]
            }
        };
        let upper = load(PRODUCT_HEADS * tile + group);
        let lower = load(PRODUCT_HEADS * tile + group + 8);
        let low = |a: u32, b: u32| a & 0xFFFF | b << 16;
        let high = |a: u32, b: u32| a >> 16 | b & 0xFFFF_0000;
        let registers = |pair: usize| {
            let ([a, b], [c, d]) = ([upper[pair], upper[pair + 2]], [lower[pair], lower[pair + 2]]);
            [low(a, b), low(c, d), high(a, b), high(c, d)]
        };
        let at = 4 * (32 * (STEPS * tile + 2 * word) + lane);
        // SAFETY: each lane's registers of each step of each product, once.
        unsafe {
            stage.store_u32x4(at, registers(0));
            stage.store_u32x4(at + 4 * 32, registers(1));
        }
        item += THREADS;
    }
}

/// A tile's keys: of eight keys each, and the first of their rows.
#[derive(Clone, Copy)]
struct Tile<K: Keys> {
    keys: [K; KEY_TILES],
    /// `None` if the tile has no block.
    row: Option<u64>,
}

/// Where keys are.
#[derive(Clone, Copy)]
struct Planes {
    code: Global<u8>,
    scale: Global<u8>,
    request: TableRow,
}

impl Planes {
    /// # Safety
    /// The table holds the request's row, and the planes the blocks that it names; the planes hold at
    /// least one block.
    #[inline(always)]
    unsafe fn load<K: Keys>(self, tile: u32) -> Tile<K> {
        let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
        // SAFETY: by this function's own contract; the first block stands for a missing one.
        unsafe {
            let row = self.request.plane_row(TILE * tile, true);
            let first = row.unwrap_or(0) + u64::from(group);
            let load = |n: u64| K::load(self.code, self.scale, first + n * 8, quarter);
            Tile { keys: [load(0), load(1), load(2), load(3)], row }
        }
    }
}

/// The weighted sums over the lane's heads, for each of its keys.
///
/// # Safety
/// The query is staged; all lanes of the warp call it together.
#[inline(always)]
unsafe fn scored<K: Keys>(stage: Shared<u32, 4096>, tile: &Tile<K>, weights: Weights) -> Parts {
    let right = [
        tile.keys.map(|keys| keys.pairs::<0>()),
        tile.keys.map(|keys| keys.pairs::<1>()),
        tile.keys.map(|keys| keys.pairs::<2>()),
        tile.keys.map(|keys| keys.pairs::<3>()),
    ];
    // Spelt out: an array walked by a loop would live in local memory.
    let of_heads = |heads: usize, parts: Parts| {
        let two_steps = |word: usize, [a, b, c, d]: Sums| {
            let at = 4 * (32 * (STEPS * heads as u32 + 2 * word as u32) + thread::lane_id());
            // SAFETY: by this function's own contract.
            unsafe {
                let (first, second) = (stage.load_u32x4(at), stage.load_u32x4(at + 4 * 32));
                let add = |key: usize, sum: [f32; 4]| {
                    let [p, q, r, s] = right[word][key];
                    bf16_m16n8k16(second, [r, s], bf16_m16n8k16(first, [p, q], sum))
                };
                [add(0, a), add(1, b), add(2, c), add(3, d)]
            }
        };
        let sums = two_steps(1, two_steps(0, [[0.0; 4]; KEY_TILES]));
        weights.add(heads, parts, two_steps(3, two_steps(2, sums)))
    };
    of_heads(3, of_heads(2, of_heads(1, of_heads(0, [[0.0; 2]; KEY_TILES]))))
}

/// The weights of a lane's heads: `16 i + g` and `16 i + g + 8`.
#[derive(Clone, Copy)]
struct Weights([[f32; 2]; HEAD_TILES]);

impl Weights {
    /// # Safety
    /// `weight` holds the row.
    #[inline(always)]
    unsafe fn load<K: Keys>(weight: Global<f32>, row: u32, heads: u32) -> Self {
        let group = thread::lane_id() / 4;
        let of = |head: u32| {
            if head < heads {
                let at = u64::from(row) * u64::from(heads) + u64::from(head);
                // SAFETY: a head of the row.
                K::UNIT * unsafe { weight.load(at) }
            } else {
                0.0
            }
        };
        let pair = |i: u32| [of(PRODUCT_HEADS * i + group), of(PRODUCT_HEADS * i + group + 8)];
        Self([pair(0), pair(1), pair(2), pair(3)])
    }

    /// Adds the weighted positive parts of the products of 16 heads.
    #[inline(always)]
    fn add(self, heads: usize, parts: Parts, sums: Sums) -> Parts {
        let [upper, lower] = self.0[heads];
        let add = |key: usize| {
            let ([x, y], [a, b, c, d]) = (parts[key], sums[key].map(|sum| max_or_nan(sum, 0.0)));
            let (x, y) = (mul_add(upper, a, x), mul_add(upper, b, y));
            [mul_add(lower, c, x), mul_add(lower, d, y)]
        };
        [add(0), add(1), add(2), add(3)]
    }
}

/// The sum of all lanes that hold a key: lane `4 g + t` gets that of key `8 (g / 2) + 2 t + g % 2`.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn sum_lanes([[a, b], [c, d], [e, f], [g, h]]: Parts) -> f32 {
    let lane = thread::lane_id();
    // Each step gives half of the values away for the other half of the partner's.
    // SAFETY: by this function's own contract.
    unsafe {
        let give = |bit: u32, low: f32, high: f32| {
            let upper = lane & bit != 0;
            let (keep, send) = if upper { (high, low) } else { (low, high) };
            keep + warp::shuffle_xor_f32(send, bit)
        };
        let [a, b, c, d] = [give(16, a, e), give(16, b, f), give(16, c, g), give(16, d, h)];
        let [a, b] = [give(8, a, c), give(8, b, d)];
        give(4, a, b)
    }
}

/// Where scores go.
#[derive(Clone, Copy)]
struct Writer {
    scores: GlobalMut<f32>,
    maxima: GlobalMut<f32>,
    row: u32,
    seen: u32,
    params: IndexScoreParams,
}

impl Writer {
    /// Writes a tile's scores and its groups' maxima, as far as the query sees them; `row` is that of its
    /// first key.
    ///
    /// # Safety
    /// The planes hold the tile's row; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn write<K: Keys>(self, tile: u32, row: Option<u64>, parts: Parts, planes: Planes) {
        let lane = thread::lane_id();
        let key = 8 * (lane / 8) + 2 * (lane % 4) + lane / 4 % 2;
        let IndexScoreParams { columns, group_log2, .. } = self.params;
        // SAFETY: a score of the row, and a group of it; the planes hold the key's row, and their
        // first where there is none.
        unsafe {
            let factor = K::factor(planes.scale, row.unwrap_or(0) + u64::from(key));
            let score = sum_lanes(parts) * factor;
            let entry = TILE * tile + key;
            let is_seen = entry < self.seen;
            let score = if is_seen && row.is_some() { score } else { f32::NAN };
            if is_seen {
                let at = u64::from(self.row) * u64::from(columns) + u64::from(entry);
                self.scores.store(at, score);
            }
            let eight = warp::reduce_max_f32_width::<8>(score);
            let sixteen = math::max(eight, warp::shuffle_xor_f32(eight, 8));
            let all = math::max(sixteen, warp::shuffle_xor_f32(sixteen, 16));
            let small = group_log2 == 3;
            let (lanes, largest) = if small { (8, eight) } else { (32, all) };
            let first = TILE * tile + lane;
            if lane.is_multiple_of(lanes) && TILE * tile < self.seen {
                let groups = u64::from(columns >> group_log2);
                let group = u64::from(first >> group_log2);
                self.maxima.store(u64::from(self.row) * groups + group, largest);
            }
        }
    }
}

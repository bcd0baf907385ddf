//! Online softmax: the weights of a tile, and the factors by which earlier sums are multiplied.

use kv_layout::geometry::HEAD_DIM;
use simt::math::approx::{ex2, ex2_ftz, lg2};
use simt::math::{max, mul_add};
use simt::shared::Shared;
use simt::warpgroup::{Fragments, FragmentsN256, Rows};
use simt::{thread, warp};

use super::memory::{Arrays, HEADS, KEY_GROUPS, TILE, WORDS, weights_of};
use crate::convert::bf16x2_from_f32;
use crate::unroll::{array_from_fn, unroll};

/// The factor by which a product of query and key is multiplied: `512^-1/2`, and log2 e, so that weights are powers of
/// two.
const SCALE: f32 = core::f32::consts::LOG2_E / 22.627_417;
const _: () = assert!(HEAD_DIM == 512);

/// How far scores, times log2 e, may be from the base of the weights. The base of a head is 0 if the largest score of
/// its first tile is within this distance of 0, else that score. It is raised to the largest score of a later tile only
/// if that score is more than this above it. So no weight exceeds 2^24, and few tiles need their largest score. The
/// relative precision of sums does not depend on the base.
const SLACK: f32 = 24.0;

/// If a thread's weights of a head add up to at most this, none of them is above 2^[`SLACK`]. This is half of that, so
/// that the rounding of the sum cannot hide one.
const SMALL_SUM: f32 = (1_u32 << (SLACK as u32 - 1)) as f32;

/// If a thread's 16 weights of a head add up to at least this, one of them is at least 2^-[`SLACK`]: a sixteenth of
/// this is twice that.
const NEAR_SUM: f32 = 1.0 / (1_u32 << (SLACK as u32 - 5)) as f32;

/// A thread's part of the softmax, for two heads: [`first_row`] and the eighth after it.
#[derive(Clone, Copy)]
pub struct Softmax {
    /// The bases of the weights: 0 or a score, times log2 e. No score is more than [`SLACK`] above its base. -infinity
    /// before the first tile.
    base: [f32; 2],
    /// Sums of the thread's weights.
    sum: [f32; 2],
}

/// The head of the thread's first row.
#[inline(always)]
pub fn first_row() -> u32 {
    16 * (thread::warp_id() % 4) + thread::lane_id() / 4
}

impl Softmax {
    /// A softmax without keys.
    #[inline(always)]
    pub const fn new() -> Self {
        Self { base: [f32::NEG_INFINITY; 2], sum: [0.0; 2] }
    }

    /// Writes the weights of the keys of tile `tile`, from their products with the queries; the products of keys that
    /// do not count are -infinity. Returns, for each head, the factor by which its earlier sums of values must be
    /// multiplied, since its base may have been raised.
    ///
    /// The weights are first written relative to the present bases. Only if one of them may be above 2^[`SLACK`] are
    /// the bases raised, and the weights written again: a thread's sum of weights costs less than the maximum over four
    /// threads.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together; nobody reads the weights before a barrier.
    #[inline(always)]
    pub unsafe fn weigh(&mut self, products: Fragments, arrays: Arrays, tile: u32) -> [f32; 2] {
        // SAFETY: words of shared memory by one thread each, with a barrier before others read them.
        unsafe {
            let weights = weights_of(tile);
            let sum = self.store_weights(products, weights);
            let fits = |i: usize| sum[i] <= SMALL_SUM && self.base[i] > f32::NEG_INFINITY;
            let factor = if warp::all(fits(0) && fits(1)) {
                self.sum = [0, 1].map(|i| self.sum[i] + sum[i]);
                [1.0; 2]
            } else {
                let factor = self.raise(products);
                let sum = self.store_weights(products, weights);
                self.sum = [0, 1].map(|i| self.sum[i] * factor[i] + sum[i]);
                factor
            };
            publish_factor(arrays, tile, factor);
            factor
        }
    }

    /// As [`Self::weigh`], for tile 0, before which there is no base.
    ///
    /// # Safety
    /// As [`Self::weigh`].
    #[inline(always)]
    pub unsafe fn weigh_first(&mut self, products: Fragments, arrays: Arrays) {
        // SAFETY: as in `weigh`.
        unsafe {
            self.raise(products);
            self.sum = self.store_weights(products, weights_of(0));
            publish_factor(arrays, 0, [1.0; 2]);
        }
    }

    /// Raises the bases of the heads that have a score far above their base. Returns the factors by which their earlier
    /// sums are multiplied.
    ///
    /// # Safety
    /// As [`Self::weigh`].
    #[inline(always)]
    unsafe fn raise(&mut self, products: Fragments) -> [f32; 2] {
        // SAFETY: by this function's own contract.
        let row_max = unsafe { [0, 1].map(|i| largest(products, i)) };
        [0, 1].map(|i| {
            let base = self.base[i];
            self.base[i] = raised(base, row_max[i]);
            // Before the first score there are no sums to multiply.
            let has_sums = base > f32::NEG_INFINITY && self.base[i] != base;
            if has_sums { ex2(base - self.base[i]) } else { 1.0 }
        })
    }

    /// Writes the thread's weights, and returns their sum of each head.
    ///
    /// # Safety
    /// As [`Self::weigh`].
    #[inline(always)]
    unsafe fn store_weights(&self, products: Fragments, weights: Rows<WORDS>) -> [f32; 2] {
        // SAFETY: the block's shared memory, a word by one thread.
        unsafe { store_weights(products, self.base, (Shared::at(0), weights)) }
    }

    /// Base and sum of weights of the thread's two heads, over all keys of the block.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    pub unsafe fn bases_and_sums(self) -> ([f32; 2], [f32; 2]) {
        // SAFETY: by this function's own contract.
        let sum = self.sum.map(|sum| unsafe {
            let sum = sum + warp::shuffle_xor_f32(sum, 1);
            sum + warp::shuffle_xor_f32(sum, 2)
        });
        (self.base, sum)
    }

    /// Stores each head's base and sum of weights over all keys of the block in `arrays`.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together; a barrier follows before others read them.
    #[inline(always)]
    pub unsafe fn store(self, arrays: Arrays) {
        let row = first_row();
        // SAFETY: as in `weigh`.
        unsafe {
            let (base, sum) = self.bases_and_sums();
            if thread::lane_id().is_multiple_of(4) {
                unroll::<2>(|i| {
                    arrays.sum.store(row + 8 * i as u32, sum[i]);
                    arrays.base.store(row + 8 * i as u32, base[i]);
                });
            }
        }
    }
}

/// The base of a head's weights after keys whose largest score, times log2 e, is `row_max`. `base` is the base before
/// these keys: -infinity if there were none.
#[inline(always)]
pub const fn raised(base: f32, row_max: f32) -> f32 {
    if base == f32::NEG_INFINITY {
        if row_max.abs() <= SLACK { 0.0 } else { row_max }
    } else if row_max > base + SLACK {
        row_max
    } else {
        base
    }
}

/// Whether these sums of weights with base 0, of the thread's two heads, prove that no score of the warp is more than
/// [`SLACK`] above 0, so that the base stays 0 ([`raised`]). False proves nothing.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
pub unsafe fn are_small(sum: [f32; 2]) -> bool {
    // SAFETY: by this function's own contract.
    unsafe { warp::all(sum[0] <= SMALL_SUM && sum[1] <= SMALL_SUM) }
}

/// As [`are_small`], for the first tile: also proves, for each head, that the largest score is at most [`SLACK`] below
/// 0, since one of the head's four threads has a sum of weights that is large enough.
///
/// # Safety
/// As [`are_small`].
#[inline(always)]
pub unsafe fn are_near(sum: [f32; 2]) -> bool {
    const FIRST_OF_FOUR: u32 = 0x1111_1111;
    // SAFETY: by this function's own contract.
    unsafe {
        let count = sum.map(|sum| {
            let lanes = warp::ballot(sum >= NEAR_SUM);
            (lanes | lanes >> 1 | lanes >> 2 | lanes >> 3) & FIRST_OF_FOUR
        });
        are_small(sum) && count[0] & count[1] == FIRST_OF_FOUR
    }
}

/// The largest of the products of the thread's head `i` with the keys of a tile, over the head's four threads: as a
/// score, times log2 e.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
pub unsafe fn largest(products: Fragments, i: usize) -> f32 {
    let own = products
        .iter()
        .fold(f32::NEG_INFINITY, |before, four| max(before, max(four[2 * i], four[2 * i + 1])));
    // SAFETY: by this function's own contract.
    unsafe {
        let pair = max(own, warp::shuffle_xor_f32(own, 1));
        max(pair, warp::shuffle_xor_f32(pair, 2)) * SCALE
    }
}

/// Writes a thread's weights of a tile, relative to its heads' bases, and returns their sum of each head.
///
/// # Safety
/// `weights` lie in `memory`, and nobody reads them before a barrier.
#[inline(always)]
pub unsafe fn store_weights<const N: usize>(
    products: Fragments,
    base: [f32; 2],
    (memory, weights): (Shared<u32, N>, Rows<N>),
) -> [f32; 2] {
    let (row, quarter) = (first_row(), thread::lane_id() % 4);
    let (pairs, sum) = self::weights(products, base);
    unroll::<8>(|n| {
        unroll::<2>(|i| {
            let word = weights.word(n as u32, row + 8 * i as u32) + quarter;
            // SAFETY: by this function's own contract.
            unsafe { memory.store(word, pairs[n][i]) }
        });
    });
    sum
}

/// Computes a thread's weights of a tile, relative to the bases of its two heads: for each group of eight keys and each
/// head, a pair of keys' weights as BF16; and the sum of weights of each head.
#[inline(always)]
pub fn weights(products: Fragments, base: [f32; 2]) -> ([[u32; 2]; 8], [f32; 2]) {
    let base = base.map(finite);
    let mut sum = [0.0_f32; 2];
    let pairs = array_from_fn(|n| {
        array_from_fn(|i| {
            let [a, b] = [0, 1].map(|j| ex2_ftz(mul_add(products[n][2 * i + j], SCALE, -base[i])));
            sum[i] += a + b;
            bf16x2_from_f32(a, b)
        })
    });
    (pairs, sum)
}

/// The factors by which a head's sums of values are multiplied to give its result, and log2 of the softmax's
/// denominator. `sink` is the sink times log2 e; `bases` and `sums` are the base and the sum of the weights of each of
/// the `N` sums of values.
#[inline(always)]
pub fn output_scales<const N: usize>(
    sink: f32,
    bases: [f32; N],
    sums: [f32; N],
) -> ([f32; N], f32) {
    let max_base = bases.iter().fold(sink, |before, &base| max(before, base));
    let factor: [f32; N] = array_from_fn(|i| ex2(bases[i] - finite(max_base)));
    let mut total = ex2(sink - finite(max_base));
    unroll::<N>(|i| total += sums[i] * factor[i]);
    // Without keys and sink all results are 0.
    let scale = if total == 0.0 { 0.0 } else { 1.0 / total };
    let lse = if total == 0.0 { f32::NEG_INFINITY } else { max_base + lg2(total) };
    (array_from_fn(|i| factor[i] * scale), lse)
}

/// Stores, for the second warpgroup, the factors by which it multiplies its sums before it adds the values of tile
/// `tile`.
///
/// # Safety
/// As [`Softmax::weigh`], whose last act it is.
#[inline(always)]
unsafe fn publish_factor(arrays: Arrays, tile: u32, factor: [f32; 2]) {
    // SAFETY: by this function's own contract, a word by one thread.
    unsafe {
        if thread::lane_id().is_multiple_of(4) {
            let row = tile % 2 * HEADS + first_row();
            arrays.factor.store(row, factor[0]);
            arrays.factor.store(row + 8, factor[1]);
        }
        // A warp's products read the weights of all its lanes, and the arrival at a named barrier does not order these
        // for its own products.
        warp::sync_warp();
    }
}

/// Mask of the keys of a tile that count: four bits a key, of which the lowest is the flag.
#[derive(Clone, Copy)]
pub struct KeyMask {
    /// The mask, eight keys a word.
    words: [[u32; 4]; 2],
    /// Bitwise AND of all words.
    all: u32,
}

/// The flags of a word whose keys all count.
const ALL: u32 = 0x1111_1111;

impl KeyMask {
    /// Loads the mask of tile `tile`.
    ///
    /// # Safety
    /// `arrays` has them.
    #[inline(always)]
    pub unsafe fn load(arrays: Arrays, tile: u32) -> Self {
        // SAFETY: two fours of words of the tile.
        let words: [[u32; 4]; 2] = array_from_fn(|i| unsafe {
            arrays.mask.load_u32x4(tile % 2 * KEY_GROUPS + 4 * i as u32)
        });
        // The optimisation barrier has it computed before the wait for the products.
        let all =
            thread::opt_barrier_u32(words.as_flattened().iter().fold(ALL, |all, word| all & word));
        Self { words, all }
    }

    /// Sets the products of keys that do not count to -infinity. Most tiles have no such key.
    #[inline(always)]
    pub fn apply(self, products: Fragments) -> Fragments {
        if self.all == ALL {
            return products;
        }
        let pair = 2 * (thread::lane_id() % 4);
        masked(products, |n, key| self.words[n / 4][n % 4] >> (4 * (pair + key)) & 1 != 0)
    }
}

/// Sets the products of keys from `count` on to -infinity. Most tiles have no such key.
#[inline(always)]
pub fn first_keys(products: Fragments, count: u32) -> Fragments {
    if count >= TILE {
        return products;
    }
    let pair = 2 * (thread::lane_id() % 4);
    masked(products, |n, key| 8 * n as u32 + pair + key < count)
}

/// Sets the products of keys that do not count to -infinity. `counts(n, i)` says it of the thread's keys in fragment `n`,
/// of which there are two: `i` 0 and 1.
#[inline(always)]
pub fn masked(products: Fragments, counts: impl Fn(usize, u32) -> bool) -> Fragments {
    array_from_fn(|n| {
        let masked = |product: f32, i| if counts(n, i) { product } else { f32::NEG_INFINITY };
        let [a, b, c, d] = products[n];
        [masked(a, 0), masked(b, 1), masked(c, 0), masked(d, 1)]
    })
}

/// `base`, or 0 if it is -infinity (no keys).
#[inline(always)]
pub fn finite(base: f32) -> f32 {
    if base == f32::NEG_INFINITY { 0.0 } else { base }
}

/// Multiplies the sums by `factor`, one factor a row. Does nothing where all factors of the warp are 1.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
pub unsafe fn rescale(values: FragmentsN256, factor: [f32; 2]) -> FragmentsN256 {
    // SAFETY: by this function's own contract.
    if unsafe { warp::all(factor[0] == 1.0 && factor[1] == 1.0) } {
        return values;
    }
    let [x, y] = factor;
    let four = |[a, b, c, d]: [f32; 4]| [a * x, b * x, c * y, d * y];
    let [low, high] = values;
    [array_from_fn(|n| four(low[n])), array_from_fn(|n| four(high[n]))]
}

//! MXFP4 keys as 8-bit integers, whose products are exact.
//!
//! An integer is four times an E2M1 value, times a power of two: 4 for a group with the largest scale of its key, 2 or
//! 1 for a group whose scale is a half or a quarter of that. A lane's channels of a key are one group, so the table for
//! the group's power of two unpacks them all: `prmt` looks up four codes at once. Lane `4 g + t` holds channels `32 t
//! .. 32 t + 32` of key `g`, and step `s` of four takes the eight from `8 s` on.
//!
//! Keys whose scales differ by more than a factor of 4, and all keys if the query has exponent gaps, are
//! scored again group by group, with the scales in f32. That is rare: keys and queries come from a Hadamard
//! transform, which evens out the groups.

use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use simt::math::{max, max_u16x2, mul_add, mul_saturated, permute_bytes};
use simt::mma::s8_m16n8k32;
use simt::warpgroup::{IntegerFragments, right_word, s8_m64n64k128};
use simt::{copy, thread, warp};

use super::{Block, Half, Keys, Query, ScoreMemory, own_thread};
use crate::indexer::score::weights::{Weights, weighted};

/// [`IndexFormat::Mxfp4`].
#[derive(Clone, Copy)]
pub struct Mxfp4Keys;

/// A lane's fragments of two keys.
#[derive(Clone, Copy)]
pub struct Left {
    /// The fragment of A of each step.
    steps: [[u32; 4]; 4],
    /// log2 of the larger power of two of the keys' groups, in both halves of the word; more than
    /// [`MAX_LOG2`] if a power would be below 1.
    log2: u32,
}

/// log2 of the power of two of a group with the largest scale.
const MAX_LOG2: u32 = 2;
/// The ratio of an integer to the key's value divided by its largest scale.
const INTEGERS: f32 = (4 << MAX_LOG2) as f32;
/// Words of a query: its integers, then its exponent gaps.
const QUERY_WORDS: usize = IndexFormat::Mxfp4.query_bytes() as usize / 4;
/// A sum of products is at most 128 * 96 * 96, so its bits are those of a subnormal f32: the sum times
/// 2^-149. Multiplied by this, 2^127, it is below 1.
const SUM_SCALE: f32 = f32::from_bits((127 + 127) << 23);
/// The factor by which a sum times `SUM_SCALE` is too small.
const SUMS: f32 = (1 << (149 - 127)) as f32;

impl Keys for Mxfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Mxfp4;
    const STAGES: u32 = 3;
    const UNIT: f32 = SUMS / INTEGERS;
    const PREPARED_WORDS: u32 = 16;
    const ARE_IN_FLIGHT: bool = true;
    type Left = Left;
    type Products = IntegerFragments;

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<1>();
    }

    #[inline(always)]
    unsafe fn prepare(memory: ScoreMemory, at: u32) {
        let log2 = own_thread();
        if log2 < Self::PREPARED_WORDS / 4 {
            // SAFETY: four words of the tables, each written once.
            unsafe { memory.store_u32x4(at + 4 * log2, table(log2)) }
        }
    }

    #[inline(always)]
    unsafe fn unpack(half: Half) -> Left {
        let quarter = thread::lane_id() % 4;
        let [upper, lower] = half.keys();
        let log2 = |key: u32| {
            // SAFETY: a key of the block.
            let scales = unsafe { half.block.scales::<Self>(key) };
            // The value is in both halves of the word; a negative lower half borrows from the upper one.
            let own = permute_bytes(scales, 0, 0x4040 + 0x0101 * quarter);
            (own + 0x0001_0001 * MAX_LOG2).wrapping_sub(largest(scales))
        };
        let (a, b) = (log2(upper), log2(lower));
        // SAFETY: keys of the block.
        let (upper, lower) =
            unsafe { (words(half.block, upper, a & 3), words(half.block, lower, b & 3)) };
        let step = |i: usize| {
            let ([a, c], [b, d]) = (upper[i], lower[i]);
            [a, b, c, d].map(thread::opt_barrier_u32)
        };
        Left { steps: [step(0), step(1), step(2), step(3)], log2: a.max(b) }
    }

    #[inline(always)]
    unsafe fn product<T>(
        left: Left,
        query: Query,
        meanwhile: impl FnOnce() -> T,
    ) -> (IntegerFragments, T) {
        // SAFETY: by this function's own contract.
        unsafe { s8_m64n64k128(left.steps, query.words::<{ QUERY_WORDS }>(), meanwhile) }
    }

    #[inline(always)]
    fn sums(products: IntegerFragments, of_sixteen: impl Fn(usize) -> [f32; 4]) -> [f32; 2] {
        // The bits of a negative sum are those of a NaN, which the saturation turns into 0.
        let positive = |sum: i32| mul_saturated(f32::from_bits(sum.cast_unsigned()), SUM_SCALE);
        weighted(products, positive, of_sixteen)
    }

    #[inline(always)]
    fn needs_group_scaling(left: Left) -> bool {
        left.log2 > 0x0001_0001 * MAX_LOG2
    }

    #[inline(always)]
    unsafe fn query_needs_group_scaling(query: Query) -> bool {
        let first = IndexFormat::query_exponent_gap_byte(0, 0) / 4 + thread::lane_id();
        // SAFETY: the exponent gaps of two heads; all lanes are together.
        unsafe {
            let query = query.words::<{ QUERY_WORDS }>();
            warp::any(query.load(first) | query.load(first + QUERY_HEADS / 2) != 0)
        }
    }

    #[inline(always)]
    unsafe fn sums_by_group(half: Half, query: Query, weights: Weights) -> [f32; 2] {
        // SAFETY: by this function's own contract.
        unsafe { scaled_group_sums(half, query, weights) }
    }

    #[inline(always)]
    unsafe fn factor(block: Block, key: u32) -> f32 {
        // SAFETY: a key of the block.
        power_of_scale(largest(unsafe { block.scales::<Self>(key) }) & 0xFF)
    }
}

/// The table of power 2^`log2` for `permute_bytes`: two words for the codes 0 to 7, and two for the negative
/// codes, halved, in seven bits. A code with the sign bit makes `permute_bytes` replicate the sign bit of
/// the selected byte. That bit is clear in both tables, so each table gives 0 for codes of the other sign.
#[inline(always)]
fn table(log2: u32) -> [u32; 4] {
    // Twice the values of codes 0 to 3, then 4 to 7; and minus the values, in seven bits.
    let (low, high) = (0x0604_0200, 0x1810_0C08);
    let (minus_low, minus_high) = (0x7D7E_7F00, 0x7478_7A7C);
    // The last table is for groups that `sums_by_group` scores; its integers are not used.
    let log2 = log2.min(MAX_LOG2);
    let kept = 0x0101_0101 * (0x7F >> log2);
    [low << log2, high << log2, (minus_low & kept) << log2, (minus_high & kept) << log2]
}

/// The integers of the lane's group of a key, eight a step.
///
/// # Safety
/// The block and the tables are in shared memory, `key < 32`, `log2 < 4`.
#[inline(always)]
unsafe fn words(block: Block, key: u32, log2: u32) -> [[u32; 2]; 4] {
    // SAFETY: by this function's own contract: 16 of the key's 64 bytes, and a table.
    let (codes, [low, high, minus_low, minus_high]) = unsafe {
        let codes = block.codes::<Mxfp4Keys>(4 * key + thread::lane_id() % 4);
        (codes, block.memory.load_u32x4(block.tables + 4 * log2))
    };
    let four = |codes: u32, opposite: u32| {
        let negative = permute_bytes(minus_low, minus_high, opposite);
        // At most one of the two is not 0.
        permute_bytes(low, high, codes).wrapping_add(negative << 1)
    };
    codes.map(|codes| {
        let opposite = codes ^ 0x8888_8888;
        [four(codes, opposite), four(codes >> 16, opposite >> 16)]
    })
}

/// The largest of four bytes, in both halves of a word.
#[inline(always)]
fn largest(bytes: u32) -> u32 {
    let (low, high) = (permute_bytes(bytes, 0, 0x4140), permute_bytes(bytes, 0, 0x4342));
    let two = max_u16x2(low, high);
    max_u16x2(two, permute_bytes(two, 0, 0x1032))
}

/// The value of a scale, NaN for 255.
#[inline(always)]
fn power_of_scale(scale: u32) -> f32 {
    let value = max(f32::from_bits(scale << 23), f32::MIN_POSITIVE / 2.0);
    // 255 gives infinity, which becomes NaN.
    mul_add(value, 0.0, value)
}

/// `2^-gap`, 0 below the smallest normal f32.
#[inline(always)]
fn power_of_gap(exponent_gap: u32) -> f32 {
    f32::from_bits(127_u32.saturating_sub(exponent_gap) << 23)
}

/// Implements [`Keys::sums_by_group`]: one product for each group, multiplied by the scales of the group of the key and
/// of the query, each relative to the largest. Heads are added in the same order as by `weighted`:
/// whether a tile is scored this way depends on all of its keys, also on those that the query does not see, and these
/// must not change the bits of the others.
///
/// # Safety
/// Keys, query and weights are in shared memory; all lanes of the warp call it together.
#[inline(always)]
unsafe fn scaled_group_sums(half: Half, query: Query, weights: Weights) -> [f32; 2] {
    let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let [upper, lower] = half.keys();
    // SAFETY: by this function's own contract.
    unsafe {
        let query = query.words::<{ QUERY_WORDS }>();
        let (a, b) = (words(half.block, upper, MAX_LOG2), words(half.block, lower, MAX_LOG2));
        let scales = half.keys().map(|key| half.block.scales::<Mxfp4Keys>(key));
        // Of each key, the sums over even and over odd heads.
        let mut sums = [0.0; 4];
        let mut eight = 0;
        while eight < QUERY_HEADS / 8 {
            let mut products = [0.0; 4];
            let mut part = 0;
            while part < 4 {
                let step = |i: usize, sum: [i32; 4]| {
                    let ([a, c], [b, d]) = (a[i], b[i]);
                    // Zeros for the channels of other groups.
                    let left = [a, b, c, d].map(|word| if quarter == part { word } else { 0 });
                    let right =
                        |sixteen: u32| query.load(right_word(sixteen, 8 * eight + group) + quarter);
                    s8_m16n8k32(left, [right(2 * i as u32), right(2 * i as u32 + 1)], sum)
                };
                let sum = step(3, step(2, step(1, step(0, [0; 4]))));
                let key = scales.map(|scales| {
                    power_of_gap((largest(scales) & 0xFF) - (scales >> (8 * part) & 0xFF))
                });
                let head = [0, 1].map(|i| {
                    let exponent_gaps = query.load(
                        IndexFormat::query_exponent_gap_byte(8 * eight + 2 * quarter + i, 0) / 4,
                    );
                    power_of_gap(exponent_gaps >> (8 * part) & 0xFF)
                });
                let add = |i: usize| mul_add(sum[i] as f32 * key[i / 2], head[i % 2], products[i]);
                products = [add(0), add(1), add(2), add(3)];
                part += 1;
            }
            let [even, odd] = weights.of_eight(eight);
            let [p, q, r, s] = products.map(|product| product.max(0.0) / SUMS);
            let [a, b, c, d] = sums;
            sums =
                [mul_add(even, p, a), mul_add(odd, q, b), mul_add(even, r, c), mul_add(odd, s, d)];
            eight += 1;
        }
        let [a, b, c, d] = sums;
        [a + b, c + d]
    }
}

//! The k-th largest of the values that a block holds, by a radix search over counts: exact, without
//! an order among threads that could show, and with work that does not depend on how values lie.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{math, thread, warp};

/// Threads of a block that searches.
pub const THREADS: u32 = 512;
/// Its warps.
const WARPS: u32 = THREADS / 32;

/// The value of what is not there: below every other.
pub const ABSENT: u32 = 0;

/// A score as an integer of the same order: NaN below everything, zeros of both signs equal.
#[inline(always)]
#[must_use]
pub fn ordered(score: f32) -> u32 {
    const NAN: u32 = ABSENT + 1;
    if score.is_nan() {
        return NAN;
    }
    // Adding zero makes -0 a +0.
    let bits = (score + 0.0).to_bits();
    bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | 0x8000_0000)
}

/// The score that [`ordered`] made the value of, or one near it where that is no finite number.
#[inline(always)]
fn score_of(value: u32) -> f32 {
    const MOST: f32 = 1e38;
    let sign = (value.cast_signed() >> 31).cast_unsigned();
    let score = f32::from_bits(value ^ (!sign | 0x8000_0000));
    math::min(math::max(score, -MOST), MOST)
}

/// What the threads of a block hold together: values, each with an index that no other has.
pub trait Values: Copy {
    /// Calls `visit` with each value of the calling thread and its index. Threads may hold different
    /// numbers of values.
    ///
    /// # Safety
    /// The memory that they come from is there.
    unsafe fn each(self, visit: impl FnMut(u32, u32));
}

/// Values in registers.
#[derive(Clone, Copy)]
pub struct Held<const N: usize> {
    /// The values.
    pub values: [u32; N],
    /// Their indices.
    pub indices: [u32; N],
}

/// Spelt out: an array walked by a loop would live in local memory.
macro_rules! held_values {
    ($count:literal: $($i:literal)*) => {
        impl Values for Held<$count> {
            #[inline(always)]
            unsafe fn each(self, mut visit: impl FnMut(u32, u32)) {
                $( visit(self.values[$i], self.indices[$i]); )*
            }
        }
    };
}

held_values!(4: 0 1 2 3);
held_values!(8: 0 1 2 3 4 5 6 7);
held_values!(16: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Those values that lie between two bounds, both included.
#[derive(Clone, Copy)]
struct Between<V: Values> {
    values: V,
    low: u32,
    high: u32,
}

impl<V: Values> Values for Between<V> {
    #[inline(always)]
    unsafe fn each(self, mut visit: impl FnMut(u32, u32)) {
        // SAFETY: by this function's own contract.
        unsafe {
            self.values.each(|value, index| {
                let inside = value >= self.low && value <= self.high;
                visit(if inside { value } else { ABSENT }, index);
            });
        }
    }
}

/// The indices of those values that are `tied`, the lowest as the largest value.
#[derive(Clone, Copy)]
struct Ties<V: Values> {
    values: V,
    tied: u32,
}

impl<V: Values> Values for Ties<V> {
    #[inline(always)]
    unsafe fn each(self, mut visit: impl FnMut(u32, u32)) {
        // SAFETY: by this function's own contract.
        unsafe {
            self.values.each(|value, index| {
                visit(if value == self.tied { !index } else { ABSENT }, index);
            });
        }
    }
}

/// A digit of scores rather than of their bits: scores crowd into a few exponents.
#[derive(Clone, Copy)]
struct Linear {
    low: f32,
    scale: f32,
}

impl Linear {
    #[inline(always)]
    fn new(low: u32, high: u32) -> Self {
        let (low, high) = (score_of(low), score_of(high));
        Self { low, scale: BINS as f32 / (high - low) }
    }

    /// Never falls as the value rises: each step is rounded, and rounding keeps the order.
    #[inline(always)]
    fn digit(self, value: u32) -> u32 {
        (((score_of(value) - self.low) * self.scale) as u32).min(BINS - 1)
    }
}

/// A bound that scores may reach.
#[derive(Clone, Copy)]
pub struct Floor {
    linear: Linear,
    digit: u32,
}

impl Floor {
    /// The bound that every score reaches.
    pub const NONE: Self = Self { linear: Linear { low: 0.0, scale: 0.0 }, digit: 0 };

    /// Whether the score that became this value reaches the bound.
    #[inline(always)]
    #[must_use]
    pub fn reached_by(self, value: u32) -> bool {
        self.linear.digit(value) >= self.digit
    }
}

/// Those values whose linear digit is `digit`.
#[derive(Clone, Copy)]
struct InDigit<V: Values> {
    values: V,
    linear: Linear,
    digit: u32,
}

impl<V: Values> Values for InDigit<V> {
    #[inline(always)]
    unsafe fn each(self, mut visit: impl FnMut(u32, u32)) {
        // SAFETY: by this function's own contract.
        unsafe {
            self.values.each(|value, index| {
                let inside = value != ABSENT && self.linear.digit(value) == self.digit;
                visit(if inside { value } else { ABSENT }, index);
            });
        }
    }
}

/// The values that were searched for: those above `least`, and of those equal to it the ones whose
/// index is at most `last`.
#[derive(Clone, Copy)]
pub struct Cut {
    /// The least value among them.
    pub least: u32,
    /// The largest value.
    pub most: u32,
    /// The highest index among those equal to `least`.
    last: u32,
}

impl Cut {
    /// Whether a value with this index is among them.
    #[inline(always)]
    #[must_use]
    pub fn takes(self, value: u32, index: u32) -> bool {
        value > self.least || (value == self.least && index <= self.last)
    }
}

/// Shared memory of a search: 1 KiB of counts, and what the warps tell each other.
#[derive(Clone, Copy)]
pub struct Scratch {
    counts: Shared<u32, { BINS as usize }>,
    words: Shared<u32, { 2 * WARPS as usize }>,
}

/// Counts of a round: one for each value of a digit.
const BINS: u32 = 256;
const DIGIT_BITS: u32 = 8;

impl Scratch {
    /// Bytes that it takes.
    pub const BYTES: u32 = 4 * (BINS + 2 * WARPS);

    /// The scratch that starts at `offset` of the block's shared memory.
    ///
    /// # Safety
    /// `offset` is a multiple of 16, and [`Self::BYTES`] from there on are used for nothing else.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(offset: u32) -> Self {
        // SAFETY: by this function's own contract.
        unsafe { Self { counts: Shared::at(offset), words: Shared::at(offset + 4 * BINS) } }
    }

    /// The cut below the `k` largest values, or below all where there are fewer.
    ///
    /// # Safety
    /// All threads of a block of [`THREADS`] call it together, with the same `k`, at least 1; together
    /// they hold `present` values.
    #[inline(always)]
    #[must_use]
    pub unsafe fn cut<V: Values>(self, values: V, present: u32, k: u32) -> Cut {
        // SAFETY: by this function's own contract; branches are the block's.
        unsafe {
            let (low, most) = self.extremes(values);
            if present <= k {
                return Cut { least: low, most, last: u32::MAX };
            }
            let linear = Linear::new(low, most);
            let found = self.round(values, k, |value| linear.digit(value));
            let inside = InDigit { values, linear, digit: found.digit };
            let range = self.extremes(inside);
            let missing = k - found.above;
            let (least, missing) = if found.count == missing {
                (range.0, 0)
            } else {
                self.search(values, range, missing)
            };
            if missing == 0 {
                return Cut { least, most, last: u32::MAX };
            }
            let ties = Ties { values, tied: least };
            let range = self.extremes(ties);
            let (last, _) = self.search(ties, range, missing);
            Cut { least, most, last: !last }
        }
    }

    /// A bound that at least `k` of the values reach, and few more.
    ///
    /// # Safety
    /// As [`Self::cut`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn floor<V: Values>(self, values: V, present: u32, k: u32) -> Floor {
        // SAFETY: by this function's own contract; branches are the block's.
        unsafe {
            let (low, high) = self.extremes(values);
            let linear = Linear::new(low, high);
            let digit = if present < k {
                0
            } else {
                self.round(values, k, |value| linear.digit(value)).digit
            };
            Floor { linear, digit }
        }
    }

    /// The k-th largest of the values between two bounds, both among them, or a value not above it and
    /// above the next one; with the number that is missing of the `k` after all those above it, or 0
    /// if the values from it on are exactly `k`.
    ///
    /// # Safety
    /// As [`Self::cut`], after [`Self::extremes`], with at least `k` values between the bounds.
    #[inline(always)]
    unsafe fn search<V: Values>(
        self,
        values: V,
        (mut low, mut high): (u32, u32),
        k: u32,
    ) -> (u32, u32) {
        let mut missing = k;
        while low != high {
            let bits = 32 - (high - low).leading_zeros();
            let shift = bits.saturating_sub(DIGIT_BITS);
            let inside = Between { values, low, high };
            // SAFETY: by this function's own contract; bounds and counts are the same in all threads.
            let found = unsafe { self.round(inside, missing, |value| (value - low) >> shift) };
            missing -= found.above;
            low += found.digit << shift;
            high = high.min(low.saturating_add((1 << shift) - 1));
            if found.count == missing {
                return (low, 0);
            }
        }
        (low, missing)
    }

    /// Counts the values by digit, which is below [`BINS`]; where the count from above reaches `k`.
    ///
    /// # Safety
    /// As [`Self::cut`]; the counts are clear, and there are at least `k` values.
    #[inline(always)]
    unsafe fn round<V: Values>(self, values: V, k: u32, digit: impl Fn(u32) -> u32) -> Crossing {
        // SAFETY: digits are below `BINS`; barriers stand between counting, reading and the clearing
        // for the next round, by which the words of the last one have been read.
        unsafe {
            values.each(|value, _| {
                if value != ABSENT {
                    BlockAtomicU32::new(self.counts, digit(value)).add(1);
                }
            });
            thread::sync_threads();
            if thread::warp_id() == 0 {
                let found = self.crossing(k);
                if thread::lane_id() == 0 {
                    self.words.store(0, found.digit);
                    self.words.store(1, found.above);
                    self.words.store(2, found.count);
                }
            }
            thread::sync_threads();
            let found = Crossing {
                digit: self.words.load(0),
                above: self.words.load(1),
                count: self.words.load(2),
            };
            self.clear();
            thread::sync_threads();
            found
        }
    }

    /// Clears the counts.
    ///
    /// # Safety
    /// No thread uses them without a barrier between.
    #[inline(always)]
    unsafe fn clear(self) {
        let i = thread::thread_idx_x();
        if i < BINS {
            // SAFETY: by this function's own contract.
            unsafe { self.counts.store(i, 0) };
        }
    }

    /// The least and the largest of the values that are there; clears the counts.
    ///
    /// # Safety
    /// As [`Self::cut`].
    #[inline(always)]
    unsafe fn extremes<V: Values>(self, values: V) -> (u32, u32) {
        let (mut low, mut high) = (u32::MAX, ABSENT);
        let lane = thread::lane_id();
        // SAFETY: barriers stand before the words are written, after the last search, and before they
        // are read; every warp has two of them.
        unsafe {
            values.each(|value, _| {
                low = low.min(if value == ABSENT { u32::MAX } else { value });
                high = high.max(value);
            });
            let (low, high) = (warp::reduce_min_u32(low), warp::reduce_max_u32(high));
            thread::sync_threads();
            self.clear();
            if lane == 0 {
                self.words.store(thread::warp_id(), low);
                self.words.store(WARPS + thread::warp_id(), high);
            }
            thread::sync_threads();
            let (low, high) =
                (self.words.load(lane % WARPS), self.words.load(WARPS + lane % WARPS));
            (warp::reduce_min_u32(low), warp::reduce_max_u32(high))
        }
    }

    /// The digit at which the counts, summed from the highest digit down, reach `k`.
    ///
    /// # Safety
    /// All lanes of a warp call it together; the counts are written, and sum up to `k` at least.
    #[inline(always)]
    unsafe fn crossing(self, k: u32) -> Crossing {
        /// Digits of a lane: lane 0 has the highest.
        const DIGITS: u32 = BINS / 32;
        let lane = thread::lane_id();
        // SAFETY: by this function's own contract.
        unsafe {
            let lowest = BINS - DIGITS * (lane + 1);
            let [a, b, c, d] = self.counts.load_u32x4(lowest + 4);
            let [e, f, g, h] = self.counts.load_u32x4(lowest);
            let sum = a + b + c + d + e + f + g + h;
            let upto = inclusive_sum(sum);
            let before = upto - sum;
            let owner = warp::ballot(upto >= k).trailing_zeros();
            // Down the lane's digits, until the count of one reaches.
            let pass = |at: Crossing, count: u32| {
                let above = at.above + at.count;
                if above < k { Crossing { digit: at.digit - 1, above, count } } else { at }
            };
            let found = Crossing { digit: lowest + 7, above: before, count: d };
            let found = pass(pass(pass(found, c), b), a);
            let found = pass(pass(pass(pass(found, h), g), f), e);
            Crossing {
                digit: warp::shuffle_idx_u32(found.digit, owner),
                above: warp::shuffle_idx_u32(found.above, owner),
                count: warp::shuffle_idx_u32(found.count, owner),
            }
        }
    }
}

/// Where the sum of counts from above reaches a number.
#[derive(Clone, Copy)]
struct Crossing {
    digit: u32,
    /// Values of the higher digits.
    above: u32,
    /// Values of the digit.
    count: u32,
}

/// The sum over this lane and those before it.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn inclusive_sum(value: u32) -> u32 {
    let lane = thread::lane_id();
    let mut sum = value;
    let mut distance = 1;
    while distance < 32 {
        // SAFETY: the lanes are together, by this function's own contract.
        let other = unsafe { warp::shuffle_up_u32(sum, distance) };
        sum += if lane >= distance { other } else { 0 };
        distance *= 2;
    }
    sum
}

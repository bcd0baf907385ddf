//! Finds the k-th largest score of a row by radix search. The search reads the row again for every digit, so it is used
//! only where a bin overflows: for rows with many equal or nearly equal scores.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{thread, warp};

use super::extremes::{MAX_WARPS, block_min_max, warp_min_max};
use super::row::{Row, Scores};
use super::scan::inclusive_sum;
use crate::rank::{self, ABSENT};

/// Describes the k largest values: those above `least`, and those equal to `least` with an index up to `last`.
#[derive(Clone, Copy)]
pub struct Cut {
    /// The least of the k largest values.
    least: u32,
    /// The highest index among those equal to `least`.
    last: u32,
}

impl Cut {
    /// Whether a value with this index is among the k largest.
    #[inline(always)]
    #[must_use]
    pub fn includes(self, value: u32, index: u32) -> bool {
        value > self.least || (value == self.least && index <= self.last)
    }
}

/// Shared memory of a search: 1 KiB of counts, and words that the warps exchange.
#[derive(Clone, Copy)]
pub struct Scratch {
    counts: Shared<u32, { BINS as usize }>,
    words: Shared<u32, { 2 * MAX_WARPS as usize }>,
}

/// Counts of a round, one for each value of a digit.
const BINS: u32 = 256;
const DIGIT_BITS: u32 = 8;

impl Scratch {
    /// Bytes of the scratch.
    pub const BYTES: u32 = 4 * (BINS + 2 * MAX_WARPS);

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

    /// The cut that includes the `k` largest scores of the row, or all if there are fewer.
    ///
    /// # Safety
    /// All threads of the block call it together, with the same `k`, at least 1, and the row is not
    /// empty.
    #[inline(always)]
    #[must_use]
    pub unsafe fn cut<const THREADS: u32, S: Scores>(self, row: Row<THREADS, S>, k: u32) -> Cut {
        // SAFETY: by this function's own contract; branches are the block's.
        unsafe {
            let value = |value, _| value;
            let range = self.extremes(row, value);
            if row.length <= k {
                return Cut { least: range.0, last: u32::MAX };
            }
            let (least, missing) = self.search(row, value, range, k);
            if missing == 0 {
                return Cut { least, last: u32::MAX };
            }
            // Among equal scores the lower index wins: search again, by inverted index.
            let tied = |value, index: u32| if value == least { !index } else { ABSENT };
            let range = self.extremes(row, tied);
            let (last, _) = self.search(row, tied, range, missing);
            Cut { least, last: !last }
        }
    }

    /// Searches for the k-th largest of the keys between two bounds, inclusive. Returns a key, and how many of the `k`
    /// largest are equal to it. If exactly `k` keys are at or above the lower end of a digit, the search stops there
    /// and returns that end and 0.
    ///
    /// # Safety
    /// As [`Self::cut`], after [`Self::extremes`], with at least `k` keys between the bounds.
    #[inline(always)]
    unsafe fn search<const THREADS: u32, S: Scores>(
        self,
        row: Row<THREADS, S>,
        key: impl Fn(u32, u32) -> u32 + Copy,
        (mut low, mut high): (u32, u32),
        k: u32,
    ) -> (u32, u32) {
        let mut missing = k;
        while low != high {
            let bits = 32 - (high - low).leading_zeros();
            let shift = bits.saturating_sub(DIGIT_BITS);
            let digit = |value, index| {
                let key = key(value, index);
                (low..=high).contains(&key).then(|| (key - low) >> shift)
            };
            // SAFETY: by this function's own contract; bounds and counts are the same in all threads.
            let found = unsafe { self.round(row, missing, digit) };
            missing -= found.above;
            low += found.digit << shift;
            high = high.min(low.saturating_add((1 << shift) - 1));
            if found.count == missing {
                return (low, 0);
            }
        }
        (low, missing)
    }

    /// Counts the digits of the scores; digits are below [`BINS`]. Returns the digit at which the count, summed from
    /// the highest digit down, reaches `k`.
    ///
    /// # Safety
    /// As [`Self::cut`]; the counts are cleared, and at least `k` scores have a digit.
    #[inline(always)]
    unsafe fn round<const THREADS: u32, S: Scores>(
        self,
        row: Row<THREADS, S>,
        k: u32,
        digit: impl Fn(u32, u32) -> Option<u32>,
    ) -> Crossing {
        // SAFETY: digits are below `BINS`; barriers separate counting, reading and clearing for the next round.
        // By then the words of this round have been read.
        unsafe {
            row.each(|score, index| {
                let value = rank::key(score);
                if let Some(digit) = digit(value, index) {
                    BlockAtomicU32::new(self.counts, digit).add(1);
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

    /// The smallest and the largest of the keys other than [`ABSENT`]; clears the counts.
    ///
    /// # Safety
    /// As [`Self::cut`].
    #[inline(always)]
    unsafe fn extremes<const THREADS: u32, S: Scores>(
        self,
        row: Row<THREADS, S>,
        key: impl Fn(u32, u32) -> u32,
    ) -> (u32, u32) {
        let (mut low, mut high) = (u32::MAX, ABSENT);
        // SAFETY: a barrier separates the reads of the last search and these writes.
        unsafe {
            row.each(|score, index| {
                let value = rank::key(score);
                let key = key(value, index);
                low = low.min(if key == ABSENT { u32::MAX } else { key });
                high = high.max(key);
            });
            let of_warp = warp_min_max(low, high);
            thread::sync_threads();
            self.clear();
            block_min_max::<THREADS>(self.words, of_warp)
        }
    }

    /// The digit at which the counts, summed from the highest digit down, reach `k`.
    ///
    /// # Safety
    /// All lanes of a warp call it together; the counts are written, and sum up to `k` at least.
    #[inline(always)]
    unsafe fn crossing(self, k: u32) -> Crossing {
        /// Digits of a lane; lane 0 has the highest.
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
            // Goes down the lane's digits until the sum reaches `k`.
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

/// The digit at which the sum of counts from the highest digit down reaches `k`.
#[derive(Clone, Copy)]
struct Crossing {
    digit: u32,
    /// Number of values of the higher digits.
    above: u32,
    /// Number of values of the digit.
    count: u32,
}

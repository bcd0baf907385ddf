//! Counts of scores by bin, where the first bin has the largest scores. Prefix sums over the counts give the bin of the
//! k-th largest score, and each score's place in a list ordered by bin.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{thread, warp};

use super::bin_map::{BINS, BinMap, FIRST, ScoreRange};
use super::extremes::{MAX_WARPS, block_min_max, warp_min_max};
use super::row::Held;
use super::scan::inclusive_sum;
use crate::rank;
use crate::unroll::{array_from_fn, unroll};

/// Number of spare counters after those of the bins, one a lane. A lane without a score counts there: this avoids a
/// branch, and contention.
const SPARE: u32 = 32;
/// Initial value of the spare counters: above the length of any list.
const SPARE_COUNT: u32 = 1 << 16;

/// The bins of a thread's scores, and how many scores of the same bin were counted before each.
#[derive(Clone, Copy)]
pub struct Places<const N: usize> {
    /// The bins; a spare counter where there is no score.
    pub bins: [u32; N],
    /// The number of scores of the same bin that were counted before each score.
    pub before: [u32; N],
}

/// The bins in shared memory. The first threads of a block of `THREADS` threads sum up `EACH` bins each.
#[derive(Clone, Copy)]
pub struct Bins<const THREADS: u32, const EACH: usize> {
    /// Counts, which the exclusive prefix sums within each warp's bins then replace. The spare counters are last.
    counts: Shared<u32, { (BINS + SPARE) as usize }>,
    /// Number of scores in the bins before those of each warp.
    before: Shared<u32, 32>,
    /// The lowest scores of the warps, then the highest.
    extremes: Shared<u32, { 2 * MAX_WARPS as usize }>,
    /// The bin of the k-th largest.
    cut: Shared<u32, 1>,
}

impl<const THREADS: u32, const EACH: usize> Bins<THREADS, EACH> {
    /// Bytes of the arrays.
    pub const BYTES: u32 = Self::CUT_AT + 16;

    /// Number of threads that sum up bins.
    const SUMMING: u32 = BINS / EACH as u32;
    /// Bins of a warp.
    const BINS_PER_WARP: u32 = 32 * EACH as u32;
    const BEFORE_AT: u32 = 4 * (BINS + SPARE);
    const EXTREMES_AT: u32 = Self::BEFORE_AT + 4 * 32;
    const CUT_AT: u32 = Self::EXTREMES_AT + 8 * MAX_WARPS;

    /// The bins that start at `offset` of the block's shared memory.
    ///
    /// # Safety
    /// `offset` is a multiple of 16, and [`Self::BYTES`] from there on are used for nothing else.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(offset: u32) -> Self {
        // SAFETY: by this function's own contract.
        unsafe {
            Self {
                counts: Shared::at(offset),
                before: Shared::at(offset + Self::BEFORE_AT),
                extremes: Shared::at(offset + Self::EXTREMES_AT),
                cut: Shared::at(offset + Self::CUT_AT),
            }
        }
    }

    /// Clears the bins for the first time, and sets up the spare counters. A barrier must follow.
    ///
    /// # Safety
    /// All threads of the block call it before anything else.
    #[inline(always)]
    pub unsafe fn begin(self) {
        let thread = thread::thread_idx_x();
        // SAFETY: by this function's own contract.
        unsafe {
            self.clear();
            if thread < SPARE {
                self.counts.store(BINS + thread, SPARE_COUNT);
            }
        }
    }

    /// Clears the bins. A barrier must follow.
    ///
    /// # Safety
    /// All threads of the block call it, with a barrier since they were used.
    #[inline(always)]
    pub unsafe fn clear(self) {
        let mut at = 4 * thread::thread_idx_x();
        // SAFETY: by this function's own contract.
        unsafe {
            if at < 32 * 4 {
                self.before.store(at / 4, 0);
            }
            while at < BINS {
                self.counts.store_u32x4(at, [0; 4]);
                at += 4 * THREADS;
            }
        }
    }

    /// The range of all scores of the block, from each thread's. Has a barrier.
    ///
    /// # Safety
    /// All threads of the block, a power of two, call it together, once.
    #[inline(always)]
    #[must_use]
    pub unsafe fn extent(self, mine: ScoreRange) -> ScoreRange {
        let (low, high) = (rank::ordered(mine.low), rank::ordered(mine.high));
        // SAFETY: by this function's own contract.
        let (low, high) =
            unsafe { block_min_max::<THREADS>(self.extremes, warp_min_max(low, high)) };
        ScoreRange { low: rank::score(low), high: rank::score(high) }
    }

    /// Counts one score. Returns the number of scores that the bin had before.
    ///
    /// # Safety
    /// The bins were cleared before a barrier; `bin` is one of them.
    #[inline(always)]
    pub unsafe fn add(self, bin: u32) -> u32 {
        // SAFETY: by this function's own contract.
        unsafe { BlockAtomicU32::new(self.counts, bin).add(1) }
    }

    /// Counts the thread's scores.
    ///
    /// # Safety
    /// As [`Self::add`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn count<const N: usize>(self, map: BinMap, held: Held<N>) -> Places<N> {
        let spare = FIRST.to_bits() + BINS + thread::lane_id();
        let bits = |i: usize| if held.there[i] { map.bits(held.scores[i]) } else { spare };
        let bins = array_from_fn(|i| bits(i) - FIRST.to_bits());
        // SAFETY: by this function's own contract; each lane has its own spare counter.
        Places { bins, before: array_from_fn(|i| unsafe { self.add(bins[i]) }) }
    }

    /// The first place of each of these bins in a list of all scores that is ordered by bin; for spare counters a place
    /// past the end of any list. Has two barriers.
    ///
    /// # Safety
    /// All threads of the block call it together after [`Self::count`]. A barrier separates it
    /// from the next [`Self::clear`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn starts<const N: usize>(self, bins: [u32; N]) -> [u32; N] {
        // SAFETY: barriers separate writes and reads. All loads are issued before the first result is used.
        unsafe {
            let _ = self.sum(|run| store(self.counts, run.starts));
            let before = self.before.load(thread::lane_id());
            let start: [u32; N] = array_from_fn(|i| self.counts.load(bins[i]));
            // A shuffle uses the low five bits of the source lane, so the constant bits of `FIRST` do not matter.
            let lane = |i: usize| (bins[i] + FIRST.to_bits()) / Self::BINS_PER_WARP;
            array_from_fn(|i| start[i] + warp::shuffle_idx_u32(before, lane(i)))
        }
    }

    /// The bin of the k-th largest score, or the last one if there are fewer. Has three barriers.
    ///
    /// # Safety
    /// All threads of the block call it together, with the same `k`, at least 1, after [`Self::count`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn bin_of_kth(self, k: u32) -> u32 {
        // SAFETY: the k-th largest score is in one thread's bins; barriers separate writes and reads.
        unsafe {
            let run = self.sum(|_| ());
            let before = self.before.load(thread::warp_id());
            if let Some(bin) = run.offset_by(before).bin_of_kth(k) {
                self.cut.store(0, bin);
            }
            thread::sync_threads();
            self.cut.load(0)
        }
    }

    /// Computes prefix sums over the counts. Returns the sums of the thread's bins within its warp, after calling
    /// `keep` with them; writes the sums before each warp's bins to `before`. Has two barriers.
    ///
    /// # Safety
    /// All threads of the block call it together, after [`Self::count`]. `keep` accesses the thread's own bins
    /// only.
    #[inline(always)]
    unsafe fn sum(self, keep: impl FnOnce(Run<EACH>)) -> Run<EACH> {
        let mut mine = Run { starts: [0; EACH], end: 0 };
        // SAFETY: between the barriers a thread accesses its own bins only; words that several threads write
        // are atomics; branches with collectives are uniform in the warp.
        unsafe {
            thread::sync_threads();
            if thread::thread_idx_x() < Self::SUMMING {
                let counts: [u32; EACH] = load(self.counts);
                let sum = counts.iter().sum();
                // One lane for each later warp.
                let (total, lane) = (warp::reduce_add_u32(sum), thread::lane_id());
                if lane > thread::warp_id() {
                    BlockAtomicU32::new(self.before, lane).add(total);
                }
                mine = Run::ending(inclusive_sum(sum), counts);
                keep(mine);
            }
            thread::sync_threads();
            mine
        }
    }
}

/// The thread's `EACH` elements of an array.
///
/// # Safety
/// They exist and were written before a barrier.
#[inline(always)]
unsafe fn load<const EACH: usize, const N: usize>(array: Shared<u32, N>) -> [u32; EACH] {
    const { assert!(EACH == 4 || EACH == 8) };
    let at = EACH as u32 * thread::thread_idx_x();
    // SAFETY: by this function's own contract.
    unsafe {
        let low = array.load_u32x4(at);
        let high = if EACH == 8 { array.load_u32x4(at + 4) } else { low };
        array_from_fn(|i| if i < 4 { low[i] } else { high[i - 4] })
    }
}

/// Sets the thread's `EACH` elements of an array.
///
/// # Safety
/// They exist; no other thread accesses them without a barrier between.
#[inline(always)]
unsafe fn store<const EACH: usize, const N: usize>(array: Shared<u32, N>, words: [u32; EACH]) {
    let at = EACH as u32 * thread::thread_idx_x();
    // SAFETY: by this function's own contract.
    unsafe {
        array.store_u32x4(at, array_from_fn(|i| words[i]));
        if EACH == 8 {
            array.store_u32x4(at + 4, array_from_fn(|i| words[(i + 4) % EACH]));
        }
    }
}

/// Prefix sums over consecutive bins of a thread.
#[derive(Clone, Copy)]
struct Run<const EACH: usize> {
    /// Scores before each bin.
    starts: [u32; EACH],
    /// Scores up to the end of the last.
    end: u32,
}

impl<const EACH: usize> Run<EACH> {
    /// The prefix sums of bins with these counts, if the last bin ends at `end`.
    #[inline(always)]
    fn ending(end: u32, counts: [u32; EACH]) -> Self {
        let mut starts = [0; EACH];
        let mut start = end;
        unroll::<EACH>(|i| {
            let i = EACH - 1 - i;
            start -= counts[i];
            starts[i] = start;
        });
        Self { starts, end }
    }

    #[inline(always)]
    fn offset_by(self, by: u32) -> Self {
        Self { starts: array_from_fn(|i| self.starts[i] + by), end: self.end + by }
    }

    /// The bin of the k-th score if it is one of the thread's; the last bin of all if there are fewer scores.
    #[inline(always)]
    fn bin_of_kth(self, k: u32) -> Option<u32> {
        let first = EACH as u32 * thread::thread_idx_x();
        let last = first + EACH as u32 == BINS;
        let mine = first < BINS && self.starts[0] < k && (self.end >= k || last);
        let before: [u32; EACH] = array_from_fn(|i| u32::from(self.starts[i] < k));
        mine.then_some(first + before.iter().sum::<u32>() - 1)
    }
}

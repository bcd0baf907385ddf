//! Values counted by bin, the bin of the largest first. From the counts follows where the bin of the
//! k-th largest ends, and where each value of the bins up to there goes in a list in their order.

use simt::atomic::BlockAtomicU32;
use simt::math::{self, approx};
use simt::shared::Shared;
use simt::{thread, warp};

use super::row::Held;
use crate::rank;
use crate::spell::spell;

/// Bins.
pub const BINS: u32 = 2048;
/// Values of a bin whose order within it is found by comparing all of them, at most.
pub const CROWDED: u32 = 127;

/// Most warps of a block.
const WARPS: u32 = 32;
/// Threads that sum the counts up, four bins each.
const SUMMING: u32 = BINS / 4;
/// Their warps.
const SUMMING_WARPS: u32 = SUMMING / 32;
/// Bins of such a warp.
const BINS_PER_WARP: u32 = BINS / SUMMING_WARPS;

/// The finite scores between which scores lie; NaN if there are none.
#[derive(Clone, Copy)]
pub struct Extent {
    low: f32,
    high: f32,
}

impl Extent {
    /// That of no score.
    pub const NONE: Self = Self { low: f32::NAN, high: f32::NAN };

    /// That of some scores.
    #[inline(always)]
    #[must_use]
    pub fn of<const N: usize>(scores: [f32; N]) -> Self {
        let mut extent = Self::NONE;
        spell::<(), N>(|i| extent = extent.with(scores[i]));
        extent
    }

    /// Without what is below `least`.
    #[inline(always)]
    #[must_use]
    pub fn above(self, least: f32) -> Self {
        Self { low: math::max(self.low, least), ..self }
    }

    /// With one more score.
    #[inline(always)]
    #[must_use]
    pub fn with(self, score: f32) -> Self {
        // Infinity times zero is NaN, which loses to any number.
        let finite = math::mul_add(score, 0.0, score);
        Self { low: math::min(self.low, finite), high: math::max(self.high, finite) }
    }
}

/// Bins of equal width from the largest score down to the least. What is above belongs to the first; what
/// is below, and NaN, to the last.
#[derive(Clone, Copy)]
pub struct Linear {
    high: f32,
    /// Bins in a distance of one.
    scale: f32,
}

impl Linear {
    /// From the largest score down to the least. If they are NaN, all scores have the last bin.
    #[inline(always)]
    #[must_use]
    pub fn new(extent: Extent) -> Self {
        // An approximation does: lists do not depend on where bins end.
        let scale = BINS as f32 * approx::rcp(extent.high - extent.low);
        // Neither zero nor infinite, so that no product with it is NaN.
        let scale = math::min(math::max(scale, f32::MIN_POSITIVE), f32::MAX);
        Self { high: extent.high, scale }
    }

    /// The bin of a score. Never rises as the score rises: each step is rounded, which keeps the order.
    #[inline(always)]
    #[must_use]
    pub fn bin(self, score: f32) -> u32 {
        let bins = math::min((self.high - score) * self.scale, (BINS - 1) as f32);
        // SAFETY: from 0 to `BINS - 1`, and no NaN, which loses to any number.
        unsafe { math::max(bins, 0.0).to_int_unchecked() }
    }

    /// A number that no score of the bins up to `bin` is below.
    #[inline(always)]
    #[must_use]
    pub fn least(self, bin: u32) -> f32 {
        if bin == BINS - 1 {
            return f32::NEG_INFINITY;
        }
        // A quarter of a bin is more than what rounding in `bin` takes from a score's distance; the
        // difference is rounded, and so are scores.
        self.high - ((bin + 1) as f32 + 0.25) / self.scale
    }
}

/// The bins of a thread's values, and how many of its bin were counted before each.
#[derive(Clone, Copy)]
pub struct Places<const N: usize> {
    /// The bins.
    pub bins: [u32; N],
    /// The numbers before.
    pub before: [u32; N],
}

/// Where the bin of the k-th largest value is, or of the last one if there are fewer.
#[derive(Clone, Copy)]
pub struct Cut {
    /// The bin.
    pub bin: u32,
    /// Values of the bins up to it.
    pub end: u32,
}

/// The shared memory of the bins.
#[derive(Clone, Copy)]
pub struct Bins {
    /// Counts; later where each bin begins among its warp's, and its count from bit 16 on.
    counts: Shared<u32, { BINS as usize }>,
    totals: Shared<u32, { SUMMING_WARPS as usize }>,
    extremes: Shared<u32, { 2 * WARPS as usize }>,
    /// A [`Cut`].
    cut: Shared<u32, 2>,
    /// Whether one of the bins up to it has more values than [`CROWDED`].
    crowded: Shared<u32, 1>,
}

impl Bins {
    /// Bytes that they take.
    pub const BYTES: u32 = 4 * (BINS + SUMMING_WARPS + 2 * WARPS + 4);

    /// The bins that start at `offset` of the block's shared memory.
    ///
    /// # Safety
    /// `offset` is a multiple of 16, and [`Self::BYTES`] from there on are used for nothing else.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(offset: u32) -> Self {
        const TOTALS_AT: u32 = 4 * BINS;
        const EXTREMES_AT: u32 = TOTALS_AT + 4 * SUMMING_WARPS;
        const CUT_AT: u32 = EXTREMES_AT + 8 * WARPS;
        // SAFETY: by this function's own contract.
        unsafe {
            Self {
                counts: Shared::at(offset),
                totals: Shared::at(offset + TOTALS_AT),
                extremes: Shared::at(offset + EXTREMES_AT),
                cut: Shared::at(offset + CUT_AT),
                crowded: Shared::at(offset + CUT_AT + 8),
            }
        }
    }

    /// Empties the bins, for whoever comes behind the next barrier.
    ///
    /// # Safety
    /// All threads of the block call it, with a barrier since they were used.
    #[inline(always)]
    pub unsafe fn clear(self) {
        let thread = thread::thread_idx_x();
        // SAFETY: by this function's own contract.
        unsafe {
            if thread < SUMMING {
                self.counts.store_u32x4(4 * thread, [0; 4]);
            }
            if thread == 0 {
                self.crowded.store(0, 0);
            }
        }
    }

    /// The extent of all the block's scores. Has a barrier.
    ///
    /// # Safety
    /// All threads of the block, a power of two, call it together, once.
    #[inline(always)]
    #[must_use]
    pub unsafe fn extent(self, mine: Extent) -> Extent {
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let some = lane & (thread::block_dim_x() / 32 - 1);
        let low = if mine.low.is_nan() { u32::MAX } else { rank::key(mine.low) };
        // SAFETY: a word a warp and extreme, read behind the barrier.
        unsafe {
            let low = warp::reduce_min_u32(low);
            let high = warp::reduce_max_u32(rank::key(mine.high));
            if lane == 0 {
                self.extremes.store(warp_id, low);
                self.extremes.store(WARPS + warp_id, high);
            }
            thread::sync_threads();
            let (low, high) = (self.extremes.load(some), self.extremes.load(WARPS + some));
            Extent {
                low: rank::score(warp::reduce_min_u32(low)),
                high: rank::score(warp::reduce_max_u32(high)),
            }
        }
    }

    /// Counts one value.
    ///
    /// # Safety
    /// The bins were cleared before a barrier. They get 65,535 values at most; `bin` is one of them.
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
    pub unsafe fn count<const N: usize>(self, map: Linear, held: Held<N>) -> Places<N> {
        let bins: [u32; N] = spell(|i| map.bin(held.scores[i]));
        // SAFETY: by this function's own contract.
        let before = spell(|i| if held.has(i) { unsafe { self.add(bins[i]) } } else { 0 });
        Places { bins, before }
    }

    /// Sums the counts up; finds the [`Cut`] for `k`, for whoever comes behind the next barrier. Has two
    /// barriers.
    ///
    /// # Safety
    /// All threads of the block call it together, with the same `k`, at least 1, after [`Self::count`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn sum(self, k: u32) -> Starts {
        let (lane, warp_id, thread) =
            (thread::lane_id(), thread::warp_id(), thread::thread_idx_x());
        let mut mine = Quad::default();
        // SAFETY: a thread reads and writes its own bins between the barriers; branches with collectives
        // are the warp's.
        unsafe {
            thread::sync_threads();
            if thread < SUMMING {
                let counts = self.counts.load_u32x4(4 * thread);
                let upto = inclusive_sum(counts[0] + counts[1] + counts[2] + counts[3]);
                if lane == 31 {
                    self.totals.store(warp_id, upto);
                }
                mine = Quad::ending(upto, counts);
                self.counts.store_u32x4(4 * thread, mine.packed());
            }
            thread::sync_threads();
            let total = if lane < SUMMING_WARPS { self.totals.load(lane) } else { 0 };
            let before = inclusive_sum_of::<SUMMING_WARPS>(total) - total;
            let starts = Starts { counts: self.counts, before };
            let first = warp::shuffle_idx_u32(before, warp_id);
            if thread < SUMMING {
                self.find_cut(mine.moved(first), k);
            }
            starts
        }
    }

    /// Writes what of the [`Cut`] for `k` is in the thread's four bins.
    ///
    /// # Safety
    /// By the threads that sum up, with a barrier before and behind.
    #[inline(always)]
    unsafe fn find_cut(self, mine: Quad, k: u32) {
        let thread = thread::thread_idx_x();
        let [a, b, c, d] = mine.starts;
        let end = d + mine.counts[3];
        if a >= k {
            return;
        }
        // SAFETY: the k-th largest value is in one thread's bins; setting one word is an atomic.
        unsafe {
            if mine.counts.iter().any(|&count| count > CROWDED) {
                BlockAtomicU32::new(self.crowded, 0).store(1);
            }
            if end >= k || thread == SUMMING - 1 {
                let later = u32::from(b < k) + u32::from(c < k) + u32::from(d < k);
                let end = if d < k { end } else { d };
                let end = if c < k { end } else { c };
                self.cut.store(0, 4 * thread + later);
                self.cut.store(1, if b < k { end } else { b });
            }
        }
    }

    /// The [`Cut`] that [`Self::sum`] found.
    ///
    /// # Safety
    /// With a barrier since.
    #[inline(always)]
    #[must_use]
    pub unsafe fn cut(self) -> Cut {
        // SAFETY: by this function's own contract.
        unsafe { Cut { bin: self.cut.load(0), end: self.cut.load(1) } }
    }

    /// Whether a bin up to the [`Cut`] has more than [`CROWDED`] values.
    ///
    /// # Safety
    /// As [`Self::cut`], before the bins are cleared.
    #[inline(always)]
    #[must_use]
    pub unsafe fn crowded(self) -> bool {
        // SAFETY: by this function's own contract.
        unsafe { self.crowded.load(0) != 0 }
    }
}

/// Four bins.
#[derive(Clone, Copy, Default)]
struct Quad {
    starts: [u32; 4],
    counts: [u32; 4],
}

impl Quad {
    /// With these counts, the last of which ends at `end`.
    #[inline(always)]
    fn ending(end: u32, counts: [u32; 4]) -> Self {
        let d = end - counts[3];
        let c = d - counts[2];
        let b = c - counts[1];
        Self { starts: [b - counts[0], b, c, d], counts }
    }

    #[inline(always)]
    fn moved(self, by: u32) -> Self {
        Self { starts: self.starts.map(|start| start + by), ..self }
    }

    #[inline(always)]
    fn packed(self) -> [u32; 4] {
        spell(|i| self.starts[i] | self.counts[i] << 16)
    }
}

/// Where bins begin.
#[derive(Clone, Copy)]
pub struct Starts {
    counts: Shared<u32, { BINS as usize }>,
    /// Values before the bins of the warp whose number is the lane's.
    before: u32,
}

impl Starts {
    /// How many values the bins before each of `bins` have, and how many it has itself.
    ///
    /// # Safety
    /// All lanes of the warp call it together, before the bins are cleared.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of<const N: usize>(self, bins: [u32; N]) -> [(u32, u32); N] {
        // SAFETY: by this function's own contract. All loads are on their way before the first is used.
        unsafe {
            let packed: [u32; N] = spell(|i| self.counts.load(bins[i]));
            let before = |i: usize| warp::shuffle_idx_u32(self.before, bins[i] / BINS_PER_WARP);
            spell(|i| (before(i) + (packed[i] & 0xFFFF), packed[i] >> 16))
        }
    }
}

/// The sum over this lane and those before it.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn inclusive_sum(value: u32) -> u32 {
    // SAFETY: by this function's own contract.
    unsafe { inclusive_sum_of::<32>(value) }
}

/// As [`inclusive_sum`], where only the first `LANES` lanes are looked at.
///
/// # Safety
/// As [`inclusive_sum`].
#[inline(always)]
unsafe fn inclusive_sum_of<const LANES: u32>(value: u32) -> u32 {
    let lane = thread::lane_id();
    let mut sum = value;
    let mut distance = 1;
    while distance < LANES {
        // SAFETY: the lanes are together, by this function's own contract.
        let other = unsafe { warp::shuffle_up_u32(sum, distance) };
        sum += if lane >= distance { other } else { 0 };
        distance *= 2;
    }
    sum
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use super::*;

    /// Extents: wide and narrow, far from zero, too wide for their width to be a number, of one score, of
    /// none.
    const EXTENTS: [(f32, f32); 9] = [
        (-3.0, 4.5),
        (0.0, 1e-3),
        (1e6, 1e6 + 8.0),
        (-1e30, 1e-30),
        (f32::MIN, f32::MAX),
        (0.0, 1e-44),
        (-1e-40, 3e-39),
        (2.5, 2.5),
        (f32::NAN, f32::NAN),
    ];

    /// Numbers in and around an extent, ascending.
    fn scores((low, high): (f32, f32)) -> Vec<f32> {
        let mut scores = vec![f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, 1e-45, 1.0, f32::MAX];
        scores.push(f32::INFINITY);
        if !low.is_nan() {
            let parts = (0..=50_000).map(|part| f64::from(part) / 50_000.0);
            let (low, width) = (f64::from(low), f64::from(high) - f64::from(low));
            scores.extend(parts.map(|part| (low + part * width) as f32));
            scores.extend([high.next_up(), high, high.next_down()]);
        }
        scores.sort_by(f32::total_cmp);
        scores
    }

    #[test]
    fn bins_have_the_order_of_the_scores() {
        for extent in EXTENTS {
            let map = Linear::new(Extent { low: extent.0, high: extent.1 });
            let bins: Vec<_> = scores(extent).into_iter().map(|score| map.bin(score)).collect();
            assert!(bins.is_sorted_by(|a, b| a >= b), "{extent:?}");
            assert!(bins[0] < BINS && map.bin(f32::NAN) == BINS - 1, "{extent:?}");
        }
    }

    #[test]
    fn no_score_is_below_the_least_of_its_bin() {
        for extent in EXTENTS {
            let map = Linear::new(Extent { low: extent.0, high: extent.1 });
            for score in scores(extent) {
                let least = map.least(map.bin(score));
                assert!(score >= least, "{score:?} of {extent:?}: {least:?}");
            }
        }
        // Few more than those of the bins are not below it.
        let map = Linear::new(Extent { low: 0.0, high: 2048.0 });
        assert!(map.least(7) > 2039.0 && map.least(7) < 2040.0 && map.bin(2039.0) == 9);
    }

    #[test]
    fn an_extent_is_of_finite_scores() {
        let Extent { low, high } = Extent::of([f32::INFINITY, 2.0, f32::NAN, -3.0]);
        assert_eq!((low, high), (-3.0, 2.0));
        let none = Extent::of([f32::NAN, f32::NEG_INFINITY]);
        assert!(none.low.is_nan() && none.high.is_nan());
    }
}

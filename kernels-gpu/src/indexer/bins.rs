//! Values counted by bin, the bin of the largest first. From the counts follows where the bin of the
//! k-th largest ends, and where each value of the bins up to there goes in a list in their order.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{thread, warp};

use crate::rank::{self, ABSENT};
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

/// The finite scores between which values lie, as keys.
#[derive(Clone, Copy)]
pub struct Extent {
    low: u32,
    high: u32,
}

impl Extent {
    /// That of no value.
    pub const NONE: Self = Self { low: u32::MAX, high: ABSENT };

    /// That of some values.
    #[inline(always)]
    #[must_use]
    pub fn of<const N: usize>(values: [u32; N]) -> Self {
        let mut extent = Self::NONE;
        spell::<(), N>(|i| extent = extent.with(values[i]));
        extent
    }

    /// With one more value.
    #[inline(always)]
    #[must_use]
    pub fn with(self, value: u32) -> Self {
        let finite = |unless: bool, value: u32, instead: u32| if unless { instead } else { value };
        Self {
            low: self.low.min(finite(value <= rank::key(f32::NEG_INFINITY), value, u32::MAX)),
            high: self.high.max(finite(value >= rank::key(f32::INFINITY), value, ABSENT)),
        }
    }
}

/// Bins of equal width between two scores; what is below belongs to the last, what is above to the
/// first.
#[derive(Clone, Copy)]
pub struct Linear {
    low: f32,
    scale: f32,
}

impl Linear {
    /// From the least score to the largest. Where one of them is no finite number, or they are one, all
    /// scores between have one bin.
    #[inline(always)]
    #[must_use]
    pub fn new(low: f32, high: f32) -> Self {
        Self { low, scale: BINS as f32 / (high - low) }
    }

    /// The bin of a value. Never rises as the value rises: each step is rounded, which keeps the order,
    /// and what becomes NaN, in the last bin, does so for all finite scores at once.
    #[inline(always)]
    #[must_use]
    pub fn bin(self, value: u32) -> u32 {
        (BINS - 1).saturating_sub(((rank::score(value) - self.low) * self.scale) as u32)
    }

    /// A score that is not above any of the bins up to `bin`. NaN, of the last bin, is not looked at.
    #[inline(always)]
    #[must_use]
    pub fn least(self, bin: u32) -> f32 {
        let steps = BINS - 1 - bin;
        if steps == 0 {
            return f32::NEG_INFINITY;
        }
        // A quarter of a step is more than what rounding in `bin` may add to a score's distance; the
        // sum is rounded, and so are scores.
        self.low + (steps as f32 - 0.25) / self.scale
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

    /// The least and the largest score of the block; NaN for none. Has a barrier.
    ///
    /// # Safety
    /// All threads of the block call it together, once.
    #[inline(always)]
    #[must_use]
    pub unsafe fn extremes(self, extent: Extent) -> (f32, f32) {
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let some = lane % (thread::block_dim_x() / 32);
        // SAFETY: a word a warp and extreme, read behind the barrier.
        unsafe {
            let low = warp::reduce_min_u32(extent.low);
            let high = warp::reduce_max_u32(extent.high);
            if lane == 0 {
                self.extremes.store(warp_id, low);
                self.extremes.store(WARPS + warp_id, high);
            }
            thread::sync_threads();
            let low = self.extremes.load(some);
            let high = self.extremes.load(WARPS + some);
            (rank::score(warp::reduce_min_u32(low)), rank::score(warp::reduce_max_u32(high)))
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

    /// Counts the thread's values.
    ///
    /// # Safety
    /// As [`Self::add`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn count<const N: usize>(self, map: Linear, values: [u32; N]) -> Places<N> {
        let bins: [u32; N] = spell(|i| map.bin(values[i]));
        // SAFETY: by this function's own contract.
        let before = spell(|i| if values[i] == ABSENT { 0 } else { unsafe { self.add(bins[i]) } });
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
        let (lane, warp_id, thread) = (thread::lane_id(), thread::warp_id(), thread::thread_idx_x());
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
            let before = inclusive_sum(total) - total;
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
        let see = |i: usize| {
            let (start, end) = (mine.starts[i], mine.starts[i] + mine.counts[i]);
            let last = 4 * thread + i as u32 == BINS - 1;
            // SAFETY: the k-th largest value is in one bin; setting one word is an atomic.
            unsafe {
                if start < k && (end >= k || last) {
                    self.cut.store(0, 4 * thread + i as u32);
                    self.cut.store(1, end);
                }
                if start < k && mine.counts[i] > CROWDED {
                    BlockAtomicU32::new(self.crowded, 0).store(1);
                }
            }
        };
        see(0);
        see(1);
        see(2);
        see(3);
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
    /// How many values the bins before `bin` have, and how many it has itself.
    ///
    /// # Safety
    /// All lanes of the warp call it together, with any bins, before they are cleared.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of(self, bin: u32) -> (u32, u32) {
        // SAFETY: by this function's own contract.
        unsafe {
            let packed = self.counts.load(bin);
            let before = warp::shuffle_idx_u32(self.before, bin / BINS_PER_WARP);
            (before + (packed & 0xFFFF), packed >> 16)
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

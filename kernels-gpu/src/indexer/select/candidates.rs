//! Candidates: the scores of a long row that may be among its k largest.
//!
//! The k-th largest group maximum is a lower bound on the k-th largest score. Only groups whose maximum
//! reaches the bound are read, and only their scores that reach it become candidates. A row of at most
//! 65,535 scores with fewer than `2 k` groups is read twice instead: once for a bound from its scores, once for the
//! candidates.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{math, thread, warp};

use super::bin_map::{BinMap, ScoreRange};
use super::bins::Bins;
use super::row::{Held, MAX_K, Row};
use super::scan::inclusive_sum;
use crate::unroll::{array_from_fn, unroll};

/// Capacity of the list of candidates.
pub const MAX_CANDIDATES: u32 = 3584;
/// Capacity of the list of groups: the largest k, and 768 more groups that reach the bound. A row with still more is
/// searched ([`super::search`]).
pub const MAX_LISTED_GROUPS: u32 = MAX_K + 768;
/// The longest row that is read twice.
const MAX_TWO_PASS: u32 = 65_535;
/// Number of vector loads of four scores that a thread has in flight. With 512 groups of 32, each of 1,024 threads has
/// four vectors; one more, because slightly more than k groups are listed. Each of 512 threads takes two rounds.
const IN_FLIGHT: usize = 5;
/// As `IN_FLIGHT`, for fewer groups, such as 1024 groups of 8.
const IN_FLIGHT_MIDDLE: usize = 3;
/// As `IN_FLIGHT`, for 512 groups of 8.
const IN_FLIGHT_FEW: usize = 2;

/// The row and the shared memory with which a block of `THREADS` finds candidates; a thread has the maxima of `GROUPS`
/// groups.
#[derive(Clone, Copy)]
pub struct Finder<const THREADS: u32, const GROUPS: usize> {
    /// The row.
    pub row: Row<THREADS>,
    /// Number of the largest scores that are to be found.
    pub k: u32,
    /// Counts by bin; cleared.
    pub bins: Bins<THREADS, 4>,
    /// Indices of the candidates.
    pub candidates: Shared<u32, { MAX_CANDIDATES as usize }>,
    /// Numbers of the groups that reach the bound.
    pub groups: Shared<u32, { MAX_LISTED_GROUPS as usize }>,
    /// `[2]`: numbers of candidates and of groups found; cleared.
    pub counters: Shared<u32, 2>,
}

/// A lower bound on the k-th largest score, close to it.
#[derive(Clone, Copy)]
struct LowerBound {
    /// Range of the finite scores, or group maxima, from which the bound was computed.
    extent: ScoreRange,
    /// The bound. Minus infinity means no bound: NaN reaches it too.
    bound: f32,
}

impl LowerBound {
    /// A bit for each score that reaches the bound, the first in the lowest bit; bits of NaN are undefined. Without a
    /// bound, all bits.
    #[inline(always)]
    fn reached_by<const N: usize>(self, scores: [f32; N]) -> u32 {
        if self.bound == f32::NEG_INFINITY {
            return (1 << N) - 1;
        }
        let mut below = 0;
        // Shifting in the sign of each difference takes one instruction, a comparison three.
        unroll::<N>(|i| {
            let difference = scores[N - 1 - i] - self.bound;
            below = below << 1 | difference.to_bits() >> 31;
        });
        below ^ ((1 << N) - 1)
    }
}

impl<const THREADS: u32, const GROUPS: usize> Finder<THREADS, GROUPS> {
    /// Lists the candidates. Returns their number, and the bins in which to count them, which are cleared; `None` if
    /// they do not fit. `maxima` are those of the thread's groups.
    ///
    /// # Safety
    /// All threads of the block call it together; the row is longer than [`MAX_HELD`](super::row::MAX_HELD).
    #[inline(always)]
    #[must_use]
    pub unsafe fn find(self, maxima: [u32; GROUPS]) -> Option<(u32, BinMap)> {
        let groups = self.row.groups();
        let two_pass = groups < 2 * self.k && self.row.length <= MAX_TWO_PASS;
        // SAFETY: branches are the block's; barriers stand between what threads write and others read.
        unsafe {
            let bound = if two_pass {
                self.bound_from_scores()
            } else if self.k <= 512 {
                self.bound_from_groups::<2>(maxima)
            } else if self.k <= 1024 {
                self.bound_from_groups::<4>(maxima)
            } else {
                self.bound_from_groups::<GROUPS>(maxima)
            };
            self.bins.clear();
            let listed = if two_pass { groups } else { self.list_groups(maxima, bound) };
            if !two_pass && listed > MAX_LISTED_GROUPS {
                return None;
            }
            if self.row.group_log2 == 3 {
                let places = THREADS / 2;
                if listed <= IN_FLIGHT_FEW as u32 * places {
                    self.gather::<2, IN_FLIGHT_FEW>((listed, !two_pass), bound);
                } else if listed <= IN_FLIGHT_MIDDLE as u32 * places {
                    self.gather::<2, IN_FLIGHT_MIDDLE>((listed, !two_pass), bound);
                } else {
                    self.gather::<2, IN_FLIGHT>((listed, !two_pass), bound);
                }
            } else {
                self.gather::<8, IN_FLIGHT>((listed, !two_pass), bound);
            }
            thread::sync_threads();
            let count = self.counters.load(0);
            (count <= MAX_CANDIDATES).then(|| (count, BinMap::new(bound.extent.above(bound.bound))))
        }
    }

    /// A bound from the group maxima. Each thread folds its maxima to `N` values, each the maximum of several groups;
    /// the bound is the k-th largest of these values in the block. There are at least `k` values if the row is not read
    /// twice. The more values there are, the closer is the bound to the k-th largest group maximum.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn bound_from_groups<const N: usize>(self, maxima: [u32; GROUPS]) -> LowerBound {
        let groups = self.row.hold_groups(maxima).scores;
        let maximum = |i: usize| {
            let mut maximum = groups[i];
            unroll::<GROUPS>(|j| {
                if j % N == i {
                    maximum = math::max(maximum, groups[j]);
                }
            });
            maximum
        };
        let there = array_from_fn(|i| Row::<THREADS>::strided(i) < self.row.groups());
        let held: Held<N> = Held::new(array_from_fn(maximum), [0; N], there);
        // SAFETY: by this function's own contract.
        unsafe {
            let extent = self.bins.extent(ScoreRange::of(held.scores));
            let bins = BinMap::new(extent);
            let _ = self.bins.count(bins, held);
            LowerBound { extent, bound: bins.lower_bound(self.bins.bin_of_kth(self.k)) }
        }
    }

    /// A bound from all scores of the row.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn bound_from_scores(self) -> LowerBound {
        let mut extent = ScoreRange::NONE;
        // SAFETY: by this function's own contract.
        unsafe {
            self.row.each(|score, _| extent = extent.with(score));
            let extent = self.bins.extent(extent);
            let bins = BinMap::new(extent);
            self.row.each(|score, _| {
                self.bins.add(bins.bin(score));
            });
            LowerBound { extent, bound: bins.lower_bound(self.bins.bin_of_kth(self.k)) }
        }
    }

    /// Lists the groups whose maximum reaches the bound. Returns their number, even if they do not fit. Has a
    /// barrier.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn list_groups(self, maxima: [u32; GROUPS], bound: LowerBound) -> u32 {
        let thread = thread::thread_idx_x();
        let there = (self.row.groups().saturating_sub(thread)).div_ceil(THREADS);
        let hits = bound.reached_by(self.row.hold_groups(maxima).scores) & ((1 << there) - 1);
        // SAFETY: by this function's own contract.
        unsafe {
            let counter = BlockAtomicU32::new(self.counters, 1);
            append(hits, |bit| thread + bit * THREADS, self.groups, counter);
            thread::sync_threads();
            self.counters.load(1)
        }
    }

    /// Lists the scores that reach the bound, in `groups` groups: the listed ones, or the first groups of the row. May
    /// also list scores of the last group that are not in use. `VECTORS` threads share a group, with `D` vector loads
    /// of four scores in flight.
    ///
    /// # Safety
    /// As [`Self::find`]; a group has `VECTORS` vectors; there is at least one group.
    #[inline(always)]
    unsafe fn gather<const VECTORS: u32, const D: usize>(
        self,
        (groups, listed): (u32, bool),
        bound: LowerBound,
    ) {
        let thread = thread::thread_idx_x();
        let within = 4 * (thread % VECTORS);
        let mut first = thread / VECTORS;
        let mut rounds = groups.div_ceil(D as u32 * (THREADS / VECTORS));
        while rounds > 0 {
            let place = |i: u32| first + i * (THREADS / VECTORS);
            let index = |i: u32| {
                let place = place(i).min(groups - 1);
                // SAFETY: a listed group.
                let group = if listed { unsafe { self.groups.load(place) } } else { place };
                group * (4 * VECTORS) + within
            };
            let start = self.row.start();
            // All loads are issued before the first result is used.
            // SAFETY: a group is one of the row, which has a multiple of 32 scores.
            let found: [[u32; 4]; D] = array_from_fn(|i| unsafe {
                self.row.scores.load_u32x4(start + u64::from(index(i as u32)))
            });
            let hits: [u32; D] = array_from_fn(|i| {
                let hits = bound.reached_by::<4>(array_from_fn(|j| f32::from_bits(found[i][j])));
                if place(i as u32) < groups { hits << (4 * i) } else { 0 }
            });
            let hits = hits.iter().fold(0, |all, hits| all | hits);
            // SAFETY: the trip count is uniform in the block.
            unsafe {
                let counter = BlockAtomicU32::new(self.counters, 0);
                append(hits, |bit| index(bit / 4) + bit % 4, self.candidates, counter);
            }
            first += D as u32 * (THREADS / VECTORS);
            rounds -= 1;
        }
    }

    /// The `count` candidates, in registers.
    ///
    /// # Safety
    /// All threads of the block call it after [`Self::find`]; `count` is at least 1 and at most `N` a thread.
    #[inline(always)]
    #[must_use]
    pub unsafe fn held<const N: usize>(self, count: u32) -> Held<N> {
        let at = Row::<THREADS>::strided;
        // SAFETY: places below the count are written, with indices of the row.
        unsafe {
            let indices: [u32; N] = array_from_fn(|i| self.candidates.load(at(i).min(count - 1)));
            let start = self.row.start();
            let found: [f32; N] =
                array_from_fn(|i| self.row.scores.load(start + u64::from(indices[i])));
            let used = |i: usize| at(i) < count && indices[i] < self.row.length;
            Held::new(found, indices, array_from_fn(used))
        }
    }
}

/// Appends `index(bit)` to a list for each bit that is set in `hits`, as far as there is room; `counter` counts them
/// all, including those without room.
///
/// # Safety
/// All lanes of the warp call it together; all appends to the list use this counter, which started at 0.
#[inline(always)]
unsafe fn append<const N: usize>(
    hits: u32,
    index: impl Fn(u32) -> u32,
    list: Shared<u32, N>,
    counter: BlockAtomicU32,
) {
    let count = hits.count_ones();
    // SAFETY: by this function's own contract; the prefix sum gives each lane its own places.
    unsafe {
        let upto = inclusive_sum(count);
        let mut first = 0;
        if thread::lane_id() == 31 && upto > 0 {
            first = counter.add(upto);
        }
        let mut at = warp::shuffle_idx_u32(first, 31) + upto - count;
        let mut left = hits;
        while left != 0 && at < N as u32 {
            list.store(at, index(left.trailing_zeros()));
            left &= left - 1;
            at += 1;
        }
    }
}

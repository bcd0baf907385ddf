//! The scores of a long row that may be among its k largest.
//!
//! What the k-th largest of its groups' maxima reaches, k of its scores reach: only groups that reach it
//! are read, and of them only scores that reach it become candidates. A row with few groups is read
//! twice instead.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{math, thread, warp};

use super::bin_map::{BinMap, ScoreRange};
use super::bins::Bins;
use super::row::{HELD_GROUPS, Held, LONG_THREADS, Row};
use super::scan::inclusive_sum;
use crate::unroll::{array_from_fn, unroll};

/// Most candidates.
pub const CANDIDATES: u32 = 3584;
/// Most groups that are listed: as many as there may be results, and the rest of a bin.
pub const GROUPS: u32 = 2816;
/// Longest row that is read twice.
const TWICE: u32 = 65_535;
/// Vectors of four scores that a thread has on their way at once. 512 groups of 32 are four a thread, and
/// a few more than k groups are listed.
const DEPTH: usize = 5;
/// The same where fewer are listed, as 1024 groups of 8.
const MIDDLE: usize = 3;
/// The same for 512 groups of 8.
const SHALLOW: usize = 2;

/// What candidates are found with.
#[derive(Clone, Copy)]
pub struct Finder {
    /// The row.
    pub row: Row<LONG_THREADS>,
    /// How many of its largest scores are looked for.
    pub k: u32,
    /// Cleared.
    pub bins: Bins<LONG_THREADS, 4>,
    /// Where the indices of candidates go.
    pub candidates: Shared<u32, { CANDIDATES as usize }>,
    /// Where groups go.
    pub groups: Shared<u32, { GROUPS as usize }>,
    /// `[2]`: the candidates and the groups found; cleared.
    pub counters: Shared<u32, 2>,
}

/// A bound that the k-th largest score reaches, and few more.
#[derive(Clone, Copy)]
struct Floor {
    /// The finite scores between which the row's lie, or its groups' largest.
    extent: ScoreRange,
    /// The bound. If it is the least number of all, NaN reaches it too.
    least: f32,
}

impl Floor {
    /// Which of some scores reach the bound, the first in the lowest bit; NaN may. Where there is no bound,
    /// all do.
    #[inline(always)]
    fn reached<const N: usize>(self, scores: [f32; N]) -> u32 {
        if self.least == f32::NEG_INFINITY {
            return (1 << N) - 1;
        }
        let mut below = 0;
        // The sign of each difference is shifted in, one instruction: a comparison takes three.
        unroll::<N>(|i| {
            let difference = scores[N - 1 - i] - self.least;
            below = below << 1 | difference.to_bits() >> 31;
        });
        below ^ ((1 << N) - 1)
    }
}

impl Finder {
    /// Lists the candidates: how many, and bins for them, which are clear; `None` if there are more than
    /// fit. `maxima` are the thread's groups.
    ///
    /// # Safety
    /// All threads of the block call it together; the row is longer than what a block holds.
    #[inline(always)]
    #[must_use]
    pub unsafe fn find(self, maxima: [u32; HELD_GROUPS]) -> Option<(u32, BinMap)> {
        let groups = self.row.groups();
        let twice = groups < 2 * self.k && self.row.length <= TWICE;
        // SAFETY: branches are the block's; barriers stand between what threads write and others read.
        unsafe {
            let floor = if twice {
                self.floor_of_scores()
            } else if self.k <= 512 {
                self.floor_of_groups::<2>(maxima)
            } else if self.k <= 1024 {
                self.floor_of_groups::<4>(maxima)
            } else {
                self.floor_of_groups::<HELD_GROUPS>(maxima)
            };
            self.bins.clear();
            let listed = if twice { groups } else { self.list_groups(maxima, floor) };
            if !twice && listed > GROUPS {
                return None;
            }
            if self.row.group_log2 == 3 {
                let places = LONG_THREADS / 2;
                if listed <= SHALLOW as u32 * places {
                    self.gather::<2, SHALLOW>((listed, !twice), floor);
                } else if listed <= MIDDLE as u32 * places {
                    self.gather::<2, MIDDLE>((listed, !twice), floor);
                } else {
                    self.gather::<2, DEPTH>((listed, !twice), floor);
                }
            } else {
                self.gather::<8, DEPTH>((listed, !twice), floor);
            }
            thread::sync_threads();
            let count = self.counters.load(0);
            (count <= CANDIDATES).then(|| (count, BinMap::new(floor.extent.above(floor.least))))
        }
    }

    /// A bound that the k-th largest score reaches, because k of the thread's `N` largest scores do, each
    /// of some of its groups. At least `4 k` of those in a block: then the bound takes few scores more
    /// than one of the groups' own.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn floor_of_groups<const N: usize>(self, maxima: [u32; HELD_GROUPS]) -> Floor {
        let groups = self.row.hold_groups(maxima).scores;
        let largest = |i: usize| {
            let mut largest = groups[i];
            unroll::<HELD_GROUPS>(|j| {
                if j % N == i {
                    largest = math::max(largest, groups[j]);
                }
            });
            largest
        };
        let there = array_from_fn(|i| Row::<LONG_THREADS>::strided(i) < self.row.groups());
        let held: Held<N> = Held::new(array_from_fn(largest), [0; N], there);
        // SAFETY: by this function's own contract.
        unsafe {
            let extent = self.bins.extent(ScoreRange::of(held.scores));
            let bins = BinMap::new(extent);
            let _ = self.bins.count(bins, held);
            Floor { extent, least: bins.least(self.bins.cut(self.k)) }
        }
    }

    /// A bound that the k-th largest score reaches.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn floor_of_scores(self) -> Floor {
        let mut extent = ScoreRange::NONE;
        // SAFETY: by this function's own contract.
        unsafe {
            self.row.each(|score, _| extent = extent.with(score));
            let extent = self.bins.extent(extent);
            let bins = BinMap::new(extent);
            self.row.each(|score, _| {
                self.bins.add(bins.bin(score));
            });
            Floor { extent, least: bins.least(self.bins.cut(self.k)) }
        }
    }

    /// Lists the groups whose largest score reaches the bound: how many, if more than fit too. Has a
    /// barrier.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn list_groups(self, maxima: [u32; HELD_GROUPS], floor: Floor) -> u32 {
        let thread = thread::thread_idx_x();
        let there = (self.row.groups().saturating_sub(thread)).div_ceil(LONG_THREADS);
        let hits = floor.reached(self.row.hold_groups(maxima).scores) & ((1 << there) - 1);
        // SAFETY: by this function's own contract.
        unsafe {
            let counter = BlockAtomicU32::new(self.counters, 1);
            append(hits, |bit| thread + bit * LONG_THREADS, self.groups, counter);
            thread::sync_threads();
            self.counters.load(1)
        }
    }

    /// Lists those scores of `groups` groups, the listed or the first, that reach the bound, and others of
    /// the last group that are not in use. `VECTORS` threads share a group, and have `D` vectors of four
    /// scores on their way at once.
    ///
    /// # Safety
    /// As [`Self::find`]; groups have so many vectors, and there is one at least.
    #[inline(always)]
    unsafe fn gather<const VECTORS: u32, const D: usize>(
        self,
        (groups, listed): (u32, bool),
        floor: Floor,
    ) {
        let thread = thread::thread_idx_x();
        let within = 4 * (thread % VECTORS);
        let mut first = thread / VECTORS;
        let mut rounds = groups.div_ceil(D as u32 * (LONG_THREADS / VECTORS));
        while rounds > 0 {
            let place = |i: u32| first + i * (LONG_THREADS / VECTORS);
            let index = |i: u32| {
                let place = place(i).min(groups - 1);
                // SAFETY: a listed group.
                let group = if listed { unsafe { self.groups.load(place) } } else { place };
                group * (4 * VECTORS) + within
            };
            let start = self.row.start();
            // All on their way before the first is looked at.
            // SAFETY: a group is one of the row, which has a multiple of 32 scores.
            let found: [[u32; 4]; D] = array_from_fn(|i| unsafe {
                self.row.scores.load_u32x4(start + u64::from(index(i as u32)))
            });
            let hits: [u32; D] = array_from_fn(|i| {
                let hits = floor.reached::<4>(array_from_fn(|j| f32::from_bits(found[i][j])));
                if place(i as u32) < groups { hits << (4 * i) } else { 0 }
            });
            let hits = hits.iter().fold(0, |all, hits| all | hits);
            // SAFETY: the loop is the block's.
            unsafe {
                let counter = BlockAtomicU32::new(self.counters, 0);
                append(hits, |bit| index(bit / 4) + bit % 4, self.candidates, counter);
            }
            first += D as u32 * (LONG_THREADS / VECTORS);
            rounds -= 1;
        }
    }

    /// The `count` candidates, in registers.
    ///
    /// # Safety
    /// By all threads of the block after [`Self::find`]; they hold so many, at least one.
    #[inline(always)]
    #[must_use]
    pub unsafe fn held<const N: usize>(self, count: u32) -> Held<N> {
        let at = Row::<LONG_THREADS>::strided;
        // SAFETY: what is below the count is written, and is of the row.
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

/// Appends to a list what `index` says of each bit that is set in `hits`, as far as it fits; the counter
/// counts all.
///
/// # Safety
/// All lanes of the warp call it together; all that append to the list use this counter, which began at
/// zero.
#[inline(always)]
unsafe fn append<const N: usize>(
    hits: u32,
    index: impl Fn(u32) -> u32,
    list: Shared<u32, N>,
    counter: BlockAtomicU32,
) {
    let count = hits.count_ones();
    // SAFETY: by this function's own contract; places are each lane's own.
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

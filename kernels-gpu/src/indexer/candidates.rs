//! The scores of a long row that may be among its k largest.
//!
//! What the k-th largest of its groups' maxima reaches, k of its scores reach: only groups that reach it
//! are read, and of them only scores that reach it become candidates. A row with few groups is read
//! twice instead.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{thread, warp};

use super::bins::{Bins, Extent, Linear, inclusive_sum};
use super::row::{HELD_GROUPS, Held, Row, strided};
use crate::spell::spell;

/// Most candidates.
pub const CANDIDATES: u32 = 3584;
/// Most groups that are listed: as many as there may be results, and the rest of a bin.
pub const GROUPS: u32 = 2816;
/// Longest row that is read twice: as many scores as bins count.
const TWICE: u32 = 65_535;
/// Vectors of four scores that a thread has on their way at once. 512 groups of 32 are four a thread, and
/// a few more than k groups are listed.
const DEPTH: usize = 5;
/// The same where fewer are listed, as 512 groups of 8.
const SHALLOW: usize = 2;
/// Groups of a thread where rows have few.
const FEW: usize = HELD_GROUPS / 2;

/// A list of scores, or of what they became, in shared memory.
#[derive(Clone, Copy)]
pub struct List {
    /// Bits of scores as they are gathered, their keys in order.
    pub values: Shared<u32, { CANDIDATES as usize }>,
    /// Indices.
    pub indices: Shared<u32, { CANDIDATES as usize }>,
}

/// What candidates are found with.
#[derive(Clone, Copy)]
pub struct Finder {
    /// The row.
    pub row: Row,
    /// How many of its largest scores are looked for.
    pub k: u32,
    /// Cleared.
    pub bins: Bins,
    /// Where candidates go.
    pub list: List,
    /// Where groups go.
    pub groups: Shared<u32, { GROUPS as usize }>,
    /// `[1]`: the candidates found; cleared.
    pub counter: Shared<u32, 1>,
}

/// Which groups may have candidates, and between which scores these are.
#[derive(Clone, Copy)]
struct Floor {
    bins: Linear,
    extent: Extent,
    /// Whether the groups that may have some are listed; all are to be read else.
    listed: bool,
}

impl Finder {
    /// Lists the candidates: how many, and bins for them, which are clear; `None` if there are more than
    /// fit. `maxima` are the thread's groups.
    ///
    /// # Safety
    /// All threads of the block call it together; the row is longer than what a block holds.
    #[inline(always)]
    #[must_use]
    pub unsafe fn find(self, maxima: [u32; HELD_GROUPS]) -> Option<(u32, Linear)> {
        let groups = self.row.groups();
        let twice = groups < 2 * self.k && self.row.length <= TWICE;
        // SAFETY: branches are the block's; barriers stand between what threads write and others read.
        unsafe {
            let floor = if twice {
                self.floor_of_scores()
            } else if groups <= FEW as u32 * thread::block_dim_x() {
                self.floor_of_groups::<FEW>(spell(|i| maxima[i]))
            } else {
                self.floor_of_groups::<HELD_GROUPS>(maxima)
            };
            thread::sync_threads();
            let cut = self.bins.cut();
            self.bins.clear();
            let listed = if floor.listed { cut.end } else { groups };
            if floor.listed && listed > GROUPS {
                return None;
            }
            let least = floor.bins.least(cut.bin);
            if listed << (self.row.group_log2 - 2) <= SHALLOW as u32 * thread::block_dim_x() {
                self.gather::<SHALLOW>((listed, floor.listed), least);
            } else {
                self.gather::<DEPTH>((listed, floor.listed), least);
            }
            thread::sync_threads();
            let count = self.counter.load(0);
            (count <= CANDIDATES).then(|| (count, Linear::new(floor.extent.above(least))))
        }
    }

    /// A bound that the k-th largest score reaches, because k groups' largest do; lists those groups.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn floor_of_groups<const N: usize>(self, maxima: [u32; N]) -> Floor {
        let held = self.row.hold_groups(maxima);
        // SAFETY: by this function's own contract. The places of listed groups differ.
        unsafe {
            let extent = self.bins.extent(Extent::of(held.scores));
            let bins = Linear::new(extent);
            let places = self.bins.count(bins, held);
            let starts = self.bins.sum(self.k).of(places.bins);
            spell::<(), N>(|i| {
                let (start, _) = starts[i];
                let at = start + places.before[i];
                if held.has(i) && start < self.k && at < GROUPS {
                    self.groups.store(at, held.indices[i]);
                }
            });
            Floor { bins, extent, listed: true }
        }
    }

    /// A bound that the k-th largest score reaches, and few more.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn floor_of_scores(self) -> Floor {
        let mut extent = Extent::NONE;
        // SAFETY: by this function's own contract.
        unsafe {
            self.row.each(|score, _| extent = extent.with(score));
            let extent = self.bins.extent(extent);
            let bins = Linear::new(extent);
            self.row.each(|score, _| {
                self.bins.add(bins.bin(score));
            });
            let _ = self.bins.sum(self.k);
            Floor { bins, extent, listed: false }
        }
    }

    /// Lists the scores of `groups` groups, the listed or the first, that reach `least`.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn gather<const D: usize>(self, (groups, listed): (u32, bool), least: f32) {
        let Row { scores, group_log2, length, .. } = self.row;
        let vectors_log2 = group_log2 - 2;
        let vectors = groups << vectors_log2;
        let mut first = 0;
        while first < vectors {
            let vector = |i: usize| first + strided(i);
            let index = |i: usize| {
                let vector = vector(i).min(vectors - 1);
                let place = vector >> vectors_log2;
                // SAFETY: a listed group.
                let group = if listed { unsafe { self.groups.load(place) } } else { place };
                (group << group_log2) + 4 * (vector & ((1 << vectors_log2) - 1))
            };
            let indices: [u32; D] = spell(index);
            // All on their way before the first is looked at.
            // SAFETY: a group is one of the row, which has a multiple of 32 scores.
            let found: [[u32; 4]; D] =
                spell(|i| unsafe { scores.load_u32x4(self.row.start() + u64::from(indices[i])) });
            let hits: [u32; D] = spell(|i| {
                // NaN is not below.
                let hit = |j: usize| {
                    let below = f32::from_bits(found[i][j]) < least;
                    u32::from(!below) << j
                };
                let there = length.saturating_sub(indices[i]).min(4);
                let there = if vector(i) < vectors { there } else { 0 };
                (hit(0) | hit(1) | hit(2) | hit(3)) & ((1 << there) - 1)
            });
            // SAFETY: the loop is the block's.
            unsafe { self.append(hits, found, indices) };
            first += D as u32 * thread::block_dim_x();
        }
    }

    /// Appends those scores of vectors to the list whose bits are set in `hits`.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    unsafe fn append<const D: usize>(
        self,
        hits: [u32; D],
        found: [[u32; 4]; D],
        indices: [u32; D],
    ) {
        let all = hits.iter().enumerate().fold(0, |all, (i, hits)| all | hits << (4 * i));
        let count = all.count_ones();
        // SAFETY: by this function's own contract; places are each lane's own.
        unsafe {
            let upto = inclusive_sum(count);
            let mut first = 0;
            if thread::lane_id() == 31 && upto > 0 {
                first = BlockAtomicU32::new(self.counter, 0).add(upto);
            }
            let mut to = warp::shuffle_idx_u32(first, 31) + upto - count;
            spell::<(), D>(|i| {
                if hits[i] == 0 {
                    return;
                }
                spell::<(), 4>(|j| {
                    let hit = hits[i] >> j & 1;
                    if hit == 1 && to < CANDIDATES {
                        self.list.values.store(to, found[i][j]);
                        self.list.indices.store(to, indices[i] + j as u32);
                    }
                    to += hit;
                });
            });
        }
    }

    /// The `count` candidates, in registers.
    ///
    /// # Safety
    /// By all threads of the block after [`Self::find`]; they hold so many.
    #[inline(always)]
    #[must_use]
    pub unsafe fn held<const N: usize>(self, count: u32) -> Held<N> {
        // SAFETY: what is below the count is written.
        unsafe {
            let score = |i| f32::from_bits(self.list.values.load(strided(i)));
            Held::new(score, strided, count).named(|i| self.list.indices.load(strided(i)))
        }
    }
}

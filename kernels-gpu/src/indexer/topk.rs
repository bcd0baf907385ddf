//! The k largest scores of a row, exactly and in order, by one block.
//!
//! Values are counted by bins between the least and the largest of them. The counts say which bins have
//! the k largest, and where in the list those of a bin go; within a bin each is compared with all. A
//! long row is thinned out first ([`candidates`](super::candidates)). Where equal or crowded scores fill
//! a bin over, the row is searched digit by digit ([`search`](super::search)) and the list sorted.

use crate::params::{IndexTopkParams, TopkSelectParams};
use simt::atomic::BlockAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use super::arena::{Arena, CROWDED};
use super::bins::{Extent, Linear};
use super::candidates::Finder;
use super::list::{self, List, NOTHING, Record};
use super::row::{
    HELD_GROUPS, Held, LONG_THREADS, LONG_VECTORS, Row, SHORT_THREADS, SHORT_VECTORS, Scores,
};
use super::visible;
use crate::rank;
use crate::unroll::{array_from_fn, unroll};

/// Longest row that a block of [`LONG_THREADS`] holds.
pub(super) const HELD: u32 = 4096;
/// Scores of a thread of a long row: as many as there may be.
const MANY: usize = 4 * LONG_VECTORS;
/// Where the index is in the word of a record; below is how many of its bin were counted before.
const INDEX_AT: u32 = CROWDED.count_ones();
/// Lists the largest scores of each row of at most 2048 columns.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of one block of [`SHORT_THREADS`] a
/// row /// call it.
#[inline(always)]
pub unsafe fn select_short(
    scores: Global<f32>,
    lengths: Global<i32>,
    selected: GlobalMut<i32>,
    params: TopkSelectParams,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        lengths.have_address(u64::from(thread::block_idx_x()));
        Short::of_row(scores, selected, params).short(|row| length(lengths, row));
    }
}

/// Lists the largest scores of each row.
///
/// # Safety
/// As [`select_short`], with [`LONG_THREADS`].
#[inline(always)]
pub unsafe fn select_long(
    scores: Global<f32>,
    maxima: Global<f32>,
    lengths: Global<i32>,
    selected: GlobalMut<i32>,
    params: TopkSelectParams,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        lengths.have_address(u64::from(thread::block_idx_x()));
        Long::of_row(scores, selected, params).long(maxima, |row| length(lengths, row));
    }
}

/// Lists the entries of the largest scores of each query, from rows of at most 2048 columns.
///
/// # Safety
/// As [`select_short`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries_short(
    scores: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    selected: GlobalMut<i32>,
    params: IndexTopkParams,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let token = u64::from(params.first + thread::block_idx_x());
        token_position.have_address(token);
        token_slot.have_address(token);
        let seen = |row| seen(token_position, token_slot, params, row);
        Short::of_query(scores, selected, params).short(seen);
    }
}

/// Lists the entries of the largest scores of each query.
///
/// # Safety
/// As [`select_long`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries_long(
    scores: Global<f32>,
    maxima: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    selected: GlobalMut<i32>,
    params: IndexTopkParams,
) {
    // SAFETY: by this function's own contract.
    unsafe {
        let token = u64::from(params.first + thread::block_idx_x());
        token_position.have_address(token);
        token_slot.have_address(token);
        let seen = |row| seen(token_position, token_slot, params, row);
        Long::of_query(scores, selected, params).long(maxima, seen);
    }
}

/// How many scores of a row are in use, and whether all of them are listed as they stand.
#[derive(Clone, Copy)]
struct Use {
    length: u32,
    all: bool,
}

/// # Safety
/// The row exists.
#[inline(always)]
unsafe fn length<const THREADS: u32>(lengths: Global<i32>, row: Row<THREADS>) -> Use {
    // SAFETY: by this function's own contract.
    let length = unsafe { lengths.load(u64::from(row.number)) };
    Use { length: (length.max(0) as u32).min(row.columns), all: false }
}

/// # Safety
/// The query exists.
#[inline(always)]
unsafe fn seen<const THREADS: u32>(
    position: Global<i32>,
    slot: Global<i32>,
    IndexTopkParams { first, k, .. }: IndexTopkParams,
    row: Row<THREADS>,
) -> Use {
    // SAFETY: by this function's own contract.
    let seen = unsafe { visible(position, slot, u64::from(first + row.number)) };
    let seen = seen.map_or(0, |(_, seen)| seen);
    Use { length: seen.min(row.columns), all: seen <= k }
}

/// A row, and where its largest scores are listed.
#[derive(Clone, Copy)]
pub(super) struct Selection<const THREADS: u32, const EACH: usize, S = Global<f32>> {
    /// The row.
    pub row: Row<THREADS, S>,
    /// How many are listed.
    pub k: u32,
    /// `[rows, k]`.
    pub selected: GlobalMut<i32>,
}

/// That of a row that a block holds.
type Short = Selection<SHORT_THREADS, { 2048 / SHORT_THREADS as usize }>;
/// That of any row.
type Long = Selection<LONG_THREADS, 4>;

impl<const THREADS: u32, const EACH: usize> Selection<THREADS, EACH> {
    #[inline(always)]
    fn of_row(scores: Global<f32>, selected: GlobalMut<i32>, params: TopkSelectParams) -> Self {
        let TopkSelectParams { columns, group_log2, k } = params;
        let number = thread::block_idx_x();
        Self { row: Row { scores, number, columns, group_log2, length: 0 }, k, selected }
    }

    #[inline(always)]
    fn of_query(scores: Global<f32>, selected: GlobalMut<i32>, params: IndexTopkParams) -> Self {
        let IndexTopkParams { columns, group_log2, k, .. } = params;
        Self::of_row(scores, selected, TopkSelectParams { columns, group_log2, k })
    }
}

impl<const THREADS: u32, const EACH: usize, S: Scores> Selection<THREADS, EACH, S> {
    /// Sets element `at` of the list.
    ///
    /// # Safety
    /// `at < k`.
    #[inline(always)]
    unsafe fn set(self, at: u32, index: i32) {
        let list = u64::from(self.row.number) * u64::from(self.k);
        // SAFETY: by this function's own contract.
        unsafe { self.selected.store(list + u64::from(at), index) }
    }

    /// Calls `index` for each place of the list from `first` on that is the thread's, and sets it.
    ///
    /// # Safety
    /// `index` may be called for any place from `first` to `end`.
    #[inline(always)]
    unsafe fn set_all(self, (first, end): (u32, u32), index: impl Fn(u32) -> i32) {
        let mut at = first + thread::thread_idx_x();
        while at < end {
            // SAFETY: `end` is at most `k`.
            unsafe { self.set(at, index(at)) };
            at += THREADS;
        }
    }

    /// Lists every index in order.
    ///
    /// # Safety
    /// The row has no more scores than the list has room for.
    #[inline(always)]
    pub(super) unsafe fn list_all(self) {
        let index = |at| if at < self.row.length { at as i32 } else { -1 };
        // SAFETY: by this function's own contract.
        unsafe { self.set_all((0, self.k), index) }
    }

    /// How many records [`Self::order`] looks at.
    #[inline(always)]
    pub(super) fn cleared(self) -> u32 {
        self.k + CROWDED + 1
    }

    /// Lists the largest of `held`, of which `bins` are the bins; `false`, and nothing, where too many are
    /// in one bin.
    ///
    /// # Safety
    /// All threads of the block call it together; [`Self::cleared`] records were cleared, and before a
    /// barrier the bins.
    #[inline(always)]
    pub(super) unsafe fn order<const N: usize>(
        self,
        arena: Arena<THREADS, EACH>,
        held: Held<N>,
        bins: Linear,
    ) -> bool {
        let Arena { bins: counted, list, crowded, .. } = arena;
        // SAFETY: barriers stand between what threads write and others read; all values have places of
        // their own, below their number, and those of a bin that is not crowded below what is cleared.
        unsafe {
            let places = counted.count(bins, held);
            let starts = counted.starts(places.bins);
            let mut most = 0;
            unroll::<N>(|i| {
                let (start, before) = (starts[i], places.before[i]);
                let listed = start < self.k;
                let word = (held.indices[i] << INDEX_AT) + before;
                // Without branches the four or fewer of them are made together.
                list.store_where(listed, start + before, list::record(held.scores[i], word));
                most = most.max(if listed { before } else { 0 });
            });
            if most >= CROWDED {
                BlockAtomicU32::new(crowded, 0).store(1);
            }
            thread::sync_threads();
            if crowded.load(0) != 0 {
                return false;
            }
            let mut at = thread::thread_idx_x();
            while at < self.cleared() - 1 {
                let mine = list.load(at);
                let (to, index) = if mine[0] == NOTHING[0] {
                    (at, -1)
                } else {
                    (place(list, at, mine), (mine[1] >> INDEX_AT) as i32)
                };
                if to < self.k {
                    self.set(to, index);
                }
                at += THREADS;
            }
            true
        }
    }

    /// Lists the largest scores of the row, whatever they are.
    ///
    /// # Safety
    /// All threads of the block call it together. The row is not empty.
    #[inline(always)]
    pub(super) unsafe fn search(self, Arena { scratch, counters, list, .. }: Arena<THREADS, EACH>) {
        let count = self.k.min(self.row.length);
        // SAFETY: barriers stand between what threads write and others read; the cut takes exactly `count`
        // scores.
        unsafe {
            let cut = scratch.cut(self.row, self.k);
            if thread::thread_idx_x() == 0 {
                counters.store(0, 0);
            }
            thread::sync_threads();
            self.row.each(|score, index| {
                if cut.takes(rank::key(score), index) {
                    let at = BlockAtomicU32::new(counters, 0).add(1);
                    list.store(at, list::record(score, index));
                }
            });
            thread::sync_threads();
            list.sort(count);
            self.set_all((0, count), |at| list.load(at)[1] as i32);
            self.set_all((count, self.k), |_| -1);
        }
    }
}

impl Short {
    /// # Safety
    /// All threads of the block call it together; the row has at most 2048 columns.
    #[inline(always)]
    unsafe fn short(mut self, in_use: impl FnOnce(Row<SHORT_THREADS>) -> Use) {
        // SAFETY: branches are the block's. What is fetched before its use is known is memory of the row;
        // nothing branches before a barrier, which would fetch it only then.
        unsafe {
            let arena = Arena::new();
            self.row.begin_fetch();
            arena.begin(self.cleared());
            let fetched = self.row.fetch::<SHORT_VECTORS>();
            let Use { length, all } = in_use(self.row);
            self.row.length = length;
            let held: Held<{ 4 * SHORT_VECTORS }> = self.row.hold(fetched);
            let bins = between(arena, held);
            if all {
                return self.list_all();
            }
            if !self.order(arena, held, bins) {
                self.search(arena);
            }
        }
    }
}

impl Long {
    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn long(mut self, maxima: Global<f32>, in_use: impl FnOnce(Row<LONG_THREADS>) -> Use) {
        // SAFETY: as above.
        unsafe {
            let arena = Arena::new();
            self.row.begin_fetch_groups(maxima);
            arena.begin(0);
            let fetched = self.row.fetch_groups(maxima);
            let Use { length, all } = in_use(self.row);
            thread::sync_threads();
            self.row.length = length;
            if all {
                return self.list_all();
            }
            if !self.order_long(arena, fetched) {
                self.search(arena);
            }
        }
    }

    /// As [`Self::order`], of the row, the largest of whose groups are `maxima`.
    ///
    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn order_long(self, arena: Arena<LONG_THREADS, 4>, maxima: [u32; HELD_GROUPS]) -> bool {
        let Arena { bins, candidates, groups, counters, .. } = arena;
        let finder = Finder { row: self.row, k: self.k, bins, candidates, groups, counters };
        // SAFETY: by this function's own contract; branches are the block's.
        unsafe {
            if self.row.length <= HELD {
                let held: Held<MANY> = self.row.hold(self.row.fetch::<LONG_VECTORS>());
                arena.list.clear(self.cleared());
                return self.order(arena, held, between(arena, held));
            }
            let found = finder.find(maxima);
            arena.list.clear(self.cleared());
            match found {
                Some((count, bins)) if count <= LONG_THREADS => {
                    self.order(arena, finder.held::<1>(count), bins)
                }
                Some((count, bins)) if count <= 2 * LONG_THREADS => {
                    self.order(arena, finder.held::<2>(count), bins)
                }
                Some((count, bins)) => self.order(arena, finder.held::<MANY>(count), bins),
                None => false,
            }
        }
    }
}

/// The bins of what a block holds. Has a barrier.
///
/// # Safety
/// All threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn between<const THREADS: u32, const EACH: usize, const N: usize>(
    arena: Arena<THREADS, EACH>,
    held: Held<N>,
) -> Linear {
    // SAFETY: by this function's own contract.
    Linear::new(unsafe { arena.bins.extent(Extent::of(held.scores)) })
}

/// The place of record `at` of a list in the order of bins: after those of the bins before, among its bin
/// by value and index.
///
/// # Safety
/// The list is written as far as bins may go, and `mine` is that record.
#[inline(always)]
unsafe fn place(list: List, at: u32, mine: Record) -> u32 {
    /// Records that are looked at together.
    const STEP: usize = 4;
    let first = at - (mine[1] & CROWDED);
    let (mut place, mut next) = (first, first);
    loop {
        // SAFETY: what is behind a bin is written too, and nothing of it precedes.
        let others: [Record; STEP] = array_from_fn(|i| unsafe { list.load(next + i as u32) });
        unroll::<STEP>(|i| place += u32::from(list::precedes(others[i], mine)));
        next += STEP as u32;
        // Behind the bin numbers are lower.
        if first + (others[STEP - 1][1] & CROWDED) + 1 != next {
            return place;
        }
    }
}

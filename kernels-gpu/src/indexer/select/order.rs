//! Lists the k largest scores that a block holds, in order.

use simt::atomic::BlockAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use super::bin_map::{BinMap, ScoreRange};
use super::list::{self, EMPTY, List, Record};
use super::memory::{MAX_IN_BIN, SelectMemory};
use super::row::{Held, Row, Scores};
use crate::params::{IndexTopkParams, TopkSelectParams};
use crate::rank;
use crate::unroll::{array_from_fn, unroll};

/// Lowest bit of the index in the word of a record. The bits below hold the number of scores of the same bin
/// that were counted before.
const INDEX_AT: u32 = MAX_IN_BIN.count_ones();

/// A selection: a row, k, and the list of results.
#[derive(Clone, Copy)]
pub struct Selection<const THREADS: u32, const EACH: usize, S = Global<f32>> {
    /// The row.
    pub row: Row<THREADS, S>,
    /// Length of the list.
    pub k: u32,
    /// `[rows, k]`.
    pub selected: GlobalMut<i32>,
}

impl<const THREADS: u32, const EACH: usize> Selection<THREADS, EACH> {
    /// The selection from the block's row.
    #[inline(always)]
    #[must_use]
    pub fn of_row(scores: Global<f32>, selected: GlobalMut<i32>, params: TopkSelectParams) -> Self {
        let TopkSelectParams { columns, group_log2, k, .. } = params;
        let number = thread::block_idx_x();
        Self { row: Row { scores, number, columns, group_log2, length: 0 }, k, selected }
    }

    /// The selection from the scores of the block's query.
    #[inline(always)]
    #[must_use]
    pub fn of_query(
        scores: Global<f32>,
        selected: GlobalMut<i32>,
        params: IndexTopkParams,
    ) -> Self {
        let IndexTopkParams { columns, group_log2, k, tokens: rows, .. } = params;
        Self::of_row(scores, selected, TopkSelectParams { columns, group_log2, k, rows })
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

    /// Sets each of the thread's elements from `first` to `end` of the list to `index(element)`.
    ///
    /// # Safety
    /// `index` may be called for any of these elements; `end` is at most `k`.
    #[inline(always)]
    unsafe fn set_all(self, (first, end): (u32, u32), index: impl Fn(u32) -> i32) {
        let mut at = first + thread::thread_idx_x();
        while at < end {
            // SAFETY: `end` is at most `k`.
            unsafe { self.set(at, index(at)) };
            at += THREADS;
        }
    }

    /// Lists every index in ascending order, then -1.
    ///
    /// # Safety
    /// The row has at most `k` scores.
    #[inline(always)]
    pub unsafe fn list_all(self) {
        let index = |at| if at < self.row.length { at as i32 } else { -1 };
        // SAFETY: by this function's own contract.
        unsafe { self.set_all((0, self.k), index) }
    }

    /// The number of records that must be cleared before [`Self::order`].
    #[inline(always)]
    pub fn cleared(self) -> u32 {
        self.k + MAX_IN_BIN + 1
    }

    /// Lists the largest of `held`, ordered by `bins`. Returns `false` and lists nothing if a bin that the list
    /// needs has more than [`MAX_IN_BIN`] scores.
    ///
    /// # Safety
    /// All threads of the block call it together; [`Self::cleared`] records were cleared, and the bins
    /// too, with a barrier since.
    #[inline(always)]
    pub unsafe fn order<const N: usize>(
        self,
        memory: SelectMemory<THREADS, EACH>,
        held: Held<N>,
        bins: BinMap,
    ) -> bool {
        let SelectMemory { bins: counted, list, overflowed, .. } = memory;
        // SAFETY: barriers separate writes and reads of different threads. Each score has its own place, below
        // the number of scores; the places of a bin that has not overflowed are below what is cleared.
        unsafe {
            let places = counted.count(bins, held);
            let starts = counted.starts(places.bins);
            let mut last_in_bin = 0;
            unroll::<N>(|i| {
                let (start, before) = (starts[i], places.before[i]);
                let listed = start < self.k;
                let word = (held.indices[i] << INDEX_AT) + before;
                // Without branches the stores of all scores overlap.
                list.store_where(listed, start + before, list::record(held.scores[i], word));
                last_in_bin = last_in_bin.max(if listed { before } else { 0 });
            });
            if last_in_bin >= MAX_IN_BIN {
                BlockAtomicU32::new(overflowed, 0).store(1);
            }
            thread::sync_threads();
            if overflowed.load(0) != 0 {
                return false;
            }
            let mut at = thread::thread_idx_x();
            while at < self.cleared() - 1 {
                let mine = list.load(at);
                let (to, index) = if mine[0] == EMPTY[0] {
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

    /// Lists the largest scores of the row, for any distribution of scores: radix search, then sort.
    ///
    /// # Safety
    /// All threads of the block call it together. The row is not empty.
    #[inline(always)]
    pub unsafe fn search(
        self,
        SelectMemory { scratch, counters, list, .. }: SelectMemory<THREADS, EACH>,
    ) {
        let count = self.k.min(self.row.length);
        // SAFETY: barriers separate writes and reads of different threads; the cut includes exactly `count`
        // scores.
        unsafe {
            let cut = scratch.cut(self.row, self.k);
            if thread::thread_idx_x() == 0 {
                counters.store(0, 0);
            }
            thread::sync_threads();
            self.row.each(|score, index| {
                if cut.includes(rank::key(score), index) {
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

/// The bins for the scores that a block holds. Has a barrier.
///
/// # Safety
/// All threads of the block call it together.
#[inline(always)]
pub unsafe fn bins_of<const THREADS: u32, const EACH: usize, const N: usize>(
    memory: SelectMemory<THREADS, EACH>,
    held: Held<N>,
) -> BinMap {
    // SAFETY: by this function's own contract.
    BinMap::new(unsafe { memory.bins.extent(ScoreRange::of(held.scores)) })
}

/// The final place of record `at` of a list that is ordered by bin: its rank within its bin, by score and
/// index.
///
/// # Safety
/// The list is written to the end of the record's bin and up to three records more; `mine` is the record.
#[inline(always)]
unsafe fn place(list: List, at: u32, mine: Record) -> u32 {
    /// Records that are loaded together.
    const STEP: usize = 4;
    let first = at - (mine[1] & MAX_IN_BIN);
    let (mut place, mut next) = (first, first);
    loop {
        // SAFETY: records behind the bin are written too, and none of them precedes this one.
        let others: [Record; STEP] = array_from_fn(|i| unsafe { list.load(next + i as u32) });
        unroll::<STEP>(|i| place += u32::from(list::precedes(others[i], mine)));
        next += STEP as u32;
        // Stops at the end of the bin: in the next bin the count restarts at 0.
        if first + (others[STEP - 1][1] & MAX_IN_BIN) + 1 != next {
            return place;
        }
    }
}

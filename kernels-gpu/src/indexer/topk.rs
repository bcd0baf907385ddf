//! The k largest scores of a row, exactly and in order, by one block.
//!
//! Values are counted by bins between the least and the largest of them. The counts say which bins have
//! the k largest, and where in the list those of a bin go; within a bin each is compared with all. A
//! long row is thinned out first ([`candidates`](super::candidates)). Where equal or crowded scores fill
//! a bin over, the row is searched digit by digit ([`search`](super::search)) and the list sorted.

use kv_layout::params::{IndexTopkParams, TopkSelectParams};
use simt::atomic::BlockAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::thread;

use super::bins::{Bins, CROWDED, Extent, Linear};
use super::candidates::{CANDIDATES, Finder, GROUPS, List};
use super::row::{Held, Row, VECTORS};
use super::search::Scratch;
use super::sort::sort;
use super::visible;
use crate::rank;
use crate::spell::spell;

/// Longest row that a block of [`select`] holds, if rows are longer than the short ones.
const HELD: u32 = 4096;
/// Candidates of a thread: as many as there may be, and what is enough for lists of 512 and 1024.
const MANY: usize = 4 * VECTORS;
const FEW: usize = MANY / 2;
/// A word of the order: from the lowest bit on whether the value is the last of its bin, how many of the
/// bin are before it, and its index.
const BEFORE_AT: u32 = 1;
const INDEX_AT: u32 = BEFORE_AT + CROWDED.count_ones();

/// Lists the largest scores of each row of at most 2048 columns.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of one block of 512 threads a row
/// call it.
#[inline(always)]
pub unsafe fn select_short(
    scores: Global<f32>,
    lengths: Global<i32>,
    selected: GlobalMut<i32>,
    params: TopkSelectParams,
) {
    // SAFETY: by this function's own contract.
    unsafe { Selection::of_row(scores, selected, params).short(|row| length(lengths, row)) }
}

/// Lists the largest scores of each row.
///
/// # Safety
/// As [`select_short`], with 1024 threads.
#[inline(always)]
pub unsafe fn select_long(
    scores: Global<f32>,
    maxima: Global<f32>,
    lengths: Global<i32>,
    selected: GlobalMut<i32>,
    params: TopkSelectParams,
) {
    // SAFETY: by this function's own contract.
    unsafe { Selection::of_row(scores, selected, params).long(maxima, |row| length(lengths, row)) }
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
        let seen = |row| seen(token_position, token_slot, params, row);
        Selection::of_query(scores, selected, params).short(seen);
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
        let seen = |row| seen(token_position, token_slot, params, row);
        Selection::of_query(scores, selected, params).long(maxima, seen);
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
unsafe fn length(lengths: Global<i32>, row: Row) -> Use {
    // SAFETY: by this function's own contract.
    let length = unsafe { lengths.load(u64::from(row.number)) };
    Use { length: (length.max(0) as u32).min(row.columns), all: false }
}

/// # Safety
/// The query exists.
#[inline(always)]
unsafe fn seen(
    position: Global<i32>,
    slot: Global<i32>,
    IndexTopkParams { first, k, .. }: IndexTopkParams,
    row: Row,
) -> Use {
    // SAFETY: by this function's own contract.
    let seen = unsafe { visible(position, slot, u64::from(first + row.number)) };
    let seen = seen.map_or(0, |(_, seen)| seen);
    Use { length: seen.min(row.columns), all: seen <= k }
}

/// What a block keeps in shared memory.
#[derive(Clone, Copy)]
struct Arena {
    bins: Bins,
    /// A search begins when the bins are done with.
    scratch: Scratch,
    counter: Shared<u32, 1>,
    /// Candidates first; when they are in registers, the list in order.
    list: List,
    /// Not of short rows.
    groups: Shared<u32, { GROUPS as usize }>,
}

impl Arena {
    /// # Safety
    /// The block has the shared memory of the kernel table.
    #[inline(always)]
    unsafe fn new() -> Self {
        const COUNTER_AT: u32 = Bins::BYTES;
        const LIST_AT: u32 = COUNTER_AT + 16;
        const GROUPS_AT: u32 = LIST_AT + 8 * CANDIDATES;
        const { assert!(Scratch::BYTES <= Bins::BYTES && Bins::BYTES.is_multiple_of(16)) };
        const { assert!(GROUPS_AT + 4 * GROUPS <= 48_640) };
        // SAFETY: inside the block's memory; the scratch comes after the bins, with a barrier between.
        unsafe {
            Self {
                bins: Bins::at(0),
                scratch: Scratch::at(0),
                counter: Shared::at(COUNTER_AT),
                list: List {
                    values: Shared::at(LIST_AT),
                    indices: Shared::at(LIST_AT + 4 * CANDIDATES),
                },
                groups: Shared::at(GROUPS_AT),
            }
        }
    }
}

/// A row, and where its largest scores are listed.
#[derive(Clone, Copy)]
struct Selection {
    row: Row,
    k: u32,
    selected: GlobalMut<i32>,
}

impl Selection {
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
            at += thread::block_dim_x();
        }
    }

    /// Lists every index in order.
    ///
    /// # Safety
    /// The row has no more scores than the list has room for.
    #[inline(always)]
    unsafe fn list_all(self) {
        let index = |at| if at < self.row.length { at as i32 } else { -1 };
        // SAFETY: by this function's own contract.
        unsafe { self.set_all((0, self.k), index) }
    }

    /// Clears what is counted with. A barrier keeps what was fetched before from being fetched only when
    /// the row's use is known.
    ///
    /// # Safety
    /// All threads of the block call it together, first.
    #[inline(always)]
    unsafe fn begin(self, arena: Arena, in_use: impl FnOnce(Row) -> Use) -> Use {
        // SAFETY: by this function's own contract.
        unsafe {
            arena.bins.clear();
            if thread::thread_idx_x() == 0 {
                arena.counter.store(0, 0);
            }
            let in_use = in_use(self.row);
            thread::sync_threads();
            in_use
        }
    }

    /// # Safety
    /// All threads of the block call it together; the row has at most a vector a thread.
    #[inline(always)]
    unsafe fn short(mut self, in_use: impl FnOnce(Row) -> Use) {
        // SAFETY: branches are the block's. What is fetched before its use is known is memory of the row.
        unsafe {
            let arena = Arena::new();
            let fetched = self.row.fetch::<1>();
            let Use { length, all } = self.begin(arena, in_use);
            self.row.length = length;
            if all {
                return self.list_all();
            }
            let held: Held<4> = self.row.hold(fetched);
            let bins = between(arena, held);
            if !self.order(arena, held, bins) {
                self.search(arena);
            }
        }
    }

    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn long(mut self, maxima: Global<f32>, in_use: impl FnOnce(Row) -> Use) {
        // SAFETY: as above.
        unsafe {
            let arena = Arena::new();
            let fetched = self.row.fetch_groups(maxima);
            let Use { length, all } = self.begin(arena, in_use);
            self.row.length = length;
            if all {
                return self.list_all();
            }
            let Arena { bins, list, groups, counter, .. } = arena;
            let finder = Finder { row: self.row, k: self.k, bins, list, groups, counter };
            let done = if length <= HELD {
                let held: Held<MANY> = self.row.hold(self.row.fetch::<VECTORS>());
                self.order(arena, held, between(arena, held))
            } else {
                match finder.find(fetched) {
                    Some((count, bins)) if count <= FEW as u32 * thread::block_dim_x() => {
                        self.order(arena, finder.held::<FEW>(count), bins)
                    }
                    Some((count, bins)) => self.order(arena, finder.held::<MANY>(count), bins),
                    None => false,
                }
            };
            if !done {
                self.search(arena);
            }
        }
    }

    /// Lists the largest of `held`, of which `bins` are the bins; `false`, and nothing, where too many are
    /// in one bin.
    ///
    /// # Safety
    /// All threads of the block call it together. The bins were cleared before a barrier.
    #[inline(always)]
    unsafe fn order<const N: usize>(self, arena: Arena, held: Held<N>, bins: Linear) -> bool {
        let Arena { bins: counted, list, .. } = arena;
        // SAFETY: barriers stand between what threads write and others read; all values have places of
        // their own, which are below `k` and what a bin may have more.
        unsafe {
            let places = counted.count(bins, held);
            let starts = counted.sum(self.k).of(places.bins);
            spell::<(), N>(|i| {
                let ((start, count), before) = (starts[i], places.before[i]);
                if held.has(i) && start < self.k && before < CROWDED {
                    list.values.store(start + before, rank::key(held.scores[i]));
                    let last = u32::from(before + 1 == count);
                    let word = held.indices[i] << INDEX_AT | before << BEFORE_AT | last;
                    list.indices.store(start + before, word);
                }
            });
            thread::sync_threads();
            if counted.crowded() {
                return false;
            }
            let end = counted.cut().end;
            let mut at = thread::thread_idx_x();
            while at < end {
                let (to, index) = place(list, at);
                if to < self.k {
                    self.set(to, index as i32);
                }
                at += thread::block_dim_x();
            }
            self.set_all((end, self.k), |_| -1);
            true
        }
    }

    /// Lists the largest scores of the row, whatever they are.
    ///
    /// # Safety
    /// All threads of the block call it together. The row is not empty.
    #[inline(always)]
    unsafe fn search(self, Arena { scratch, counter, list, .. }: Arena) {
        let count = self.k.min(self.row.length);
        // SAFETY: barriers stand between what threads write and others read; the cut takes exactly `count`
        // scores.
        unsafe {
            let cut = scratch.cut(self.row, self.k);
            if thread::thread_idx_x() == 0 {
                counter.store(0, 0);
            }
            thread::sync_threads();
            self.row.each(|score, index| {
                let value = rank::key(score);
                if cut.takes(value, index) {
                    let at = BlockAtomicU32::new(counter, 0).add(1);
                    list.values.store(at, value);
                    list.indices.store(at, index);
                }
            });
            thread::sync_threads();
            sort(list, count);
            self.set_all((0, count), |at| list.indices.load(at) as i32);
            self.set_all((count, self.k), |_| -1);
        }
    }
}

/// The bins of what a block holds. Has a barrier.
///
/// # Safety
/// All threads of the block call it together.
#[inline(always)]
unsafe fn between<const N: usize>(arena: Arena, held: Held<N>) -> Linear {
    // SAFETY: by this function's own contract.
    Linear::new(unsafe { arena.bins.extent(Extent::of(held.scores)) })
}

/// The place of the value at `at` of an ordered list, and its index: after those of the bins before,
/// among its bin by value and index.
///
/// # Safety
/// The list is written up to the end of the bin.
#[inline(always)]
unsafe fn place(list: List, at: u32) -> (u32, u32) {
    // SAFETY: by this function's own contract.
    unsafe {
        let (value, word) = (list.values.load(at), list.indices.load(at));
        let first = at - (word >> BEFORE_AT & CROWDED);
        let (mut rank, mut other) = (first, first);
        loop {
            let (other_value, other_word) = (list.values.load(other), list.indices.load(other));
            // Words have the order of their indices.
            let precedes = other_value > value || (other_value == value && other_word < word);
            rank += u32::from(precedes);
            // Not a count: the compiler would unroll the loop, which most often runs two or three times.
            if other_word & 1 == 1 {
                return (rank, word >> INDEX_AT);
            }
            other += 1;
        }
    }
}

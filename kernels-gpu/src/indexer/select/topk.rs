//! The kernels that list the k largest scores of a row, exactly and in order, one block a row.
//!
//! Scores are counted in bins of equal width between the lowest and the highest score. Prefix sums over the counts tell
//! which bins hold the k largest scores and where each bin starts in the list; within a bin each score is compared with
//! all others. A long row is reduced to candidates first ([`candidates`](super::candidates)). If equal or nearly equal
//! scores overflow a bin, a radix search ([`search`](super::search)) finds the k-th largest score, and the list is
//! sorted.

use crate::args::{IndexTopkLong, IndexTopkMany, IndexTopkShort, TopkSelectLong, TopkSelectShort};
use crate::params::IndexTopkParams;
use simt::mem::Global;
use simt::thread;

use super::candidates::Finder;
use super::memory::SelectMemory;
use super::order::{Selection, bins_of};
use super::row::{
    Held, LONG_THREADS, MANY_THREADS, MAX_HELD, Row, SHORT_THREADS, SHORT_VECTORS,
    groups_per_thread, long_vectors,
};
use crate::indexer::visible;

/// Groups of a long row, vectors of four scores, and scores that a thread holds.
const LONG_GROUPS: usize = groups_per_thread(LONG_THREADS);
const LONG_VECTORS: usize = long_vectors(LONG_THREADS);
const LONG_SCORES: usize = 4 * LONG_VECTORS;
/// The same in launches of many rows.
const MANY_GROUPS: usize = groups_per_thread(MANY_THREADS);
const MANY_VECTORS: usize = long_vectors(MANY_THREADS);
const MANY_SCORES: usize = 4 * MANY_VECTORS;
/// Number of bins that a thread sums up, for a short row.
const SHORT_EACH: usize = 2048 / SHORT_THREADS as usize;
/// Number of bins that a thread sums up, for a long row.
const LONG_EACH: usize = 4;
/// Bytes of shared memory of a block that selects from a short row.
pub const SHORT_SHARED_BYTES: u32 = SelectMemory::<SHORT_THREADS, SHORT_EACH>::BYTES;
/// Bytes of shared memory of a block that selects from a long row.
pub const LONG_SHARED_BYTES: u32 = SelectMemory::<LONG_THREADS, LONG_EACH>::BYTES;
/// The same in launches of many rows.
pub const MANY_SHARED_BYTES: u32 = SelectMemory::<MANY_THREADS, LONG_EACH>::BYTES;

/// Lists the largest scores of each row of at most 2048 columns.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of one block of [`SHORT_THREADS`] a
/// row call it.
#[inline(always)]
pub unsafe fn select_short(args: TopkSelectShort) {
    // SAFETY: by this function's own contract.
    unsafe {
        args.lengths.precompute_address(u64::from(thread::block_idx_x()));
        Short::of_row(args.scores, args.selected, args.params)
            .short(|row| length(args.lengths, row));
    }
}

/// Lists the largest scores of each row.
///
/// # Safety
/// As [`select_short`], with [`LONG_THREADS`].
#[inline(always)]
pub unsafe fn select_long(args: TopkSelectLong) {
    // SAFETY: by this function's own contract.
    unsafe {
        args.lengths.precompute_address(u64::from(thread::block_idx_x()));
        let selection = Long::of_row(args.scores, args.selected, args.params);
        selection.long::<LONG_GROUPS, LONG_VECTORS, LONG_SCORES>(args.maxima, |row| {
            length(args.lengths, row)
        });
    }
}

/// Lists the entries of the largest scores of each query, from rows of at most 2048 columns.
///
/// # Safety
/// As [`select_short`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries_short(args: IndexTopkShort) {
    let params = args.params;
    // SAFETY: by this function's own contract.
    unsafe {
        let in_use = use_of_query(args.token_position, args.token_slot, params);
        Short::of_query(args.scores, args.selected, params).short(in_use);
    }
}

/// Lists the entries of the largest scores of each query.
///
/// # Safety
/// As [`select_long`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries_long(args: IndexTopkLong) {
    let params = args.params;
    // SAFETY: by this function's own contract.
    unsafe {
        let in_use = use_of_query(args.token_position, args.token_slot, params);
        let selection = Long::of_query(args.scores, args.selected, params);
        selection.long::<LONG_GROUPS, LONG_VECTORS, LONG_SCORES>(args.maxima, in_use);
    }
}

/// As [`select_entries_long`], for launches of many queries.
///
/// # Safety
/// As [`select_long`], with [`MANY_THREADS`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries_many(args: IndexTopkMany) {
    let params = args.params;
    // SAFETY: by this function's own contract.
    unsafe {
        let in_use = use_of_query(args.token_position, args.token_slot, params);
        let selection = Many::of_query(args.scores, args.selected, params);
        selection.long::<MANY_GROUPS, MANY_VECTORS, MANY_SCORES>(args.maxima, in_use);
    }
}

/// The number of scores of a row that are in use, and whether all of them are listed, in index order.
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

/// Computes the addresses of the position and the slot of the block's query. The result loads both, and gives the use of its
/// row of scores.
///
/// # Safety
/// The query exists.
#[inline(always)]
unsafe fn use_of_query<const THREADS: u32>(
    position: Global<i32>,
    slot: Global<i32>,
    IndexTopkParams { first, k, .. }: IndexTopkParams,
) -> impl Fn(Row<THREADS>) -> Use {
    let token = u64::from(first + thread::block_idx_x());
    // SAFETY: by this function's own contract.
    unsafe {
        position.precompute_address(token);
        slot.precompute_address(token);
    }
    move |row| {
        // SAFETY: by this function's own contract: the row is the block's.
        let seen = unsafe { visible(position, slot, token) };
        let seen = seen.map_or(0, |(_, seen)| seen);
        let length = seen.min(row.columns);
        Use { length, all: length <= k }
    }
}

/// The selection from a row that a block holds in registers.
type Short = Selection<SHORT_THREADS, SHORT_EACH>;
/// The selection from a row of any length.
type Long = Selection<LONG_THREADS, LONG_EACH>;
/// The same in launches of many rows.
type Many = Selection<MANY_THREADS, LONG_EACH>;

impl Short {
    /// # Safety
    /// All threads of the block call it together; the row has at most 2048 columns.
    #[inline(always)]
    unsafe fn short(mut self, in_use: impl FnOnce(Row<SHORT_THREADS>) -> Use) {
        // SAFETY: branches are uniform in the block. Scores are loaded before the length is known, inside the
        // row. There is no branch before the first barrier: the compiler would sink the loads into it.
        unsafe {
            let memory = SelectMemory::new();
            self.row.begin_fetch();
            memory.begin(self.cleared());
            let fetched = self.row.fetch::<SHORT_VECTORS>();
            let Use { length, all } = in_use(self.row);
            self.row.length = length;
            let held: Held<{ 4 * SHORT_VECTORS }> = self.row.hold(fetched);
            let bins = bins_of(memory, held);
            if all {
                return self.list_all();
            }
            if !self.order(memory, held, bins) {
                self.search(memory);
            }
        }
    }
}

impl<const THREADS: u32> Selection<THREADS, LONG_EACH> {
    /// A thread holds `GROUPS` group maxima, and up to `SCORES` scores, `VECTORS` vectors of four.
    ///
    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn long<const GROUPS: usize, const VECTORS: usize, const SCORES: usize>(
        mut self,
        maxima: Global<f32>,
        in_use: impl FnOnce(Row<THREADS>) -> Use,
    ) {
        // SAFETY: as above.
        unsafe {
            let memory = SelectMemory::new();
            self.row.begin_fetch_groups::<GROUPS>(maxima);
            memory.begin(0);
            let fetched = self.row.fetch_groups::<GROUPS>(maxima);
            let Use { length, all } = in_use(self.row);
            thread::sync_threads();
            self.row.length = length;
            if all {
                return self.list_all();
            }
            if !self.order_long::<GROUPS, VECTORS, SCORES>(memory, fetched) {
                self.search(memory);
            }
        }
    }

    /// [`Self::order`] for a row with these group maxima.
    ///
    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn order_long<const GROUPS: usize, const VECTORS: usize, const SCORES: usize>(
        self,
        memory: SelectMemory<THREADS, LONG_EACH>,
        maxima: [u32; GROUPS],
    ) -> bool {
        let SelectMemory { bins, candidates, groups, counters, .. } = memory;
        let finder = Finder { row: self.row, k: self.k, bins, candidates, groups, counters };
        // SAFETY: by this function's own contract; branches are uniform in the block.
        unsafe {
            if self.row.length <= MAX_HELD {
                let held: Held<SCORES> = self.row.hold(self.row.fetch::<VECTORS>());
                memory.list.clear(self.cleared());
                return self.order(memory, held, bins_of(memory, held));
            }
            let found = finder.find(maxima);
            memory.list.clear(self.cleared());
            match found {
                Some((count, bins)) if count <= THREADS => {
                    self.order(memory, finder.held::<1>(count), bins)
                }
                Some((count, bins)) if count <= 2 * THREADS => {
                    self.order(memory, finder.held::<2>(count), bins)
                }
                Some((count, bins)) => self.order(memory, finder.held::<SCORES>(count), bins),
                None => false,
            }
        }
    }
}

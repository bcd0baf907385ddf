//! The k largest scores of a row, exactly and in order, by one block.
//!
//! A long row is not read: the k-th largest of its groups' maxima is a lower bound of its k-th
//! largest score, so only groups that reach it are, and of them only scores that reach it become
//! candidates. Where many scores are equal there may be too many candidates to keep; then the whole
//! row is searched, pass by pass.

use kv_layout::params::{IndexTopkParams, TopkSelectParams};
use simt::atomic::BlockAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{thread, warp};

use super::append::append;
use super::search::{ABSENT, Cut, Floor, Held, Scratch, THREADS, Values, inclusive_sum, ordered};
use super::visible;

/// Scores that the threads of a block hold: more are thinned out first.
const CANDIDATES: u32 = 4096;
/// Candidates of a thread.
const HELD: usize = (CANDIDATES / THREADS) as usize;
/// Scores of a thread where rows have at most 2048 columns.
const HELD_SHORT: usize = 4;
/// Groups of the longest row, by thread.
const HELD_GROUPS: usize = 16;
/// Groups that are listed: as many as there may be results, and the rest of a digit.
const GROUPS: u32 = 3072;
/// Bins of the final order.
const BINS: u32 = 2 * THREADS;
const BIN_BITS: u32 = 10;
const WARPS: u32 = THREADS / 32;

/// Lists the largest scores of each row. `SHORT`: rows have at most 2048 columns.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of one block of 512 threads a
/// row call it.
#[inline(always)]
pub unsafe fn select<const SHORT: bool>(
    scores: Global<f32>,
    maxima: Global<f32>,
    lengths: Global<i32>,
    selected: GlobalMut<i32>,
    params: TopkSelectParams,
) {
    let TopkSelectParams { columns, group_log2, k } = params;
    let row = thread::block_idx_x();
    // SAFETY: by this function's own contract.
    unsafe {
        let length = (lengths.load(u64::from(row)).max(0) as u32).min(columns);
        let row = Row::new(scores, maxima, (row, columns, group_log2), length);
        Selection { row, k, selected }.run::<SHORT>();
    }
}

/// Lists the entries of the largest scores of each query.
///
/// # Safety
/// As [`select`], for one block a query.
#[inline(always)]
pub unsafe fn select_entries<const SHORT: bool>(
    scores: Global<f32>,
    maxima: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    selected: GlobalMut<i32>,
    params: IndexTopkParams,
) {
    let IndexTopkParams { first, columns, group_log2, k } = params;
    let row = thread::block_idx_x();
    // SAFETY: by this function's own contract; the branch is the block's.
    unsafe {
        let token = u64::from(first + row);
        let seen = visible(token_position, token_slot, token).map_or(0, |(_, visible)| visible);
        let row = Row::new(scores, maxima, (row, columns, group_log2), seen.min(columns));
        let selection = Selection { row, k, selected };
        if seen <= k { selection.list_all() } else { selection.run::<SHORT>() }
    }
}

/// A row of scores.
#[derive(Clone, Copy)]
struct Row {
    scores: Global<f32>,
    maxima: Global<f32>,
    /// Its number.
    number: u32,
    /// Its first score.
    start: u64,
    /// Scores, in use or not.
    columns: u32,
    /// Its first group.
    first_group: u64,
    group_log2: u32,
    /// Scores in use.
    length: u32,
}

impl Row {
    #[inline(always)]
    fn new(
        scores: Global<f32>,
        maxima: Global<f32>,
        (number, columns, group_log2): (u32, u32, u32),
        length: u32,
    ) -> Self {
        let of = |elements: u32| u64::from(number) * u64::from(elements);
        let (start, first_group) = (of(columns), of(columns >> group_log2));
        Self { scores, maxima, number, start, columns, first_group, group_log2, length }
    }

    /// The scores, in registers.
    ///
    /// # Safety
    /// The row has at most `N` a thread.
    #[inline(always)]
    unsafe fn held<const N: usize>(self) -> Held<N> {
        let indices = strided::<N>();
        // Fetched before the length is known to reach so far.
        let scores = indices.map(|index| {
            let inside = index.min(self.columns - 1);
            // SAFETY: a score of the row.
            unsafe { self.scores.load(self.start + u64::from(inside)) }
        });
        let mut values = scores.map(ordered);
        for (value, index) in values.iter_mut().zip(&indices) {
            *value = if *index < self.length { *value } else { ABSENT };
        }
        Held { values, indices }
    }

    /// The groups' maxima, in registers; `groups` of them.
    ///
    /// # Safety
    /// The row has at most 16 groups a thread.
    #[inline(always)]
    unsafe fn groups(self, groups: u32) -> Held<HELD_GROUPS> {
        let indices = strided::<HELD_GROUPS>();
        let last = (self.columns >> self.group_log2) - 1;
        // Fetched before the length is known to reach so far.
        let maxima = indices.map(|index| {
            // SAFETY: a group of the row.
            unsafe { self.maxima.load(self.first_group + u64::from(index.min(last))) }
        });
        let mut values = maxima.map(ordered);
        for (value, index) in values.iter_mut().zip(&indices) {
            *value = if *index < groups { *value } else { ABSENT };
        }
        Held { values, indices }
    }
}

/// The indices of what a thread holds, those of a warp side by side.
#[inline(always)]
fn strided<const N: usize>() -> [u32; N] {
    core::array::from_fn(|i| i as u32 * THREADS + thread::thread_idx_x())
}

/// All scores of a row that reach `floor`, read whenever they are asked for.
#[derive(Clone, Copy)]
struct Streamed {
    row: Row,
    floor: Floor,
}

impl Values for Streamed {
    #[inline(always)]
    unsafe fn each(self, mut visit: impl FnMut(u32, u32)) {
        let mut index = thread::thread_idx_x();
        while index < self.row.length {
            // SAFETY: a score of the row.
            let value = ordered(unsafe { self.row.scores.load(self.row.start + u64::from(index)) });
            visit(if self.floor.reached_by(value) { value } else { ABSENT }, index);
            index += THREADS;
        }
    }
}

/// What a block keeps in shared memory. The listed groups are done with when the final order begins,
/// and the candidates are in registers by then: both lend their memory to it.
#[derive(Clone, Copy)]
struct Arena {
    values: Shared<u32, { CANDIDATES as usize }>,
    indices: Shared<u32, { CANDIDATES as usize }>,
    groups: Shared<u32, { GROUPS as usize }>,
    bins: Shared<u32, { BINS as usize }>,
    totals: Shared<u32, { WARPS as usize }>,
    /// Groups listed, candidates found.
    counters: Shared<u32, 2>,
    scratch: Scratch,
}

impl Arena {
    /// # Safety
    /// The block has the shared memory of the kernel table.
    #[inline(always)]
    unsafe fn new() -> Self {
        const GROUPS_AT: u32 = 8 * CANDIDATES;
        const SCRATCH_AT: u32 = GROUPS_AT + 4 * GROUPS;
        const TOTALS_AT: u32 = SCRATCH_AT + Scratch::BYTES;
        const { assert!(TOTALS_AT + 4 * (WARPS + 2) <= 46_592) };
        // SAFETY: inside the block's memory; `groups` and `bins` are used one after the other.
        unsafe {
            Self {
                values: Shared::at(0),
                indices: Shared::at(4 * CANDIDATES),
                groups: Shared::at(GROUPS_AT),
                bins: Shared::at(GROUPS_AT),
                totals: Shared::at(TOTALS_AT),
                counters: Shared::at(TOTALS_AT + 4 * WARPS),
                scratch: Scratch::at(SCRATCH_AT),
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

    /// Lists every index in order.
    ///
    /// # Safety
    /// The row has no more scores than the list has room for.
    #[inline(always)]
    unsafe fn list_all(self) {
        let mut at = thread::thread_idx_x();
        while at < self.k {
            // SAFETY: `at < k`.
            unsafe { self.set(at, if at < self.row.length { at as i32 } else { -1 }) };
            at += THREADS;
        }
    }

    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn run<const SHORT: bool>(self) {
        // SAFETY: all threads are together: every branch here is the block's.
        unsafe {
            let arena = Arena::new();
            let length = self.row.length;
            if SHORT {
                self.finish(arena, self.row.held::<HELD_SHORT>(), length);
            } else {
                let (held, floor) = if length <= CANDIDATES {
                    (Some((self.row.held::<HELD>(), length)), Floor::NONE)
                } else {
                    let floor = self.floor(arena);
                    (self.gather(arena, floor), floor)
                };
                // One copy of the long code that follows, whichever way the scores came.
                match held {
                    Some((held, count)) => self.finish(arena, held, count),
                    None => self.finish(arena, Streamed { row: self.row, floor }, length),
                }
            }
        }
    }

    /// A bound that the k-th largest score reaches, and lists the groups that reach it.
    ///
    /// # Safety
    /// As [`Self::run`], for a row longer than [`CANDIDATES`].
    #[inline(always)]
    unsafe fn floor(self, arena: Arena) -> Floor {
        let count = self.row.length.div_ceil(1 << self.row.group_log2);
        // SAFETY: by this function's own contract. The counters are cleared before the barriers of
        // the search, and counted after them.
        unsafe {
            let groups = self.row.groups(count);
            if thread::thread_idx_x() < 2 {
                arena.counters.store(thread::thread_idx_x(), 0);
            }
            // What k maxima reach, k scores reach.
            let floor = arena.scratch.floor(groups, count, self.k);
            let list = |first: usize| {
                let takes = |i: usize| {
                    let value = groups.values[first + i];
                    value != ABSENT && floor.reached_by(value)
                };
                let takes = [takes(0), takes(1), takes(2), takes(3)];
                let to = append(arena.counters, 0, takes);
                let store = |i: usize| {
                    if takes[i] && to[i] < GROUPS {
                        arena.groups.store(to[i], groups.indices[first + i]);
                    }
                };
                store(0);
                store(1);
                store(2);
                store(3);
            };
            list(0);
            list(4);
            list(8);
            list(12);
            thread::sync_threads();
            floor
        }
    }

    /// The scores of the listed groups that reach `floor`, in registers, and how many; `None` if there
    /// are more than fit.
    ///
    /// # Safety
    /// As [`Self::run`], after [`Self::floor`].
    #[inline(always)]
    unsafe fn gather(self, arena: Arena, floor: Floor) -> Option<(Held<HELD>, u32)> {
        let Row { scores, start, group_log2, length, .. } = self.row;
        // SAFETY: a listed group is one of the row, whose memory is a multiple of 32 scores; loops
        // and branches with collectives are the block's.
        unsafe {
            let listed = arena.counters.load(0);
            if listed > GROUPS {
                return None;
            }
            let vectors_log2 = group_log2 - 2;
            let vectors = listed << vectors_log2;
            let mut first = 0;
            while first < vectors {
                let at = |i: u32| {
                    let vector = first + i * THREADS + thread::thread_idx_x();
                    let group = arena.groups.load((vector >> vectors_log2).min(listed - 1));
                    let within = 4 * (vector & ((1 << vectors_log2) - 1));
                    ((group << group_log2) + within, vector < vectors)
                };
                let load = |(index, _): (u32, bool)| scores.load_u32x4(start + u64::from(index));
                let places = [at(0), at(1), at(2), at(3)];
                // All on their way before the first is looked at.
                let found = places.map(load);
                let keep = |(index, wanted): (u32, bool), found: [u32; 4]| {
                    let values = found.map(|bits| ordered(f32::from_bits(bits)));
                    let takes = |i: usize| {
                        wanted && index + (i as u32) < length && floor.reached_by(values[i])
                    };
                    let takes = [takes(0), takes(1), takes(2), takes(3)];
                    let to = append(arena.counters, 1, takes);
                    let store = |i: usize| {
                        if takes[i] && to[i] < CANDIDATES {
                            arena.values.store(to[i], values[i]);
                            arena.indices.store(to[i], index + i as u32);
                        }
                    };
                    store(0);
                    store(1);
                    store(2);
                    store(3);
                };
                keep(places[0], found[0]);
                keep(places[1], found[1]);
                keep(places[2], found[2]);
                keep(places[3], found[3]);
                first += 4 * THREADS;
            }
            thread::sync_threads();
            let count = arena.counters.load(1);
            if count > CANDIDATES {
                return None;
            }
            let places = strided::<HELD>();
            let or_absent = |at: u32, array: Shared<u32, { CANDIDATES as usize }>| {
                if at < count { array.load(at) } else { ABSENT }
            };
            let values = places.map(|at| or_absent(at, arena.values));
            let indices = places.map(|at| or_absent(at, arena.indices));
            Some((Held { values, indices }, count))
        }
    }

    /// Lists the largest of `values`, of which there are `present` or fewer.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline(always)]
    unsafe fn finish<V: Values>(self, arena: Arena, values: V, present: u32) {
        let count = self.k.min(present);
        // SAFETY: by this function's own contract; barriers stand between what threads write and what
        // others read. The cut takes exactly `count` values, so that all places are below it.
        unsafe {
            let cut = arena.scratch.cut(values, present, self.k);
            let order = Order::new(cut);
            arena.bins.store(thread::thread_idx_x(), 0);
            arena.bins.store(thread::thread_idx_x() + THREADS, 0);
            thread::sync_threads();
            values.each(|value, index| {
                if cut.takes(value, index) {
                    BlockAtomicU32::new(arena.bins, order.bin(value)).add(1);
                }
            });
            thread::sync_threads();
            start_bins(arena);
            values.each(|value, index| {
                if cut.takes(value, index) {
                    let at = BlockAtomicU32::new(arena.bins, order.bin(value)).add(1);
                    arena.values.store(at, value);
                    arena.indices.store(at, index);
                }
            });
            thread::sync_threads();
            let mut at = thread::thread_idx_x();
            while at < count {
                let (value, index) = (arena.values.load(at), arena.indices.load(at));
                self.set(rank(arena, order.bin(value), (value, index)), index as i32);
                at += THREADS;
            }
            let mut at = count + thread::thread_idx_x();
            while at < self.k {
                self.set(at, -1);
                at += THREADS;
            }
        }
    }
}

/// Which bin of the final order a value belongs to, the largest value in the first.
#[derive(Clone, Copy)]
struct Order {
    most: u32,
    shift: u32,
}

impl Order {
    #[inline(always)]
    fn new(cut: Cut) -> Self {
        // Without any value the bounds are the wrong way round, and nothing is binned.
        let bits = 32 - cut.most.wrapping_sub(cut.least).leading_zeros();
        Self { most: cut.most, shift: bits.saturating_sub(BIN_BITS) }
    }

    #[inline(always)]
    fn bin(self, value: u32) -> u32 {
        (self.most - value) >> self.shift
    }
}

/// Turns the bins' counts into where each begins.
///
/// # Safety
/// All threads of the block call it together, with a barrier before; it ends with one.
#[inline(always)]
unsafe fn start_bins(arena: Arena) {
    let (lane, warp_id, i) = (thread::lane_id(), thread::warp_id(), 2 * thread::thread_idx_x());
    // SAFETY: two bins a thread, one total a warp; barriers between writing and reading.
    unsafe {
        let (first, second) = (arena.bins.load(i), arena.bins.load(i + 1));
        let upto = inclusive_sum(first + second);
        if lane == 31 {
            arena.totals.store(warp_id, upto);
        }
        thread::sync_threads();
        let before = if lane < warp_id { arena.totals.load(lane) } else { 0 };
        let start = warp::reduce_add_u32(before) + upto - first - second;
        arena.bins.store(i, start);
        arena.bins.store(i + 1, start + first);
        thread::sync_threads();
    }
}

/// The place of a value in the list: after its bin's predecessors, among its bin by value and index.
///
/// # Safety
/// The bins are filled, so that each holds where it ends, which is where the next begins.
#[inline(always)]
unsafe fn rank(arena: Arena, bin: u32, (value, index): (u32, u32)) -> u32 {
    // SAFETY: by this function's own contract.
    unsafe {
        let begin = if bin == 0 { 0 } else { arena.bins.load(bin - 1) };
        let end = arena.bins.load(bin);
        let mut rank = begin;
        let mut at = begin;
        while at < end {
            let (other, other_index) = (arena.values.load(at), arena.indices.load(at));
            let precedes = other > value || (other == value && other_index < index);
            rank += u32::from(precedes);
            at += 1;
        }
        rank
    }
}

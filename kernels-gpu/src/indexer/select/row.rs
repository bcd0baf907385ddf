//! A row of scores from which a block selects, its group maxima, and the scores that a thread holds in registers.

use simt::mem::Global;
use simt::shared::Shared;
use simt::thread;

use crate::unroll::{array_from_fn, unroll};

/// Most indices of a list.
pub const MAX_K: u32 = 2048;
/// Most columns of a short row.
pub const SHORT_COLUMNS: u32 = 2048;
/// Threads of a block that selects from a short row.
pub const SHORT_THREADS: u32 = 512;
/// Number of vectors of four scores of a short row that a thread holds.
pub const SHORT_VECTORS: usize = (SHORT_COLUMNS / (4 * SHORT_THREADS)) as usize;
/// Threads of a block that selects from a long row.
pub const LONG_THREADS: u32 = 1024;
/// The same in launches of so many rows that multiprocessors take several: two blocks of a multiprocessor then take a
/// row each, and one goes on while the other waits at a barrier.
pub const MANY_THREADS: u32 = 512;
/// Longest row that a block holds in registers, without use of the maxima of its groups.
pub const MAX_HELD: u32 = 4096;
/// Most groups of a row.
pub const MAX_ROW_GROUPS: u32 = 8192;

/// Number of vectors of four scores of a long row, or of its candidates, that a thread holds.
#[must_use]
pub const fn long_vectors(threads: u32) -> usize {
    (MAX_HELD / (4 * threads)) as usize
}

/// Number of groups of the longest row that a thread holds.
#[must_use]
pub const fn groups_per_thread(threads: u32) -> usize {
    (MAX_ROW_GROUPS / threads) as usize
}

/// Rows of scores in global or shared memory.
pub trait Scores: Copy {
    /// Element number of the first score of row `number`.
    fn start(self, number: u32, columns: u32) -> u64;

    /// Four scores from element `at` on, by a volatile load.
    ///
    /// # Safety
    /// They exist, and `at` is a multiple of four.
    unsafe fn fetch_x4(self, at: u64) -> [u32; 4];

    /// Four scores from element `at` on.
    ///
    /// # Safety
    /// As [`Self::fetch_x4`].
    unsafe fn load_x4(self, at: u64) -> [u32; 4];
}

/// Rows in global memory, one after the other.
impl Scores for Global<f32> {
    #[inline(always)]
    fn start(self, number: u32, columns: u32) -> u64 {
        u64::from(number) * u64::from(columns)
    }

    #[inline(always)]
    unsafe fn fetch_x4(self, at: u64) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.load_u32x4_volatile(at) }
    }

    #[inline(always)]
    unsafe fn load_x4(self, at: u64) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.load_u32x4(at) }
    }
}

/// The block's own row in shared memory.
impl<const N: usize> Scores for Shared<f32, N> {
    #[inline(always)]
    fn start(self, _: u32, _: u32) -> u64 {
        0
    }

    #[inline(always)]
    unsafe fn fetch_x4(self, at: u64) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.load_u32x4(at as u32) }
    }

    #[inline(always)]
    unsafe fn load_x4(self, at: u64) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.load_u32x4(at as u32) }
    }
}

/// A row of scores, and the way a block of `THREADS` divides it.
#[derive(Clone, Copy)]
pub struct Row<const THREADS: u32, S = Global<f32>> {
    /// `[rows, columns]`.
    pub scores: S,
    /// Index of the row.
    pub number: u32,
    /// Number of scores of the row, in use or not: a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group.
    pub group_log2: u32,
    /// Number of scores in use.
    pub length: u32,
}

/// Scores in a thread's registers, NaN where it has none, and their indices.
#[derive(Clone, Copy)]
pub struct Held<const N: usize> {
    /// The scores.
    pub scores: [f32; N],
    /// The indices of the scores; undefined where there is no score.
    pub indices: [u32; N],
    /// Whether the thread has this score.
    pub there: [bool; N],
}

impl<const N: usize> Held<N> {
    /// `scores` where `there`, NaN elsewhere.
    #[inline(always)]
    #[must_use]
    pub fn new(scores: [f32; N], indices: [u32; N], there: [bool; N]) -> Self {
        Self {
            scores: array_from_fn(|i| if there[i] { scores[i] } else { f32::NAN }),
            indices,
            there,
        }
    }
}

impl<const THREADS: u32> Row<THREADS> {
    /// Number of groups with a score in use.
    #[inline(always)]
    #[must_use]
    pub fn groups(self) -> u32 {
        self.length.div_ceil(1 << self.group_log2)
    }

    /// Computes the first address that [`Self::fetch`] loads from.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn begin_fetch(self) {
        // SAFETY: a score of the row.
        unsafe { self.scores.precompute_address(self.vector(0)) }
    }

    /// Computes the addresses that [`Self::fetch_groups`] loads from.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn begin_fetch_groups<const GROUPS: usize>(self, maxima: Global<f32>) {
        // SAFETY: groups of the row.
        unroll::<GROUPS>(|i| unsafe { maxima.precompute_address(self.group(i)) });
    }

    /// Loads the maxima of the thread's groups, in use or not, from `maxima`, `[rows, columns >>
    /// group_log2]`.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    #[must_use]
    pub unsafe fn fetch_groups<const GROUPS: usize>(self, maxima: Global<f32>) -> [u32; GROUPS] {
        // SAFETY: groups of the row.
        array_from_fn(|i| unsafe { maxima.load_u32_volatile(self.group(i)) })
    }

    /// Element number of group `i` of the thread, or of the row's last.
    #[inline(always)]
    fn group(self, i: usize) -> u64 {
        let groups = self.columns >> self.group_log2;
        u64::from(self.number) * u64::from(groups) + u64::from(Self::strided(i).min(groups - 1))
    }

    /// The maxima from [`Self::fetch_groups`], without groups that are not in use.
    #[inline(always)]
    #[must_use]
    pub fn hold_groups<const GROUPS: usize>(self, fetched: [u32; GROUPS]) -> Held<GROUPS> {
        let indices = array_from_fn(Self::strided);
        let scores = array_from_fn(|i| f32::from_bits(fetched[i]));
        Held::new(scores, indices, array_from_fn(|i| indices[i] < self.groups()))
    }

    /// Index of the thread's element `i` where threads take consecutive elements, for coalesced loads.
    #[inline(always)]
    #[must_use]
    pub fn strided(i: usize) -> u32 {
        i as u32 * THREADS + thread::thread_idx_x()
    }
}

impl<const THREADS: u32, S: Scores> Row<THREADS, S> {
    /// Element number of the row's first score.
    #[inline(always)]
    #[must_use]
    pub fn start(self) -> u64 {
        self.scores.start(self.number, self.columns)
    }

    /// Loads the thread's first vectors of scores, in use or not.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    #[must_use]
    pub unsafe fn fetch<const V: usize>(self) -> [[u32; 4]; V] {
        // SAFETY: four scores of the row, which starts at a multiple of 32 and has a multiple of 32.
        array_from_fn(|i| unsafe { self.scores.fetch_x4(self.vector(i)) })
    }

    /// Element number of vector `i` of the thread, or of the row's last.
    #[inline(always)]
    fn vector(self, i: usize) -> u64 {
        self.start() + u64::from((4 * Row::<THREADS>::strided(i)).min(self.columns - 4))
    }

    /// The scores from [`Self::fetch`], without those that are not in use.
    #[inline(always)]
    #[must_use]
    pub fn hold<const V: usize, const N: usize>(self, fetched: [[u32; 4]; V]) -> Held<N> {
        const { assert!(N == 4 * V) };
        let indices: [u32; N] =
            array_from_fn(|i| 4 * Row::<THREADS>::strided(i / 4) + (i % 4) as u32);
        let scores = array_from_fn(|i| f32::from_bits(fetched[i / 4][i % 4]));
        Held::new(scores, indices, array_from_fn(|i| indices[i] < self.length))
    }

    /// Calls `visit` with each of the thread's scores of the row in use, and its index.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn each(self, mut visit: impl FnMut(f32, u32)) {
        let mut first = 4 * thread::thread_idx_x();
        while first < self.length {
            // SAFETY: four scores of the row, which starts at a multiple of 32 and has a multiple of 32.
            let found = unsafe { self.scores.load_x4(self.start() + u64::from(first)) };
            let mut see = |i: usize| {
                let index = first + i as u32;
                if index < self.length {
                    visit(f32::from_bits(found[i]), index);
                }
            };
            see(0);
            see(1);
            see(2);
            see(3);
            first += 4 * THREADS;
        }
    }
}

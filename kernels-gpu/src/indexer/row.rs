//! A row of scores that a block selects from, and the largest of each group of them.

use kv_layout::kernels::{KERNELS, kernel_index};
use simt::mem::Global;
use simt::thread;

use crate::spell::spell;

/// Threads of a block that selects from a short row.
pub const SHORT_THREADS: u32 = 512;
/// Vectors of four scores of such a row that a thread holds.
pub const SHORT_VECTORS: usize = (2048 / (4 * SHORT_THREADS)) as usize;
/// Threads of a block that selects from a long row.
pub const LONG_THREADS: u32 = 1024;
/// Vectors of four scores, of rows that are held whole and of candidates, that a thread holds.
pub const LONG_VECTORS: usize = (4096 / (4 * LONG_THREADS)) as usize;
/// Groups of the longest row that a thread holds.
pub const HELD_GROUPS: usize = (8192 / LONG_THREADS) as usize;

const _: () = {
    assert!(KERNELS[kernel_index("topk_select_long")].block == LONG_THREADS);
    assert!(KERNELS[kernel_index("index_topk_long")].block == LONG_THREADS);
    assert!(KERNELS[kernel_index("topk_select_short")].block == SHORT_THREADS);
    assert!(KERNELS[kernel_index("index_topk_short")].block == SHORT_THREADS);
};

/// A row of scores, before a block of `THREADS`.
#[derive(Clone, Copy)]
pub struct Row<const THREADS: u32> {
    /// `[rows, columns]`.
    pub scores: Global<f32>,
    /// Its number.
    pub number: u32,
    /// Scores, in use or not: a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group.
    pub group_log2: u32,
    /// Scores in use.
    pub length: u32,
}

/// Scores of a thread, NaN where it has none, and their indices.
#[derive(Clone, Copy)]
pub struct Held<const N: usize> {
    /// The scores.
    pub scores: [f32; N],
    /// Their indices; anything where there is none.
    pub indices: [u32; N],
    /// Whether there is one.
    pub there: [bool; N],
}

impl<const N: usize> Held<N> {
    /// These, where they are there.
    #[inline(always)]
    #[must_use]
    pub fn new(scores: [f32; N], indices: [u32; N], there: [bool; N]) -> Self {
        Self { scores: spell(|i| if there[i] { scores[i] } else { f32::NAN }), indices, there }
    }
}

impl<const THREADS: u32> Row<THREADS> {
    /// Element number of the row's first score.
    #[inline(always)]
    #[must_use]
    pub fn start(self) -> u64 {
        u64::from(self.number) * u64::from(self.columns)
    }

    /// Groups with a score in use.
    #[inline(always)]
    #[must_use]
    pub fn groups(self) -> u32 {
        self.length.div_ceil(1 << self.group_log2)
    }

    /// Has the address of what [`Self::fetch`] fetches first.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn begin_fetch(self) {
        // SAFETY: a score of the row.
        unsafe { self.scores.have_address(self.vector(0)) }
    }

    /// Fetches the thread's first vectors of scores, in use or not.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    #[must_use]
    pub unsafe fn fetch<const V: usize>(self) -> [[u32; 4]; V] {
        // SAFETY: four scores of the row, which starts at a multiple of 32 and has a multiple of 32.
        spell(|i| unsafe { self.scores.load_u32x4_in_order(self.vector(i)) })
    }

    /// Element number of vector `i` of the thread, or of the row's last.
    #[inline(always)]
    fn vector(self, i: usize) -> u64 {
        self.start() + u64::from((4 * Self::strided(i)).min(self.columns - 4))
    }

    /// Has the addresses of what [`Self::fetch_groups`] fetches.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn begin_fetch_groups(self, maxima: Global<f32>) {
        // SAFETY: groups of the row.
        spell::<(), HELD_GROUPS>(|i| unsafe { maxima.have_address(self.group(i)) });
    }

    /// Fetches the largest scores of the thread's groups, in use or not, from `maxima`, `[rows, columns >>
    /// group_log2]`.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    #[must_use]
    pub unsafe fn fetch_groups(self, maxima: Global<f32>) -> [u32; HELD_GROUPS] {
        // SAFETY: groups of the row.
        spell(|i| unsafe { maxima.load_u32_in_order(self.group(i)) })
    }

    /// Element number of group `i` of the thread, or of the row's last.
    #[inline(always)]
    fn group(self, i: usize) -> u64 {
        let groups = self.columns >> self.group_log2;
        u64::from(self.number) * u64::from(groups) + u64::from(Self::strided(i).min(groups - 1))
    }

    /// What [`Self::fetch`] fetched, as far as it is in use.
    #[inline(always)]
    #[must_use]
    pub fn hold<const V: usize, const N: usize>(self, fetched: [[u32; 4]; V]) -> Held<N> {
        const { assert!(N == 4 * V) };
        let indices: [u32; N] = spell(|i| 4 * Self::strided(i / 4) + (i % 4) as u32);
        let scores = spell(|i| f32::from_bits(fetched[i / 4][i % 4]));
        Held::new(scores, indices, spell(|i| indices[i] < self.length))
    }

    /// What [`Self::fetch_groups`] fetched, as far as it is in use.
    #[inline(always)]
    #[must_use]
    pub fn hold_groups(self, fetched: [u32; HELD_GROUPS]) -> Held<HELD_GROUPS> {
        let indices = spell(Self::strided);
        let scores = spell(|i| f32::from_bits(fetched[i]));
        Held::new(scores, indices, spell(|i| indices[i] < self.groups()))
    }

    /// The index of what a thread holds in place `i`, where those of a warp are side by side.
    #[inline(always)]
    #[must_use]
    pub fn strided(i: usize) -> u32 {
        i as u32 * THREADS + thread::thread_idx_x()
    }

    /// Calls `visit` with each of the thread's scores and its index, in all of the row.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn each(self, mut visit: impl FnMut(f32, u32)) {
        let mut first = 4 * thread::thread_idx_x();
        while first < self.length {
            // SAFETY: four scores of the row, which starts at a multiple of 32 and has a multiple of 32.
            let found = unsafe { self.scores.load_u32x4(self.start() + u64::from(first)) };
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

//! A list of records in shared memory, and its bitonic sort, whose running time depends only on the length.

use simt::shared::Shared;
use simt::thread;

use crate::rank;

/// A score as a key that ascends in the order of the list, and a word that orders equal scores.
pub type Record = [u32; 2];

/// An empty record: sorts after every score.
pub const EMPTY: Record = [!rank::ABSENT, 0];

/// The record of a score.
#[inline(always)]
#[must_use]
pub fn record(score: f32, word: u32) -> Record {
    // Negation reverses the order; both zeros become 0.0 - 0.0.
    let high = if score.is_nan() { !rank::key(f32::NAN) } else { rank::ordered(0.0 - score) };
    [high, word]
}

/// Whether `a` comes before `b`.
#[inline(always)]
#[must_use]
pub fn precedes(a: Record, b: Record) -> bool {
    let number = |[high, low]: Record| u64::from(high) << 32 | u64::from(low);
    number(a) < number(b)
}

/// Capacity of a list.
pub const MAX_RECORDS: u32 = 4096;

/// A list of records.
#[derive(Clone, Copy)]
pub struct List(Shared<u32, { 2 * MAX_RECORDS as usize }>);

impl List {
    /// Bytes of a list.
    pub const BYTES: u32 = 8 * MAX_RECORDS;

    /// The list that starts at `offset` of the block's shared memory.
    ///
    /// # Safety
    /// `offset` is a multiple of 16, and [`Self::BYTES`] from there on are used for nothing else without a
    /// barrier between.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(offset: u32) -> Self {
        // SAFETY: by this function's own contract.
        Self(unsafe { Shared::at(offset) })
    }

    /// Record `at`.
    ///
    /// # Safety
    /// `at < MAX_RECORDS`; it was written before a barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(self, at: u32) -> Record {
        // SAFETY: by this function's own contract.
        unsafe { self.0.load_u32x2(2 * at) }
    }

    /// Sets record `at`.
    ///
    /// # Safety
    /// `at < MAX_RECORDS`; no other thread accesses it without a barrier between.
    #[inline(always)]
    pub unsafe fn store(self, at: u32, record: Record) {
        // SAFETY: by this function's own contract.
        unsafe { self.0.store_u32x2(2 * at, record) }
    }

    /// Sets record `at` if `there`, without a branch.
    ///
    /// # Safety
    /// As [`Self::store`], if `there`.
    #[inline(always)]
    pub unsafe fn store_where(self, there: bool, at: u32, record: Record) {
        // SAFETY: by this function's own contract.
        unsafe { self.0.store_u32x2_where(there, 2 * at, record) }
    }

    /// Sets the first `count` records to [`EMPTY`], with `count` rounded up to an even number.
    ///
    /// # Safety
    /// All threads of the block call it, with barriers before and after; `count <= MAX_RECORDS`.
    #[inline(always)]
    pub unsafe fn clear(self, count: u32) {
        let mut at = 2 * thread::thread_idx_x();
        while at < count {
            let [high, low] = EMPTY;
            // SAFETY: below an even number of records.
            unsafe { self.0.store_u32x4(2 * at, [high, low, high, low]) };
            at += 2 * thread::block_dim_x();
        }
    }

    /// Sorts the first `count` records. Ends with a barrier.
    ///
    /// # Safety
    /// All threads of the block call it together, with a barrier after the list was written; `count`,
    /// rounded up to a power of two, is at most [`MAX_RECORDS`].
    #[inline(always)]
    pub unsafe fn sort(self, count: u32) {
        let (thread, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        let size = count.next_power_of_two();
        // SAFETY: indices are below `size`; in each step every thread has its own pairs, and barriers separate
        // the steps. Loops with barriers are uniform in the block.
        unsafe {
            let mut at = count + thread;
            while at < size {
                self.store(at, EMPTY);
                at += threads;
            }
            thread::sync_threads();
            let mut run = 2;
            while run <= size {
                let mut distance = run / 2;
                while distance > 0 {
                    let mut pair = thread;
                    while pair < size / 2 {
                        let low = 2 * pair - (pair & (distance - 1));
                        self.order(low, low + distance, low & run == 0);
                        pair += threads;
                    }
                    thread::sync_threads();
                    distance /= 2;
                }
                run *= 2;
            }
        }
    }

    /// Puts two records in ascending order if `forward`, else in descending order.
    ///
    /// # Safety
    /// Both are in the list, and no other thread accesses them.
    #[inline(always)]
    unsafe fn order(self, a: u32, b: u32, forward: bool) {
        // SAFETY: by this function's own contract.
        unsafe {
            let (first, second) = (self.load(a), self.load(b));
            if precedes(second, first) == forward {
                self.store(a, second);
                self.store(b, first);
            }
        }
    }
}

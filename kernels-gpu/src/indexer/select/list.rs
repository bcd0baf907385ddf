//! A list of records in shared memory, and a bitonic network that sorts it: work that depends on its
//! length alone.

use simt::shared::Shared;
use simt::thread;

use crate::rank;

/// A score in the order of a list, and what orders equal ones.
pub type Record = [u32; 2];

/// Comes after every score.
pub const NOTHING: Record = [!rank::ABSENT, 0];

/// The record of a score.
#[inline(always)]
#[must_use]
pub fn record(score: f32, word: u32) -> Record {
    // The negation of a greater score is less; both zeros are 0.0 - 0.0.
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

/// Most records of a list.
pub const RECORDS: u32 = 4096;

/// A list of records.
#[derive(Clone, Copy)]
pub struct List(Shared<u32, { 2 * RECORDS as usize }>);

impl List {
    /// Bytes that it takes.
    pub const BYTES: u32 = 8 * RECORDS;

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
    /// `at < RECORDS`; it was written before a barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(self, at: u32) -> Record {
        // SAFETY: by this function's own contract.
        unsafe { self.0.load_u32x2(2 * at) }
    }

    /// Sets record `at`.
    ///
    /// # Safety
    /// `at < RECORDS`; no other thread touches it without a barrier between.
    #[inline(always)]
    pub unsafe fn store(self, at: u32, record: Record) {
        // SAFETY: by this function's own contract.
        unsafe { self.0.store_u32x2(2 * at, record) }
    }

    /// Sets record `at` where `there`.
    ///
    /// # Safety
    /// As [`Self::store`], where `there`.
    #[inline(always)]
    pub unsafe fn store_where(self, there: bool, at: u32, record: Record) {
        // SAFETY: by this function's own contract.
        unsafe { self.0.store_u32x2_where(there, 2 * at, record) }
    }

    /// Sets the first `count` records to [`NOTHING`], and the one behind if their number is odd.
    ///
    /// # Safety
    /// All threads of the block call it, with barriers before and behind; `count <= RECORDS`.
    #[inline(always)]
    pub unsafe fn clear(self, count: u32) {
        let mut at = 2 * thread::thread_idx_x();
        while at < count {
            let [high, low] = NOTHING;
            // SAFETY: below an even number of records.
            unsafe { self.0.store_u32x4(2 * at, [high, low, high, low]) };
            at += 2 * thread::block_dim_x();
        }
    }

    /// Sorts the first `count` records. Ends with a barrier.
    ///
    /// # Safety
    /// All threads of the block call it together, with a barrier after the list was written; it has room
    /// for the next power of two from `count` on.
    #[inline(always)]
    pub unsafe fn sort(self, count: u32) {
        let (thread, threads) = (thread::thread_idx_x(), thread::block_dim_x());
        let size = count.next_power_of_two();
        // SAFETY: indices are below `size`; of each step a thread has pairs of its own, and a barrier
        // stands between steps. Loops are the block's.
        unsafe {
            let mut at = count + thread;
            while at < size {
                self.store(at, NOTHING);
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

    /// Brings two records in order, or against it.
    ///
    /// # Safety
    /// Both are in the list, and no other thread touches them.
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

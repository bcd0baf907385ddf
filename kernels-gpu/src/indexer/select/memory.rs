//! What a block that selects keeps in shared memory.

use simt::shared::Shared;
use simt::{grid, thread};

use super::bins::Bins;
use super::candidates::{CANDIDATES, GROUPS};
use super::list::{List, RECORDS};
use super::row::MAX_HELD;
use super::search::Scratch;

/// Values of a bin whose order within it is found by comparing all of them, at most.
pub const CROWDED: u32 = 127;
/// Longest list.
const MOST: u32 = 2048;

/// What a block keeps in shared memory.
#[derive(Clone, Copy)]
pub struct SelectMemory<const THREADS: u32, const EACH: usize> {
    /// Counts of values.
    pub bins: Bins<THREADS, EACH>,
    /// A search begins when the bins are done with.
    pub scratch: Scratch,
    /// Of candidates, of groups.
    pub counters: Shared<u32, 2>,
    /// Whether a bin that the list needs has more values than [`CROWDED`].
    pub crowded: Shared<u32, 1>,
    /// The list in the making.
    pub list: List,
    /// In the list's place, before it.
    pub groups: Shared<u32, { GROUPS as usize }>,
    /// Likewise.
    pub candidates: Shared<u32, { CANDIDATES as usize }>,
}

impl<const THREADS: u32, const EACH: usize> SelectMemory<THREADS, EACH> {
    const COUNTERS_AT: u32 = Bins::<THREADS, EACH>::BYTES;
    const LIST_AT: u32 = Self::COUNTERS_AT + 16;
    /// Behind what is cleared of the list while candidates are read.
    const CANDIDATES_AT: u32 = Self::LIST_AT + 8 * (MOST + CROWDED + 1);
    /// Bytes that it takes.
    pub const BYTES: u32 = Self::LIST_AT + List::BYTES;
    const CHECKED: () = {
        assert!(Scratch::BYTES <= Bins::<THREADS, EACH>::BYTES);
        assert!(Bins::<THREADS, EACH>::BYTES.is_multiple_of(16));
        assert!(Self::BYTES <= 48_640);
        assert!(Self::LIST_AT + 4 * GROUPS <= Self::CANDIDATES_AT);
        assert!(Self::CANDIDATES_AT + 4 * CANDIDATES <= Self::BYTES);
        assert!(CANDIDATES <= RECORDS && MAX_HELD <= RECORDS);
    };

    /// That at the start of the block's shared memory.
    ///
    /// # Safety
    /// The block has so much.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new() -> Self {
        const { Self::CHECKED };
        // SAFETY: inside the block's memory; what is in one place is there one after the other, with
        // barriers between.
        unsafe {
            Self {
                bins: Bins::at(0),
                scratch: Scratch::at(0),
                counters: Shared::at(Self::COUNTERS_AT),
                crowded: Shared::at(Self::COUNTERS_AT + 8),
                list: List::at(Self::LIST_AT),
                groups: Shared::at(Self::LIST_AT),
                candidates: Shared::at(Self::CANDIDATES_AT),
            }
        }
    }

    /// As [`Self::clear`], while the launch before may still run. Behind it global memory may be used.
    ///
    /// # Safety
    /// All threads of the block call it together, first.
    #[inline(always)]
    pub unsafe fn begin(self, records: u32) {
        // SAFETY: by this function's own contract.
        unsafe { self.clear(records) }
        grid::wait_for_dependencies();
        grid::launch_dependents();
    }

    /// Clears what is counted with, and the first `records` of the list, for whoever comes behind the next
    /// barrier.
    ///
    /// # Safety
    /// All threads of the block call it together; the memory is free.
    #[inline(always)]
    pub unsafe fn clear(self, records: u32) {
        // SAFETY: by this function's own contract.
        unsafe {
            self.bins.begin();
            if thread::thread_idx_x() == 0 {
                self.counters.store_u32x2(0, [0; 2]);
                self.crowded.store(0, 0);
            }
            self.list.clear(records);
        }
    }
}

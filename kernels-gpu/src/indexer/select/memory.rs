//! The shared memory of a block that selects.

use simt::shared::Shared;
use simt::{grid, thread};

use super::bins::Bins;
use super::candidates::{MAX_CANDIDATES, MAX_LISTED_GROUPS};
use super::list::{List, MAX_RECORDS};
use super::row::{MAX_HELD, MAX_K};
use super::search::Scratch;

/// The most scores of a bin for which each is compared with all others.
pub const MAX_IN_BIN: u32 = 127;

/// The arrays of the block's shared memory; some share space.
#[derive(Clone, Copy)]
pub struct SelectMemory<const THREADS: u32, const EACH: usize> {
    /// Counts of scores by bin.
    pub bins: Bins<THREADS, EACH>,
    /// Scratch of the radix search; in the space of the bins, which are no longer needed then.
    pub scratch: Scratch,
    /// Numbers of candidates and of groups.
    pub counters: Shared<u32, 2>,
    /// 1 if a bin that the list needs has more scores than [`MAX_IN_BIN`].
    pub overflowed: Shared<u32, 1>,
    /// The list of results.
    pub list: List,
    /// Groups that reach the bound; in the space of the list, before it is written.
    pub groups: Shared<u32, { MAX_LISTED_GROUPS as usize }>,
    /// Indices of candidates; also in the space of the list.
    pub candidates: Shared<u32, { MAX_CANDIDATES as usize }>,
}

impl<const THREADS: u32, const EACH: usize> SelectMemory<THREADS, EACH> {
    const COUNTERS_AT: u32 = Bins::<THREADS, EACH>::BYTES;
    const LIST_AT: u32 = Self::COUNTERS_AT + 16;
    /// After the part of the list that is cleared while candidates are read.
    const CANDIDATES_AT: u32 = Self::LIST_AT + 8 * (MAX_K + MAX_IN_BIN + 1);
    /// Bytes of the memory.
    pub const BYTES: u32 = Self::LIST_AT + List::BYTES;
    const CHECKED: () = {
        assert!(Scratch::BYTES <= Bins::<THREADS, EACH>::BYTES);
        assert!(Bins::<THREADS, EACH>::BYTES.is_multiple_of(16));
        assert!(Self::LIST_AT + 4 * MAX_LISTED_GROUPS <= Self::CANDIDATES_AT);
        assert!(Self::CANDIDATES_AT + 4 * MAX_CANDIDATES <= Self::BYTES);
        assert!(MAX_CANDIDATES <= MAX_RECORDS && MAX_HELD <= MAX_RECORDS);
    };

    /// The memory from byte 0 of the block's shared memory on.
    ///
    /// # Safety
    /// The block has [`Self::BYTES`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn new() -> Self {
        const { Self::CHECKED };
        // SAFETY: inside the block's memory; barriers separate the uses of arrays that share space.
        unsafe {
            Self {
                bins: Bins::at(0),
                scratch: Scratch::at(0),
                counters: Shared::at(Self::COUNTERS_AT),
                overflowed: Shared::at(Self::COUNTERS_AT + 8),
                list: List::at(Self::LIST_AT),
                groups: Shared::at(Self::LIST_AT),
                candidates: Shared::at(Self::CANDIDATES_AT),
            }
        }
    }

    /// As [`Self::clear`], then waits for the launches on which this one depends: afterwards global memory may be
    /// accessed.
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

    /// Clears the counters and the first `records` of the list. A barrier must follow.
    ///
    /// # Safety
    /// All threads of the block call it together; no thread uses the memory.
    #[inline(always)]
    pub unsafe fn clear(self, records: u32) {
        // SAFETY: by this function's own contract.
        unsafe {
            self.bins.begin();
            if thread::thread_idx_x() == 0 {
                self.counters.store_u32x2(0, [0; 2]);
                self.overflowed.store(0, 0);
            }
            self.list.clear(records);
        }
    }
}

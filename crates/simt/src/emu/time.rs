//! Vector clocks of a block: one time per warp, which stands for the accesses of that warp before it.

use std::fmt;

use super::fault::ThreadIndex;
use crate::limits::{MAX_BLOCK_THREADS, MAX_CLUSTER_BLOCKS, WARP_SIZE};

/// Most warps of a block. Also the number of a pseudo-warp, to which all threads of the cluster's other blocks belong.
pub const OTHERS: usize = WARP_SIZE as usize;
/// Elements of a vector clock: the warps of a block, and the pseudo-warp.
pub const WARPS: usize = OTHERS + 1;

/// A vector clock: for each warp, the accesses at smaller times are known, that is, happen before.
pub type Known = [u64; WARPS];
/// The vector clock that covers no access.
pub const NOTHING: Known = [0; WARPS];

/// Joins `other` into `known`: the larger time of each element.
pub fn join(known: &mut Known, other: &Known) {
    for (known, other) in known.iter_mut().zip(other) {
        *known = (*known).max(*other);
    }
}

/// The warp of a thread; for threads of other blocks, the pseudo-warp `OTHERS`.
pub fn warp_of(thread: ThreadIndex) -> usize {
    ((thread.0 / WARP_SIZE) as usize).min(OTHERS)
}

/// A point in the run of a thread, by the clock of its warp. One word, since shared memory keeps one for each access that
/// may race: the thread in the low bits, the time above them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Moment(u64);

impl Moment {
    /// Enough for the threads of a cluster. The other 48 bits hold times, which count barriers: enough for years.
    const THREAD_BITS: u32 = 16;

    /// A point of a thread.
    pub fn new(thread: ThreadIndex, time: u64) -> Self {
        Self(time << Self::THREAD_BITS | u64::from(thread.0))
    }

    /// The thread.
    pub fn thread(self) -> ThreadIndex {
        ThreadIndex((self.0 & ((1 << Self::THREAD_BITS) - 1)) as u32)
    }

    /// The time.
    pub fn time(self) -> u64 {
        self.0 >> Self::THREAD_BITS
    }
}

const _: () = assert!(MAX_BLOCK_THREADS * (MAX_CLUSTER_BLOCKS + 1) < 1 << Moment::THREAD_BITS);

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.thread(), self.time())
    }
}

/// The knowledge that warps have released to a barrier.
#[derive(Clone, Copy)]
pub struct Released {
    /// Accesses that happen before everything after the barrier.
    pub known: Known,
    /// Stores to shared memory that a product after the barrier sees ([`super::proxy`]).
    pub visible: Known,
}

impl Released {
    /// Nothing was released.
    pub const NOTHING: Self = Self { known: NOTHING, visible: NOTHING };
}

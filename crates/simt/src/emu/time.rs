//! Vector clocks of a block: a time of each warp, which stands for what that warp did before it.

use super::fault::ThreadIndex;
use crate::limits::WARP_SIZE;

/// The most warps of a block; the threads of the other blocks of its cluster are one more.
pub const OTHERS: usize = WARP_SIZE as usize;
/// How many warps have a time.
pub const WARPS: usize = OTHERS + 1;

/// What is known of each warp: what it did at smaller times.
pub type Known = [u64; WARPS];
/// Nothing of anybody.
pub const NOTHING: Known = [0; WARPS];

/// Makes `known` the larger of both in each element.
pub fn join(known: &mut Known, other: &Known) {
    for (known, other) in known.iter_mut().zip(other) {
        *known = (*known).max(*other);
    }
}

/// The warp of a thread; threads of other blocks are of one warp.
pub fn warp_of(thread: ThreadIndex) -> usize {
    ((thread.0 / WARP_SIZE) as usize).min(OTHERS)
}

/// When a thread did something: what the clock of its warp said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The thread.
    pub thread: ThreadIndex,
    /// The time.
    pub time: u64,
}

/// What warps have released to a barrier.
#[derive(Clone, Copy)]
pub struct Released {
    /// Accesses that are ordered before whatever comes behind the barrier.
    pub known: Known,
    /// Stores to shared memory that a product behind the barrier sees ([`super::proxy`]).
    pub visible: Known,
}

impl Released {
    /// Nothing.
    pub const NOTHING: Self = Self { known: NOTHING, visible: NOTHING };
}

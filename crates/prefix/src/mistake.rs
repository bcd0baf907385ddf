//! Deliberate mistakes, which tests make to prove that such bugs are found. They exist only with the feature
//! `mistakes`; without it they compile to nothing.

/// A mistake in a prefix tree or in its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// All salts share one root.
    SaltIgnored,
    /// A match may cover the whole prompt, so that there is nothing left to compute.
    Boundary,
    /// Only the first half of a block's tokens is compared.
    HalfCompared,
    /// A match is reused to its end, even without a checkpoint there.
    NoCheckpoint,
    /// Segments that requests reference are evicted like others.
    ReferencedEvicted,
    /// Leases protect nothing.
    LeaseIgnored,
    /// A segment that is split keeps its checkpoint at the end of its first part.
    SplitMovesCheckpoint,
    /// Blocks stay although no checkpoint is at or below them.
    NothingTrimmed,
    /// A block that the tree has already is registered a second time.
    SecondCommitWins,
    /// Eviction stops one block too early.
    OneShort,
    /// Blocks are removed without an event.
    RemovalNotTold,
    /// Stored blocks are logged twice.
    EventTwice,
    /// Blocks that are stored below a segment are logged as if they were at the root.
    ParentForgotten,
    /// Splitting a segment swaps the serials of the blocks before and after the cut.
    SplitMovesSerials,
    /// A full log is emptied without reporting an overflow.
    OverflowNotTold,
    /// Events from before a snapshot are drained after it.
    SnapshotKeepsLog,
}

impl Mistake {
    /// All but [`Self::Nothing`].
    pub const ALL: [Self; 16] = [
        Self::SaltIgnored,
        Self::Boundary,
        Self::HalfCompared,
        Self::NoCheckpoint,
        Self::ReferencedEvicted,
        Self::LeaseIgnored,
        Self::SplitMovesCheckpoint,
        Self::NothingTrimmed,
        Self::SecondCommitWins,
        Self::OneShort,
        Self::RemovalNotTold,
        Self::EventTwice,
        Self::ParentForgotten,
        Self::SplitMovesSerials,
        Self::OverflowNotTold,
        Self::SnapshotKeepsLog,
    ];
}

/// Defines `make`, by which tests switch a mistake on, and `made`, which the code asks at the place of each mistake.
/// Without the feature `mistakes` of the crate that uses the macro, `make` does not exist and `made` is `false`. The
/// type must have a variant `Nothing`.
#[doc(hidden)]
#[macro_export]
macro_rules! mistake_switch {
    ($mistake:ident) => {
        #[cfg(feature = "mistakes")]
        thread_local! {
            static MADE: std::cell::Cell<$mistake> =
                const { std::cell::Cell::new($mistake::Nothing) };
        }

        /// Switches `mistake` on in this thread.
        #[cfg(feature = "mistakes")]
        pub fn make(mistake: $mistake) {
            MADE.set(mistake);
        }

        #[cfg(feature = "mistakes")]
        pub(crate) fn made(mistake: $mistake) -> bool {
            MADE.get() == mistake
        }

        #[cfg(not(feature = "mistakes"))]
        #[inline(always)]
        pub(crate) const fn made(_mistake: $mistake) -> bool {
            false
        }
    };
}

mistake_switch!(Mistake);

//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it
//! nothing of them is left.

/// A mistake that a prefix cache, or an index of one, can be shipped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// All salts share one root.
    SaltIgnored,
    /// A match may cover the whole prompt, so that there is nothing left to compute.
    Boundary,
    /// Of a block of tokens only the first half is compared.
    HalfCompared,
    /// A match goes on from where it ends, checkpoint or not.
    NoCheckpoint,
    /// What requests refer to is evicted like the rest.
    ReferencedEvicted,
    /// Leases hold nothing.
    LeaseIgnored,
    /// A segment that is split keeps its checkpoint at the end of its first part.
    SplitMovesCheckpoint,
    /// Blocks stay though no checkpoint is at or below them.
    NothingTrimmed,
    /// A block that the tree has already is registered a second time.
    SecondCommitWins,
    /// Evicting stops one block short.
    OneShort,
    /// Blocks go, and no event says so.
    RemovalNotTold,
    /// Blocks are told twice.
    EventTwice,
    /// What is stored below a segment is told as if it were at the root.
    ParentForgotten,
    /// Splitting a segment exchanges the serials of the blocks before and behind the cut.
    SplitMovesSerials,
    /// A log that is full is emptied, and nobody is told.
    OverflowNotTold,
    /// What a snapshot has is told again.
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

/// How mistakes of a type are made and asked for: `make` for tests, `made` for where each is made. Without the feature
/// `mistakes` of the crate that it stands in there is no `make`, and `made` is `false`. The type has a variant `Nothing`.
#[doc(hidden)]
#[macro_export]
macro_rules! mistake_switch {
    ($mistake:ident) => {
        #[cfg(feature = "mistakes")]
        thread_local! {
            static MADE: std::cell::Cell<$mistake> =
                const { std::cell::Cell::new($mistake::Nothing) };
        }

        /// From now on `mistake` is made, in this thread.
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

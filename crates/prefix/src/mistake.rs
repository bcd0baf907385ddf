//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it
//! nothing of them is left.

/// A mistake that prefix caches were shipped with.
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
}

impl Mistake {
    /// All but [`Self::Nothing`].
    pub const ALL: [Self; 10] = [
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
    ];
}

#[cfg(feature = "mistakes")]
thread_local! {
    static MADE: std::cell::Cell<Mistake> = const { std::cell::Cell::new(Mistake::Nothing) };
}

/// From now on `mistake` is made, in this thread.
#[cfg(feature = "mistakes")]
pub fn make(mistake: Mistake) {
    MADE.set(mistake);
}

#[cfg(feature = "mistakes")]
pub(crate) fn made(mistake: Mistake) -> bool {
    MADE.get() == mistake
}

#[cfg(not(feature = "mistakes"))]
#[inline(always)]
pub(crate) const fn made(_mistake: Mistake) -> bool {
    false
}

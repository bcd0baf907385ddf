//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it nothing of
//! them is left.

/// A protection that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// Salt and adapter of an image are not compared with those that its target asked for.
    OwnerIgnored,
    /// Bytes are not compared with their digests.
    DigestIgnored,
    /// The source is not asked again whether it still holds what it offered.
    EpochIgnored,
    /// Memory whose read has missed its deadline is used again at once.
    NoQuarantine,
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

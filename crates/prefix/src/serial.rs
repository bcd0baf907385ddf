//! Numbers of blocks.

/// The number of a block in a tree: one of each block that was ever registered, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Serial(u64);

impl Serial {
    /// The serial of a block; `next` moves behind it.
    pub(crate) fn take(next: &mut u64) -> Self {
        *next += 1;
        Self(*next - 1)
    }

    /// The number: 0 of the first block of a tree, and one more of each that follows.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

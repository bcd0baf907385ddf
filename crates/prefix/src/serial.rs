//! Numbers of blocks.

/// The number of a block in a tree. Each registered block gets a new one; numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Serial(u64);

impl Serial {
    /// Returns the serial `next`, and increments `next`.
    pub(crate) fn take(next: &mut u64) -> Self {
        *next += 1;
        Self(*next - 1)
    }

    /// The number: 0 for the first block of a tree, and one more for each following block.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

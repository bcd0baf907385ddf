//! Which keys a kernel of attention takes.

use crate::main_row::MainFormat;

/// Most heads of a query.
pub const MOST_HEADS: u32 = 128;

/// What a query attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttendedKeys {
    /// Its sliding window.
    Window,
    /// Its window, and the entries of a list.
    List,
    /// Its window, and all entries that it sees.
    All,
}

impl AttendedKeys {
    /// Blocks that share a query's keys: a cluster.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        match self {
            Self::Window => 1,
            Self::List => 2,
            Self::All => 3,
        }
    }
}

/// What a kernel of attention is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendKernel {
    /// How rows are scaled.
    pub format: MainFormat,
    /// The keys.
    pub keys: AttendedKeys,
}

//! Which keys a kernel of attention takes.

use crate::main_row::MainFormat;

/// Most heads of a query.
pub const MOST_HEADS: u32 = 128;

/// Keys of a tile.
pub const TILE_KEYS: u32 = 64;

/// Most tiles that a part of a query's keys has: a window and 2,048 entries.
pub const PART_TILES: u32 = 34;

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

    /// Parts of a query's `keys` keys: each is a cluster's, and the last cluster to be done adds them up. Lists, which a
    /// model limits, are one part.
    #[must_use]
    pub const fn parts(self, keys: u32) -> u32 {
        let parts = match self {
            Self::Window | Self::List => 1,
            Self::All => keys.div_ceil(TILE_KEYS).div_ceil(PART_TILES),
        };
        if parts == 0 { 1 } else { parts }
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

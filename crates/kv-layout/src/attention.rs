//! Which keys a kernel of attention takes.

use crate::main_row::MainFormat;

/// Most heads of a query.
pub const MOST_HEADS: u32 = 128;

/// Keys of a tile.
pub const TILE_KEYS: u32 = 64;

/// Most tiles that a part of a query's keys has, up to [`FEW_PARTS`] parts: a window and 960 entries.
pub const PART_TILES: u32 = 17;

/// Parts of which there are no more before they have [`MOST_PART_TILES`] tiles: what each adds to the sum takes time.
pub const FEW_PARTS: u32 = 4;

/// Most tiles of any part: a window and 2,048 entries.
pub const MOST_PART_TILES: u32 = 34;

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
            Self::List | Self::All => 2,
        }
    }

    /// Parts of a query's `keys` keys: each is a cluster's, and the last cluster to be done adds them up. Lists, which a
    /// model limits, are one part.
    #[must_use]
    pub const fn parts(self, keys: u32) -> u32 {
        let parts = match self {
            Self::Window | Self::List => 1,
            Self::All => {
                let tiles = keys.div_ceil(TILE_KEYS);
                let short = tiles.div_ceil(PART_TILES);
                let long = tiles.div_ceil(MOST_PART_TILES);
                let most = if long > FEW_PARTS { long } else { FEW_PARTS };
                if short < most { short } else { most }
            }
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

#[cfg(test)]
mod tests {
    use super::{AttendedKeys, TILE_KEYS};

    #[test]
    fn parts_depend_on_the_number_of_tiles() {
        let parts = |tiles: u32| AttendedKeys::All.parts(tiles * TILE_KEYS);
        let few = [0, 1, 17, 18, 34, 35, 51, 52].map(parts);
        assert_eq!(few, [1, 1, 1, 2, 2, 3, 3, 4]);
        // Contexts of 1,048,576 tokens have 130 tiles.
        assert_eq!([68, 69, 130, 136, 137, 170, 171].map(parts), [4, 4, 4, 4, 5, 5, 6]);
        assert_eq!(AttendedKeys::List.parts(u32::MAX), 1);
    }
}

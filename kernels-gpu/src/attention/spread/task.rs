//! What a block has of a query, and where that lies.

use super::super::memory::HEADS;
use super::super::source::Heads;
use super::memory::{BLOCKS, PANEL, TILES};
use crate::args::Attend;

/// Words of a tile of keys in the memory for exchange: its weights, then the sums of each head's four threads.
const TILE_WORDS: u32 = PANEL + 4 * HEADS;
/// Words of a cluster there.
pub const CLUSTER_WORDS: u32 = TILES * TILE_WORDS;

/// What a block has of a query.
#[derive(Clone, Copy)]
pub struct Task {
    /// The cluster's heads, and which part of their keys it has.
    pub heads: Heads,
    /// Which block of the cluster it is: which 64 channels of values it has.
    pub rank: u32,
    /// Tiles of the part.
    pub tiles: u32,
    /// The first of those that the block scores, and how many: 0, 1 or 2.
    pub first: u32,
    pub own: u32,
    /// The first tile of the second of the two sums; all tiles if there is one.
    pub second: u32,
}

impl Task {
    /// Whether the block's channels of values are the rotary ones, which are last.
    #[inline(always)]
    pub const fn has_rotary(self) -> bool {
        self.rank + 1 == BLOCKS
    }

    /// The first element of tile `tile` in the memory for exchange.
    #[inline(always)]
    pub fn exchange(self, args: &Attend, tile: u32) -> u64 {
        let cluster = self.heads.part(args, self.heads.part);
        cluster * u64::from(CLUSTER_WORDS) + u64::from(tile * TILE_WORDS)
    }
}

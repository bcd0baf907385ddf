//! What a block has of a query, and where that lies.

use super::super::memory::HEADS;
use super::memory::{BLOCKS, PANEL, TILES};
use crate::args::Attend;

/// Words of a tile of keys in the memory for exchange: its weights, then the sums of each head's four threads.
const TILE_WORDS: u32 = PANEL + 4 * HEADS;
/// Words of a cluster there.
pub const CLUSTER_WORDS: u32 = TILES * TILE_WORDS;

/// What a block has of a query.
#[derive(Clone, Copy)]
pub struct Task {
    pub query: u32,
    pub first_head: u32,
    /// Which block of the cluster it is: which 64 channels of values it has.
    pub rank: u32,
    /// Tiles of the query's keys.
    pub tiles: u32,
    /// The first of those that the block scores, and how many: 0, 1 or 2.
    pub first: u32,
    pub own: u32,
    /// The first tile of the second of the two sums; all tiles if there is one.
    pub second: u32,
}

impl Task {
    /// The row of the queries' heads that the first head is, and heads that there are.
    #[inline(always)]
    pub fn rows(self, args: &Attend) -> (u64, u32) {
        rows_of(args, (self.query, self.first_head))
    }

    /// Whether the block's channels of values are the rotary ones, which are last.
    #[inline(always)]
    pub const fn has_rotary(self) -> bool {
        self.rank + 1 == BLOCKS
    }

    /// The first element of tile `tile` in the memory for exchange.
    #[inline(always)]
    pub fn exchange(self, args: &Attend, tile: u32) -> u64 {
        let groups = args.params.heads.div_ceil(HEADS);
        let cluster =
            u64::from(self.query) * u64::from(groups) + u64::from(self.first_head / HEADS);
        cluster * u64::from(CLUSTER_WORDS) + u64::from(tile * TILE_WORDS)
    }
}

/// The row of the queries' heads that head `first_head` of a query is, and the heads from there on, 1 to 64.
#[inline(always)]
pub fn rows_of(args: &Attend, (query, first_head): (u32, u32)) -> (u64, u32) {
    let Attend { params, .. } = args;
    let row = (u64::from(params.skipped) + u64::from(query)) * u64::from(params.heads);
    (row + u64::from(first_head), (params.heads - first_head).min(HEADS))
}

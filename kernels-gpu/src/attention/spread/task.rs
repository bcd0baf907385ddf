//! The work of a block: heads, keys and channels of a query, and the index of its partial output.

use super::super::work_item::Heads;
use super::memory::CLUSTER_BLOCKS;
use crate::args::Attend;

/// The work of a block.
#[derive(Clone, Copy)]
pub struct Task {
    /// The cluster's heads, and the part of their keys of which it has all or half.
    pub heads: Heads,
    /// Number of clusters of each part, 1 or 2, and the index of this cluster among them.
    pub halves: u32,
    pub half: u32,
    /// Rank of the block in the cluster: it has the 64 channels of the values from `64 * rank` on.
    pub rank: u32,
    /// Number of tiles of the cluster.
    pub tiles: u32,
    /// The first of the tiles that the block scores, and their number, 0 to 3.
    pub first_tile: u32,
    pub scored_tiles: u32,
    /// The first tile of the second of the two sums; equal to `tiles` if there is one sum.
    pub second: u32,
    /// Whether some score is too far from 0 for weights relative to 0, which are then computed again relative to the
    /// largest scores; known once all warps have stored their flags.
    pub is_far: bool,
}

impl Task {
    /// Whether the block's channels of the values are the rotary ones, which are last.
    #[inline(always)]
    pub const fn has_rotary(self) -> bool {
        self.rank + 1 == CLUSTER_BLOCKS
    }

    /// Number of clusters of the query.
    #[inline(always)]
    pub const fn clusters(self) -> u32 {
        self.heads.parts * self.halves
    }

    /// Index of cluster `cluster` of the query among the clusters of all queries.
    #[inline(always)]
    pub fn cluster(self, args: &Attend, cluster: u32) -> u64 {
        let most = u64::from(args.params.parts * args.params.key_halves);
        self.heads.group(args) * most + u64::from(cluster)
    }

    /// Index of the block's cluster among those of the query.
    #[inline(always)]
    pub const fn own_cluster(self) -> u32 {
        self.heads.part * self.halves + self.half
    }
}

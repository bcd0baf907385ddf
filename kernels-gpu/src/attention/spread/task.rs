//! The work of a block: heads, keys and channels of a query, and where its partial output lies.

use super::super::work_item::Heads;
use super::memory::CLUSTER_BLOCKS;
use crate::args::Attend;

/// The work of a block.
#[derive(Clone, Copy)]
pub struct Task {
    /// The cluster's heads, and which part of their keys it has, or has half of.
    pub heads: Heads,
    /// Clusters of each part, 1 or 2, and which of them it is.
    pub halves: u32,
    pub half: u32,
    /// Which block of the cluster it is: which 64 channels of values it has.
    pub rank: u32,
    /// Tiles of the cluster.
    pub tiles: u32,
    /// The first of those that the block scores, and how many: 0 to 3.
    pub first_tile: u32,
    pub scored_tiles: u32,
    /// The first tile of the second of the two sums; all tiles if there is one.
    pub second: u32,
    /// Whether weights may be relative to something else than 0; known once all warps' flags are stored.
    pub is_far: bool,
}

impl Task {
    /// Whether the block's channels of values are the rotary ones, which are last.
    #[inline(always)]
    pub const fn has_rotary(self) -> bool {
        self.rank + 1 == CLUSTER_BLOCKS
    }

    /// Clusters of the query.
    #[inline(always)]
    pub const fn clusters(self) -> u32 {
        self.heads.parts * self.halves
    }

    /// Cluster `cluster` of the query among all.
    #[inline(always)]
    pub fn cluster(self, args: &Attend, cluster: u32) -> u64 {
        let most = u64::from(args.params.parts * args.params.clusters_per_part);
        self.heads.group(args) * most + u64::from(cluster)
    }

    /// The cluster that the block is in, of those of the query.
    #[inline(always)]
    pub const fn own_cluster(self) -> u32 {
        self.heads.part * self.halves + self.half
    }
}

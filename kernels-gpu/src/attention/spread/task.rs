//! The work of a cluster, and of a block of it: heads, keys and channels of a query, and the index of its partial
//! output.

use super::super::keys::{KeySet, Keys};
use super::super::work_item::Heads;
use super::memory::{CLUSTER_BLOCKS, may_have_clusters};
use crate::args::Attend;

/// The query of a cluster, and the piece of its keys.
#[derive(Clone, Copy)]
pub struct ClusterWork {
    /// The query among those of the launch.
    pub query: u32,
    /// Index of the cluster among those of the query.
    pub piece: u32,
    /// The split of the keys, and the half of that split.
    pub split: u32,
    half: u32,
    /// The most splits of a query, and the number of clusters that a split may have.
    max_splits: u32,
    halves: u32,
}

impl ClusterWork {
    /// The work of cluster `cluster` among those with the same heads.
    #[inline(always)]
    pub fn of<W: KeySet>(args: &Attend, cluster: u32) -> Self {
        let max_splits = if W::HAS_SPLITS { args.params.num_splits } else { 1 };
        let halves = if may_have_clusters::<W>() { args.params.key_halves } else { 1 };
        // Avoids divisions where a query has one cluster, as in most launches.
        let of_query = max_splits * halves;
        let (query, piece) =
            if of_query > 1 { (cluster / of_query, cluster % of_query) } else { (cluster, 0) };
        let (split, half) = if halves == 2 { (piece / 2, piece % 2) } else { (piece, 0) };
        Self { query, piece, split, half, max_splits, halves }
    }

    /// The cluster's keys out of those of the query, and the work of block `rank`; `None` if the cluster has no keys.
    #[inline(always)]
    pub fn of_block<W: KeySet>(
        self,
        args: &Attend,
        (heads, keys): (Heads, Keys),
        rank: u32,
    ) -> Option<(Keys, Task)> {
        let Self { split, half, max_splits, halves, .. } = self;
        let num_splits = if max_splits > 1 { keys.num_splits::<W>(args) } else { 1 };
        // For few keys it costs more to combine clusters than it saves: the first cluster then has both halves.
        let is_halved = halves == 2 && (num_splits > 1 || keys.tiles > CLUSTER_BLOCKS);
        if !keys.is_live || split >= num_splits || half > u32::from(is_halved) {
            return None;
        }
        let keys = if num_splits > 1 { keys.of_piece(split, num_splits) } else { keys };
        let keys = if is_halved { keys.of_piece(half, 2) } else { keys };
        let (heads, tiles) = (Heads { num_splits, ..heads }, keys.tiles);
        let [own, end] = [rank, rank + 1].map(|rank| tiles * rank / CLUSTER_BLOCKS);
        let second =
            if args.params.blocks_per_split == 2 && !is_halved { tiles / 2 } else { tiles };
        let task = Task {
            heads,
            halves: 1 + u32::from(is_halved),
            half,
            rank,
            tiles,
            first_tile: own,
            scored_tiles: end - own,
            second,
            needs_rescale: false,
        };
        Some((keys, task))
    }
}

/// The work of a block.
#[derive(Clone, Copy)]
pub struct Task {
    /// The cluster's heads, and the split of their keys of which it has all or half.
    pub heads: Heads,
    /// Number of clusters of each split, 1 or 2, and the index of this cluster among them.
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
    pub needs_rescale: bool,
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
        self.heads.num_splits * self.halves
    }

    /// Index of cluster `cluster` of the query among the clusters of all queries.
    #[inline(always)]
    pub fn cluster(self, args: &Attend, cluster: u32) -> u64 {
        let of_query = u64::from(args.params.num_splits * args.params.key_halves);
        self.heads.group(args) * of_query + u64::from(cluster)
    }

    /// Index of the block's cluster among those of the query.
    #[inline(always)]
    pub const fn own_cluster(self) -> u32 {
        self.heads.split * self.halves + self.half
    }
}

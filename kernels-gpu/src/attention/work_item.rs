//! The work of a block: a work item (a query, a split of its keys, up to 64 heads), or a share of one (some of its keys
//! or channels).

use kv_layout::geometry::HEAD_DIM;
use simt::cluster::block_rank;

use super::keys::KeySet;
use super::memory::HEADS;
use crate::args::Attend;

/// The blocks that share the keys of a split: all blocks of a cluster, or one.
#[derive(Clone, Copy)]
pub struct SplitBlocks {
    /// Number of blocks.
    pub count: u32,
    /// Rank in the cluster of the first of these blocks.
    first: u32,
    /// Index of this block among them.
    pub rank: u32,
}

impl SplitBlocks {
    /// The blocks of the launch that share keys with this block.
    #[inline(always)]
    pub fn of<W: KeySet>(args: &Attend) -> Self {
        if W::CLUSTER_BLOCKS == 1 {
            return Self { count: 1, first: 0, rank: 0 };
        }
        let rank = block_rank();
        if args.params.blocks_per_split == 1 {
            Self { count: 1, first: rank, rank: 0 }
        } else {
            Self { count: W::CLUSTER_BLOCKS, first: 0, rank }
        }
    }

    /// The tiles of block `rank`, of `tiles` in all: the first, and one past the last.
    #[inline(always)]
    pub const fn tiles_of(self, tiles: u32, rank: u32) -> (u32, u32) {
        (tiles * rank / self.count, tiles * (rank + 1) / self.count)
    }

    /// Rank in the cluster of block `rank` of these blocks.
    #[inline(always)]
    pub const fn in_cluster(self, rank: u32) -> u32 {
        self.first + rank
    }
}

/// The channels of the values that a block multiplies by weights: all, or half of them. With few queries, two clusters
/// have the same keys of a query and half of the channels each; both multiply queries by all channels of the keys. So
/// the sum of each channel has the same bits in both cases.
#[derive(Clone, Copy)]
pub struct Channels {
    /// Number of shares of the channels: 1 (all channels) or 2 (half of them).
    pub halves: u32,
    /// Index of the share of the channels, 0 or 1.
    pub half: u32,
}

impl Channels {
    /// All channels.
    pub const ALL: Self = Self { halves: 1, half: 0 };

    /// The channels of cluster `cluster` (of block `cluster`, where a split has one block), and the index of its work
    /// item among those with the same heads: the index that the cluster would have if each had all channels.
    #[inline(always)]
    pub fn of_cluster(args: &Attend, cluster: u32) -> (Self, u32) {
        if args.params.channel_halves == 2 {
            (Self { halves: 2, half: cluster % 2 }, cluster / 2)
        } else {
            (Self::ALL, cluster)
        }
    }

    /// Whether the rotary channels, which are last, are among them.
    #[inline(always)]
    pub const fn has_rotary(self) -> bool {
        self.half + 1 == self.halves
    }

    /// Whether this block reports faults and log-sum-exps: it has the first half of the channels, or all.
    #[inline(always)]
    pub const fn is_first(self) -> bool {
        self.half == 0
    }
}

/// Up to 64 heads of a query, and the split of their keys that a block has.
#[derive(Clone, Copy)]
pub struct Heads {
    /// The query among those of the launch.
    pub query: u32,
    /// The first head, a multiple of 64.
    pub first: u32,
    /// The split of the query's keys.
    pub split: u32,
    /// Number of splits of the query's keys.
    pub num_splits: u32,
}

impl Heads {
    /// The first head of cluster `cluster` (of block `cluster`, where a split has one block), and its index among the
    /// clusters with these heads. The two groups of 64 heads with the same keys are adjacent, so that the second reads
    /// the rows from L2.
    #[inline(always)]
    pub fn of_cluster(args: &Attend, cluster: u32) -> (u32, u32) {
        if args.params.heads > HEADS { (cluster % 2 * HEADS, cluster / 2) } else { (0, cluster) }
    }

    /// The row of the first head in the tensor of queries, `[skipped + tokens, heads]` rows.
    #[inline(always)]
    pub fn row(self, args: &Attend) -> u64 {
        let row = u64::from(args.params.skipped) + u64::from(self.query);
        row * u64::from(args.params.heads) + u64::from(self.first)
    }

    /// The number of these heads, 1 to 64. The group must exist in the query.
    #[inline(always)]
    pub fn count(self, args: &Attend) -> u32 {
        (args.params.heads - self.first).min(HEADS)
    }

    /// Index of this group of up to 64 heads among the groups of all queries.
    #[inline(always)]
    pub fn group(self, args: &Attend) -> u64 {
        let groups = args.params.heads.div_ceil(HEADS);
        u64::from(self.query) * u64::from(groups) + u64::from(self.first / HEADS)
    }

    /// Index of split `split` of these heads among the splits of all queries.
    #[inline(always)]
    pub fn split_index(self, args: &Attend, split: u32) -> u64 {
        self.group(args) * u64::from(args.params.num_splits) + u64::from(split)
    }
}

/// The work of a block: heads, keys, channels.
#[derive(Clone, Copy)]
pub struct Task {
    pub heads: Heads,
    /// The blocks that share the keys of the split.
    pub blocks: SplitBlocks,
    /// The channels of the values that the block has.
    pub channels: Channels,
}

impl Task {
    /// The first channel that the block writes.
    #[inline(always)]
    pub const fn first_channel(self) -> u32 {
        HEAD_DIM / 2 * self.channels.half
    }
}

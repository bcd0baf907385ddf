//! The work of a block: a work item (a query, a part of its keys, up to 64 heads), or some of its keys or channels.

use kv_layout::geometry::HEAD_DIM;
use simt::cluster::block_rank;

use super::keys::KeySet;
use super::memory::HEADS;
use crate::args::Attend;

/// The blocks among which a part's keys are split: all of a cluster, or one.
#[derive(Clone, Copy)]
pub struct Split {
    /// Blocks.
    pub blocks: u32,
    /// Which of the cluster's blocks is the first of them.
    first: u32,
    /// Which of them this block is.
    pub rank: u32,
}

impl Split {
    /// The launch's, as this block sees it.
    #[inline(always)]
    pub fn of<W: KeySet>(args: &Attend) -> Self {
        if W::CLUSTER_BLOCKS == 1 {
            return Self { blocks: 1, first: 0, rank: 0 };
        }
        let rank = block_rank();
        if args.params.split == 1 {
            Self { blocks: 1, first: rank, rank: 0 }
        } else {
            Self { blocks: W::CLUSTER_BLOCKS, first: 0, rank }
        }
    }

    /// Which of `tiles` tiles block `rank` has: from the first to before the second.
    #[inline(always)]
    pub const fn tiles_of(self, tiles: u32, rank: u32) -> (u32, u32) {
        (tiles * rank / self.blocks, tiles * (rank + 1) / self.blocks)
    }

    /// Which of the cluster's blocks block `rank` is.
    #[inline(always)]
    pub const fn in_cluster(self, rank: u32) -> u32 {
        self.first + rank
    }
}

/// Which channels of the values a block multiplies by weights: all, or half of them. Where there are few queries, two
/// clusters have the same keys of a query and half of the channels each; both multiply all channels of keys by
/// queries. So each channel's sum is the same, bit by bit.
#[derive(Clone, Copy)]
pub struct Channels {
    /// 1 or 2.
    pub halves: u32,
    /// Which half of the channels, 0 or 1.
    pub half: u32,
}

impl Channels {
    /// All of them.
    pub const ALL: Self = Self { halves: 1, half: 0 };

    /// The channels of a cluster, or of a block where keys are not split, and its number among those that there were
    /// if each had all channels: which query and part it has.
    #[inline(always)]
    pub fn of_cluster(args: &Attend, cluster: u32) -> (Self, u32) {
        if args.params.clusters_per_part == 2 {
            (Self { halves: 2, half: cluster % 2 }, cluster / 2)
        } else {
            (Self::ALL, cluster)
        }
    }

    /// Whether rotary channels, which are last, are among them.
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

/// Up to 64 heads of a query, and which part of their keys a block has.
#[derive(Clone, Copy)]
pub struct Heads {
    /// The query among those of the launch.
    pub query: u32,
    /// The first head, a multiple of 64.
    pub first: u32,
    /// The part of the query's keys.
    pub part: u32,
    /// Parts of the query's keys.
    pub parts: u32,
}

impl Heads {
    /// The first head of cluster `cluster` (of block `cluster` with one-block split), and which of the clusters with these heads
    /// it is. The two groups of 64 heads of the same keys follow each other, so that the second reads the rows from L2.
    #[inline(always)]
    pub fn of_cluster(args: &Attend, cluster: u32) -> (u32, u32) {
        if args.params.heads > HEADS { (cluster % 2 * HEADS, cluster / 2) } else { (0, cluster) }
    }

    /// The first head's row of the queries' heads.
    #[inline(always)]
    pub fn row(self, args: &Attend) -> u64 {
        let row = u64::from(args.params.skipped) + u64::from(self.query);
        row * u64::from(args.params.heads) + u64::from(self.first)
    }

    /// How many there are, 1 to 64, of a group that is one of the query's.
    #[inline(always)]
    pub fn count(self, args: &Attend) -> u32 {
        (args.params.heads - self.first).min(HEADS)
    }

    /// Their number among those of all queries, 64 at a time.
    #[inline(always)]
    pub fn group(self, args: &Attend) -> u64 {
        let groups = args.params.heads.div_ceil(HEADS);
        u64::from(self.query) * u64::from(groups) + u64::from(self.first / HEADS)
    }

    /// Part `part` of these heads among all parts.
    #[inline(always)]
    pub fn part(self, args: &Attend, part: u32) -> u64 {
        self.group(args) * u64::from(args.params.parts) + u64::from(part)
    }
}

/// The work of a block: heads, keys, channels.
#[derive(Clone, Copy)]
pub struct Task {
    pub heads: Heads,
    /// The blocks among which the part's keys are split.
    pub split: Split,
    /// Which of the channels of values it has.
    pub channels: Channels,
}

impl Task {
    /// The first channel that the block writes.
    #[inline(always)]
    pub const fn first_channel(self) -> u32 {
        HEAD_DIM / 2 * self.channels.half
    }
}

//! The keys that an attention kernel takes, and the forms in which blocks share them.

use crate::main_row::MainFormat;

/// Most heads of a query.
pub const MAX_HEADS: u32 = 128;

/// Keys of a tile.
pub const TILE_KEYS: u32 = 64;

/// Most tiles of a split of a query's keys, while the number of splits is small ([`AttendedKeys::num_splits`]): a
/// window and 960 entries.
pub const SPLIT_TILES: u32 = 17;

/// Most tiles of any split: a window and 2,944 entries.
pub const MAX_SPLIT_TILES: u32 = 2 * SPREAD_TILES;

/// Number of blocks over which 64 heads of a query are spread in launches of few queries: each block has 64 channels of
/// the values.
pub const SPREAD_BLOCKS: u32 = 8;

/// Most tiles of keys of a cluster of [`SPREAD_BLOCKS`] blocks: a window and 1,408 entries.
pub const SPREAD_TILES: u32 = 24;

/// Most tiles of a query's keys for [`AttendForm::Spread`]: a window and 640 entries.
pub const SHORT_SPREAD_TILES: u32 = 12;

/// Most queries that a block of [`AttendForm::Consecutive`] takes.
pub const MAX_CONSECUTIVE: u32 = 32;

/// The keys to which a query attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttendedKeys {
    /// The query's sliding window.
    Window,
    /// The query's window, and the entries of a list.
    List,
    /// The query's window, and all entries that the query sees.
    All,
}

/// The number of thread blocks that share the keys of one query (64 heads, one split of the keys), in layers with
/// entries. The number of splits is independent of it ([`AttendedKeys::num_splits`]).
///
/// The results of the two differ in their last bits. Neither depends on the other queries of a launch: so the number is
/// chosen for a cache, not for a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "config", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "config", serde(rename_all = "kebab-case"))]
pub enum KeyCluster {
    /// Two blocks, a cluster, which combine their results. Takes least time for up to 66 work items in a launch
    /// (queries, times splits of the keys of each, times groups of 64 heads), since an H100 runs that many clusters at
    /// a time.
    #[default]
    TwoBlocks,
    /// One block: a query takes longer, and twice as many run at a time. Takes less time for more queries: large
    /// batches, drafts, and the chunks of long prompts.
    OneBlock,
}

impl KeyCluster {
    /// Number of blocks that share a split of `keys`.
    #[must_use]
    pub const fn blocks(self, keys: AttendedKeys) -> u32 {
        match self {
            Self::TwoBlocks => keys.blocks(),
            Self::OneBlock => 1,
        }
    }

    /// The variant with which `blocks` thread blocks, one or two, share the keys of a split in layers with entries.
    #[must_use]
    pub const fn of_blocks(blocks: u32) -> Self {
        if blocks > 1 { Self::TwoBlocks } else { Self::OneBlock }
    }

    /// Most splits of the keys of a query with `heads` heads, while each split has at most [`MAX_SPLIT_TILES`] tiles.
    /// The number is limited because it takes time to combine splits.
    ///
    /// More than 64 heads are two groups, each of which has all splits. Three splits, each of two halves, are twelve
    /// clusters of [`SPREAD_BLOCKS`] blocks for one query. Four splits would be 16 clusters, and an H100 runs 15 at a
    /// time.
    const fn few_splits(self, heads: u32) -> u32 {
        if matches!(self, Self::TwoBlocks) && heads > 64 { 3 } else { 4 }
    }
}

impl AttendedKeys {
    /// Number of blocks of a cluster, where queries are not spread: the most that share a split.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        match self {
            Self::Window => 1,
            Self::List | Self::All => 2,
        }
    }

    /// Number of splits of `keys` keys of a query of `heads` heads (split-KV). Each split is a work item of its own. Of
    /// the blocks with the same heads (in the spread forms, with the same channels), the last to finish combines the
    /// splits. Windows and lists, whose length a model limits, are one split. All others have as few splits as have at
    /// most [`SPLIT_TILES`] tiles each, but no more than four (three, with [`KeyCluster::TwoBlocks`] and more than 64
    /// heads) until these have [`MAX_SPLIT_TILES`] tiles each.
    #[must_use]
    pub const fn num_splits(self, keys: u32, cluster: KeyCluster, heads: u32) -> u32 {
        let splits = match self {
            Self::Window | Self::List => 1,
            Self::All => {
                let tiles = keys.div_ceil(TILE_KEYS);
                let short = tiles.div_ceil(SPLIT_TILES);
                let long = tiles.div_ceil(MAX_SPLIT_TILES);
                let few = cluster.few_splits(heads);
                let most = if long > few { long } else { few };
                if short < most { short } else { most }
            }
        };
        if splits == 0 { 1 } else { splits }
    }
}

/// The kind of entries of queries that have, or may have, more keys than [`SHORT_SPREAD_TILES`] tiles: not a window
/// alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ManyEntries {
    /// [`AttendedKeys::List`].
    List,
    /// [`AttendedKeys::All`].
    All,
}

/// The keys that an attention kernel takes, and how blocks share them. All forms give the same results. With few
/// queries, spreading them takes less time, and so does less code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttendForm {
    /// [`AttendedKeys::blocks`] blocks share each split of a query's keys, or each split has one block.
    Whole(AttendedKeys),
    /// A query is spread over [`SPREAD_BLOCKS`] blocks. Its keys are one split, of at most [`SHORT_SPREAD_TILES`]
    /// tiles.
    Spread(AttendedKeys),
    /// Windows alone, for queries that are normed and rotated: a block takes several queries in turn, and keeps the
    /// rows that consecutive queries of a request share.
    Consecutive,
    /// Each split of a query's keys is spread over [`SPREAD_BLOCKS`] blocks; with [`KeyCluster::TwoBlocks`] it may be
    /// each of the split's two halves instead. Each has at most [`SPREAD_TILES`] tiles.
    SpreadSplits(ManyEntries),
}

/// The row format and the form of an attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendKernel {
    /// The format of the rows.
    pub format: MainFormat,
    /// The keys, and the blocks that share them.
    pub form: AttendForm,
}

impl AttendKernel {
    /// The keys.
    #[must_use]
    pub const fn keys(self) -> AttendedKeys {
        match self.form {
            AttendForm::Whole(keys) | AttendForm::Spread(keys) => keys,
            AttendForm::Consecutive => AttendedKeys::Window,
            AttendForm::SpreadSplits(ManyEntries::List) => AttendedKeys::List,
            AttendForm::SpreadSplits(ManyEntries::All) => AttendedKeys::All,
        }
    }

    /// Whether queries, or splits of their keys, are spread over [`SPREAD_BLOCKS`] blocks.
    #[must_use]
    pub const fn is_spread(self) -> bool {
        matches!(self.form, AttendForm::Spread(_) | AttendForm::SpreadSplits(_))
    }

    /// Whether a block takes several queries.
    #[must_use]
    pub const fn is_consecutive(self) -> bool {
        matches!(self.form, AttendForm::Consecutive)
    }

    /// Blocks of a cluster.
    #[must_use]
    pub const fn cluster(self) -> u32 {
        if self.is_spread() { SPREAD_BLOCKS } else { self.keys().blocks() }
    }

    /// Number of pieces into which the keys of a query are divided, in a launch for `num_splits` splits. A cluster has
    /// a piece; with [`KeyCluster::OneBlock`], a block has one. In [`AttendForm::SpreadSplits`] each split has
    /// `key_halves` pieces, 1 or 2.
    #[must_use]
    pub const fn pieces(self, num_splits: u32, key_halves: u32) -> u32 {
        match self.form {
            AttendForm::Whole(_) => num_splits,
            AttendForm::Spread(_) | AttendForm::Consecutive => 1,
            AttendForm::SpreadSplits(_) => num_splits.saturating_mul(key_halves),
        }
    }

    /// Number of f32 values that a cluster stores for each head, from which the last one computes the softmax's
    /// denominator. Not spread: 1, the log2 of the cluster's denominator. Spread: 2 for each of its eight blocks. These
    /// are that log2 and an unused value; for half of a split, the base of the weights and their sum.
    #[must_use]
    pub const fn denominators(self) -> u32 {
        if self.is_spread() { 2 * SPREAD_BLOCKS } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::{AttendedKeys, KeyCluster, MAX_HEADS, TILE_KEYS};

    fn of_tiles(tiles: u32, cluster: KeyCluster, heads: u32) -> u32 {
        AttendedKeys::All.num_splits(tiles * TILE_KEYS, cluster, heads)
    }

    #[test]
    fn splits_depend_on_the_number_of_tiles() {
        let splits = |tiles: u32| of_tiles(tiles, KeyCluster::TwoBlocks, 64);
        let few = [0, 1, 17, 18, 34, 35, 51, 52].map(splits);
        assert_eq!(few, [1, 1, 1, 2, 2, 3, 3, 4]);
        // Contexts of 1,048,576 tokens have 130 tiles.
        assert_eq!([68, 69, 130, 192, 193, 240, 241].map(splits), [4, 4, 4, 4, 5, 5, 6]);
        assert_eq!(AttendedKeys::List.num_splits(u32::MAX, KeyCluster::TwoBlocks, 64), 1);
    }

    #[test]
    fn more_heads_than_64_have_fewer_splits() {
        let splits = |tiles: u32| of_tiles(tiles, KeyCluster::TwoBlocks, 65);
        assert_eq!([17, 18, 51, 52, 130, 144, 145].map(splits), [1, 2, 3, 3, 3, 3, 4]);
        assert_eq!(of_tiles(130, KeyCluster::TwoBlocks, MAX_HEADS), 3);
        assert_eq!(of_tiles(130, KeyCluster::OneBlock, MAX_HEADS), 4);
    }
}

//! The keys that an attention kernel takes, and the forms in which blocks share them.

use crate::main_row::MainFormat;

/// Most heads of a query.
pub const MOST_HEADS: u32 = 128;

/// Keys of a tile.
pub const TILE_KEYS: u32 = 64;

/// Most tiles of a part of a query's keys, while the number of parts is small ([`AttendedKeys::parts`]): a window and
/// 960 entries.
pub const PART_TILES: u32 = 17;

/// Most tiles of any part: a window and 2,944 entries.
pub const MOST_PART_TILES: u32 = 2 * SPREAD_TILES;

/// Number of blocks over which 64 heads of a query are spread in launches of few queries: each block has 64 channels of
/// the values.
pub const SPREAD_BLOCKS: u32 = 8;

/// Most tiles of keys of a cluster of [`SPREAD_BLOCKS`] blocks: a window and 1,408 entries.
pub const SPREAD_TILES: u32 = 24;

/// Most tiles of a query's keys for [`AttendForm::Spread`]: a window and 640 entries.
pub const SHORT_SPREAD_TILES: u32 = 12;

/// Most queries that a block of [`AttendForm::Consecutive`] takes.
pub const MOST_CONSECUTIVE: u32 = 32;

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

/// The number of blocks among which the keys of 64 heads of a query are split, in layers with entries.
///
/// The results of the two differ in their last bits. Neither depends on the other queries of a launch: so the split is
/// chosen for a cache, not for a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "config", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "config", serde(rename_all = "kebab-case"))]
pub enum KeySplit {
    /// Two blocks, a cluster, which add up their sums. Takes least time for up to 66 work items in a launch (queries,
    /// times parts of the keys of each, times groups of 64 heads), since an H100 runs that many clusters at a time.
    #[default]
    TwoBlocks,
    /// One block: a query takes longer, and twice as many run at a time. Takes less time for more queries: large
    /// batches, drafts, and the chunks of long prompts.
    OneBlock,
}

impl KeySplit {
    /// Number of blocks among which a part of `keys` is split.
    #[must_use]
    pub const fn blocks(self, keys: AttendedKeys) -> u32 {
        match self {
            Self::TwoBlocks => keys.blocks(),
            Self::OneBlock => 1,
        }
    }

    /// The split with which `blocks` thread blocks, one or two, share the keys of a part in layers with entries.
    #[must_use]
    pub const fn of_blocks(blocks: u32) -> Self {
        if blocks > 1 { Self::TwoBlocks } else { Self::OneBlock }
    }

    /// Most parts of the keys of a query with `heads` heads, while each part has at most [`MOST_PART_TILES`] tiles. The
    /// number is limited because it takes time to add up a part.
    ///
    /// More than 64 heads are two groups, each of which has all parts. Three parts, each of two halves, are twelve
    /// clusters of [`SPREAD_BLOCKS`] blocks for one query. Four parts would be 16 clusters, and an H100 runs 15 at a
    /// time.
    const fn few_parts(self, heads: u32) -> u32 {
        if matches!(self, Self::TwoBlocks) && heads > 64 { 3 } else { 4 }
    }
}

impl AttendedKeys {
    /// Number of blocks of a cluster: the most that share a query's keys.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        match self {
            Self::Window => 1,
            Self::List | Self::All => 2,
        }
    }

    /// Number of parts into which `keys` keys of a query of `heads` heads are divided. Each part is a work item of its
    /// own. Of the blocks with the same heads (in the spread forms, with the same channels), the last to finish adds up
    /// the parts. Windows and lists, whose length a model limits, are one part. All others have as few parts as have at
    /// most [`PART_TILES`] tiles each, but no more than four (three, if keys are split between two blocks and there are
    /// more than 64 heads) until these have [`MOST_PART_TILES`] tiles each.
    #[must_use]
    pub const fn parts(self, keys: u32, split: KeySplit, heads: u32) -> u32 {
        let parts = match self {
            Self::Window | Self::List => 1,
            Self::All => {
                let tiles = keys.div_ceil(TILE_KEYS);
                let short = tiles.div_ceil(PART_TILES);
                let long = tiles.div_ceil(MOST_PART_TILES);
                let few = split.few_parts(heads);
                let most = if long > few { long } else { few };
                if short < most { short } else { most }
            }
        };
        if parts == 0 { 1 } else { parts }
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
    /// Each part of a query's keys is split among [`AttendedKeys::blocks`] blocks, or has one.
    Whole(AttendedKeys),
    /// A query is spread over [`SPREAD_BLOCKS`] blocks. Its keys are one part, of at most [`SHORT_SPREAD_TILES`] tiles.
    Spread(AttendedKeys),
    /// Windows alone, for queries that are normed and rotated: a block takes several queries in turn, and keeps the
    /// rows that consecutive queries of a request share.
    Consecutive,
    /// Each part of a query's keys is spread over [`SPREAD_BLOCKS`] blocks; with [`KeySplit::TwoBlocks`] it may be each
    /// of the part's two halves instead. Each has at most [`SPREAD_TILES`] tiles.
    SpreadParts(ManyEntries),
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
            AttendForm::SpreadParts(ManyEntries::List) => AttendedKeys::List,
            AttendForm::SpreadParts(ManyEntries::All) => AttendedKeys::All,
        }
    }

    /// Whether queries, or parts of their keys, are spread over [`SPREAD_BLOCKS`] blocks.
    #[must_use]
    pub const fn is_spread(self) -> bool {
        matches!(self.form, AttendForm::Spread(_) | AttendForm::SpreadParts(_))
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

    /// Number of pieces into which the keys of a query are divided, in a launch for `parts` parts. A cluster has a
    /// piece; with [`KeySplit::OneBlock`], a block has one. In [`AttendForm::SpreadParts`] each part has
    /// `key_halves` pieces, 1 or 2.
    #[must_use]
    pub const fn pieces(self, parts: u32, key_halves: u32) -> u32 {
        match self.form {
            AttendForm::Whole(_) => parts,
            AttendForm::Spread(_) | AttendForm::Consecutive => 1,
            AttendForm::SpreadParts(_) => parts.saturating_mul(key_halves),
        }
    }

    /// Number of f32 values that a cluster stores for each head, from which the last one computes the softmax's
    /// denominator. Not spread: 1, the log2 of the cluster's denominator. Spread: 2 for each of its eight blocks. These
    /// are that log2 and an unused value; for half of a part, the base of the weights and their sum.
    #[must_use]
    pub const fn denominators(self) -> u32 {
        if self.is_spread() { 2 * SPREAD_BLOCKS } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::{AttendedKeys, KeySplit, MOST_HEADS, TILE_KEYS};

    fn of_tiles(tiles: u32, split: KeySplit, heads: u32) -> u32 {
        AttendedKeys::All.parts(tiles * TILE_KEYS, split, heads)
    }

    #[test]
    fn parts_depend_on_the_number_of_tiles() {
        let parts = |tiles: u32| of_tiles(tiles, KeySplit::TwoBlocks, 64);
        let few = [0, 1, 17, 18, 34, 35, 51, 52].map(parts);
        assert_eq!(few, [1, 1, 1, 2, 2, 3, 3, 4]);
        // Contexts of 1,048,576 tokens have 130 tiles.
        assert_eq!([68, 69, 130, 192, 193, 240, 241].map(parts), [4, 4, 4, 4, 5, 5, 6]);
        assert_eq!(AttendedKeys::List.parts(u32::MAX, KeySplit::TwoBlocks, 64), 1);
    }

    #[test]
    fn more_heads_than_64_have_fewer_parts() {
        let parts = |tiles: u32| of_tiles(tiles, KeySplit::TwoBlocks, 65);
        assert_eq!([17, 18, 51, 52, 130, 144, 145].map(parts), [1, 2, 3, 3, 3, 3, 4]);
        assert_eq!(of_tiles(130, KeySplit::TwoBlocks, MOST_HEADS), 3);
        assert_eq!(of_tiles(130, KeySplit::OneBlock, MOST_HEADS), 4);
    }
}

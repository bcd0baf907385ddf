//! The thread blocks that share a query.

use kv_layout::attention::KeySplit;

/// How the work on a query is divided among thread blocks: its keys, and the channels of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub split: KeySplit,
    /// Number of multiprocessors that the launch assumes; it decides the form of the launch.
    pub multiprocessors: u32,
    /// Clusters of eight blocks for which the launch has exchange memory, per part of a query's keys: 0, 1 or 2.
    pub clusters: u32,
}

impl Blocks {
    /// Blocks that each have all channels.
    pub const fn whole(split: KeySplit) -> Self {
        Self { split, multiprocessors: 0, clusters: 0 }
    }

    /// As [`Self::whole`] with twice as many blocks, each with half of the channels.
    pub const fn halves(split: KeySplit) -> Self {
        Self { split, multiprocessors: u32::MAX, clusters: 0 }
    }

    /// One block takes several queries of a chunk in turn, if there are more queries than blocks on so many
    /// multiprocessors. All other queries are as in [`Self::whole`].
    pub const fn consecutive(multiprocessors: u32) -> Self {
        Self { split: KeySplit::TwoBlocks, multiprocessors, clusters: 0 }
    }

    /// [`Self::consecutive`] on one multiprocessor, if there are own rows: that form requires them.
    pub fn of_own_rows<T>(own: &[T]) -> Option<Self> {
        (!own.is_empty()).then_some(Self::consecutive(1))
    }

    /// A cluster of eight blocks for each part of a query's keys; [`Self::halves`] where that is not possible.
    pub const fn spread(split: KeySplit) -> Self {
        Self { clusters: 1, ..Self::halves(split) }
    }

    /// Two clusters of eight blocks for each part, one per half of its keys, where keys are split and many; else as
    /// [`Self::spread`].
    pub const fn spread_halves(split: KeySplit) -> Self {
        Self { clusters: 2, ..Self::halves(split) }
    }

    /// All forms that spread a query over clusters of eight blocks.
    pub fn all_spread(split: KeySplit) -> impl Iterator<Item = Self> {
        let halves = (split == KeySplit::TwoBlocks).then_some(Self::spread_halves(split));
        std::iter::once(Self::spread(split)).chain(halves)
    }

    /// All forms except [`Self::whole`], and except [`Self::consecutive`], which needs own rows.
    pub fn others(split: KeySplit) -> impl Iterator<Item = Self> {
        std::iter::once(Self::halves(split)).chain(Self::all_spread(split))
    }
}

//! The blocks that share a query.

use kv_layout::attention::KeySplit;

/// Among how many blocks the keys of a query are split, and the channels of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub split: KeySplit,
    /// What the launch takes for the multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// Clusters of eight blocks for which the launch has memory, of each part of a query's keys: 0, 1 or 2.
    pub clusters: u32,
}

impl Blocks {
    /// Blocks with all channels.
    pub const fn whole(split: KeySplit) -> Self {
        Self { split, multiprocessors: 0, clusters: 0 }
    }

    /// Two for each of those, with half of the channels.
    pub const fn halves(split: KeySplit) -> Self {
        Self { split, multiprocessors: u32::MAX, clusters: 0 }
    }

    /// One for several queries of a chunk, as with so many multiprocessors; for other queries, and few, as [`Self::whole`].
    pub const fn consecutive(multiprocessors: u32) -> Self {
        Self { split: KeySplit::TwoBlocks, multiprocessors, clusters: 0 }
    }

    /// [`Self::consecutive`], of which `own` rows are a condition.
    pub fn of_own_rows<T>(own: &[T]) -> Option<Self> {
        (!own.is_empty()).then_some(Self::consecutive(1))
    }

    /// Eight for each part of a query's keys; those of [`Self::halves`] where that is not possible.
    pub const fn spread(split: KeySplit) -> Self {
        Self { clusters: 1, ..Self::halves(split) }
    }

    /// Eight for each of the two halves of a part where keys are split and many; else as [`Self::spread`].
    pub const fn spread_halves(split: KeySplit) -> Self {
        Self { clusters: 2, ..Self::halves(split) }
    }

    /// All forms that spread queries.
    pub fn all_spread(split: KeySplit) -> impl Iterator<Item = Self> {
        let halves = (split == KeySplit::TwoBlocks).then_some(Self::spread_halves(split));
        std::iter::once(Self::spread(split)).chain(halves)
    }

    /// All forms but [`Self::whole`].
    pub fn others(split: KeySplit) -> impl Iterator<Item = Self> {
        std::iter::once(Self::halves(split)).chain(Self::all_spread(split))
    }
}

//! The thread blocks that share a query.

use kv_layout::attention::KeyCluster;

/// How the work on a query is divided among thread blocks: its keys, and the channels of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The blocks that share a split of the keys.
    pub cluster: KeyCluster,
    /// Number of multiprocessors that the launch assumes; it decides the form of the launch.
    pub multiprocessors: u32,
    /// Clusters of eight blocks for which the launch has exchange memory, per split of a query's keys: 0, 1 or 2.
    pub spread_clusters: u32,
}

impl Blocks {
    /// Blocks that each have all channels.
    pub const fn whole(cluster: KeyCluster) -> Self {
        Self { cluster, multiprocessors: 0, spread_clusters: 0 }
    }

    /// As [`Self::whole`] with twice as many blocks, each with half of the channels.
    pub const fn halves(cluster: KeyCluster) -> Self {
        Self { cluster, multiprocessors: u32::MAX, spread_clusters: 0 }
    }

    /// One block takes several queries of a chunk in turn, if there are more queries than blocks on so many
    /// multiprocessors. All other queries are as in [`Self::whole`].
    pub const fn consecutive(multiprocessors: u32) -> Self {
        Self { cluster: KeyCluster::TwoBlocks, multiprocessors, spread_clusters: 0 }
    }

    /// [`Self::consecutive`] on one multiprocessor, if there are own rows: that form requires them.
    pub fn of_own_rows<T>(own: &[T]) -> Option<Self> {
        (!own.is_empty()).then_some(Self::consecutive(1))
    }

    /// A cluster of eight blocks for each split of a query's keys; [`Self::halves`] where that is not possible.
    pub const fn spread(cluster: KeyCluster) -> Self {
        Self { spread_clusters: 1, ..Self::halves(cluster) }
    }

    /// Two clusters of eight blocks for each split, one per half of its keys, where two blocks share its keys and these
    /// are many; else as [`Self::spread`].
    pub const fn spread_halves(cluster: KeyCluster) -> Self {
        Self { spread_clusters: 2, ..Self::halves(cluster) }
    }

    /// All forms that spread a query over clusters of eight blocks.
    pub fn all_spread(cluster: KeyCluster) -> impl Iterator<Item = Self> {
        let halves = (cluster == KeyCluster::TwoBlocks).then_some(Self::spread_halves(cluster));
        std::iter::once(Self::spread(cluster)).chain(halves)
    }

    /// All forms except [`Self::whole`], and except [`Self::consecutive`], which needs own rows.
    pub fn others(cluster: KeyCluster) -> impl Iterator<Item = Self> {
        std::iter::once(Self::halves(cluster)).chain(Self::all_spread(cluster))
    }
}

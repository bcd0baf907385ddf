//! Memory by which blocks of attention tell each other a query's weights.

use kernels_gpu::attention::spread::CLUSTER_WORDS;
use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::attention::SPREAD_BLOCKS;

use crate::device::{Backend, Buffer, Device, DeviceError, Memory};

/// Most clusters of eight blocks that a GPU of so many multiprocessors runs at a time, about: clusters do not cross its groups of
/// multiprocessors, so that some stay idle (15 on an H200 of 132).
pub(super) const fn spread_clusters(multiprocessors: u32) -> u32 {
    multiprocessors / 10 * 9 / SPREAD_BLOCKS
}

/// Memory in which the blocks over which a query is spread leave its weights for each other: of 64 heads and a part of their keys a cluster, 162 KiB.
/// Launches that use it must run one after the other, as those of one stream do.
pub struct AttentionExchange<B: Backend> {
    /// `[clusters, 18, 2304]` u32: of each tile of keys the weights, `[64, 64]` BF16, and four sums of each head's.
    pub(crate) weights: Buffer<B, u32>,
}

/// Elements for so many clusters.
#[must_use]
pub const fn exchange_elements(clusters: u32) -> u64 {
    clusters as u64 * CLUSTER_WORDS as u64
}

/// Most clusters of a launch that spreads queries, on a GPU of [`MULTIPROCESSORS`].
pub const SPREAD_CLUSTERS: u32 = spread_clusters(MULTIPROCESSORS);

impl<B: Backend> AttentionExchange<B> {
    /// Allocates it for so many clusters.
    ///
    /// # Errors
    /// [`DeviceError`] if the device has no memory.
    pub fn new(device: &Device<B>, clusters: u32) -> Result<Self, DeviceError> {
        let weights = device.allocate("weights of attention", exchange_elements(clusters))?;
        Ok(Self { weights })
    }

    /// All of it, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Memory<B> {
        self.weights.memory()
    }

    /// Clusters that it is enough for.
    pub(super) fn clusters(&self) -> u64 {
        self.weights.len() / u64::from(CLUSTER_WORDS)
    }
}

#[cfg(test)]
mod tests {
    use super::spread_clusters;

    #[test]
    fn clusters_of_eight_fit_in_nine_tenths() {
        assert_eq!([0, 9, 10, 132, u32::MAX].map(spread_clusters), [0, 0, 1, 14, 483_183_820]);
    }
}

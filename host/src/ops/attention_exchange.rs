//! Workspace of queries that are spread over clusters of eight blocks.

use kernels_gpu::attention::HEADS;
use kernels_gpu::attention::spread::CLUSTER_WORDS;
use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::attention::SPREAD_BLOCKS;
use kv_layout::geometry::HEAD_DIM;

use crate::device::{Backend, Buffer, Device, DeviceError, Memory};

/// About the most clusters of eight blocks that a GPU with `multiprocessors` multiprocessors runs at a time. A cluster
/// lies within one group of multiprocessors (GPC), so that some stay idle: an H200 with 132 runs 15 clusters.
pub(super) const fn spread_clusters(multiprocessors: u32) -> u32 {
    multiprocessors / 10 * 9 / SPREAD_BLOCKS
}

/// Workspace of launches that are spread over clusters of eight blocks: results that the blocks of a cluster, and the
/// clusters of a query, exchange. 348 KiB a cluster, which has up to 64 heads of a query and all of its keys, a split,
/// or half of one; one allocation. Launches that use it must run one after the other, as those of one stream do. Two at
/// a time would read each other's data, and leave counters that make later launches wrong too; after that, make a new
/// workspace.
pub struct AttentionExchange<B: Backend> {
    /// `[clusters, 24, 2304]` u32: for each tile of keys the softmax weights, 64 heads by 64 keys, BF16, in the order of `wgmma`'s A
    /// fragments (2,048 words), then two f32 sums of weights of each of 128 threads.
    pub(crate) weights: Buffer<B, u32>,
    /// `[clusters, 8, 4096]` f32: partial outputs, 64 heads by 64 channels a block, in the order of the threads' fragments.
    pub(crate) sums: Buffer<B, f32>,
    /// `[clusters, 8, 2, 64]` f32, one copy per block. For a whole split: log2 of the softmax's denominator, and an
    /// unused value. For half a split: the base, and the sum of weights.
    pub(crate) denominators: Buffer<B, f32>,
    /// `[clusters, 8]` u32: clusters of a query that have stored their partial output, for each block's 64 channels; 0 between launches.
    pub(crate) arrivals: Buffer<B, u32>,
}

/// Words of the weights, of the sums, of the denominators and of the counters, for `clusters` clusters.
const fn words(clusters: u64) -> [u64; 4] {
    let blocks = clusters * SPREAD_BLOCKS as u64;
    let sums = clusters * HEADS as u64 * HEAD_DIM as u64;
    [clusters * CLUSTER_WORDS as u64, sums, blocks * 2 * HEADS as u64, blocks]
}

/// u32 elements of the workspace for `clusters` clusters.
#[must_use]
pub const fn exchange_elements(clusters: u32) -> u64 {
    let [weights, sums, denominators, arrivals] = words(clusters as u64);
    weights + sums + denominators + arrivals
}

/// Most clusters of a launch that spreads queries, on a GPU of [`MULTIPROCESSORS`].
pub const SPREAD_CLUSTERS: u32 = spread_clusters(MULTIPROCESSORS);

impl<B: Backend> AttentionExchange<B> {
    /// Allocates a workspace for `clusters` clusters.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device<B>, clusters: u32) -> Result<Self, DeviceError> {
        Self::of(&device.allocate("exchange of attention", exchange_elements(clusters))?)
    }

    /// Divides `all` into the buffers, for as many clusters as it has room for.
    pub(crate) fn of(all: &Buffer<B, u32>) -> Result<Self, DeviceError> {
        let [weights, sums, denominators, arrivals] = words(all.len() / exchange_elements(1));
        let part = |at, words| all.slice(at, words).expect("all parts are there");
        Ok(Self {
            weights: part(0, weights),
            sums: part(weights, sums).cast()?,
            denominators: part(weights + sums, denominators).cast()?,
            arrivals: part(weights + sums + denominators, arrivals),
        })
    }

    /// All of it, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Memory<B> {
        self.weights.memory()
    }

    /// Number of clusters that it has room for.
    pub(super) fn clusters(&self) -> u64 {
        self.arrivals.len() / u64::from(SPREAD_BLOCKS)
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

//! Workspace for attention whose keys are in several splits.

use kernels_gpu::attention::HEADS;
use kv_layout::attention::AttendedKeys;
use kv_layout::geometry::HEAD_DIM;

use crate::device::{Backend, Buffer, Device, DeviceError, Memory};

/// Workspace for keys in several splits (split-KV, as in Flash-Decoding): needed for queries that may have more than
/// 960 entries without a list ([`AttendedKeys::num_splits`](kv_layout::attention::AttendedKeys::num_splits)). A cluster
/// has one split and 64 heads of a query, and stores its partial output and log-sum-exp. Launches that use the
/// workspace must run one after the other, as those of one stream do. Two at a time would combine each other's splits,
/// and leave counters that make later launches wrong too; after that, make a new workspace.
pub struct SplitWorkspace<B: Backend> {
    /// `[clusters, 64, 512]` f32: partial outputs.
    pub(crate) sums: Buffer<B, f32>,
    /// `[clusters, 64]` f32: log2 of the softmax's denominators.
    pub(crate) lse: Buffer<B, f32>,
    /// `[clusters, 2]` u32: splits that are done, by block of a cluster; 0 between launches.
    pub(crate) arrivals: Buffer<B, u32>,
}

/// Elements of the sums, of the denominators and of the counters, for `clusters` clusters.
#[must_use]
pub const fn split_elements(clusters: u32) -> [u64; 3] {
    let heads = clusters as u64 * HEADS as u64;
    [heads * HEAD_DIM as u64, heads, clusters as u64 * AttendedKeys::All.blocks() as u64]
}

impl<B: Backend> SplitWorkspace<B> {
    /// Allocates a workspace for `clusters` clusters in one launch.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device<B>, clusters: u32) -> Result<Self, DeviceError> {
        let [sums, lse, arrivals] = split_elements(clusters);
        Ok(Self {
            sums: device.allocate("splits of attention", sums)?,
            lse: device.allocate("denominators of splits", lse)?,
            arrivals: device.allocate("counters of splits", arrivals)?,
        })
    }

    /// All of it, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> [Memory<B>; 3] {
        [self.sums.memory(), self.lse.memory(), self.arrivals.memory()]
    }

    /// Number of clusters that it has room for.
    pub(super) fn clusters(&self) -> u64 {
        self.arrivals.len() / u64::from(AttendedKeys::All.blocks())
    }
}

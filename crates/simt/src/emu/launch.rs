//! The shape of a launch.

use crate::limits::{MAX_BLOCK_THREADS, MAX_CLUSTER_BLOCKS, WARP_SIZE};

/// A launch: the kernel's name, its shape, and the seed of the order in which threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name, for faults.
    pub kernel: &'static str,
    /// Blocks, as (x, y). As on a device, x is below 2^31 and y below 2^16; neither is 0.
    pub grid: (u32, u32),
    /// Threads of a block: a multiple of 32, at most 1024.
    pub block: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Seed of the order in which lanes, warps, and blocks of a cluster run.
    pub seed: u64,
}

impl Launch {
    /// The launch of a block that has not run yet.
    pub(super) const NONE: Self =
        Self { kernel: "", grid: (0, 0), block: 0, shared_bytes: 0, seed: 0 };

    /// Whether a device accepts this shape with clusters of `size` blocks (CUDA C++ programming guide,
    /// compute capabilities).
    pub(super) fn is_valid(&self, size: u32) -> bool {
        let (x, y) = self.grid;
        let clusters = (1..=MAX_CLUSTER_BLOCKS).contains(&size) && x.is_multiple_of(size);
        clusters
            && (1..1 << 31).contains(&x)
            && (1..1 << 16).contains(&y)
            && (1..=MAX_BLOCK_THREADS).contains(&self.block)
            && self.block.is_multiple_of(WARP_SIZE)
    }
}

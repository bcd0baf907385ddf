//! Limits of the thread model, the same on every device.

/// Lanes of a warp.
pub const WARP_SIZE: u32 = 32;

/// The largest block, in threads.
#[cfg(not(target_arch = "nvptx64"))]
pub const MAX_BLOCK_THREADS: u32 = 1024;

/// The portable cluster size: the largest cluster, in blocks, that every device with clusters accepts.
#[cfg(not(target_arch = "nvptx64"))]
pub const MAX_CLUSTER_BLOCKS: u32 = 8;

//! The default number of checkpoints.

use dsv4_kv::{CacheConfig, Capacity};

/// Checkpoints get 1 / `PARTS` of the memory that the slots leave. This is near the best hit ratio of V4-Flash on both
/// Mooncake traces, with 16, 64 and 140 GiB.
const PARTS: u64 = 3;

/// The number of checkpoints, given a cache without any. They replace a part of its blocks, but leave the blocks of the
/// longest request.
pub fn checkpoints(without: &CacheConfig) -> u32 {
    let Capacity { block_bytes, checkpoint_bytes, blocks, .. } = Capacity::new(without);
    let blocks = u64::from(blocks);
    let spare = blocks.saturating_sub(without.max_blocks_per_request().into());
    let bytes = block_bytes * (blocks / PARTS).min(spare);
    let checkpoints = bytes.checked_div(checkpoint_bytes).unwrap_or(0);
    checkpoints.min(CacheConfig::MAX_CHECKPOINTS.into()) as u32
}

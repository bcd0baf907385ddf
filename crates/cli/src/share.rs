//! The share of a cache's memory that is for checkpoints where nobody says how many.

use dsv4_kv::{CacheConfig, Capacity};

/// One part in so many of what slots leave of the memory is for checkpoints: near the best hit ratio of V4-Flash on
/// both Mooncake traces, with 16, 64 and 140 GiB.
const PARTS: u64 = 3;

/// Checkpoints that take the place of a part of the blocks of a cache without any, though not of those of the longest
/// request.
pub fn checkpoints(without: &CacheConfig) -> u32 {
    let Capacity { block_bytes, checkpoint_bytes, blocks, .. } = Capacity::new(without);
    let blocks = u64::from(blocks);
    let spare = blocks.saturating_sub(without.max_blocks_per_request().into());
    let bytes = block_bytes * (blocks / PARTS).min(spare);
    let checkpoints = bytes.checked_div(checkpoint_bytes).unwrap_or(0);
    checkpoints.min(CacheConfig::MAX_CHECKPOINTS.into()) as u32
}

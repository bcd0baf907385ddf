//! The measured cache, and the number of measurements.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{CacheConfig, KvError};

/// Memory of the device that does nothing, in bytes.
pub const MEMORY: u64 = 1 << 50;
/// Tokens of a request before the measured steps.
pub const CONTEXT: u32 = 8192;
/// Timed steps per case.
pub const STEPS: usize = 2000;
/// Drafts per request, in cases with drafts.
pub const DRAFTS: u32 = 4;

/// The measured cache: DeepSeek-V4-Flash with draft layers, for `requests` requests.
pub fn config(requests: u32) -> Result<CacheConfig, KvError> {
    let model = ModelConfig::preset("flash").expect("a preset");
    Ok(CacheConfig {
        max_draft: DRAFTS,
        max_requests: requests,
        num_blocks: requests * 128,
        max_context: 131_072,
        max_step_tokens: 8192,
        ..CacheConfig::new(model)
    })
}

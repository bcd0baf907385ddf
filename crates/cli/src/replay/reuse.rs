//! The reuse of a load's prompts: a part of the summary.

use std::collections::BTreeMap;

use bytesize::ByteSize;
use dsv4_kv::TierStats;
use dsv4_kv_prefix::{Origin, ReuseStats};
use schemars::JsonSchema;
use serde::Serialize;

use super::timeline::Sample;

/// Prompts of requests that are too long to share blocks. The prefix tree does not count them, since they are admitted
/// without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TooLong {
    /// Their number.
    pub prompts: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// Prompt tokens that were reused, and why others were not. A request that was preempted and admitted again counts as
/// often as it was admitted, with what it had generated.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Reuse {
    /// Share of the prompt tokens that were reused.
    pub hit_ratio: f64,
    /// Prompts that were admitted.
    pub prompts: u64,
    /// Those of them that reused something.
    pub hits: u64,
    /// Tokens of all prompts that were admitted: reused, or of one of the groups that follow.
    pub prompt_tokens: u64,
    /// The prefix tree had them, behind the last checkpoint.
    pub no_checkpoint: u64,
    /// They were evicted, as far as that is remembered.
    pub missed_by_eviction: u64,
    /// Another salt, adapter or model had their first block, which these are; never in a replay.
    pub other_root: u64,
    /// Behind the last block that leaves a token to compute.
    pub tail: u64,
    /// Nobody had them.
    pub never_seen: u64,
    /// Their request needs more than half of all blocks, and shares none.
    pub too_long: u64,
    /// Prompts that went on from a checkpoint at the end of a prompt.
    pub hits_at_prompt: u64,
    /// From one where two prompts part.
    pub hits_at_branch: u64,
    /// From one at an interval.
    pub hits_at_interval: u64,
    /// From one at the end of an output.
    pub hits_at_output: u64,
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted.
    pub evicted_checkpoints: u64,
    /// Checkpoints there are.
    pub checkpoints: u32,
    /// Largest number of blocks that were kept and that nobody used.
    pub peak_cached: u32,
    /// What moved between the device and host memory; none without a host tier.
    #[schemars(with = "Option<BTreeMap<String, u64>>")]
    pub tier: Option<TierStats>,
}

impl Reuse {
    /// The statistics of a cache with this number of checkpoints.
    pub fn new(
        (stats, too_long): (&ReuseStats, TooLong),
        checkpoints: u32,
        largest: &Sample,
        tier: Option<TierStats>,
    ) -> Self {
        let hits = |origin: Origin| stats.hits_by_origin[origin.index()];
        let prompt_tokens = stats.prompt_tokens + too_long.tokens;
        Self {
            hit_ratio: stats.reused as f64 / prompt_tokens.max(1) as f64,
            prompts: stats.prompts + too_long.prompts,
            hits: stats.hits,
            prompt_tokens,
            no_checkpoint: stats.no_checkpoint,
            missed_by_eviction: stats.missed_by_eviction,
            other_root: stats.other_root,
            tail: stats.tail,
            never_seen: stats.never_seen,
            too_long: too_long.tokens,
            hits_at_prompt: hits(Origin::Prompt),
            hits_at_branch: hits(Origin::Branch),
            hits_at_interval: hits(Origin::Interval),
            hits_at_output: hits(Origin::Output),
            evicted_blocks: stats.evicted_blocks,
            evicted_checkpoints: stats.evicted_checkpoints,
            checkpoints,
            peak_cached: largest.cached,
            tier,
        }
    }

    /// The rows of the table.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Self {
            hit_ratio, prompts, hits, prompt_tokens, no_checkpoint, missed_by_eviction, ..
        } = self;
        let Self { tail, never_seen, too_long, hits_at_prompt, hits_at_branch, .. } = self;
        let Self { hits_at_interval, hits_at_output, evicted_blocks, checkpoints, .. } = self;
        let Self { evicted_checkpoints, peak_cached, .. } = self;
        let mut rows = vec![
            ("hit ratio", format!("{hit_ratio:.4} of {prompt_tokens} prompt tokens")),
            (
                "not reused",
                format!(
                    "{never_seen} new, {tail} of no whole block, {no_checkpoint} behind a checkpoint, {missed_by_eviction} evicted, {too_long} too long to share"
                ),
            ),
            ("hits", format!("{hits} of {prompts} prompts")),
            (
                "",
                format!(
                    "{hits_at_prompt} at the end of a prompt, {hits_at_branch} at branch points, {hits_at_interval} at intervals, {hits_at_output} at the end of an output"
                ),
            ),
            (
                "evicted",
                format!(
                    "{evicted_blocks} blocks, {evicted_checkpoints} checkpoints (there are {checkpoints})"
                ),
            ),
            ("peak cached", format!("{peak_cached} blocks that nobody used")),
        ];
        rows.extend(self.tier.iter().flat_map(tier_rows));
        rows
    }
}

/// Traffic of the host tier.
fn tier_rows(tier: &TierStats) -> [(&'static str, String); 2] {
    let moved = |blocks: u64, checkpoints: u64, bytes: u64| {
        format!("{blocks} blocks, {checkpoints} checkpoints, {}", ByteSize(bytes))
    };
    let there = moved(tier.stored_blocks, tier.stored_checkpoints, tier.bytes_to_host);
    let back = moved(tier.restored_blocks, tier.restored_checkpoints, tier.bytes_from_host);
    let (tokens, evicted) = (tier.restored_tokens, tier.evicted_blocks);
    [
        ("to host memory", format!("{there}; {evicted} blocks evicted there")),
        ("and back", format!("{back}, for {tokens} tokens")),
    ]
}

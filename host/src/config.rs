//! `CacheConfig`: every choice that shapes the cache, in one value that can be printed and stored. `with_memory` and
//! `for_memory` are in `capacity.rs`, `identity` is in `identity.rs`.

use std::ops::Range;

use kv_layout::attention::KeyCluster;
use kv_layout::config::{ModelConfig, RopeConstants};
use kv_layout::geometry::{BLOCK_TOKENS, LayerKind, MAX_CONTEXT};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use serde::{Deserialize, Serialize};

use crate::error::KvError;
use crate::ids::{LayerGroup, LayerId};
use crate::pool_kind::PoolUnit;

/// The shape of one cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheConfig {
    /// The model whose attention it serves.
    pub model: ModelConfig,
    /// Format of main rows: the window and the compressed entries.
    pub main_format: MainFormat,
    /// Format of indexer keys.
    pub index_format: IndexFormat,
    /// Draft tokens of a verify step that may be rejected, 0 to 127; 0 without speculation.
    pub max_draft: u32,
    /// Requests that can be admitted at once, 1 to [`Self::MAX_REQUESTS`].
    pub max_requests: u32,
    /// Blocks of 128 tokens that all requests share, 1 to [`Self::MAX_BLOCKS`].
    pub num_blocks: u32,
    /// Longest context of one request, in tokens: 1 to the model's, at most 1,048,576.
    pub max_context: u32,
    /// Most tokens of one step, over all its requests: 1 to 1,048,576.
    pub max_step_tokens: u32,
    /// Checkpoints that the cache can hold, 0 to [`Self::MAX_CHECKPOINTS`]. Later requests with the same prefix continue
    /// from them ([`crate::checkpoints`]).
    #[serde(default)]
    pub num_checkpoints: u32,
    /// Tokens between additional checkpoints of a prompt: a multiple of 128, or 0 for none. Two checkpoints are always
    /// wanted: at the last block boundary of the prompt, and where the prompt diverges from the prefix tree. If a step
    /// passes more wanted positions than checkpoints can be had, the earlier ones get them.
    #[serde(default = "checkpoint_interval")]
    pub checkpoint_interval: u32,
    /// Whether the last block boundary of an output gets a checkpoint, so that the next turn of the conversation can
    /// reuse the output. It costs one checkpoint for each running request, and one copy for each 128 tokens of output.
    #[serde(default = "keep_outputs")]
    pub keep_outputs: bool,
    /// Budget of all leases together, in bytes of blocks and checkpoints ([`crate::Ledger::pin`]). With 0 every lease is
    /// refused.
    #[serde(default)]
    pub lease_bytes: u64,
    /// Capacity of the event log: blocks stored or removed between two drains ([`crate::events`]). 0 for no log, at most
    /// 1,048,576; 560 bytes of host memory each.
    #[serde(default)]
    pub event_capacity: u32,
    /// Bytes of pinned host memory for evicted prefixes ([`crate::host_tier`]); 0 for none. It must hold at
    /// least one block and one checkpoint, and needs [`Self::num_checkpoints`] > 0.
    #[serde(default)]
    pub host_bytes: u64,
    /// Requests that can be suspended at once, 0 to [`Self::MAX_REQUESTS`], each with the state of a slot.
    #[serde(default)]
    pub max_suspended: u32,
    /// Thread blocks that share the keys of one query (64 heads) in layers with entries: two, a cluster (lower latency
    /// in small steps), or one (higher throughput in large ones). Results differ in their last bits, so it is part of
    /// the cache's identity. The number of splits of the keys (split-KV) is not set here: it follows from their number.
    #[serde(default, alias = "attention_split")]
    pub attention_cluster: KeyCluster,
    /// Whether unowned memory is filled with NaN, so that `KvCacheManager::check_poison` reports
    /// gathered rows and scored keys that come from it. For tests and debugging: every gathered row
    /// and scored key is checked.
    #[serde(default)]
    pub poison: bool,
}

impl CacheConfig {
    /// Most blocks a cache can have: block ids and rows are 32-bit on the device.
    pub const MAX_BLOCKS: u32 = 1 << 25;
    /// Most requests: the launch that copies the state of all of them has one grid row per request, and a grid has at
    /// most 65,535 rows.
    pub const MAX_REQUESTS: u32 = (1 << 16) - 1;
    /// Most checkpoints: checkpoint times window rows is 31-bit on the device.
    pub const MAX_CHECKPOINTS: u32 = 1 << 23;

    /// A configuration for `model` with the formats it was trained for: one request, one block, contexts of up to the model's,
    /// steps of up to 8,192 tokens, and neither drafts nor checkpoints. Set the rest by `..`.
    #[must_use]
    pub fn new(model: ModelConfig) -> Self {
        let max_context = model.max_context.min(MAX_CONTEXT);
        Self {
            model,
            main_format: MainFormat::default(),
            index_format: IndexFormat::default(),
            max_draft: 0,
            max_requests: 1,
            num_blocks: 1,
            max_context,
            max_step_tokens: 8192,
            num_checkpoints: 0,
            checkpoint_interval: checkpoint_interval(),
            keep_outputs: keep_outputs(),
            lease_bytes: 0,
            event_capacity: 0,
            host_bytes: 0,
            max_suspended: 0,
            attention_cluster: KeyCluster::default(),
            poison: false,
        }
    }

    /// Number of units of a pool: blocks, or the slots of requests and of suspended requests.
    #[must_use]
    pub const fn units(&self, unit: PoolUnit) -> u32 {
        match unit {
            PoolUnit::Slot => self.max_requests.saturating_add(self.max_suspended),
            PoolUnit::Block => self.num_blocks,
        }
    }

    /// Checks every setting but [`Self::host_bytes`], whose range depends on the bytes of the model's blocks and is
    /// checked when a cache is made, and the shapes of the indexer, which its workspace and weights check.
    ///
    /// # Errors
    /// [`KvError::Config`] names the first setting out of range, its value and the range; [`KvError::Model`] a constant of the
    /// rotary embedding.
    pub fn validate(&self) -> Result<(), KvError> {
        check_setting("model.layers", self.model.layers.len() as u32, 1, 4096)?;
        let (theta, compress) = (self.model.rope_theta, self.model.compress_rope);
        RopeConstants { theta, compress }
            .check()
            .map_err(|error| KvError::Model(Box::new(error)))?;
        check_setting("max_draft", self.max_draft, 0, 127)?;
        check_setting("max_requests", self.max_requests, 1, Self::MAX_REQUESTS)?;
        check_setting("num_blocks", self.num_blocks, 1, Self::MAX_BLOCKS)?;
        check_setting("num_checkpoints", self.num_checkpoints, 0, Self::MAX_CHECKPOINTS)?;
        if !self.checkpoint_interval.is_multiple_of(BLOCK_TOKENS) {
            let setting = "checkpoint_interval (a multiple of 128)";
            let (value, most) =
                (self.checkpoint_interval.into(), u32::MAX / BLOCK_TOKENS * BLOCK_TOKENS);
            return Err(KvError::Config { setting, value, least: 0, most: most.into() });
        }
        check_setting("event_capacity", self.event_capacity, 0, 1 << 20)?;
        check_setting("max_suspended", self.max_suspended, 0, Self::MAX_REQUESTS)?;
        check_setting("max_context", self.max_context, 1, self.model.max_context.min(MAX_CONTEXT))?;
        check_setting("max_step_tokens", self.max_step_tokens, 1, 1 << 20)?;
        check_setting(
            "model.mtp_layers",
            self.model.mtp_layers,
            0,
            self.model.layers.len() as u32 - 1,
        )?;
        self.check_draft_layers()
    }

    /// Draft layers run at positions of their own, for which no block holds entries.
    fn check_draft_layers(&self) -> Result<(), KvError> {
        let layers = self.group_layers(LayerGroup::Draft);
        let kinds = layers.map(|layer| (layer, self.model.layers[layer as usize]));
        match kinds.into_iter().find(|&(_, kind)| kind != LayerKind::Swa) {
            Some((layer, kind)) => Err(KvError::DraftLayerKind { layer: LayerId(layer), kind }),
            None => Ok(()),
        }
    }

    /// The layers of a group, as numbers of [`crate::LayerId`]s.
    #[must_use]
    pub fn group_layers(&self, group: LayerGroup) -> Range<u32> {
        let layers = self.model.layers.len() as u32;
        let trunk = layers.saturating_sub(self.model.mtp_layers);
        match group {
            LayerGroup::Trunk => 0..trunk,
            LayerGroup::Draft => trunk..layers,
        }
    }

    /// Most tokens of a request in a decode step: the drafts and the token that they follow, `max_draft` + 1 (vLLM's
    /// decode query length). At most so many tokens of a request can be rejected, in any step.
    #[must_use]
    pub const fn max_decode_tokens(&self) -> u32 {
        self.max_draft.saturating_add(1)
    }

    /// Blocks of the longest request.
    #[must_use]
    pub const fn max_blocks_per_request(&self) -> u32 {
        self.max_context.div_ceil(BLOCK_TOKENS)
    }
}

/// Refuses a setting outside `least..=most`.
pub(crate) fn check_setting(
    setting: &'static str,
    value: u32,
    least: u32,
    most: u32,
) -> Result<(), KvError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let [value, least, most] = [value, least, most].map(u64::from);
    Err(KvError::Config { setting, value, least, most })
}

/// Measured on traces: see decision D31 of the architecture.
const fn checkpoint_interval() -> u32 {
    2048
}

/// Measured on conversations: see decision D31 of the architecture.
const fn keep_outputs() -> bool {
    true
}

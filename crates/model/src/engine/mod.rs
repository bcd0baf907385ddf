//! The model on a device. The cache, the indexer and the router run there; dense mathematics runs on the host.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Engine`]: requests, and the limits of a step |
//! | `forward.rs` | a step through all layers, to logits; [`Forward`], open until it is committed |
//! | `attention.rs` | attention of a layer: inputs go to the device; gathered rows or results come back |
//! | `updated.rs` | a layer of any kind after its update |
//! | `captured.rs` | each layer's launches as a graph |
//! | `device_layer.rs` | a layer's weights on the device |
//! | `buffers.rs` | the tensors that are copied to and from the device |
//! | `place.rs` | attention on the host or on the device: [`AttentionPlace`], and the tensors of each |
//! | `tile.rs` | a tile of queries |

mod attention;
mod buffers;
mod captured;
mod device_layer;
mod forward;
mod place;
mod tile;
mod updated;

use std::sync::Arc;

use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv::{Admission, Bucket, CacheConfig, KvCacheManager, Prompt, RequestId};
use dsv4_kv_device::{Backend, Device, Stream};
use kv_layout::config::ModelConfig;
use kv_layout::geometry::BLOCK_TOKENS;

use crate::error::ModelError;
use crate::model::Model;
use buffers::Buffers;
use captured::Captured;
use device_layer::DeviceLayer;

pub use forward::{Chunk, Forward, Logits};
pub use place::AttentionPlace;

/// The limits of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Requests that can be admitted at once.
    pub requests: u32,
    /// Longest context of a request, in tokens.
    pub context: u32,
    /// Capacity of the cache in tokens, over all requests; rounded up to whole blocks.
    pub max_total_tokens: u32,
    /// Maximum number of tokens of a step, over all its requests.
    pub max_step_tokens: u32,
    /// Most drafts of a request in a step that can be rejected.
    pub max_draft: u32,
    /// Number of checkpoints, from which prompts continue; 0 for none.
    pub checkpoints: u32,
    /// Bytes of pinned host memory for copies of prefixes, which outlive their eviction from the device; 0 for none.
    pub host_bytes: u64,
    /// Most blocks that may enter or leave the prefix tree between two readings of the event log; 0 for no log.
    pub event_capacity: u32,
    /// How many thread blocks share a query's keys in attention on the device ([`CacheConfig::attention_cluster`]).
    pub attention_cluster: KeyCluster,
}

/// A model, its cache, and the requests in it.
pub struct Engine<B: Backend> {
    model: Arc<Model>,
    cache: KvCacheManager<B>,
    stream: Stream<B>,
    layers: Vec<DeviceLayer<B>>,
    buffers: Buffers<B>,
    captured: Option<Captured<B>>,
    replayed_steps: u64,
}

impl<B: Backend> Engine<B> {
    /// Creates a cache for these limits, and copies the weights that the device needs. Attention runs where
    /// [`AttentionPlace::of_device`] says.
    ///
    /// # Errors
    /// [`ModelError`]: limits that the cache refuses, or too little device memory.
    pub fn new(
        device: &Device<B>,
        model: Arc<Model>,
        limits: EngineLimits,
    ) -> Result<Self, ModelError> {
        let place = AttentionPlace::of_device(device, model.config.heads);
        Self::with_attention(device, model, limits, place)
    }

    /// As [`Self::new`], with attention at `place`.
    ///
    /// # Errors
    /// As [`Self::new`]; [`dsv4_kv_device::DeviceError::Argument`] for more heads than attention on the device takes.
    pub fn with_attention(
        device: &Device<B>,
        model: Arc<Model>,
        limits: EngineLimits,
        place: AttentionPlace,
    ) -> Result<Self, ModelError> {
        let config = CacheConfig {
            max_draft: limits.max_draft,
            max_requests: limits.requests,
            num_blocks: limits.max_total_tokens.div_ceil(BLOCK_TOKENS),
            max_context: limits.context,
            max_step_tokens: limits.max_step_tokens,
            num_checkpoints: limits.checkpoints,
            host_bytes: limits.host_bytes,
            event_capacity: limits.event_capacity,
            attention_cluster: limits.attention_cluster,
            ..CacheConfig::new(trunk(&model.config.cache))
        };
        let cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let layers = model.layers.iter();
        let layers =
            layers.map(|layer| DeviceLayer::new(&stream, &model, layer, limits.max_step_tokens));
        let layers = layers.collect::<Result<_, _>>()?;
        let buffers = Buffers::new(device, cache.config(), (place, model.config.heads))?;
        Ok(Self { model, cache, stream, layers, buffers, captured: None, replayed_steps: 0 })
    }

    /// Admits a request without tokens.
    ///
    /// # Errors
    /// [`dsv4_kv::KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, ModelError> {
        Ok(self.cache.admit()?)
    }

    /// Admits a request that continues from the cached prefix of `tokens` under the same salt: its first step starts at
    /// [`Admission::reused`]. Its logits have the same bits as without reuse. Waits for parts of the prefix that come
    /// from host memory.
    ///
    /// # Errors
    /// As [`KvCacheManager::admit_waiting`].
    pub fn admit_with(&mut self, tokens: &[u32], salt: &[u8]) -> Result<Admission, ModelError> {
        let prompt = Prompt { tokens, salt, adapter: b"" };
        Ok(self.cache.admit_waiting(&self.stream, &prompt)?)
    }

    /// Begins to copy new prefixes of the prefix tree to host memory; waits for nothing. Call it between steps.
    ///
    /// # Errors
    /// As [`KvCacheManager::advance_tier`].
    pub fn advance_tier(&mut self) -> Result<(), ModelError> {
        Ok(self.cache.advance_tier(&self.stream)?)
    }

    /// As [`Self::advance_tier`], and waits until all transfers are done, so that none keeps blocks from being evicted.
    /// Returns whether any were under way.
    ///
    /// # Errors
    /// As [`KvCacheManager::settle_tier`].
    pub fn settle_tier(&mut self) -> Result<bool, ModelError> {
        let moves = self.cache.has_tier_transfers();
        self.cache.settle_tier(&self.stream)?;
        Ok(moves)
    }

    /// Ends a request and frees its slot and blocks. Before that, saves the checkpoint of a boundary that its last step
    /// has passed.
    ///
    /// # Errors
    /// [`dsv4_kv::KvError::UnknownRequest`], [`dsv4_kv::KvError::ForeignRequest`].
    pub fn release(&mut self, id: RequestId) -> Result<(), ModelError> {
        // If that fails, later prompts continue from an earlier checkpoint: no reason to keep the request.
        let _ = self.cache.save_wanted(&self.stream);
        Ok(self.cache.release(id)?)
    }

    /// Captures each layer's launches for steps of up to `requests` requests with up to `tokens_per_request`
    /// tokens each. From then on steps that fit replay the graphs, with the same bits as without.
    ///
    /// # Errors
    /// [`ModelError::BucketTooLarge`] for more tokens than one tile of queries; [`ModelError::Cache`], as
    /// [`KvCacheManager::capture`].
    pub fn capture(&mut self, requests: u32, tokens_per_request: u32) -> Result<(), ModelError> {
        let tokens = requests.saturating_mul(tokens_per_request);
        let context = self.cache.config().max_context;
        let bucket = Bucket { tokens, tokens_per_request, requests, context };
        let Self { cache, stream, layers, buffers, captured, .. } = self;
        *captured = Some(Captured::record(cache, stream, layers, buffers, bucket)?);
        Ok(())
    }

    /// Number of steps that have replayed the graphs of [`Self::capture`].
    #[must_use]
    pub fn replayed_steps(&self) -> u64 {
        self.replayed_steps
    }

    /// The cache, for its configuration and its ledger.
    #[must_use]
    pub fn cache(&self) -> &KvCacheManager<B> {
        &self.cache
    }

    /// The cache, for a lower tier. The engine owns the requests in it: do not change them.
    pub fn cache_mut(&mut self) -> &mut KvCacheManager<B> {
        &mut self.cache
    }

    /// The cache and the stream of its steps, for moving requests between caches.
    pub fn moves(&mut self) -> (&mut KvCacheManager<B>, &Stream<B>) {
        (&mut self.cache, &self.stream)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}

/// The configuration without draft (MTP) layers, which an engine does not run.
fn trunk(config: &ModelConfig) -> ModelConfig {
    let layers = config.layers.len() - config.mtp_layers as usize;
    ModelConfig { layers: config.layers[..layers].to_vec(), mtp_layers: 0, ..config.clone() }
}

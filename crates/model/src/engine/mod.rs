//! The model on a device: the cache, the indexer and the router run there, dense mathematics on the host.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Engine`]: requests, and what a step may be |
//! | `forward.rs` | a step through all layers, to logits; [`Forward`], open until it is committed |
//! | `attention.rs` | attention of a layer: inputs to the device, update, gathers and rows back, or results |
//! | `updated.rs` | a layer of any kind behind its update |
//! | `captured.rs` | each layer's launches as a graph |
//! | `device_layer.rs` | a layer's weights on the device |
//! | `buffers.rs` | the tensors that go there and back |
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

use dsv4_kv::kv_layout::attention::KeySplit;
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

/// The largest loads of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Requests that can be admitted at once.
    pub requests: u32,
    /// Longest context of a request, in tokens.
    pub context: u32,
    /// Tokens of all requests together that there is memory for.
    pub cached_tokens: u32,
    /// Tokens of a step, over all its requests.
    pub step_tokens: u32,
    /// Drafts of a request and step that may be rejected.
    pub max_draft: u32,
    /// Checkpoints that prefixes are reused from; 0 for none.
    pub checkpoints: u32,
    /// Bytes of pinned host memory that keep prefixes which the device evicts; 0 for none.
    pub host_bytes: u64,
    /// Blocks that may enter or leave the prefix tree between two readings of its log of events; 0 for no log.
    pub event_capacity: u32,
    /// Among how many blocks attention on the device splits a query's keys ([`CacheConfig::attention_split`]).
    pub attention_split: KeySplit,
}

/// A model, its cache, and the requests in it.
pub struct Engine<B: Backend> {
    model: Arc<Model>,
    cache: KvCacheManager<B>,
    stream: Stream<B>,
    layers: Vec<DeviceLayer<B>>,
    buffers: Buffers<B>,
    captured: Option<Captured<B>>,
}

impl<B: Backend> Engine<B> {
    /// A cache for these limits, and what the device needs of the model's weights; attention runs where
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

    /// The same with attention at `place`.
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
            num_blocks: limits.cached_tokens.div_ceil(BLOCK_TOKENS),
            max_context: limits.context,
            max_step_tokens: limits.step_tokens,
            num_checkpoints: limits.checkpoints,
            host_bytes: limits.host_bytes,
            event_capacity: limits.event_capacity,
            attention_split: limits.attention_split,
            ..CacheConfig::new(trunk(&model.config.cache))
        };
        let cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let layers = model.layers.iter();
        let layers =
            layers.map(|layer| DeviceLayer::new(&stream, &model, layer, limits.step_tokens));
        let layers = layers.collect::<Result<_, _>>()?;
        let buffers = Buffers::new(device, cache.config(), (place, model.config.heads))?;
        Ok(Self { model, cache, stream, layers, buffers, captured: None })
    }

    /// Admits a request without tokens.
    ///
    /// # Errors
    /// [`dsv4_kv::KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, ModelError> {
        Ok(self.cache.admit()?)
    }

    /// Admits a request that goes on from what earlier ones with the same salt and the same first tokens have computed:
    /// its first step starts at [`Admission::reused`]. Its logits have the bits that they have without. What host memory has
    /// of them is waited for.
    ///
    /// # Errors
    /// As [`KvCacheManager::admit_waiting`].
    pub fn admit_with(&mut self, tokens: &[u32], salt: &[u8]) -> Result<Admission, ModelError> {
        let prompt = Prompt { tokens, salt, adapter: b"" };
        Ok(self.cache.admit_waiting(&self.stream, &prompt)?)
    }

    /// Copies to host memory what has entered the prefix tree; waits for nothing. To be called between steps.
    ///
    /// # Errors
    /// As [`KvCacheManager::advance_tier`].
    pub fn advance_tier(&mut self) -> Result<(), ModelError> {
        Ok(self.cache.advance_tier(&self.stream)?)
    }

    /// The same, and waits for it: nothing is kept from being evicted any more. Whether something was under way.
    ///
    /// # Errors
    /// As [`KvCacheManager::settle_tier`].
    pub fn settle_tier(&mut self) -> Result<bool, ModelError> {
        let moves = self.cache.is_moving();
        self.cache.settle_tier(&self.stream)?;
        Ok(moves)
    }

    /// Ends a request and frees what it held. What its last step passed is saved before.
    ///
    /// # Errors
    /// [`dsv4_kv::KvError::UnknownRequest`], [`dsv4_kv::KvError::ForeignRequest`].
    pub fn release(&mut self, id: RequestId) -> Result<(), ModelError> {
        // Without the checkpoint, a later prompt is computed from an earlier one: no reason to keep the request.
        let _ = self.cache.save_wanted(&self.stream);
        Ok(self.cache.release(id)?)
    }

    /// Captures each layer's launches for steps of up to `requests` requests with up to `tokens_per_request`
    /// tokens each. From then on steps that fit replay the graphs, with the same bits as without.
    ///
    /// # Errors
    /// [`ModelError::BucketTooLarge`] for more tokens than are gathered at once;
    /// [`ModelError::Cache`], as [`KvCacheManager::capture`].
    pub fn capture(&mut self, requests: u32, tokens_per_request: u32) -> Result<(), ModelError> {
        let tokens = requests.saturating_mul(tokens_per_request);
        let context = self.cache.config().max_context;
        let bucket = Bucket { tokens, tokens_per_request, requests, context };
        let Self { cache, stream, layers, buffers, captured, .. } = self;
        *captured = Some(Captured::record(cache, stream, layers, buffers, bucket)?);
        Ok(())
    }

    /// The cache, for its configuration and its ledger.
    #[must_use]
    pub fn cache(&self) -> &KvCacheManager<B> {
        &self.cache
    }

    /// The cache, for a lower tier. Its requests belong to the engine: do not change them.
    pub fn cache_mut(&mut self) -> &mut KvCacheManager<B> {
        &mut self.cache
    }

    /// The cache and the stream of its steps, to move requests to another cache and from there.
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

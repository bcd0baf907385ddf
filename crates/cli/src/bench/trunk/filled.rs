//! A cache whose requests have long contexts. They are prefilled in chunks, with random projections.

use std::collections::VecDeque;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, Memory, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::{CsaInputs, HcaInputs};
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, CapturedStep, KvCacheManager, KvError, Launches, LayerId,
    Layers, RequestId, StepRequest,
};

use super::super::projections::LayerProjections;
use super::tensors::{Size, Tensors};

/// Most tokens per request in a prefill step. Several requests take turns, so that their blocks are interleaved.
const CHUNK: u32 = 2048;
/// Most tokens of a prefill step.
pub const PREFILL_TOKENS: u32 = 8192;

/// The model called `name`, without its draft layers.
pub fn trunk_of(name: &str) -> Result<ModelConfig> {
    let preset = ModelConfig::preset(name).context("a preset")?;
    let layers = preset.layers[..preset.layers.len() - preset.mtp_layers as usize].to_vec();
    Ok(ModelConfig { layers, mtp_layers: 0, ..preset })
}

/// A cache, its requests, and the inputs of its layers.
pub struct Filled<B: Backend> {
    pub stream: Stream<B>,
    pub cache: KvCacheManager<B>,
    pub tensors: Tensors<B>,
    pub ids: Vec<RequestId>,
    /// Number of chunks that were prefilled.
    chunks: u64,
}

impl<B: Backend> Filled<B> {
    /// Creates the cache, and admits as many requests as it takes, without tokens.
    pub fn new(device: &Device<B>, config: CacheConfig, size: Size) -> Result<Self> {
        let mut cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let tensors = Tensors::new(&stream, cache.config(), size)?;
        let requests = cache.config().max_requests;
        let ids = (0..requests).map(|_| cache.admit()).collect::<Result<_, _>>()?;
        Ok(Self { stream, cache, tensors, ids, chunks: 0 })
    }

    /// All memory that launches of a step touch.
    pub fn memory(&self) -> Vec<Memory<B>> {
        self.tensors.memory().into_iter().chain(self.cache.memory()).collect()
    }

    /// Captures what `queue` queues for each layer, for steps of `bucket`. `others` is other memory that it touches.
    pub fn capture(
        &mut self,
        bucket: &Bucket,
        others: Vec<Memory<B>>,
        mut queue: impl FnMut(&Tensors<B>, &mut Layers<'_, B>, (LayerId, LayerKind)) -> Result<()>,
    ) -> Result<CapturedStep<B>> {
        let memory = [self.memory(), others].concat();
        let Self { stream, cache, tensors, .. } = self;
        let mut queued = Ok(());
        let graph = cache.capture(stream, bucket, memory, |layers| {
            queued = layers.layer_kinds().try_for_each(|layer| queue(tensors, layers, layer));
            Ok(())
        })?;
        queued.map(|()| graph)
    }

    /// Prefills every request up to `tokens` tokens.
    pub fn advance(&mut self, tokens: u32) -> Result<()> {
        let mut left = VecDeque::new();
        for &id in &self.ids {
            let start = self.cache.ledger().committed(id)?;
            if start < tokens {
                left.push_back((id, start));
            }
        }
        while !left.is_empty() {
            let mut room = self.cache.config().max_step_tokens;
            let mut step = Vec::new();
            for _ in 0..left.len() {
                let Some((id, start)) = left.pop_front() else { break };
                let taken = room.min(CHUNK).min(tokens - start);
                if taken == 0 {
                    left.push_front((id, start));
                    break;
                }
                room -= taken;
                step.push(StepRequest { id, start, tokens: taken });
                if start + taken < tokens {
                    left.push_back((id, start + taken));
                }
            }
            self.prefill(&step, &[])?;
        }
        Ok(self.cache.check_faults(&self.stream)?)
    }

    /// Prefills a request from token `start` of its prompt, and passes the token ids to the cache.
    pub fn tell(&mut self, id: RequestId, start: u32, prompt: &[u32]) -> Result<()> {
        let most = self.cache.config().max_step_tokens;
        let mut from = start;
        for told in prompt[start as usize..].chunks(most as usize) {
            let tokens = told.len() as u32;
            self.prefill(&[StepRequest { id, start: from, tokens }], told)?;
            from += tokens;
        }
        Ok(self.cache.check_faults(&self.stream)?)
    }

    /// Runs a prefill step. If `told` is not empty, there is one request, and these are its token ids.
    fn prefill(&mut self, requests: &[StepRequest], told: &[u32]) -> Result<()> {
        let Self { stream, cache, tensors, chunks, .. } = self;
        let mut step = cache.begin_step(stream, Launches::Eager, requests)?;
        let tokens = step.plan().tokens;
        for (layer, kind) in step.layer_kinds() {
            let projections = tensors.chunk(*chunks + u64::from(layer.0), tokens);
            update(&mut step, (layer, kind), &projections)?;
        }
        *chunks += 1;
        let accepted =
            |part: &StepRequest| Accepted { id: part.id, accepted: part.tokens, tokens: told };
        let accepted: Vec<_> = requests.iter().map(accepted).collect();
        Ok(step.commit(&accepted)?)
    }
}

/// Queues a layer's update and append.
pub fn update<B: Backend>(
    layers: &mut Layers<'_, B>,
    (layer, kind): (LayerId, LayerKind),
    projections: &LayerProjections<B>,
) -> Result<(), KvError> {
    let LayerProjections { kv, main, index } = projections;
    let (main, index) = (main.inputs(), index.inputs());
    match kind {
        LayerKind::Swa => layers.swa(layer)?.update(kv)?.append(),
        LayerKind::Csa => layers.csa(layer)?.update(&CsaInputs { kv, main, index })?.append(),
        LayerKind::Hca => layers.hca(layer)?.update(&HcaInputs { kv, main })?.append(),
    }
}

//! A cache whose requests have long contexts: prefilled in chunks, with random projections.

use std::collections::VecDeque;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::step::{CsaInputs, HcaInputs};
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerId, Layers, RequestId,
    StepRequest,
};

use super::super::projections::LayerProjections;
use super::case::{Case, DRAFTS};
use super::parts::Routers;
use super::tensors::Tensors;

/// Most tokens of a request in a prefill step: several requests take turns, and so do their blocks.
const CHUNK: u32 = 2048;
/// Most tokens of a prefill step.
const STEP: u32 = 8192;

/// A cache, its requests, and what its layers read.
pub struct Setup<B: Backend> {
    pub stream: Stream<B>,
    pub cache: KvCacheManager<B>,
    pub tensors: Tensors<B>,
    pub routers: Routers<B>,
    pub ids: Vec<RequestId>,
    /// Chunks that were prefilled.
    chunks: u64,
}

impl<B: Backend> Setup<B> {
    /// The cache of a case, its requests admitted and without tokens.
    pub fn new(device: &Device<B>, case: &Case) -> Result<Self> {
        let preset = ModelConfig::preset(&case.model).context("a preset")?;
        let trunk = preset.layers.len() - preset.mtp_layers as usize;
        let model =
            ModelConfig { layers: preset.layers[..trunk].to_vec(), mtp_layers: 0, ..preset };
        let config = CacheConfig {
            max_draft: DRAFTS,
            max_requests: case.requests,
            num_blocks: case.requests * case.context.div_ceil(BLOCK_TOKENS),
            max_context: case.max_context.max(case.context),
            max_step_tokens: STEP.max(case.requests),
            ..CacheConfig::smallest(model)
        };
        let mut cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let size = (case.requests, case.context);
        let tensors = Tensors::new(&stream, cache.config(), size, case.weight)?;
        let routers = Routers::new(&stream, &case.model, trunk, case.requests)?;
        let ids = (0..case.requests).map(|_| cache.admit()).collect::<Result<_, _>>()?;
        Ok(Self { stream, cache, tensors, routers, ids, chunks: 0 })
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
            self.prefill(&step)?;
        }
        Ok(self.cache.check_faults(&self.stream)?)
    }

    fn prefill(&mut self, requests: &[StepRequest]) -> Result<()> {
        let Self { stream, cache, tensors, chunks, .. } = self;
        let mut step = cache.begin_step(stream, Launches::Eager, requests)?;
        let tokens = step.plan().tokens;
        for (layer, kind) in step.ids() {
            let projections = tensors.chunk(*chunks + u64::from(layer.0), tokens);
            update(&mut step, (layer, kind), &projections)?;
        }
        *chunks += 1;
        let accepted = |part: &StepRequest| Accepted::count(part.id, part.tokens);
        let accepted: Vec<_> = requests.iter().map(accepted).collect();
        Ok(step.commit(&accepted).map_err(KvError::from)?)
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

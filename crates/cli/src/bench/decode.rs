//! Decode of a layer in one launch: window, state, and at the end of a window also the entry and the indexer key.
//! Cases: one token per request, in the middle of a window, at its end, and at random positions; and a token with four
//! drafts.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind};
use dsv4_kv::step::{CsaInputs, HcaInputs};
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, KvError, Launches, LayerId, Layers, RequestId,
    StepRequest,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::projections::{LayerProjections, Projections};
use super::timing::{Measurement, measure_replay, nodes_for};
use super::work::Work;

/// Requests that are prefilled together, each with about 128 tokens.
const FILL_REQUESTS: usize = 32;
/// Tokens of the longest prompt.
const PROMPT: u32 = 131;
/// Drafts per request, in cases with drafts.
const DRAFTS: u32 = 4;

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for kind in [LayerKind::Csa, LayerKind::Hca] {
        for (phase, drafts) in [
            (Phase::Middle, 0),
            (Phase::Boundary, 0),
            (Phase::Random, 0),
            (Phase::Middle, DRAFTS),
            (Phase::Boundary, DRAFTS),
        ] {
            for requests in [1, 32, 256] {
                let case = Case { kind, phase, drafts, requests };
                works.push(Work::row(case.name(), move || case.measure(device)));
            }
        }
    }
    works
}

/// Position of the requests in their windows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No window closes, except for CSA windows in cases with drafts.
    Middle,
    /// A window closes: with the only token, or in the middle of the drafts.
    Boundary,
    /// Every request is at another position.
    Random,
}

/// One measurement.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub kind: LayerKind,
    pub phase: Phase,
    /// Drafts after the token of each request.
    pub drafts: u32,
    pub requests: u32,
}

impl Case {
    fn name(self) -> String {
        let kind = if self.kind == LayerKind::Csa { "decode_csa" } else { "decode_hca" };
        let phase = match self.phase {
            Phase::Middle => "mid-window",
            Phase::Boundary => "boundary",
            Phase::Random => "random phases",
        };
        match self.drafts {
            0 => format!("{kind} {phase}"),
            drafts => format!("{kind} {phase}, {drafts} drafts"),
        }
    }

    /// Tokens per request in the step.
    fn tokens(self) -> u32 {
        self.drafts + 1
    }

    /// Tokens of each request before the step.
    fn prompts(self) -> Vec<u32> {
        let mut random = SmallRng::seed_from_u64(2);
        let mut prompt = || match (self.kind, self.phase) {
            (_, Phase::Random) => random.random_range(1..=HCA_RATIO),
            (LayerKind::Hca, Phase::Boundary) => HCA_RATIO - 1 - self.drafts / 2,
            (_, Phase::Boundary) => PROMPT - self.drafts / 2,
            (_, Phase::Middle) => HCA_RATIO + 1,
        };
        (0..self.requests).map(|_| prompt()).collect()
    }

    /// Bytes that the step of a request with `prompt` tokens must move: projections read, state read and written, the
    /// entries of closing windows written, window rows read as BF16 and written as stored.
    fn request_bytes(self, config: &CacheConfig, prompt: u32) -> u64 {
        let (main, index) = (u64::from(HEAD_DIM) * 8, u64::from(INDEX_DIM) * 8);
        let row = config.main_format.row_bytes();
        let positions = prompt..prompt + self.tokens();
        let tokens = u64::from(self.tokens());
        let closed = |ratio: u32| {
            let closing = positions.clone().filter(|position| (position + 1).is_multiple_of(ratio));
            closing.count() as u64
        };
        let window = tokens * (2 * u64::from(HEAD_DIM) + row);
        window
            + match self.kind {
                LayerKind::Csa => {
                    let half = main + index;
                    let closed = closed(CSA_RATIO);
                    // The halves of tokens before the step are read once, however many windows close.
                    let older = if closed > 0 { 4 + u64::from(prompt % CSA_RATIO) } else { 0 };
                    let halves = 2 * tokens + (2 * tokens - closed) + older;
                    halves * half + closed * (row + config.index_format.row_bytes())
                }
                _ => {
                    let (sums, closed) = (main + main / 2, closed(HCA_RATIO));
                    let goes_on = u64::from(!prompt.is_multiple_of(HCA_RATIO));
                    tokens * main + (goes_on + tokens - closed) * sums + closed * row
                }
            }
    }

    /// Bytes of the weights that the step reads: a row of the position bias for each place in a window that a token has,
    /// and the norms if a window closes.
    fn weight_bytes(self) -> u64 {
        let (ratio, bias, norm) = match self.kind {
            LayerKind::Csa => (CSA_RATIO, 2 * (HEAD_DIM + INDEX_DIM), HEAD_DIM + INDEX_DIM),
            _ => (HCA_RATIO, HEAD_DIM, HEAD_DIM),
        };
        let tokens = self.prompts().into_iter().flat_map(|prompt| prompt..prompt + self.tokens());
        let places: BTreeSet<u32> = tokens.map(|position| position % ratio).collect();
        let norm = if places.contains(&(ratio - 1)) { norm } else { 0 };
        4 * (places.len() as u64 * u64::from(bias) + u64::from(norm))
    }

    /// Inputs of a step of all requests in `nodes` layers, each with its own, or of one prefill in one layer.
    pub fn projections<B: Backend>(self, stream: &Stream<B>, nodes: u64) -> Result<Projections<B>> {
        let (step, fill) = (self.step_tokens(), FILL_REQUESTS as u64 * u64::from(PROMPT));
        Projections::new(stream, &[(nodes, step), (1, fill)])
    }

    /// Tokens of the step.
    pub fn step_tokens(self) -> u64 {
        u64::from(self.requests * self.tokens())
    }

    pub fn measure<B: Backend>(self, device: &Device<B>) -> Result<Measurement> {
        let config = CacheConfig {
            max_draft: self.drafts,
            max_requests: self.requests,
            num_blocks: 2 * self.requests,
            max_context: 1024,
            max_step_tokens: FILL_REQUESTS as u32 * PROMPT,
            ..CacheConfig::new(ModelConfig::preset("tiny").context("a preset")?)
        };
        let of_request = |prompt| self.request_bytes(&config, prompt);
        let of_requests: u64 = self.prompts().into_iter().map(of_request).sum();
        let bytes = of_requests + self.weight_bytes();
        let nodes = nodes_for(bytes);
        let layers = vec![self.kind; nodes as usize];
        let model = ModelConfig { layers, mtp_layers: 0, ..config.model.clone() };
        self.measure_cache(device, CacheConfig { model, ..config }, (bytes, nodes))
    }

    /// Times a step with one launch per layer, in a cache of `nodes` layers.
    fn measure_cache<B: Backend>(
        self,
        device: &Device<B>,
        config: CacheConfig,
        (bytes, nodes): (u64, u64),
    ) -> Result<Measurement> {
        let stream = device.stream()?;
        let bucket = Bucket {
            tokens: self.requests * self.tokens(),
            tokens_per_request: self.tokens(),
            requests: self.requests,
            context: config.max_context,
        };
        let mut cache = KvCacheManager::new(device.clone(), config)?;
        let inputs = self.projections(&stream, nodes)?;
        let ids = (0..self.requests).map(|_| cache.admit()).collect::<Result<Vec<_>, _>>()?;
        let prompts: Vec<_> = ids.into_iter().zip(self.prompts()).collect();
        for prompts in prompts.chunks(FILL_REQUESTS) {
            self.prefill(&mut cache, &stream, &inputs, prompts)?;
        }
        let retained = inputs.memory().to_vec();
        let graph = cache.capture(&stream, &bucket, retained, |layers| {
            let ids = layers.layer_kinds();
            ids.zip(0..).try_for_each(|((layer, _), node)| {
                self.run_layer(layers, layer, &inputs.layer(node, self.step_tokens()))
            })
        })?;
        let tokens = self.tokens();
        let part = |&(id, start): &(RequestId, u32)| StepRequest { id, start, tokens };
        let parts: Vec<_> = prompts.iter().map(part).collect();
        let mut step = cache.begin_step(&stream, Launches::Bucket(&bucket), &parts)?;
        step.replay(&graph)?;
        let names = (self.name(), format!("{} requests", self.requests));
        let repeat = || Ok(step.repeat(&graph)?);
        let result = measure_replay(&stream, names, (bytes, nodes), repeat)?;
        drop(step);
        cache.check_faults(&stream)?;
        Ok(result)
    }

    fn prefill<B: Backend>(
        self,
        cache: &mut KvCacheManager<B>,
        stream: &Stream<B>,
        inputs: &Projections<B>,
        prompts: &[(RequestId, u32)],
    ) -> Result<(), KvError> {
        let part = |&(id, tokens): &(RequestId, u32)| StepRequest { id, start: 0, tokens };
        let parts: Vec<_> = prompts.iter().map(part).collect();
        let tokens = parts.iter().map(|part| u64::from(part.tokens)).sum();
        let inputs = inputs.layer(0, tokens);
        let mut step = cache.begin_step(stream, Launches::Eager, &parts)?;
        for (layer, _) in step.layer_kinds() {
            self.run_layer(&mut step, layer, &inputs)?;
        }
        let accept = |&(id, tokens): &(RequestId, u32)| Accepted::count(id, tokens);
        step.commit(&prompts.iter().map(accept).collect::<Vec<_>>())
    }

    /// Queues one layer.
    fn run_layer<B: Backend>(
        self,
        layers: &mut Layers<'_, B>,
        layer: LayerId,
        LayerProjections { kv, main, index }: &LayerProjections<B>,
    ) -> Result<(), KvError> {
        let main = main.inputs();
        if self.kind == LayerKind::Csa {
            let index = index.inputs();
            layers.csa(layer)?.update(&CsaInputs { kv, main, index })?.append()
        } else {
            layers.hca(layer)?.update(&HcaInputs { kv, main })?.append()
        }
    }
}

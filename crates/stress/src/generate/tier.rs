//! Generates operations on the host tier, and on the prompts that it can have.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{CacheConfig, LayerGroup};
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{Rng, SeedableRng};

use super::reuse::{kernel_reuse_config, reuse_config};
use super::{Generator, kernel_config};
use crate::model::Model;
use crate::op::{Accept, Launches, Layers, Name, Op, Part, Step, TierOp};
use crate::text::Text;

/// Bytes of host memory: from room for one checkpoint and a few blocks to room for many.
const BYTES: [u64; 4] = [700_000, 1 << 20, 2 << 20, 16 << 20];

/// A small cache with a host tier that keeps some of the evicted prefixes; it runs out of everything.
#[must_use]
pub fn tier_config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed + 1);
    let config = CacheConfig {
        max_requests: random.random_range(2..=8),
        num_blocks: random.random_range(4..=14),
        num_checkpoints: random.random_range(1..=4),
        max_step_tokens: random.random_range(100..=500),
        ..reuse_config(seed)
    };
    with_host_memory(config, seed)
}

/// As `tier_config`, for runs with kernels.
#[must_use]
pub fn kernel_tier_config(seed: u64) -> CacheConfig {
    let model = ModelConfig::preset("tiny").expect("a preset");
    with_host_memory(CacheConfig { model, ..kernel_reuse_config(seed) }, seed)
}

/// As `kernel_tier_config`, with few layers and little room. Transfers are the same in all layers of a kind.
#[must_use]
pub fn lean_tier_config(seed: u64) -> CacheConfig {
    let mut model = ModelConfig::preset("tiny").expect("a preset");
    (model.layers, model.mtp_layers) = (vec![LayerKind::Csa, LayerKind::Hca], 0);
    CacheConfig {
        model,
        max_draft: [0, 3][seed as usize % 2],
        max_requests: 2,
        num_blocks: 4,
        num_checkpoints: 2,
        max_context: 280,
        max_step_tokens: 270,
        checkpoint_interval: 128,
        host_bytes: 16 << 20,
        ..kernel_tier_config(seed)
    }
}

/// A small cache for runs with kernels. Every other seed shares prefixes, and half of these have a host tier.
#[must_use]
pub fn any_kernel_config(seed: u64) -> CacheConfig {
    match seed % 4 {
        1 => kernel_reuse_config(seed),
        3 => kernel_tier_config(seed),
        _ => kernel_config(seed),
    }
}

fn with_host_memory(config: CacheConfig, seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(!seed);
    CacheConfig { host_bytes: *BYTES.choose(&mut random).expect("not empty"), ..config }
}

impl Generator {
    /// An operation on the host tier, or one of a request whose prompt the host tier will keep.
    pub(super) fn tier(&mut self, model: &Model) -> Op {
        if self.random.random() {
            return self.visit(model);
        }
        let wanted: Vec<_> = model.wanted().collect();
        Op::Tier(match self.random.random_range(0..24) {
            0..5 if !wanted.is_empty() => TierOp::Cancel(self.one_of(&wanted)),
            0..9 => {
                self.names += 1;
                let text = self.known_text();
                self.said(&text);
                TierOp::Prefetch { name: self.names, text }
            }
            9..12 => {
                self.names += 1;
                TierOp::AdmitWaiting { request: self.names, text: self.known_text() }
            }
            12..19 => TierOp::Advance,
            19..23 => TierOp::CatchUp,
            _ if self.random.random_ratio(1, 4) => TierOp::Settle,
            _ => TierOp::Cancel(self.one_of(&wanted)),
        })
    }

    /// The next operation of a request that is admitted with a prompt, computes the part that was not reused, and is
    /// released.
    fn visit(&mut self, model: &Model) -> Op {
        self.visitors.retain(|&name| model.named(name).is_some());
        for &name in &self.visitors {
            let Some(request) = model.named(name) else { continue };
            let (progress, text) = (request.group(LayerGroup::Trunk), &request.says);
            let end = text.prompt_tokens().saturating_add(1).min(model.config().max_context);
            let tokens = end.saturating_sub(progress.tokens).min(model.config().max_step_tokens);
            if tokens > 0 && progress.is_whole_at(progress.tokens, model.max_decode_tokens()) {
                return Op::Step(whole_step(name, tokens));
            }
            return Op::Release(name);
        }
        if model.live().len() as u32 == model.config().max_requests {
            return Op::Release(self.anyone(model));
        }
        let admission = self.admit_with(model);
        if let Op::AdmitWith { request, .. } = admission {
            self.visitors.push(request);
        }
        admission
    }

    /// Records a prompt.
    pub(super) fn said(&mut self, text: &Text) {
        self.said.retain(|said| said != text);
        self.said.truncate(11);
        self.said.insert(0, text.clone());
    }

    /// Mostly an earlier prompt, and often the last one.
    pub(super) fn known_text(&mut self) -> Text {
        let all = if self.random.random_ratio(1, 3) { 1 } else { self.said.len() };
        let known = self.said.iter().take(all).choose(&mut self.random).cloned();
        match known.filter(|_| self.random.random_ratio(7, 8)) {
            Some(text) => text,
            None => self.text(),
        }
    }
}

/// A step of one request with genuine tokens only.
fn whole_step(request: Name, tokens: u32) -> Step {
    let (ahead, accepted) = (0, tokens);
    Step {
        group: LayerGroup::Trunk,
        launches: Launches::Eager,
        parts: vec![Part { request, ahead, tokens, genuine: tokens }],
        layers: Layers::All,
        meanwhile: None,
        commits: vec![vec![Accept { request, accepted, told: tokens }]],
    }
}

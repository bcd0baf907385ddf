//! The routers of a model's layers.

use anyhow::{Context, Result};
use dsv4_kv::LayerId;
use dsv4_kv::device::{Backend, Buffer, Memory, Stream};
use dsv4_kv_router::{Batch, ChoiceWeights, Router, RouterConfig, RouterWeights};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::trunk::Tensors;

/// The routers of a model's layers, all of the learned kind.
pub struct Routers<B: Backend> {
    routers: Vec<Router<B>>,
    token: Buffer<B, i32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Routers<B> {
    /// One router for each of `layers` layers of the model called `name`, with random gates.
    pub fn new(stream: &Stream<B>, name: &str, layers: usize, tokens: u32) -> Result<Self> {
        let config = RouterConfig::preset(name).context("a preset")?;
        let mut random = SmallRng::seed_from_u64(5);
        let values = config.experts as usize * config.hidden_size as usize;
        let gate: Vec<bf16> =
            (0..values).map(|_| bf16::from_f32(random.random_range(-0.1..0.1))).collect();
        let bias: Vec<f32> = (0..config.experts).map(|_| random.random_range(0.0..1.0)).collect();
        let choice = ChoiceWeights::Bias(bias.into());
        let weights = RouterWeights { gate: gate.into(), choice };
        let router = |_| Router::new(stream, &config, &weights, tokens);
        let selected = u64::from(tokens) * u64::from(config.selected);
        let device = stream.device();
        Ok(Self {
            routers: (0..layers).map(router).collect::<Result<_, _>>()?,
            token: stream.upload_new("tokens", &vec![1; tokens as usize])?,
            ids: device.allocate("experts", selected)?,
            weights: device.allocate("weights of experts", selected)?,
        })
    }

    /// Queues the router of a layer for the step's tokens.
    pub fn queue(
        &mut self,
        stream: &Stream<B>,
        tensors: &Tensors<B>,
        layer: LayerId,
    ) -> Result<()> {
        let Self { routers, token, ids, weights } = self;
        let batch = Batch { tokens: tensors.tokens, token, ids, weights };
        let [_, hidden] = &tensors.layer(layer).activations;
        Ok(routers[layer.0 as usize].route(stream, hidden, &batch)?)
    }

    /// Reports inputs that kernels refused.
    pub fn check(&mut self, stream: &Stream<B>) -> Result<()> {
        Ok(self.routers.iter_mut().try_for_each(|router| router.check_faults(stream))?)
    }

    /// All memory of the routers, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let routers = self.routers.iter().flat_map(Router::memory);
        let answers = [self.token.memory(), self.ids.memory(), self.weights.memory()];
        routers.chain(answers).collect()
    }
}

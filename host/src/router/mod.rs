//! The MoE router of a layer: from hidden states or logits to experts and weights.
//!
//! Independent of the cache. How a router chooses is fixed when it is made: by score, or by token id
//! in a model's first layers.

mod config;
mod error;
mod weights;

use std::sync::Arc;

use bytemuck::Pod;
use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS};

pub use config::{RouterConfig, RouterMode};
pub use error::RouterError;
pub use weights::{Choice, RouterWeights};

use crate::device::ops::{self, DecodeScratch, Gate, HashTable, Routed, Selection};
use crate::device::{Buffer, Device};

/// A layer's router on a device: weights, and all memory its launches need.
pub struct Router<D: Device> {
    device: D,
    selection: Selection,
    hidden: u32,
    max_tokens: u32,
    gate: Buffer<D, u16>,
    choice: DeviceChoice<D>,
    /// `[64, experts]`, where the blocks of a decode launch meet.
    activations: Buffer<D, f32>,
    arrivals: Buffer<D, u32>,
    /// `[max_tokens, experts]`, for batches that are no decode batches.
    logits: Buffer<D, f32>,
    faults: Buffer<D, u32>,
}

/// [`Choice`] on the device.
enum DeviceChoice<D: Device> {
    Bias(Buffer<D, f32>),
    Table { table: Buffer<D, i32>, vocabulary: u32 },
}

/// A batch to route, and where the answer goes.
pub struct Batch<'a, D: Device> {
    /// Tokens.
    pub tokens: u32,
    /// `[tokens]` token ids, -1 = padding. A router that chooses by score only looks whether it is
    /// negative, so that any per-token array with that meaning will do.
    pub token: &'a Buffer<D, i32>,
    /// `[tokens, selected]`: each token's experts, best first or as the table lists them; -1 for
    /// padding.
    pub ids: &'a Buffer<D, i32>,
    /// `[tokens, selected]` f32: their weights, which add up to the model's scaling; 0 for padding.
    pub weights: &'a Buffer<D, f32>,
}

impl<D: Device> Router<D> {
    /// A router with these weights, for batches of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`RouterConfig::validate`]; [`RouterError::Shape`] and [`RouterError::NoSuchExpert`] for weights
    /// that are not of that configuration; [`RouterError::Device`].
    pub fn new(
        device: &D,
        stream: &D::Stream,
        config: &RouterConfig,
        weights: &RouterWeights<'_>,
        max_tokens: u32,
    ) -> Result<Self, RouterError> {
        config.validate()?;
        weights.check(config)?;
        let experts = u64::from(config.experts);
        let choice = match &weights.choice {
            Choice::Bias(bias) => DeviceChoice::Bias(upload(device, stream, "gate bias", bias)?),
            Choice::Table(table) => DeviceChoice::Table {
                table: upload(device, stream, "experts of token ids", table)?,
                vocabulary: config.vocabulary,
            },
        };
        let more = if max_tokens > DECODE_TOKENS { u64::from(max_tokens) } else { 0 };
        Ok(Self {
            device: device.clone(),
            selection: config.selection()?,
            hidden: config.hidden_size,
            max_tokens,
            gate: upload(device, stream, "gate weights", &weights.gate)?,
            choice,
            activations: device
                .allocate("router activations", u64::from(DECODE_TOKENS) * experts)?,
            arrivals: device.allocate("router arrivals", DECODE_SLICES.into())?,
            logits: device.allocate("router logits", more * experts)?,
            faults: device.allocate("router fault word", 1)?,
        })
    }

    /// How it chooses.
    #[must_use]
    pub fn mode(&self) -> RouterMode {
        match self.choice {
            DeviceChoice::Bias(_) => RouterMode::Dense,
            DeviceChoice::Table { .. } => RouterMode::Hash,
        }
    }

    /// What a graph that captured [`Self::route`] must retain, besides the batch.
    #[must_use]
    pub fn memory(&self) -> Vec<Arc<D::Memory>> {
        let choice = match &self.choice {
            DeviceChoice::Bias(bias) => bias.memory(),
            DeviceChoice::Table { table, .. } => table.memory(),
        };
        let words = [self.arrivals.memory(), self.faults.memory()];
        let floats = [self.activations.memory(), self.logits.memory()];
        words.into_iter().chain(floats).chain([self.gate.memory(), choice]).collect()
    }

    /// Queues the routing of a batch from its hidden states, `x` (`[tokens, hidden]` BF16). Allocates
    /// nothing and waits for nothing. Two calls on one router must follow each other in one stream.
    ///
    /// Up to 64 tokens are one launch. A larger batch takes the logits from tiled products first.
    ///
    /// # Errors
    /// [`RouterError::TooManyTokens`]; [`RouterError::Device`] if a tensor is too short, or a launch
    /// failed.
    pub fn route(
        &self,
        stream: &D::Stream,
        x: &Buffer<D, u16>,
        batch: &Batch<'_, D>,
    ) -> Result<(), RouterError> {
        let Self { device, selection, max_tokens, .. } = self;
        let Batch { tokens, token, .. } = *batch;
        if tokens > *max_tokens {
            return Err(RouterError::TooManyTokens { tokens, most: *max_tokens });
        }
        let gate = Gate { weight: &self.gate, hidden: self.hidden };
        if tokens > DECODE_TOKENS {
            self.check(batch)?;
            ops::router_logits(device, stream, *selection, tokens, x, &gate, &self.logits)?;
            return self.route_logits(stream, &self.logits, batch);
        }
        let scratch = DecodeScratch { activations: &self.activations, arrivals: &self.arrivals };
        let routed = self.routed(batch);
        match &self.choice {
            DeviceChoice::Bias(bias) => ops::dense_router_decode(
                device, stream, *selection, tokens, x, &gate, bias, token, &scratch, &routed,
            ),
            DeviceChoice::Table { table, vocabulary } => {
                let table = HashTable { table, vocabulary: *vocabulary };
                ops::hash_router_decode(
                    device, stream, *selection, tokens, x, &gate, &table, token, &scratch, &routed,
                )
            }
        }?;
        Ok(())
    }

    /// Queues the routing of a batch of any size from logits (`[tokens, experts]` f32) that the caller
    /// made.
    ///
    /// # Errors
    /// [`RouterError::Device`] if a tensor is too short, or the launch failed.
    pub fn route_logits(
        &self,
        stream: &D::Stream,
        logits: &Buffer<D, f32>,
        batch: &Batch<'_, D>,
    ) -> Result<(), RouterError> {
        let (device, selection) = (&self.device, self.selection);
        let (tokens, token, routed) = (batch.tokens, batch.token, self.routed(batch));
        match &self.choice {
            DeviceChoice::Bias(bias) => ops::activation_topk(
                device, stream, selection, tokens, logits, bias, token, &routed,
            ),
            DeviceChoice::Table { table, vocabulary } => {
                let table = HashTable { table, vocabulary: *vocabulary };
                ops::hash_router(device, stream, selection, tokens, logits, &table, token, &routed)
            }
        }?;
        Ok(())
    }

    /// Waits for the stream, and reports what kernels refused since the last check.
    ///
    /// # Errors
    /// [`RouterError::Refused`]; [`RouterError::Device`].
    pub fn check_faults(&self, stream: &D::Stream) -> Result<(), RouterError> {
        let mut count = [0];
        self.device.download(stream, &self.faults, 0, &mut count)?;
        match count {
            [0] => Ok(()),
            [count] => {
                self.device.upload(stream, &[0], &self.faults, 0)?;
                Err(RouterError::Refused { count })
            }
        }
    }

    /// Refuses a batch whose answer would not fit before the first of its launches is queued.
    fn check(&self, batch: &Batch<'_, D>) -> Result<(), RouterError> {
        Ok(ops::check_routed(self.selection, batch.tokens, batch.token, &self.routed(batch))?)
    }

    fn routed<'a>(&'a self, batch: &Batch<'a, D>) -> Routed<'a, D> {
        Routed { ids: batch.ids, weights: batch.weights, faults: &self.faults }
    }
}

fn upload<D: Device, T: Pod>(
    device: &D,
    stream: &D::Stream,
    label: &'static str,
    values: &[T],
) -> Result<Buffer<D, T>, RouterError> {
    let buffer = device.allocate(label, values.len() as u64)?;
    device.upload(stream, values, &buffer, 0)?;
    Ok(buffer)
}

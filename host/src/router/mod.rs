//! The MoE router of a layer: from hidden states or logits to experts and weights.
//!
//! Independent of the cache. How a router chooses is fixed when it is made: by score, or by token id
//! in a model's first layers.

mod config;
mod error;
mod weights;

use std::ops::Range;

use bytemuck::Pod;
use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS};

pub use config::{RouterConfig, RouterMode};
pub use error::RouterError;
pub use weights::{Choice, RouterWeights};

use crate::device::{Backend, Buffer, DeviceError, Memory, Stream};
use crate::ops::{
    self, DecodeRouting, DecodeScratch, Gate, GateProduct, HashTable, LogitsRouting, Routed,
    Selection,
};

/// Tokens up to which a batch is routed in parts of [`DECODE_TOKENS`]: for more, one tiled product costs
/// less than so many launches (docs/performance.md).
const MOST_IN_PARTS: u32 = 512;

/// A layer's router on a device: weights, and all memory its launches need.
pub struct Router<B: Backend> {
    selection: Selection,
    hidden: u32,
    max_tokens: u32,
    gate: Buffer<B, u16>,
    choice: DeviceChoice<B>,
    /// `[64, experts]`, where the blocks of a decode launch meet.
    activations: Buffer<B, f32>,
    arrivals: Buffer<B, u32>,
    /// `[max_tokens, experts]`, for batches that are no decode batches.
    logits: Buffer<B, f32>,
    faults: Buffer<B, u32>,
}

/// [`Choice`] on the device.
enum DeviceChoice<B: Backend> {
    Bias(Buffer<B, f32>),
    Table { table: Buffer<B, i32>, vocabulary: u32 },
}

/// A batch to route, and where the answer goes.
pub struct Batch<'a, B: Backend> {
    /// Tokens.
    pub tokens: u32,
    /// `[tokens]` token ids, -1 = padding. A router that chooses by score only looks whether it is
    /// negative, so that any per-token array with that meaning will do.
    pub token: &'a Buffer<B, i32>,
    /// `[tokens, selected]`: each token's experts, best first or as the table lists them; -1 for
    /// padding.
    pub ids: &'a Buffer<B, i32>,
    /// `[tokens, selected]` f32: their weights, which add up to the model's scaling; 0 for padding.
    pub weights: &'a Buffer<B, f32>,
}

/// A part of a batch, one launch.
struct Part<B: Backend> {
    tokens: u32,
    x: Buffer<B, u16>,
    token: Buffer<B, i32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Router<B> {
    /// A router with these weights, for batches of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`RouterConfig::validate`]; [`RouterError::Shape`] and [`RouterError::NoSuchExpert`] for weights
    /// that are not of that configuration; [`RouterError::Device`].
    pub fn new(
        stream: &Stream<B>,
        config: &RouterConfig,
        weights: &RouterWeights<'_>,
        max_tokens: u32,
    ) -> Result<Self, RouterError> {
        config.validate()?;
        weights.check(config)?;
        let (device, experts) = (stream.device(), u64::from(config.experts));
        let choice = match &weights.choice {
            Choice::Bias(bias) => DeviceChoice::Bias(upload(stream, "gate bias", bias)?),
            Choice::Table(table) => DeviceChoice::Table {
                table: upload(stream, "experts of token ids", table)?,
                vocabulary: config.vocabulary,
            },
        };
        let more = if max_tokens > MOST_IN_PARTS { u64::from(max_tokens) } else { 0 };
        Ok(Self {
            selection: config.selection()?,
            hidden: config.hidden_size,
            max_tokens,
            gate: upload(stream, "gate weights", &weights.gate)?,
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
    pub fn memory(&self) -> Vec<Memory<B>> {
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
    /// Up to 64 tokens are one launch, up to 512 one for each 64. A larger batch takes the logits from a
    /// tiled product first.
    ///
    /// # Errors
    /// [`RouterError::TooManyTokens`]; [`RouterError::Device`] if a tensor is too short, or a launch
    /// failed.
    pub fn route(
        &self,
        stream: &Stream<B>,
        x: &Buffer<B, u16>,
        batch: &Batch<'_, B>,
    ) -> Result<(), RouterError> {
        let (tokens, most) = (batch.tokens, self.max_tokens);
        if tokens > most {
            return Err(RouterError::TooManyTokens { tokens, most });
        }
        let gate = Gate { weight: &self.gate, hidden: self.hidden };
        self.routed(batch).check(self.selection, tokens, batch.token)?;
        if tokens > MOST_IN_PARTS {
            let (selection, gate, logits) = (self.selection, &gate, &self.logits);
            ops::router_logits(stream, &GateProduct { selection, tokens, x, gate, logits })?;
            return self.route_logits(stream, logits, batch);
        }
        gate.check(self.selection, x, tokens)?;
        for first in (0..tokens).step_by(DECODE_TOKENS as usize) {
            let part = self.part(x, batch, first..tokens.min(first + DECODE_TOKENS));
            self.route_part(stream, &gate, &part)?;
        }
        Ok(())
    }

    /// What of a batch that was checked the tokens `range` have.
    fn part(&self, x: &Buffer<B, u16>, batch: &Batch<'_, B>, range: Range<u32>) -> Part<B> {
        let of = |per_token: u32| {
            let [first, tokens] = [range.start, range.end - range.start].map(u64::from);
            (first * u64::from(per_token), tokens * u64::from(per_token))
        };
        const CHECKED: &str = "the batch was checked";
        let (selected, hidden, one) = (of(self.selection.selected()), of(self.hidden), of(1));
        Part {
            tokens: range.end - range.start,
            x: x.slice(hidden.0, hidden.1).expect(CHECKED),
            token: batch.token.slice(one.0, one.1).expect(CHECKED),
            ids: batch.ids.slice(selected.0, selected.1).expect(CHECKED),
            weights: batch.weights.slice(selected.0, selected.1).expect(CHECKED),
        }
    }

    /// Queues the routing of up to [`DECODE_TOKENS`] tokens.
    fn route_part(
        &self,
        stream: &Stream<B>,
        gate: &Gate<'_, B>,
        part: &Part<B>,
    ) -> Result<(), DeviceError> {
        let Part { tokens, x, token, ids, weights } = part;
        let scratch = &DecodeScratch { activations: &self.activations, arrivals: &self.arrivals };
        let routed = &Routed { ids, weights, faults: &self.faults };
        let (selection, tokens) = (self.selection, *tokens);
        let routing = DecodeRouting { selection, tokens, x, gate, token, scratch, routed };
        match &self.choice {
            DeviceChoice::Bias(bias) => ops::dense_router_decode(stream, &routing, bias),
            DeviceChoice::Table { table, vocabulary } => {
                let table = HashTable { table, vocabulary: *vocabulary };
                ops::hash_router_decode(stream, &routing, &table)
            }
        }
    }

    /// Queues the routing of a batch of any size from logits (`[tokens, experts]` f32) that the caller
    /// made.
    ///
    /// # Errors
    /// [`RouterError::Device`] if a tensor is too short, or the launch failed.
    pub fn route_logits(
        &self,
        stream: &Stream<B>,
        logits: &Buffer<B, f32>,
        batch: &Batch<'_, B>,
    ) -> Result<(), RouterError> {
        let (selection, routed) = (self.selection, &self.routed(batch));
        let (tokens, token) = (batch.tokens, batch.token);
        let routing = LogitsRouting { selection, tokens, logits, token, routed };
        match &self.choice {
            DeviceChoice::Bias(bias) => ops::activation_topk(stream, &routing, bias),
            DeviceChoice::Table { table, vocabulary } => {
                let table = HashTable { table, vocabulary: *vocabulary };
                ops::hash_router(stream, &routing, &table)
            }
        }?;
        Ok(())
    }

    /// Waits for the stream, and reports what kernels refused since the last check.
    ///
    /// # Errors
    /// [`RouterError::Refused`]; [`RouterError::Device`].
    pub fn check_faults(&self, stream: &Stream<B>) -> Result<(), RouterError> {
        let mut count = [0];
        stream.download(&self.faults, 0, &mut count)?;
        match count {
            [0] => Ok(()),
            [count] => {
                stream.upload(&[0], &self.faults, 0)?;
                Err(RouterError::Refused { count })
            }
        }
    }

    fn routed<'a>(&'a self, batch: &Batch<'a, B>) -> Routed<'a, B> {
        Routed { ids: batch.ids, weights: batch.weights, faults: &self.faults }
    }
}

fn upload<B: Backend, T: Pod>(
    stream: &Stream<B>,
    label: &'static str,
    values: &[T],
) -> Result<Buffer<B, T>, RouterError> {
    let buffer = stream.device().allocate(label, values.len() as u64)?;
    stream.upload(values, &buffer, 0)?;
    Ok(buffer)
}

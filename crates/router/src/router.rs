//! A layer's router on a device.

use dsv4_kv_device::shape::check_length;
use dsv4_kv_device::{Backend, Buffer, Memory, Stream, View, bf16};
use dsv4_kv_model_files::{self as model_files, ModelFiles};
use kv_layout::router::DECODE_TOKENS;

use crate::config::RouterConfig;
use crate::error::RouterError;
use crate::ops::{self, ExpertSelection, GateProduct, HashTable, Routing};
use crate::scratch::Scratch;
use crate::selection::Selection;
use crate::weights::{ChoiceWeights, RouterWeights};

/// A layer's router on a device: its weights, and all memory that its launches need.
///
/// Its launches share memory, so calls take `&mut self`. A call in another stream than the last call is ordered after
/// that call on the device, without a wait of the host.
pub struct Router<B: Backend> {
    selection: Selection,
    hidden: u32,
    max_tokens: u32,
    /// `[experts, hidden]` BF16.
    gate: View<B, bf16>,
    choice: ExpertSelection<B>,
    scratch: Scratch<B>,
    /// `[1]` u32: number of refusals by kernels.
    faults: Buffer<B, u32>,
}

/// A batch to route, and where the result goes.
pub struct Batch<'a, B: Backend> {
    /// Number of tokens.
    pub tokens: u32,
    /// `[tokens]` i32: token ids; -1 for padding. A router that chooses by score only checks whether it is negative, so
    /// any per-token array with that meaning will do.
    pub token: &'a View<B, i32>,
    /// `[tokens, selected]` i32: each token's experts, best first or in the order of the table; -1 for padding.
    pub ids: &'a Buffer<B, i32>,
    /// `[tokens, selected]` f32: their weights, which add up to the model's scaling; 0 for padding.
    pub weights: &'a Buffer<B, f32>,
}

impl<B: Backend> Router<B> {
    /// A router with these weights, for batches of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`RouterConfig::validate`]; [`RouterError::Shape`] and [`RouterError::NoSuchExpert`] for weights that do not
    /// match the configuration; [`RouterError::Device`].
    pub fn new(
        stream: &Stream<B>,
        config: &RouterConfig,
        weights: &RouterWeights<'_>,
        max_tokens: u32,
    ) -> Result<Self, RouterError> {
        config.validate()?;
        weights.check(config)?;
        let choice = match &weights.choice {
            ChoiceWeights::Bias(bias) => {
                ExpertSelection::Bias(stream.upload_new("gate bias", bias)?.into())
            }
            ChoiceWeights::Table(table) => ExpertSelection::Table(HashTable {
                table: stream.upload_new("experts of token ids", table)?.into(),
                vocabulary: config.vocabulary,
            }),
        };
        let selection = config.selection()?;
        let logits = if max_tokens > DECODE_TOKENS { max_tokens } else { 0 };
        Ok(Self {
            selection,
            hidden: config.hidden_size,
            max_tokens,
            gate: stream.upload_new("gate weights", &weights.gate)?.into(),
            choice,
            scratch: Scratch::new(stream, selection, logits)?,
            faults: stream.device().allocate("router fault word", 1)?,
        })
    }

    /// The router of layer `layer` of a model, for batches of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`RouterWeights::of_layer`] and [`Self::new`].
    pub fn of_layer(
        stream: &Stream<B>,
        model_files: &ModelFiles,
        layer: u32,
        max_tokens: u32,
    ) -> Result<Self, RouterError> {
        let weights = RouterWeights::of_layer(model_files, layer)?;
        Self::new(stream, &RouterConfig::from(model_files.config()), &weights, max_tokens)
    }

    /// How it chooses experts.
    #[must_use]
    pub fn mode(&self) -> model_files::Routing {
        match self.choice {
            ExpertSelection::Bias(_) => model_files::Routing::Learned,
            ExpertSelection::Table(_) => model_files::Routing::Hash,
        }
    }

    /// The memory that a graph that captured [`Self::route`] must retain, besides that of the batch.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        let constant = [self.gate.memory(), self.choice.memory(), self.faults.memory()];
        constant.into_iter().chain(self.scratch.memory()).collect()
    }

    /// Queues the routing of a batch from its hidden states, `x` (`[tokens, hidden]` BF16). Allocates
    /// nothing and waits for nothing.
    ///
    /// Up to 64 tokens take one launch. For a larger batch, a tiled product computes the logits first. On one device a
    /// token gets the same experts, and weights with the same bits, in every batch.
    ///
    /// A graph that captured this call uses the router's memory at each replay: see [`Self::follow`].
    ///
    /// ```
    /// use dsv4_kv_device::{EmuDevice, EmuOptions};
    /// use dsv4_kv_router::{Batch, ChoiceWeights, Router, RouterConfig, RouterWeights, bf16};
    ///
    /// let device = EmuDevice::new(EmuOptions::default());
    /// let stream = device.stream()?;
    /// // 64 experts of which a token gets six. All logits are 0 here, so that biases choose: the last experts.
    /// let config = RouterConfig::preset("tiny").expect("a preset");
    /// let gate = vec![bf16::ZERO; (config.experts * config.hidden_size) as usize];
    /// let bias = (0..config.experts).map(|expert| expert as f32).collect();
    /// let weights = RouterWeights { gate: gate.into(), choice: ChoiceWeights::Bias(bias) };
    /// let mut router = Router::new(&stream, &config, &weights, 2)?;
    ///
    /// // Two tokens, the second of which is padding.
    /// let x = device.allocate::<bf16>("hidden states", 2 * u64::from(config.hidden_size))?;
    /// stream.fill(&x, 0)?;
    /// let token = device.allocate("tokens", 2)?;
    /// stream.upload(&[7, -1], &token, 0)?;
    /// let (ids, weights) = (device.allocate("experts", 12)?, device.allocate("weights", 12)?);
    /// router.route(&stream, &x, &Batch { tokens: 2, token: &token, ids: &ids, weights: &weights })?;
    ///
    /// let (mut experts, mut shares) = ([0; 12], [0.0; 12]);
    /// stream.download(&ids, 0, &mut experts)?;
    /// stream.download(&weights, 0, &mut shares)?;
    /// assert_eq!(experts, [63, 62, 61, 60, 59, 58, -1, -1, -1, -1, -1, -1]);
    /// assert!((shares[0] - config.scaling / 6.0).abs() < 1e-6 && shares[6] == 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`RouterError::TooManyTokens`]; [`RouterError::Device`] if a tensor is too short, or a launch failed. The router
    /// can still be used afterwards.
    pub fn route(
        &mut self,
        stream: &Stream<B>,
        x: &View<B, bf16>,
        batch: &Batch<'_, B>,
    ) -> Result<(), RouterError> {
        let (tokens, most) = (batch.tokens, self.max_tokens);
        if tokens > most {
            return Err(RouterError::TooManyTokens { tokens, most });
        }
        let Self { selection, hidden, gate, choice, scratch, faults, .. } = self;
        let (selection, hidden) = (*selection, *hidden);
        let &Batch { token, ids, weights, .. } = batch;
        let routing = Routing { selection, choice, tokens, token, ids, weights, faults };
        let product = GateProduct { x, gate, hidden };
        // Check all lengths first, so that either all launches are queued or none.
        check_length("hidden states", x.len(), u64::from(tokens) * u64::from(hidden))?;
        check_length("tokens", token.len(), tokens.into())?;
        check_length("expert ids", ids.len(), selection.of_selected(tokens))?;
        check_length("expert weights", weights.len(), selection.of_selected(tokens))?;
        scratch.queue(stream, |scratch| {
            if tokens <= DECODE_TOKENS {
                return ops::route_decode(stream, &routing, &product, scratch.decode());
            }
            let logits = scratch.logits();
            ops::gate_logits(stream, selection, tokens, &product, logits)?;
            ops::route_logits(stream, &routing, logits)
        })
    }

    /// Queues the routing of a batch of any size from the caller's logits, `[tokens, experts]` f32.
    ///
    /// # Errors
    /// [`RouterError::Device`] if a tensor is too short, or the launch failed.
    pub fn route_logits(
        &mut self,
        stream: &Stream<B>,
        logits: &View<B, f32>,
        batch: &Batch<'_, B>,
    ) -> Result<(), RouterError> {
        let Self { selection, choice, scratch, faults, .. } = self;
        let (selection, &Batch { tokens, token, ids, weights }) = (*selection, batch);
        let routing = Routing { selection, choice, tokens, token, ids, weights, faults };
        scratch.queue(stream, |_| ops::route_logits(stream, &routing, logits))
    }

    /// Orders all later work in `stream` after the router's last call, if that was in another stream. From then on
    /// `stream` counts as the stream of the last call. [`Self::route`] does this itself, but a graph that captured it
    /// does not: call this before each replay in another stream. After a replay that failed call
    /// [`Self::check_faults`] before the next one: it zeroes what the failed launch has counted.
    ///
    /// # Errors
    /// [`RouterError::Device`], also while a stream of the device is being captured.
    pub fn follow(&mut self, stream: &Stream<B>) -> Result<(), RouterError> {
        self.scratch.follow(stream)
    }

    /// Waits for the router's calls and for `stream`, and reports the refusals of kernels since the last check.
    ///
    /// # Errors
    /// [`RouterError::Unfinished`] if the results since the last check cannot be trusted: route these batches again;
    /// [`RouterError::Refused`]; [`RouterError::Device`]. Each call reports one error, once; the next call reports the
    /// next.
    pub fn check_faults(&mut self, stream: &Stream<B>) -> Result<(), RouterError> {
        self.scratch.follow(stream)?;
        self.scratch.check(stream)?;
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
}

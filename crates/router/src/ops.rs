//! Single launches as safe functions. [`Stream::launch`] checks everything that the kernel table states about a
//! kernel's arguments, lengths included; this module checks the other requirements of the kernels. Work in one stream
//! runs in order; if two streams use a buffer, the caller orders them.

use dsv4_kv_device::{Backend, Buffer, Memory, Stream, View, bf16};
use kernels_gpu::launch::{
    ActivationTopk, DenseRouterDecode, HashRouter, HashRouterDecode, RouterLogits,
};
use kernels_gpu::params::{
    ActivationTopkParams, DenseRouterDecodeParams, HashRouterDecodeParams, HashRouterParams,
    RouterLogitsParams,
};
use kv_layout::router::{DECODE_TOKENS, HIDDEN_STEP, LogitsSplit};

use crate::error::RouterError;
use crate::selection::Selection;

/// What chooses a token's experts, in device memory.
#[derive(Clone)]
pub enum ExpertSelection<B: Backend> {
    /// Scores: the activations of the logits plus this bias, `[experts]` f32.
    Bias(View<B, f32>),
    /// A table by token id.
    Table(HashTable<B>),
}

/// The experts of a layer that looks them up by token id.
#[derive(Clone)]
pub struct HashTable<B: Backend> {
    /// `[vocabulary, selected]` i32: the experts of each token id.
    pub table: View<B, i32>,
    /// Number of token ids.
    pub vocabulary: u32,
}

impl<B: Backend> ExpertSelection<B> {
    /// Its memory, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Memory<B> {
        match self {
            Self::Bias(bias) => bias.memory(),
            Self::Table(HashTable { table, .. }) => table.memory(),
        }
    }
}

/// Tokens to route, how their experts are chosen, and where the result goes.
///
/// Kernels count in `faults` what they refuse: logits and biases that are NaN, which rank last, and token ids and
/// experts of a table that are out of range, which get expert -1 and weight 0.
pub struct Routing<'a, B: Backend> {
    /// The number of experts of the layer and of a token.
    pub selection: Selection,
    /// How experts are chosen.
    pub choice: &'a ExpertSelection<B>,
    /// Number of tokens.
    pub tokens: u32,
    /// `[tokens]` i32: token ids; -1 for padding. If experts are chosen by score, only the sign matters.
    pub token: &'a View<B, i32>,
    /// `[tokens, selected]` i32: experts, best first or in the order of the table; -1 for padding.
    pub ids: &'a Buffer<B, i32>,
    /// `[tokens, selected]` f32: their weights; 0 for padding.
    pub weights: &'a Buffer<B, f32>,
    /// `[1]` u32: kernels add the number of refusals to it.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues the routing of tokens by their `logits` (`[tokens, experts]` f32): `activation_topk_*` or
/// `hash_router`.
///
/// # Errors
/// [`RouterError::Device`] for a buffer shorter than its shape, and as [`Stream::launch`].
pub fn route_logits<B: Backend>(
    stream: &Stream<B>,
    routing: &Routing<'_, B>,
    logits: &View<B, f32>,
) -> Result<(), RouterError> {
    let Routing { selection, tokens, choice, .. } = *routing;
    if tokens == 0 {
        return Ok(());
    }
    let (experts, selected) = (selection.experts(), selection.selected());
    let (logits, token, faults) = (logits.ptr(), routing.token.ptr(), routing.faults.ptr_mut());
    let (ids, weights) = (routing.ids.ptr_mut(), routing.weights.ptr_mut());
    let scaling_bits = selection.scaling_bits();
    match choice {
        ExpertSelection::Bias(bias) => {
            let (bias, width) = (bias.ptr(), selection.width());
            let params = ActivationTopkParams { tokens, experts, selected, scaling_bits };
            let operation = ActivationTopk { logits, bias, token, ids, weights, faults, params };
            // SAFETY: the launch checks every buffer.
            unsafe { stream.launch(width, &operation)? };
        }
        ExpertSelection::Table(HashTable { table, vocabulary }) => {
            let (table, vocabulary) = (table.ptr(), *vocabulary);
            let params = HashRouterParams { tokens, experts, selected, vocabulary, scaling_bits };
            let operation = HashRouter { token, table, logits, ids, weights, faults, params };
            // SAFETY: as above; the kernel refuses token ids and experts that the shapes do not have.
            unsafe { stream.launch((), &operation)? };
        }
    }
    Ok(())
}

/// The hidden states of a batch, and the gate of a layer: their product is the logits.
pub struct GateProduct<'a, B: Backend> {
    /// `[tokens, hidden]` BF16.
    pub x: &'a View<B, bf16>,
    /// `[experts, hidden]` BF16.
    pub gate: &'a View<B, bf16>,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
}

/// Refuses a width of the hidden state that no kernel supports.
pub(crate) fn check_hidden(hidden: u32) -> Result<(), RouterError> {
    if hidden == 0 || !hidden.is_multiple_of(HIDDEN_STEP) {
        return Err(RouterError::HiddenSize { hidden, multiple: HIDDEN_STEP });
    }
    Ok(())
}

/// Queues `router_logits_*`: the product of the hidden states of `tokens` tokens with the gate, into `logits`
/// (`[tokens, experts]` f32).
///
/// # Errors
/// [`RouterError::HiddenSize`]; [`RouterError::Device`] for a buffer shorter than its shape, and as
/// [`Stream::launch`].
pub fn gate_logits<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    product: &GateProduct<'_, B>,
    logits: &Buffer<B, f32>,
) -> Result<(), RouterError> {
    if tokens == 0 {
        return Ok(());
    }
    check_hidden(product.hidden)?;
    let (x, gate, logits) = (product.x.ptr(), product.gate.ptr(), logits.ptr_mut());
    let experts = selection.experts();
    let params = RouterLogitsParams { tokens, experts, hidden: product.hidden };
    let split = LogitsSplit::of(tokens, experts);
    // SAFETY: the launch checks every buffer.
    unsafe { stream.launch(split, &RouterLogits { x, gate, logits, params })? };
    Ok(())
}

/// Where the thread blocks of a decode launch exchange results. Only one launch at a time may use it: if two overlap,
/// the results of both are wrong, and those of all later launches until `arrivals` is zeroed.
pub struct DecodeScratch<B: Backend> {
    /// `[64, experts]` f32: activations.
    pub activations: Buffer<B, f32>,
    /// `[8]` u32: number of thread blocks that have stored their activations. Zero before and after a launch.
    pub arrivals: Buffer<B, u32>,
}

/// Queues the routing of up to 64 tokens by their hidden states, in one launch: `dense_router_decode_*` or
/// `hash_router_decode_*`.
///
/// # Errors
/// [`RouterError::DecodeTokens`]; [`RouterError::HiddenSize`]; [`RouterError::Device`] for a buffer shorter
/// than its shape, and as [`Stream::launch`].
pub fn route_decode<B: Backend>(
    stream: &Stream<B>,
    routing: &Routing<'_, B>,
    product: &GateProduct<'_, B>,
    scratch: &DecodeScratch<B>,
) -> Result<(), RouterError> {
    let Routing { selection, tokens, choice, .. } = *routing;
    if tokens == 0 {
        return Ok(());
    }
    if tokens > DECODE_TOKENS {
        return Err(RouterError::DecodeTokens { tokens, most: DECODE_TOKENS });
    }
    check_hidden(product.hidden)?;
    let decode = Decode { routing, product, scratch };
    match choice {
        ExpertSelection::Bias(bias) => {
            // SAFETY: the launch checks every buffer.
            unsafe { stream.launch(selection.width(), &decode.dense(bias))? };
        }
        ExpertSelection::Table(table) => {
            // SAFETY: as above; the kernel refuses token ids and experts that the shapes do not have.
            unsafe { stream.launch(selection.width(), &decode.hash(table))? };
        }
    }
    Ok(())
}

/// What a decode launch takes, however a layer chooses its experts.
struct Decode<'a, B: Backend> {
    routing: &'a Routing<'a, B>,
    product: &'a GateProduct<'a, B>,
    scratch: &'a DecodeScratch<B>,
}

impl<B: Backend> Decode<'_, B> {
    fn dense(&self, bias: &View<B, f32>) -> DenseRouterDecode {
        let Self { routing, product, scratch } = self;
        let selection = routing.selection;
        DenseRouterDecode {
            x: product.x.ptr(),
            gate: product.gate.ptr(),
            bias: bias.ptr(),
            token: routing.token.ptr(),
            activations: scratch.activations.ptr_mut(),
            arrivals: scratch.arrivals.ptr_mut(),
            ids: routing.ids.ptr_mut(),
            weights: routing.weights.ptr_mut(),
            faults: routing.faults.ptr_mut(),
            params: DenseRouterDecodeParams {
                tokens: routing.tokens,
                experts: selection.experts(),
                hidden: product.hidden,
                selected: selection.selected(),
                scaling_bits: selection.scaling_bits(),
            },
        }
    }

    fn hash(&self, HashTable { table, vocabulary }: &HashTable<B>) -> HashRouterDecode {
        let Self { routing, product, scratch } = self;
        let selection = routing.selection;
        HashRouterDecode {
            x: product.x.ptr(),
            gate: product.gate.ptr(),
            table: table.ptr(),
            token: routing.token.ptr(),
            activations: scratch.activations.ptr_mut(),
            arrivals: scratch.arrivals.ptr_mut(),
            ids: routing.ids.ptr_mut(),
            weights: routing.weights.ptr_mut(),
            faults: routing.faults.ptr_mut(),
            params: HashRouterDecodeParams {
                tokens: routing.tokens,
                experts: selection.experts(),
                hidden: product.hidden,
                selected: selection.selected(),
                vocabulary: *vocabulary,
                scaling_bits: selection.scaling_bits(),
            },
        }
    }
}

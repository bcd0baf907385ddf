//! The router: experts and weights of tokens.

use kernels_gpu::params::{
    ActivationTopkParams, DenseRouterDecodeParams, HashRouterDecodeParams, HashRouterParams,
    RouterLogitsParams,
};
use kv_layout::router::{
    DECODE_SLICES, DECODE_TOKENS, EXPERT_STEP, ExpertWidth, HIDDEN_STEP, MAX_EXPERTS, MAX_SELECTED,
};

use super::{check, check_argument};
use crate::device::{Backend, Buffer, DeviceError, Stream, View};
use kernels_gpu::launch::{
    ActivationTopk, DenseRouterDecode, HashRouter, HashRouterDecode, RouterLogits,
};

/// How many experts there are, how many a token gets, and what their weights add up to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    experts: u32,
    selected: u32,
    scaling: f32,
    width: ExpertWidth,
}

impl Selection {
    /// `selected` of `experts` experts, with weights that add up to `scaling`.
    ///
    /// # Errors
    /// [`DeviceError::Argument`] unless `experts` is a multiple of 32 up to 512, and `selected` 1 to 8.
    pub fn new(experts: u32, selected: u32, scaling: f32) -> Result<Self, DeviceError> {
        let width = ExpertWidth::of(experts).ok_or(DeviceError::Argument {
            what: "experts of a layer",
            value: experts.into(),
            multiple: EXPERT_STEP.into(),
            most: MAX_EXPERTS.into(),
        })?;
        check_argument("experts of a token", selected, 1, MAX_SELECTED)?;
        Ok(Self { experts, selected, scaling, width })
    }

    /// Experts of the layer.
    #[must_use]
    pub fn experts(self) -> u32 {
        self.experts
    }

    /// Experts of a token.
    #[must_use]
    pub fn selected(self) -> u32 {
        self.selected
    }
}

/// Where the router's answer goes.
pub struct Routed<'a, B: Backend> {
    /// `[tokens, selected]` experts; -1 for padding.
    pub ids: &'a Buffer<B, i32>,
    /// `[tokens, selected]` f32; 0 for padding.
    pub weights: &'a Buffer<B, f32>,
    /// `[1]` count of what the kernel refused.
    pub faults: &'a Buffer<B, u32>,
}

impl<B: Backend> Routed<'_, B> {
    /// Checks the answer of `tokens` tokens, and `token` (`[tokens]`).
    pub(crate) fn check(
        &self,
        selection: Selection,
        tokens: u32,
        token: &View<B, i32>,
    ) -> Result<(), DeviceError> {
        let selected = u64::from(tokens) * u64::from(selection.selected);
        check("tokens", token, tokens.into())?;
        check("expert ids", self.ids, selected)?;
        check("expert weights", self.weights, selected)?;
        check("fault word", self.faults, 1)
    }
}

/// The experts of a hash layer.
pub struct HashTable<'a, B: Backend> {
    /// `[vocabulary, selected]` experts of each token id.
    pub table: &'a View<B, i32>,
    /// Token ids there are.
    pub vocabulary: u32,
}

impl<B: Backend> HashTable<'_, B> {
    fn check(&self, selection: Selection) -> Result<(), DeviceError> {
        let elements = u64::from(self.vocabulary) * u64::from(selection.selected);
        check("experts of token ids", self.table, elements)
    }
}

/// Checks the biases of a layer that chooses by score, `[experts]`.
fn check_bias<B: Backend>(selection: Selection, bias: &View<B, f32>) -> Result<(), DeviceError> {
    check("expert biases", bias, selection.experts.into())
}

/// Tokens to route by their logits.
pub struct LogitsRouting<'a, B: Backend> {
    /// How many experts there are and a token gets.
    pub selection: Selection,
    /// Tokens.
    pub tokens: u32,
    /// `[tokens, experts]` f32.
    pub logits: &'a View<B, f32>,
    /// `[tokens]` token ids; negative for padding.
    pub token: &'a View<B, i32>,
    /// Where the answer goes.
    pub routed: &'a Routed<'a, B>,
}

impl<B: Backend> LogitsRouting<'_, B> {
    fn check(&self) -> Result<(), DeviceError> {
        let logits = u64::from(self.tokens) * u64::from(self.selection.experts);
        check("logits", self.logits, logits)?;
        self.routed.check(self.selection, self.tokens, self.token)
    }
}

/// Queues `activation_topk_*`: the experts with the largest scores, of which `bias` (`[experts]` f32) is a part.
///
/// Logits and biases that are no numbers rank last, and are counted in the fault word.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn activation_topk<B: Backend>(
    stream: &Stream<B>,
    routing: &LogitsRouting<'_, B>,
    bias: &View<B, f32>,
) -> Result<(), DeviceError> {
    let LogitsRouting { selection, tokens, logits, token, routed } = *routing;
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    routing.check()?;
    check_bias(selection, bias)?;
    let params =
        ActivationTopkParams { tokens, experts, selected, scaling_bits: scaling.to_bits() };
    let operation = ActivationTopk {
        logits: logits.ptr(),
        bias: bias.ptr(),
        token: token.ptr(),
        ids: routed.ids.ptr_mut(),
        weights: routed.weights.ptr_mut(),
        faults: routed.faults.ptr_mut(),
        params,
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above).
    unsafe { stream.launch(width, &operation) }
}

/// Queues `hash_router`: the experts that `table` lists for each token id, weighed by the logits.
///
/// A token id or an expert out of range, and a logit that is no number, is counted in the fault word;
/// such a token or expert gets id -1 and weight 0, such a logit weight 0.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn hash_router<B: Backend>(
    stream: &Stream<B>,
    routing: &LogitsRouting<'_, B>,
    table: &HashTable<'_, B>,
) -> Result<(), DeviceError> {
    let LogitsRouting { selection, tokens, logits, token, routed } = *routing;
    let Selection { experts, selected, scaling, .. } = selection;
    if tokens == 0 {
        return Ok(());
    }
    routing.check()?;
    table.check(selection)?;
    let (vocabulary, scaling_bits) = (table.vocabulary, scaling.to_bits());
    let operation = HashRouter {
        token: token.ptr(),
        table: table.table.ptr(),
        logits: logits.ptr(),
        ids: routed.ids.ptr_mut(),
        weights: routed.weights.ptr_mut(),
        faults: routed.faults.ptr_mut(),
        params: HashRouterParams { tokens, experts, selected, vocabulary, scaling_bits },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel refuses token
    // ids and experts outside them.
    unsafe { stream.launch((), &operation) }
}

/// The gate of a layer: what makes logits of hidden states.
pub struct Gate<'a, B: Backend> {
    /// `[experts, hidden]` BF16.
    pub weight: &'a View<B, u16>,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
}

impl<B: Backend> Gate<'_, B> {
    /// Checks the weights, and the hidden states of `tokens` tokens.
    pub(crate) fn check(
        &self,
        selection: Selection,
        x: &View<B, u16>,
        tokens: u32,
    ) -> Result<(), DeviceError> {
        check_argument("width of a hidden state", self.hidden, HIDDEN_STEP, u32::MAX)?;
        let hidden = u64::from(self.hidden);
        check("gate weights", self.weight, u64::from(selection.experts) * hidden)?;
        check("hidden states", x, u64::from(tokens) * hidden)
    }
}

/// Logits to make of hidden states.
pub struct GateProduct<'a, B: Backend> {
    /// How many experts there are.
    pub selection: Selection,
    /// Tokens.
    pub tokens: u32,
    /// `[tokens, hidden]` BF16.
    pub x: &'a View<B, u16>,
    /// The gate.
    pub gate: &'a Gate<'a, B>,
    /// `[tokens, experts]` f32.
    pub logits: &'a Buffer<B, f32>,
}

/// Queues `router_logits`: the product of hidden states with the gate.
///
/// # Errors
/// [`DeviceError::Argument`] for a hidden state of no multiple of 32; [`DeviceError::Length`] for a buffer
/// shorter than its shape; as [`Stream::launch`].
pub fn router_logits<B: Backend>(
    stream: &Stream<B>,
    product: &GateProduct<'_, B>,
) -> Result<(), DeviceError> {
    let GateProduct { selection, tokens, x, gate, logits } = *product;
    let (experts, hidden) = (selection.experts, gate.hidden);
    if tokens == 0 {
        return Ok(());
    }
    gate.check(selection, x, tokens)?;
    check("logits", logits, u64::from(tokens) * u64::from(experts))?;
    let params = RouterLogitsParams { tokens, experts, hidden };
    let operation =
        RouterLogits { x: x.ptr(), gate: gate.weight.ptr(), logits: logits.ptr_mut(), params };
    // SAFETY: every buffer has the shape of the kernel table (checked above).
    unsafe { stream.launch((), &operation) }
}

/// Where the blocks of a decode launch meet. One launch at a time uses it.
pub struct DecodeScratch<'a, B: Backend> {
    /// `[64, experts]` f32.
    pub activations: &'a Buffer<B, f32>,
    /// `[8]`, zero before the first launch.
    pub arrivals: &'a Buffer<B, u32>,
}

/// Tokens to route by their hidden states, up to 64.
pub struct DecodeRouting<'a, B: Backend> {
    /// How many experts there are and a token gets.
    pub selection: Selection,
    /// Tokens.
    pub tokens: u32,
    /// `[tokens, hidden]` BF16.
    pub x: &'a View<B, u16>,
    /// The gate.
    pub gate: &'a Gate<'a, B>,
    /// `[tokens]` token ids; negative for padding.
    pub token: &'a View<B, i32>,
    /// Where the blocks meet.
    pub scratch: &'a DecodeScratch<'a, B>,
    /// Where the answer goes.
    pub routed: &'a Routed<'a, B>,
}

impl<B: Backend> DecodeRouting<'_, B> {
    fn check(&self) -> Result<(), DeviceError> {
        let Self { selection, tokens, x, gate, token, scratch, routed } = *self;
        gate.check(selection, x, tokens)?;
        check_argument("tokens of the one-launch router", tokens, 1, DECODE_TOKENS)?;
        let experts = u64::from(selection.experts);
        check("activations", scratch.activations, u64::from(DECODE_TOKENS) * experts)?;
        check("arrivals", scratch.arrivals, DECODE_SLICES.into())?;
        routed.check(selection, tokens, token)
    }
}

/// Queues `dense_router_decode_*`: [`activation_topk`] of the product of the hidden states with the gate.
///
/// # Errors
/// [`DeviceError::Argument`] for more than 64 tokens, or a hidden state of no multiple of 32;
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn dense_router_decode<B: Backend>(
    stream: &Stream<B>,
    routing: &DecodeRouting<'_, B>,
    bias: &View<B, f32>,
) -> Result<(), DeviceError> {
    let DecodeRouting { selection, tokens, x, gate, token, scratch, routed } = *routing;
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    routing.check()?;
    check_bias(selection, bias)?;
    let (hidden, scaling_bits) = (gate.hidden, scaling.to_bits());
    let operation = DenseRouterDecode {
        x: x.ptr(),
        gate: gate.weight.ptr(),
        bias: bias.ptr(),
        token: token.ptr(),
        activations: scratch.activations.ptr_mut(),
        arrivals: scratch.arrivals.ptr_mut(),
        ids: routed.ids.ptr_mut(),
        weights: routed.weights.ptr_mut(),
        faults: routed.faults.ptr_mut(),
        params: DenseRouterDecodeParams { tokens, experts, hidden, selected, scaling_bits },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above).
    unsafe { stream.launch(width, &operation) }
}

/// Queues `hash_router_decode_*`: [`hash_router`] with the product of the hidden states with the gate.
///
/// # Errors
/// As [`dense_router_decode`].
pub fn hash_router_decode<B: Backend>(
    stream: &Stream<B>,
    routing: &DecodeRouting<'_, B>,
    table: &HashTable<'_, B>,
) -> Result<(), DeviceError> {
    let DecodeRouting { selection, tokens, x, gate, token, scratch, routed } = *routing;
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    let (hidden, vocabulary, scaling_bits) = (gate.hidden, table.vocabulary, scaling.to_bits());
    routing.check()?;
    table.check(selection)?;
    let operation = HashRouterDecode {
        x: x.ptr(),
        gate: gate.weight.ptr(),
        table: table.table.ptr(),
        token: token.ptr(),
        activations: scratch.activations.ptr_mut(),
        arrivals: scratch.arrivals.ptr_mut(),
        ids: routed.ids.ptr_mut(),
        weights: routed.weights.ptr_mut(),
        faults: routed.faults.ptr_mut(),
        params: HashRouterDecodeParams {
            tokens,
            experts,
            hidden,
            selected,
            vocabulary,
            scaling_bits,
        },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel refuses token
    // ids and experts outside them.
    unsafe { stream.launch(width, &operation) }
}

//! The router: experts and weights of tokens.

use kernels_gpu::params::{
    ActivationTopkParams, DenseRouterDecodeParams, HashRouterDecodeParams, HashRouterParams,
    RouterLogitsParams,
};
use kv_layout::router::{
    DECODE_SLICES, DECODE_TOKENS, EXPERT_STEP, ExpertWidth, HIDDEN_STEP, MAX_EXPERTS, MAX_SELECTED,
};

use super::{check, check_argument};
use crate::device::{Backend, Buffer, DeviceError, Stream};
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

/// Checks what every launch of the router takes: `token` (`[tokens]`) and the answer.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape.
pub fn check_routed<B: Backend>(
    selection: Selection,
    tokens: u32,
    token: &Buffer<B, i32>,
    routed: &Routed<'_, B>,
) -> Result<(), DeviceError> {
    let selected = u64::from(tokens) * u64::from(selection.selected);
    check("tokens", token, tokens.into())?;
    check("expert ids", routed.ids, selected)?;
    check("expert weights", routed.weights, selected)?;
    check("fault word", routed.faults, 1)
}

/// What chooses the experts of a token: their scores with a bias, or a table.
enum Choice<'a, B: Backend> {
    /// `[experts]` f32.
    Bias(&'a Buffer<B, f32>),
    Table(&'a HashTable<'a, B>),
}

impl<B: Backend> Choice<'_, B> {
    /// Checks what every choice takes: itself, `token` and the answer.
    fn check(
        &self,
        selection: Selection,
        tokens: u32,
        token: &Buffer<B, i32>,
        routed: &Routed<'_, B>,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Bias(bias) => check("expert biases", bias, selection.experts.into())?,
            Self::Table(HashTable { table, vocabulary }) => {
                let elements = u64::from(*vocabulary) * u64::from(selection.selected);
                check("experts of token ids", table, elements)?;
            }
        }
        check_routed(selection, tokens, token, routed)
    }
}

/// Checks logits, `[tokens, experts]`.
fn check_logits<B: Backend>(
    selection: Selection,
    tokens: u32,
    logits: &Buffer<B, f32>,
) -> Result<(), DeviceError> {
    check("logits", logits, u64::from(tokens) * u64::from(selection.experts))
}

/// Queues `activation_topk_*` over `logits` (`[tokens, experts]` f32) with `bias` (`[experts]` f32).
/// Tokens whose element of `token` is negative are padding.
///
/// Logits and biases that are no numbers rank last, and are counted in the fault word.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn activation_topk<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    logits: &Buffer<B, f32>,
    bias: &Buffer<B, f32>,
    token: &Buffer<B, i32>,
    routed: &Routed<'_, B>,
) -> Result<(), DeviceError> {
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    check_logits(selection, tokens, logits)?;
    Choice::Bias(bias).check(selection, tokens, token, routed)?;
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

/// The experts of a hash layer.
pub struct HashTable<'a, B: Backend> {
    /// `[vocabulary, selected]` experts of each token id.
    pub table: &'a Buffer<B, i32>,
    /// Token ids there are.
    pub vocabulary: u32,
}

/// Queues `hash_router`: the experts that `table` lists for each token id, weighed by `logits`
/// (`[tokens, experts]` f32). Token id -1 is padding.
///
/// A token id or an expert out of range, and a logit that is no number, is counted in the fault word;
/// such a token or expert gets id -1 and weight 0, such a logit weight 0.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn hash_router<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    logits: &Buffer<B, f32>,
    table: &HashTable<'_, B>,
    token: &Buffer<B, i32>,
    routed: &Routed<'_, B>,
) -> Result<(), DeviceError> {
    let Selection { experts, selected, scaling, .. } = selection;
    if tokens == 0 {
        return Ok(());
    }
    check_logits(selection, tokens, logits)?;
    Choice::Table(table).check(selection, tokens, token, routed)?;
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
    pub weight: &'a Buffer<B, u16>,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
}

impl<B: Backend> Gate<'_, B> {
    /// Checks the weights, and the hidden states of `tokens` tokens.
    pub(crate) fn check(
        &self,
        selection: Selection,
        x: &Buffer<B, u16>,
        tokens: u32,
    ) -> Result<(), DeviceError> {
        check_argument("width of a hidden state", self.hidden, HIDDEN_STEP, u32::MAX)?;
        let hidden = u64::from(self.hidden);
        check("gate weights", self.weight, u64::from(selection.experts) * hidden)?;
        check("hidden states", x, u64::from(tokens) * hidden)
    }
}

/// Queues `router_logits`: the product of `x` (`[tokens, hidden]` BF16) with the gate, into `logits`
/// (`[tokens, experts]` f32).
///
/// # Errors
/// [`DeviceError::Argument`] for a hidden state of no multiple of 32; [`DeviceError::Length`] for a buffer shorter than its shape; as
/// [`Stream::launch`].
pub fn router_logits<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    x: &Buffer<B, u16>,
    gate: &Gate<'_, B>,
    logits: &Buffer<B, f32>,
) -> Result<(), DeviceError> {
    let (experts, hidden) = (selection.experts, gate.hidden);
    if tokens == 0 {
        return Ok(());
    }
    gate.check(selection, x, tokens)?;
    check_logits(selection, tokens, logits)?;
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

impl<B: Backend> DecodeScratch<'_, B> {
    /// Checks what every decode launch takes: itself, the hidden states and the gate.
    fn check(
        &self,
        selection: Selection,
        tokens: u32,
        x: &Buffer<B, u16>,
        gate: &Gate<'_, B>,
    ) -> Result<(), DeviceError> {
        gate.check(selection, x, tokens)?;
        check_argument("tokens of the one-launch router", tokens, 1, DECODE_TOKENS)?;
        let experts = u64::from(selection.experts);
        check("activations", self.activations, u64::from(DECODE_TOKENS) * experts)?;
        check("arrivals", self.arrivals, DECODE_SLICES.into())
    }
}

/// Queues `dense_router_decode_*`: [`activation_topk`] of the product of `x` (`[tokens, hidden]` BF16)
/// with the gate, for up to 64 tokens.
///
/// # Errors
/// [`DeviceError::Argument`] for more tokens, or a hidden state of no multiple of 32; [`DeviceError::Length`] for a buffer
/// shorter than its shape; as [`Stream::launch`].
#[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
pub fn dense_router_decode<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    x: &Buffer<B, u16>,
    gate: &Gate<'_, B>,
    bias: &Buffer<B, f32>,
    token: &Buffer<B, i32>,
    scratch: &DecodeScratch<'_, B>,
    routed: &Routed<'_, B>,
) -> Result<(), DeviceError> {
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    scratch.check(selection, tokens, x, gate)?;
    Choice::Bias(bias).check(selection, tokens, token, routed)?;
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

/// Queues `hash_router_decode_*`: [`hash_router`] with the product of `x` (`[tokens, hidden]` BF16) with
/// the gate, for up to 64 tokens.
///
/// # Errors
/// As [`dense_router_decode`].
#[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
pub fn hash_router_decode<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    tokens: u32,
    x: &Buffer<B, u16>,
    gate: &Gate<'_, B>,
    table: &HashTable<'_, B>,
    token: &Buffer<B, i32>,
    scratch: &DecodeScratch<'_, B>,
    routed: &Routed<'_, B>,
) -> Result<(), DeviceError> {
    let Selection { experts, selected, scaling, width } = selection;
    if tokens == 0 {
        return Ok(());
    }
    let (hidden, vocabulary, scaling_bits) = (gate.hidden, table.vocabulary, scaling.to_bits());
    scratch.check(selection, tokens, x, gate)?;
    Choice::Table(table).check(selection, tokens, token, routed)?;
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

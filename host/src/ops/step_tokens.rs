//! The tokens of a step, and which of them an operation is for: all, some as queries, or those that close a window.

use kernels_gpu::launch::ListClosingTokens;
use kernels_gpu::params::ListClosingTokensParams;

use super::check_most;
use crate::device::{Backend, Buffer, DeviceError, Stream, View};

/// The tokens of a step.
pub struct StepTokens<'a, B: Backend> {
    /// `[tokens]` i32 position.
    pub position: &'a View<B, i32>,
    /// `[tokens]` i32 slot of the token's request; -1 = padding.
    pub slot: &'a View<B, i32>,
    /// `[tokens]` i32 tokens of the same request that precede it in the step.
    pub index: &'a View<B, i32>,
    /// `[tokens]` i32 tokens of the same request that follow it in the step.
    pub remaining: &'a View<B, i32>,
    /// Tokens.
    pub count: u32,
}

/// Queries of gathers, scores, lists or attention: tokens `first..first + count` of a step, by their places in it.
/// `step` is `first + count` at least.
pub struct StepQueries<'a, B: Backend> {
    /// `[step]` i32 position of each token.
    pub position: &'a View<B, i32>,
    /// `[step]` i32 slot of each token's request; -1 = padding.
    pub slot: &'a View<B, i32>,
    /// `[step]` i32 tokens of the same request that precede it in the step.
    pub index: &'a View<B, i32>,
    /// Place in the step of the first query.
    pub first: u32,
    /// How many queries there are.
    pub count: u32,
}

impl<B: Backend> StepQueries<'_, B> {
    /// Fails if the places of the queries in the step do not fit in 32 bits.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let end = u64::from(self.first) + u64::from(self.count);
        check_most("first + count of queries", end, u32::MAX)
    }
}

/// The step's projections for a compressor, before the position bias. `columns` is that of its `CompressorKind`.
pub struct StepProjections<'a, B: Backend> {
    /// `[tokens, columns]` f32, the keys.
    pub kv: &'a View<B, f32>,
    /// `[tokens, columns]` f32, the gates of the keys.
    pub gate: &'a View<B, f32>,
}

/// A work list: rows of the step's tokens that close a window (the last of the 4 or 128 tokens of an entry), or end a
/// run, then -1.
pub struct WorkList<'a, B: Backend> {
    /// `[capacity]` i32.
    pub records: &'a Buffer<B, i32>,
    /// Records it has room for.
    pub capacity: u32,
}

/// The work lists of a step. They must have room for all tokens that the step may list:
/// [`window_capacity`], [`run_capacity`](super::run_capacity).
pub struct WorkLists<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// Tokens that close a CSA window.
    pub csa: &'a WorkList<'a, B>,
    /// Tokens that close an HCA window, or are their request's last: the ends of runs.
    pub hca: &'a WorkList<'a, B>,
}

/// Queues `list_closing_tokens`: both work lists of the step.
///
/// # Errors
/// [`DeviceError::Argument`] for more than `i32::MAX` tokens, or records of a list; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn list_closing_tokens<B: Backend>(
    stream: &Stream<B>,
    lists: &WorkLists<'_, B>,
) -> Result<(), DeviceError> {
    let WorkLists { tokens, csa, hca } = *lists;
    let counts = [
        ("tokens of the step", tokens.count),
        ("records of the CSA list", csa.capacity),
        ("records of the HCA list", hca.capacity),
    ];
    counts.iter().try_for_each(|&(what, count)| check_most(what, count.into(), i32::MAX as u32))?;
    let operation = ListClosingTokens {
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_remaining: tokens.remaining.ptr(),
        closing_csa: csa.records.ptr_mut(),
        runs_hca: hca.records.ptr_mut(),
        params: ListClosingTokensParams {
            tokens: tokens.count,
            csa_capacity: csa.capacity,
            hca_capacity: hca.capacity,
        },
    };
    // SAFETY: the launch checks every buffer.
    unsafe { stream.launch((), &operation) }
}

/// Most windows of `ratio` tokens that `tokens` tokens of `requests` requests can close.
///
/// # Panics
/// If `ratio` is 0.
#[must_use]
pub const fn window_capacity(tokens: u32, requests: u32, ratio: u32) -> u32 {
    let most = (tokens / ratio).saturating_add(requests);
    if most < tokens { most } else { tokens }
}

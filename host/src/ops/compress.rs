//! The CSA compressors: entries and indexer keys of the compression windows that close, and the tokens' state.

use kernels_gpu::params::{CompressParams, WriteStateParams};
use kv_layout::geometry::{CSA_RATIO, CompressorKind, CsaCompressor};

use super::checkpoint_rows::{CheckpointArguments, CheckpointRows};
use super::pools::StateRing;
use super::step_tokens::{StepProjections, StepTokens, WorkList};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{Compress, WriteState};

/// A compressor's weights and rotary frequencies: what turns the pooled tokens of a window into an entry. `ratio`,
/// `columns` and `channels` are those of its `CompressorKind`.
pub struct PoolingWeights<'a, B: Backend> {
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// `[channels]` f32, of the RMS norm.
    pub norm: &'a View<B, f32>,
    /// `[32]` f32, the rotary frequencies of compressed layers.
    pub frequencies: &'a View<B, f32>,
}

/// Arguments of [`compress`]: the compression windows that a step closes.
pub struct Compression<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// The model's projections of these tokens.
    pub projections: &'a StepProjections<'a, B>,
    /// The compressor's weights.
    pub weights: &'a PoolingWeights<'a, B>,
    /// Its state.
    pub state: &'a StateRing<'a, B>,
    /// Which tokens close a compression window.
    pub closing: &'a WorkList<'a, B>,
    /// `[capacity, 512]` BF16 entries, or `[capacity, 128]` BF16 indexer keys.
    pub entries: &'a Buffer<B, bf16>,
}

/// Queues `compress_csa` or `compress_index`: the entries, or the indexer keys before the Hadamard
/// rotation, of the listed windows.
///
/// For a chunk it must run before [`write_state`], which may overwrite rows that the chunk's first tokens need.
///
/// # Errors
/// [`DeviceError::Length`] for a ring with fewer rows than a step of one token needs;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the step's positions, slots and work lists: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn compress<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    windows: &Compression<'_, B>,
) -> Result<(), DeviceError> {
    let Compression { tokens, projections, weights, state, closing, entries } = *windows;
    state.check(which.into())?;
    if closing.capacity == 0 {
        return Ok(());
    }
    let operation = Compress {
        kv: projections.kv.ptr(),
        gate: projections.gate.ptr(),
        ape: weights.ape.ptr(),
        norm: weights.norm.ptr(),
        frequencies: weights.frequencies.ptr(),
        closing: closing.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        state: state.rows.ptr(),
        entries: entries.ptr_mut(),
        params: CompressParams {
            capacity: closing.capacity,
            ring: state.ring,
            slots: state.slots,
            tokens: tokens.count,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel leaves
    // out what a work list names that is no token of the step, and slots that do not exist.
    unsafe { stream.launch(which, &operation) }
}

/// Arguments of [`write_state`]: a step's tokens, and the state of a CSA compressor.
pub struct StateUpdate<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// The model's projections of these tokens.
    pub projections: &'a StepProjections<'a, B>,
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// The state.
    pub state: &'a StateRing<'a, B>,
}

/// Queues `write_state_*`: the step's tokens into the rings of compressor `which`.
///
/// # Errors
/// [`DeviceError::Length`] for a ring with fewer rows than a step of one token needs;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn write_state<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    update: &StateUpdate<'_, B>,
) -> Result<(), DeviceError> {
    write_state_saving(stream, which, update, None)
}

/// As [`write_state`]; also writes the rows that tokens have in `checkpoints`.
///
/// # Errors
/// As [`write_state`]; [`DeviceError::Length`] for rows that do not lie in a checkpoint.
pub fn write_state_saving<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    update: &StateUpdate<'_, B>,
    checkpoints: Option<&CheckpointRows<'_, B>>,
) -> Result<(), DeviceError> {
    let StateUpdate { tokens, projections, ape, state } = *update;
    if tokens.count == 0 {
        return Ok(());
    }
    state.check(which.into())?;
    let saved = match checkpoints {
        None => CheckpointArguments::none(tokens.position, &state.rows.cast()?),
        Some(rows) => {
            let place = rows.image.halves[which as usize];
            let bytes = 4 * u64::from(CSA_RATIO * CompressorKind::from(which).row_floats());
            rows.arguments([(place, bytes), (place, bytes)])?
        }
    };
    let operation = WriteState {
        kv: projections.kv.ptr(),
        gate: projections.gate.ptr(),
        ape: ape.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_remaining: tokens.remaining.ptr(),
        state: state.rows.ptr_mut(),
        token_checkpoint_row: saved.row,
        checkpoints: saved.checkpoints,
        params: WriteStateParams {
            ring: state.ring,
            slots: state.slots,
            tokens: tokens.count,
            checkpoints: saved.number,
            checkpoint_granules: saved.granules,
            row_granules: saved.places[0],
        },
    };
    // SAFETY: the launch checks every buffer, and a checkpoint has the compressor's rows; the kernel leaves out
    // slots outside the ring, rows of no checkpoint, and tokens whose row a later one takes.
    unsafe { stream.launch(which, &operation) }
}

//! The compressors: work lists, entries, state rings.

use kernels_gpu::params::{
    CompressParams, ListClosingTokensParams, UpdateTableParams, WriteStateParams,
};
use kv_layout::geometry::{CSA_RATIO, CompressorKind, CsaCompressor, csa_own_rows, hca_state_rows};

use super::gather::BlockTable;
use super::state_copy::{CheckpointArguments, CheckpointRows};
use super::{check_length, check_most};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{Compress, ListClosingTokens, UpdateTable, WriteState};

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

/// A work list: rows of the step's tokens that close a window (the last of the 4 or 128 tokens of an entry), or end a
/// run, then -1.
pub struct WorkList<'a, B: Backend> {
    /// `[capacity]` i32.
    pub records: &'a Buffer<B, i32>,
    /// Records it has room for.
    pub capacity: u32,
}

/// A compressor's weights.
pub struct CompressorWeights<'a, B: Backend> {
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// `[channels]` f32, of the RMS norm.
    pub norm: &'a View<B, f32>,
    /// `[32]` f32, the rotary frequencies of compressed layers.
    pub frequencies: &'a View<B, f32>,
}

/// The step's projections for a compressor, before the position bias.
pub struct StepProjections<'a, B: Backend> {
    /// `[tokens, columns]` f32.
    pub kv: &'a View<B, f32>,
    /// `[tokens, columns]` f32.
    pub gate: &'a View<B, f32>,
}

/// What a compressor keeps for later windows.
pub struct StateRing<'a, B: Backend> {
    /// `[slots, rows, row]` f32. Of a CSA compressor the rows are the ring of own halves, then that of previous
    /// halves, and a row is half the columns of keys, then of scores. Of an HCA compressor the rows are one
    /// ring, and a row is maximum, sum and weighted sum.
    pub rows: &'a Buffer<B, f32>,
    /// Rows of one request's ring; of a CSA compressor of that of own halves.
    pub ring: u32,
    /// Request slots.
    pub slots: u32,
}

impl<B: Backend> StateRing<'_, B> {
    /// Refuses a ring with fewer rows than a step of one token needs.
    pub(super) fn check(&self, which: CompressorKind) -> Result<(), DeviceError> {
        let needed = match which {
            CompressorKind::CsaMain | CompressorKind::CsaIndex => csa_own_rows(1),
            CompressorKind::Hca => hca_state_rows(1),
        };
        check_length("rows of a state ring", self.ring.into(), needed.into())
    }
}

/// Blocks on their way into the block table.
pub struct TableUpdate<'a, B: Backend> {
    /// `[count]` element of the table, distinct.
    pub index: &'a View<B, i32>,
    /// `[count]` block of the pool.
    pub block: &'a View<B, i32>,
    /// The table.
    pub table: &'a BlockTable<'a, B>,
    /// Blocks.
    pub count: u32,
}

/// Queues `update_table`: each block into its element of the table.
///
/// # Errors
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn update_table<B: Backend>(
    stream: &Stream<B>,
    update: &TableUpdate<'_, B>,
) -> Result<(), DeviceError> {
    let TableUpdate { index, block, table, count } = *update;
    if count == 0 {
        return Ok(());
    }
    let elements = table.slots.saturating_mul(table.max_blocks);
    let operation = UpdateTable {
        update_index: index.ptr(),
        update_block: block.ptr(),
        table: table.table.ptr_mut(),
        params: UpdateTableParams { count, elements },
    };
    // SAFETY: the launch checks every buffer; the kernel leaves out
    // elements beyond the table.
    unsafe { stream.launch((), &operation) }
}

/// The work lists of a step. They must have room for whatever it may list: [`plan_capacity`],
/// [`run_capacity`](super::run_capacity).
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
pub const fn plan_capacity(tokens: u32, requests: u32, ratio: u32) -> u32 {
    let most = (tokens / ratio).saturating_add(requests);
    if most < tokens { most } else { tokens }
}

/// The CSA windows that a step closes, on their way to entries.
pub struct Compression<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// What the model projected for them.
    pub projections: &'a StepProjections<'a, B>,
    /// The compressor's weights.
    pub weights: &'a CompressorWeights<'a, B>,
    /// Its state.
    pub state: &'a StateRing<'a, B>,
    /// Which tokens close a window.
    pub closing: &'a WorkList<'a, B>,
    /// `[capacity, 512]` BF16 entries, or `[capacity, 128]` BF16 indexer keys.
    pub entries: &'a Buffer<B, bf16>,
}

/// Queues `compress_csa` or `compress_index`: the entries, or the indexer keys before the Hadamard
/// rotation, of the listed windows.
///
/// Of a chunk it must run before [`write_state`].
///
/// # Errors
/// [`DeviceError::Length`] for a ring that has not even the rows of a step of one token;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn compress<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    windows: &Compression<'_, B>,
) -> Result<(), DeviceError> {
    let Compression { tokens, projections, weights, state, closing, entries } = *windows;
    state.check(which.into())?;
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

/// A step's tokens, on their way into a CSA compressor's state.
pub struct StateUpdate<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// What the model projected for them.
    pub projections: &'a StepProjections<'a, B>,
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// The state.
    pub state: &'a StateRing<'a, B>,
}

/// Queues `write_state_*`: the step's tokens into the rings of compressor `which`.
///
/// # Errors
/// [`DeviceError::Length`] for a ring that has not even the rows of a step of one token;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn write_state<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    update: &StateUpdate<'_, B>,
) -> Result<(), DeviceError> {
    write_state_saving(stream, which, update, None)
}

/// As [`write_state`]; tokens that have a row in one of `checkpoints` go there too.
///
/// # Errors
/// As [`write_state`]; [`DeviceError::Length`] for rows that no checkpoint has.
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
            checkpoint_units: saved.units,
            image_units: saved.places[0],
        },
    };
    // SAFETY: the launch checks every buffer, and a checkpoint has the compressor's rows; the kernel leaves out
    // slots outside the ring, rows of no checkpoint, and tokens whose row a later one takes.
    unsafe { stream.launch(which, &operation) }
}

//! HCA entries of a step of any length: runs are folded into running sums, then those that closed a window
//! are stored.

use kernels_gpu::params::{CompressHcaParams, FlushParams};
use kv_layout::geometry::{CompressorKind, HCA_RATIO};

use super::block_table::BlockTable;
use super::pools::Entries;
use super::{StateRing, StepProjections, StepTokens, WorkList};
use crate::device::{Backend, Buffer, DeviceError, Stream, View};
use kernels_gpu::launch::{CompressHca, FlushHca};

/// Most runs that `tokens` tokens of `requests` requests can have. A run is the tokens of one request in a step
/// that lie in one HCA window.
#[must_use]
pub const fn run_capacity(tokens: u32, requests: u32) -> u32 {
    // A request's first and last run may be of one token each.
    let most = (tokens / HCA_RATIO).saturating_add(requests.saturating_mul(2));
    if most < tokens { most } else { tokens }
}

/// Arguments of [`compress_hca`]: a step's runs, and the running sums.
pub struct HcaCompression<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// The model's projections of these tokens.
    pub projections: &'a StepProjections<'a, B>,
    /// `[128, 512]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// The running sums.
    pub state: &'a StateRing<'a, B>,
    /// The last tokens of the runs.
    pub runs: &'a WorkList<'a, B>,
    /// `[capacity, 512]` f32: pooled entries of the runs that close a window.
    pub pooled: &'a Buffer<B, f32>,
}

/// The launches of `compress_hca`, in order: first the runs that continue from a state row, then those that start a
/// window. In this order, because a chunk longer than the ring may overwrite the row from which its first run
/// continues.
pub(crate) const HCA_LAUNCHES: [u32; 2] =
    [CompressHcaParams::CONTINUING, CompressHcaParams::STARTING];

/// Queues `compress_hca`, once for the runs that continue from a state row and once for those that
/// start a window.
///
/// # Errors
/// [`DeviceError::Length`] for a ring with fewer rows than a step of one token needs;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn compress_hca<B: Backend>(
    stream: &Stream<B>,
    windows: &HcaCompression<'_, B>,
) -> Result<(), DeviceError> {
    HCA_LAUNCHES.into_iter().try_for_each(|part| compress_hca_part(stream, windows, part))
}

/// Queues one of [`HCA_LAUNCHES`].
pub(crate) fn compress_hca_part<B: Backend>(
    stream: &Stream<B>,
    windows: &HcaCompression<'_, B>,
    part: u32,
) -> Result<(), DeviceError> {
    let HcaCompression { tokens, projections, ape, state, runs, pooled } = *windows;
    state.check(CompressorKind::Hca)?;
    if runs.capacity == 0 {
        return Ok(());
    }
    let operation = CompressHca {
        kv: projections.kv.ptr(),
        gate: projections.gate.ptr(),
        ape: ape.ptr(),
        runs: runs.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        token_remaining: tokens.remaining.ptr(),
        state: state.rows.ptr_mut(),
        pooled: pooled.ptr_mut(),
        params: CompressHcaParams {
            capacity: runs.capacity,
            ring: state.ring,
            slots: state.slots,
            tokens: tokens.count,
            part,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel leaves out what the list names that is no
    // token of the step, and slots that do not exist.
    unsafe { stream.launch((), &operation) }
}

/// Arguments of [`flush_hca`]: pooled windows to store as entries.
pub struct HcaFlush<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// The last tokens of the runs.
    pub runs: &'a WorkList<'a, B>,
    /// `[capacity, 512]` f32: pooled entries of the runs that close a window.
    pub pooled: &'a View<B, f32>,
    /// `[512]` f32, of the RMS norm.
    pub norm: &'a View<B, f32>,
    /// `[32]` f32, the rotary frequencies of compressed layers.
    pub frequencies: &'a View<B, f32>,
    /// Which block holds each window.
    pub table: &'a BlockTable<'a, B>,
    /// Slots of the compressor's state. Nothing was pooled for tokens in other slots.
    pub state_slots: u32,
    /// The pool.
    pub to: &'a Entries<'a, B>,
    /// `[1]` count of windows without a block.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `flush_hca_*`: the entries of the runs that close a window are normed, rotated and quantised, each to
/// the row that the block table gives it. A window without a block, or whose slot is not one of the state's, is left out and
/// counted in the fault word.
///
/// # Errors
/// [`DeviceError::Argument`] unless a block has one entry; [`DeviceError::NotADivisor`] if `entries_per_block` does
/// not divide 128; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the step's positions, slots and runs, or the block table: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn flush_hca<B: Backend>(
    stream: &Stream<B>,
    flush: &HcaFlush<'_, B>,
) -> Result<(), DeviceError> {
    let HcaFlush { tokens, runs, pooled, norm, frequencies, table, state_slots, to, faults } =
        *flush;
    to.check_ratio(HCA_RATIO)?;
    if runs.capacity == 0 {
        return Ok(());
    }
    let operation = FlushHca {
        pooled: pooled.ptr(),
        norm: norm.ptr(),
        frequencies: frequencies.ptr(),
        runs: runs.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        token_remaining: tokens.remaining.ptr(),
        table: table.table.ptr(),
        entry_data: to.data.ptr_mut(),
        entry_scale: to.scale.ptr_mut(),
        faults: faults.ptr_mut(),
        params: FlushParams {
            capacity: runs.capacity,
            slots: table.slots.min(state_slots),
            max_blocks: table.max_blocks,
            num_blocks: to.num_blocks,
            hadamard: 0,
            tokens: tokens.count,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses slots outside the table and blocks outside
    // the planes.
    unsafe { stream.launch(to.format, &operation) }
}

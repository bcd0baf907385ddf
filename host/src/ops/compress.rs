//! The compressors: work lists, entries, state rings.

use kernels_gpu::params::{
    CompressParams, ListClosingTokensParams, UpdateTableParams, WriteStateParams,
};
use kv_layout::geometry::{
    CSA_RATIO, CompressorKind, CsaCompressor, HCA_RATIO, HEAD_DIM, INDEX_DIM, ROPE_DIM,
};

use super::gather::BlockTable;
use super::{check, product};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{Compress, CompressHca, ListClosingTokens, UpdateTable, WriteState};

/// The tokens of a step.
pub struct StepTokens<B: Backend> {
    /// `[tokens]` position.
    pub position: View<B, i32>,
    /// `[tokens]` slot of the token's request; -1 = padding.
    pub slot: View<B, i32>,
    /// `[tokens]` tokens of the same request that precede it in the step.
    pub index: View<B, i32>,
    /// `[tokens]` tokens of the same request that follow it in the step.
    pub remaining: View<B, i32>,
    /// Tokens.
    pub count: u32,
}

impl<B: Backend> StepTokens<B> {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let tokens = u64::from(self.count);
        check("positions", &self.position, tokens)?;
        check("slots", &self.slot, tokens)?;
        check("indices", &self.index, tokens)?;
        check("remaining tokens", &self.remaining, tokens)
    }
}

/// A work list: rows of the step's tokens that close a window, then -1.
pub struct WorkList<'a, B: Backend> {
    /// `[capacity]`.
    pub records: &'a Buffer<B, i32>,
    /// Records it has room for.
    pub capacity: u32,
}

impl<B: Backend> WorkList<'_, B> {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        check("work list", self.records, u64::from(self.capacity))
    }
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

/// The ring that keeps what later windows need.
pub struct StateRing<B: Backend> {
    /// `[slots * ring, 2 * columns]` f32.
    pub rows: Buffer<B, f32>,
    /// Rows of one request's ring.
    pub ring: u32,
    /// Request slots.
    pub slots: u32,
}

/// What a compressor's tensors look like.
pub(super) struct Shape {
    ratio: u32,
    columns: u32,
    channels: u32,
}

impl Shape {
    pub(super) const fn of(stream: CompressorKind) -> Self {
        match stream {
            CompressorKind::CsaMain => {
                Self { ratio: CSA_RATIO, columns: 2 * HEAD_DIM, channels: HEAD_DIM }
            }
            CompressorKind::CsaIndex => {
                Self { ratio: CSA_RATIO, columns: 2 * INDEX_DIM, channels: INDEX_DIM }
            }
            CompressorKind::Hca => Self { ratio: HCA_RATIO, columns: HEAD_DIM, channels: HEAD_DIM },
        }
    }

    pub(super) fn check<B: Backend>(
        &self,
        tokens: &StepTokens<B>,
        projections: &StepProjections<'_, B>,
        ape: &View<B, f32>,
        state: &StateRing<B>,
    ) -> Result<(), DeviceError> {
        tokens.check()?;
        let columns = u64::from(self.columns);
        check("key projections", projections.kv, u64::from(tokens.count) * columns)?;
        check("gate projections", projections.gate, u64::from(tokens.count) * columns)?;
        check("position bias", ape, u64::from(self.ratio) * columns)?;
        let rows = u64::from(state.slots) * u64::from(state.ring);
        check("state ring", &state.rows, product([rows, 2, columns]))?;
        // A window's older tokens must be in the ring: as many rows as it pools.
        let window = if self.ratio == CSA_RATIO { 2 * CSA_RATIO } else { self.ratio };
        super::check_length("rows of a state ring", state.ring.into(), window.into())
    }

    pub(super) fn check_weights<B: Backend>(
        &self,
        weights: &CompressorWeights<'_, B>,
    ) -> Result<(), DeviceError> {
        check("norm weights", weights.norm, self.channels.into())?;
        check("rotary frequencies", weights.frequencies, u64::from(ROPE_DIM / 2))
    }

    fn check_entries<B: Backend>(
        &self,
        closing: &WorkList<'_, B>,
        entries: &Buffer<B, bf16>,
    ) -> Result<(), DeviceError> {
        closing.check()?;
        check("entries", entries, u64::from(closing.capacity) * u64::from(self.channels))
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
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn update_table<B: Backend>(
    stream: &Stream<B>,
    update: &TableUpdate<'_, B>,
) -> Result<(), DeviceError> {
    let TableUpdate { index, block, table, count } = *update;
    if count == 0 {
        return Ok(());
    }
    table.check()?;
    check("table elements", index, count.into())?;
    check("new blocks", block, count.into())?;
    let elements = table.slots.saturating_mul(table.max_blocks);
    let operation = UpdateTable {
        update_index: index.ptr(),
        update_block: block.ptr(),
        table: table.table.ptr_mut(),
        params: UpdateTableParams { count, elements },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel leaves out
    // elements beyond the table.
    unsafe { stream.launch((), &operation) }
}

/// The work lists of a step. They must have room for every window that can close: [`plan_capacity`].
pub struct WorkLists<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<B>,
    /// Tokens that close a CSA window.
    pub csa: &'a WorkList<'a, B>,
    /// Tokens that close an HCA window.
    pub hca: &'a WorkList<'a, B>,
}

/// Queues `list_closing_tokens`: both work lists of the step.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn list_closing_tokens<B: Backend>(
    stream: &Stream<B>,
    lists: &WorkLists<'_, B>,
) -> Result<(), DeviceError> {
    let WorkLists { tokens, csa, hca } = *lists;
    tokens.check()?;
    csa.check()?;
    hca.check()?;
    let operation = ListClosingTokens {
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        closing_csa: csa.records.ptr_mut(),
        closing_hca: hca.records.ptr_mut(),
        params: ListClosingTokensParams {
            tokens: tokens.count,
            csa_capacity: csa.capacity,
            hca_capacity: hca.capacity,
        },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above).
    unsafe { stream.launch((), &operation) }
}

/// Most windows of `ratio` tokens that `tokens` tokens of `requests` requests can close.
#[must_use]
pub const fn plan_capacity(tokens: u32, requests: u32, ratio: u32) -> u32 {
    let most = tokens / ratio + requests;
    if most < tokens { most } else { tokens }
}

/// The windows that a step closes, on their way to entries.
pub struct Compression<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<B>,
    /// What the model projected for them.
    pub projections: &'a StepProjections<'a, B>,
    /// The compressor's weights.
    pub weights: &'a CompressorWeights<'a, B>,
    /// Its state.
    pub state: &'a StateRing<B>,
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
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn compress<B: Backend>(
    stream: &Stream<B>,
    which: CsaCompressor,
    windows: &Compression<'_, B>,
) -> Result<(), DeviceError> {
    let Compression { tokens, projections, weights, state, closing, entries } = *windows;
    let shape = Shape::of(match which {
        CsaCompressor::Main => CompressorKind::CsaMain,
        CsaCompressor::Index => CompressorKind::CsaIndex,
    });
    shape.check(tokens, projections, weights.ape, state)?;
    shape.check_weights(weights)?;
    shape.check_entries(closing, entries)?;
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
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel leaves
    // out what a work list names that is no token of the step, and slots that do not exist.
    unsafe { stream.launch(which, &operation) }
}

/// Where the blocks of HCA windows meet; scratch of [`compress_hca`] and
/// [`decode_hca`](super::decode_hca), of one launch at a time.
pub struct HcaScratch<B: Backend> {
    /// `[windows, 512]` f32, all bits set before the first launch; every launch leaves them so.
    pooled: Buffer<B, u32>,
}

impl<B: Backend> HcaScratch<B> {
    /// Room for `windows` windows in a launch; made ready in `stream`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Cuda`].
    pub fn new(stream: &Stream<B>, windows: u64) -> Result<Self, DeviceError> {
        let pooled = stream.device().allocate("pooled entries", windows * u64::from(HEAD_DIM))?;
        stream.fill(&pooled, 0xFF)?;
        Ok(Self { pooled })
    }

    /// The buffer, for a graph to retain.
    pub fn pooled(&self) -> &Buffer<B, u32> {
        &self.pooled
    }

    /// Checks that there is a place for each of `records` windows.
    pub(super) fn check(&self, records: u32) -> Result<(), DeviceError> {
        check("pooled entries", &self.pooled, u64::from(records) * u64::from(HEAD_DIM))
    }
}

/// Queues `compress_hca`: the entries of the listed windows.
///
/// Of a chunk it must run before [`write_state`].
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn compress_hca<B: Backend>(
    stream: &Stream<B>,
    scratch: &HcaScratch<B>,
    windows: &Compression<'_, B>,
) -> Result<(), DeviceError> {
    let Compression { tokens, projections, weights, state, closing, entries } = *windows;
    let shape = Shape::of(CompressorKind::Hca);
    shape.check(tokens, projections, weights.ape, state)?;
    shape.check_weights(weights)?;
    shape.check_entries(closing, entries)?;
    scratch.check(closing.capacity)?;
    let operation = CompressHca {
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
        pooled: scratch.pooled().ptr_mut(),
        entries: entries.ptr_mut(),
        params: CompressParams {
            capacity: closing.capacity,
            ring: state.ring,
            slots: state.slots,
            tokens: tokens.count,
        },
    };
    // SAFETY: as `compress`; the scratch has a place for every record.
    unsafe { stream.launch((), &operation) }
}

/// A step's tokens, on their way into a compressor's state.
pub struct StateUpdate<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<B>,
    /// What the model projected for them.
    pub projections: &'a StepProjections<'a, B>,
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a View<B, f32>,
    /// The state.
    pub state: &'a StateRing<B>,
}

/// Queues `write_state_*`: the step's tokens into the ring of compressor `which`.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn write_state<B: Backend>(
    stream: &Stream<B>,
    which: CompressorKind,
    update: &StateUpdate<'_, B>,
) -> Result<(), DeviceError> {
    let StateUpdate { tokens, projections, ape, state } = *update;
    if tokens.count == 0 {
        return Ok(());
    }
    Shape::of(which).check(tokens, projections, ape, state)?;
    let operation = WriteState {
        kv: projections.kv.ptr(),
        gate: projections.gate.ptr(),
        ape: ape.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_remaining: tokens.remaining.ptr(),
        state: state.rows.ptr_mut(),
        params: WriteStateParams { ring: state.ring, slots: state.slots, tokens: tokens.count },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel leaves out
    // slots outside the ring, and tokens whose row a later one takes.
    unsafe { stream.launch(which, &operation) }
}

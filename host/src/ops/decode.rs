//! Decode, drafts included: a layer's whole update in one launch.

use kernels_gpu::params::DecodeParams;
use kv_layout::geometry::{CSA_RATIO, CompressorKind, HCA_RATIO};

use super::block_table::BlockTable;
use super::pools::{Entries, IndexKeys};
use super::{
    PoolingWeights, StateRing, StepProjections, StepTokens, SwaRing, check_equal, check_length,
};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{DecodeCsa, DecodeHca};

/// Arguments common to the decode steps of all layers: the step, the window, the block table and the entries.
pub struct DecodeStep<'a, B: Backend> {
    /// The step's tokens; of each request at most as many as its rings can take back.
    pub tokens: &'a StepTokens<'a, B>,
    /// `[tokens]` row of the window each token goes to. A token whose row does not exist is counted as a fault.
    pub ring_row: &'a View<B, i32>,
    /// `[tokens, 512]` BF16, the window rows, after norm and RoPE.
    pub window_kv: &'a View<B, bf16>,
    /// The window.
    pub window: SwaRing<'a, B>,
    /// The block table.
    pub table: BlockTable<'a, B>,
    /// The layer's entries.
    pub entries: Entries<'a, B>,
    /// `[1]` count of tokens and entries refused.
    pub faults: &'a Buffer<B, u32>,
}

/// One compressor's part of a decode step.
pub struct DecodeCompressor<'a, B: Backend> {
    /// The model's projections.
    pub projections: StepProjections<'a, B>,
    /// The compressor's weights.
    pub weights: PoolingWeights<'a, B>,
    /// Its state.
    pub state: StateRing<'a, B>,
}

impl<B: Backend> DecodeStep<'_, B> {
    fn check(&self, ratio: u32, state: &StateRing<'_, B>) -> Result<DecodeParams, DeviceError> {
        let window_rows = self.window.rows()?;
        self.entries.check_ratio(ratio)?;
        let [window, entries] = [self.window.format, self.entries.format];
        let what = "scale bytes of a row of the window";
        check_equal(what, window.scale_bytes(), entries.scale_bytes())?;
        let slots = state.slots.min(self.table.slots);
        Ok(DecodeParams {
            tokens: self.tokens.count,
            slots,
            window_rows,
            state_ring: state.ring,
            max_blocks: self.table.max_blocks,
            num_blocks: self.entries.num_blocks,
        })
    }
}

/// A CSA layer's decode step.
pub struct CsaDecode<'a, B: Backend> {
    /// Arguments common to all layers.
    pub step: &'a DecodeStep<'a, B>,
    /// The compressor of the entries.
    pub main: &'a DecodeCompressor<'a, B>,
    /// The compressor of the indexer keys.
    pub index: &'a DecodeCompressor<'a, B>,
    /// The indexer keys.
    pub keys: &'a IndexKeys<'a, B>,
}

/// An HCA layer's decode step.
pub struct HcaDecode<'a, B: Backend> {
    /// Arguments common to all layers.
    pub step: &'a DecodeStep<'a, B>,
    /// The compressor of the entries.
    pub main: &'a DecodeCompressor<'a, B>,
}

/// Queues `decode_csa_*`. A request may have at most as many tokens in the step as its state rings can take
/// back ([`csa_decode_tokens`](kv_layout::geometry::csa_decode_tokens)). Tokens of a request with more are
/// refused on the device and counted in `faults`.
///
/// # Errors
/// [`DeviceError::Length`] for a ring with fewer rows than a step of one token needs, or an indexer's state of fewer
/// slots than the entries'; [`DeviceError::Argument`] for a window's ring or pools out of range, window and entries of
/// different formats, an indexer's ring of another length than the entries', or keys without the Hadamard transform;
/// [`DeviceError::NotADivisor`] if `entries_per_block` does not divide 128; [`DeviceError::TooShort`] for a buffer
/// shorter than its shape; as [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the slots, positions and other numbers of the step's tokens, or the block table: each thread
/// of a block reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn decode_csa<B: Backend>(
    stream: &Stream<B>,
    decode: &CsaDecode<'_, B>,
) -> Result<(), DeviceError> {
    let CsaDecode { step, main, index, keys } = *decode;
    let tokens = step.tokens;
    if tokens.count == 0 {
        return Ok(());
    }
    let params = step.check(CSA_RATIO, &main.state)?;
    main.state.check(CompressorKind::CsaMain)?;
    // The kernel always multiplies keys by the Hadamard matrix.
    check_equal("hadamard of the indexer keys", keys.hadamard, true)?;
    check_length("indexer state", index.state.slots.into(), params.slots.into())?;
    // The kernel has one ring length for both states.
    check_equal("rows of the indexer's ring", index.state.ring, params.state_ring)?;
    let operation = DecodeCsa {
        window_kv: step.window_kv.ptr(),
        main_kv: main.projections.kv.ptr(),
        main_gate: main.projections.gate.ptr(),
        main_ape: main.weights.ape.ptr(),
        main_norm: main.weights.norm.ptr(),
        index_kv: index.projections.kv.ptr(),
        index_gate: index.projections.gate.ptr(),
        index_ape: index.weights.ape.ptr(),
        index_norm: index.weights.norm.ptr(),
        frequencies: main.weights.frequencies.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        token_remaining: tokens.remaining.ptr(),
        token_ring_row: step.ring_row.ptr(),
        table: step.table.table.ptr(),
        ring_data: step.window.data.ptr_mut(),
        ring_scale: step.window.scale.ptr_mut(),
        main_state: main.state.rows.ptr_mut(),
        index_state: index.state.rows.ptr_mut(),
        entry_data: step.entries.data.ptr_mut(),
        entry_scale: step.entries.scale.ptr_mut(),
        index_code: keys.code.ptr_mut(),
        index_scale: keys.scale.ptr_mut(),
        faults: step.faults.ptr_mut(),
        params,
    };
    let variant = (step.entries.format, keys.format);
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots, ring rows and blocks outside their buffers.
    unsafe { stream.launch(variant, &operation) }
}

/// Queues `decode_hca_*`; see [`decode_csa`], and
/// [`hca_decode_tokens`](kv_layout::geometry::hca_decode_tokens).
///
/// # Errors
/// As [`decode_csa`].
///
/// # Safety
/// Until the launch is done nothing writes the slots, positions and other numbers of the step's tokens, or the block table: each thread
/// of a block reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn decode_hca<B: Backend>(
    stream: &Stream<B>,
    decode: &HcaDecode<'_, B>,
) -> Result<(), DeviceError> {
    let HcaDecode { step, main } = *decode;
    let tokens = step.tokens;
    if tokens.count == 0 {
        return Ok(());
    }
    let params = step.check(HCA_RATIO, &main.state)?;
    main.state.check(CompressorKind::Hca)?;
    let operation = DecodeHca {
        window_kv: step.window_kv.ptr(),
        kv: main.projections.kv.ptr(),
        gate: main.projections.gate.ptr(),
        ape: main.weights.ape.ptr(),
        norm: main.weights.norm.ptr(),
        frequencies: main.weights.frequencies.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        token_remaining: tokens.remaining.ptr(),
        token_ring_row: step.ring_row.ptr(),
        table: step.table.table.ptr(),
        ring_data: step.window.data.ptr_mut(),
        ring_scale: step.window.scale.ptr_mut(),
        state: main.state.rows.ptr_mut(),
        entry_data: step.entries.data.ptr_mut(),
        entry_scale: step.entries.scale.ptr_mut(),
        faults: step.faults.ptr_mut(),
        params,
    };
    // SAFETY: as `decode_csa`.
    unsafe { stream.launch(step.entries.format, &operation) }
}

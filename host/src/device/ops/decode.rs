//! One-token decode: a layer's whole update in one launch.

use kernels_gpu::params::DecodeParams;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, StateStream};

use super::compress::{HCA_SPLITS, Shape};
use super::flush::{IndexKeys, check_index_keys};
use super::gather::{BlockTable, Entries};
use super::{
    CompressorWeights, HcaScratch, StateRing, StepProjections, StepTokens, SwaRing, check,
};
use crate::device::{Buffer, Device, DeviceError};
use crate::kernels::{DecodeCsa, DecodeHca};

/// Blocks of a token of a CSA layer: for the entry, and for indexer key and window.
const CSA_PARTS: u32 = 2;
/// Shares that the tokens of an HCA layer are cut into: about as many groups of eight blocks as run at
/// once on an H200, two blocks on each of 132 multiprocessors.
const HCA_SHARES: u32 = 32;
/// Most tokens of a share.
const HCA_SHARE_TOKENS: u32 = 16;

/// What every layer's decode step takes: the step, the window, the block table and the entries.
pub struct DecodeStep<'a, D: Device> {
    /// The step's tokens, one a request.
    pub tokens: &'a StepTokens<D>,
    /// `[tokens]` row of the window each token goes to; -1 = none.
    pub ring_row: &'a Buffer<D, i32>,
    /// `[tokens, 512]` BF16, the window rows, after norm and RoPE.
    pub window_kv: &'a Buffer<D, u16>,
    /// The window.
    pub window: SwaRing<'a, D>,
    /// The block table.
    pub table: BlockTable<'a, D>,
    /// The layer's entries.
    pub entries: Entries<'a, D>,
    /// `[1]` count of tokens and entries refused.
    pub faults: &'a Buffer<D, u32>,
}

/// One compressor's part of a decode step.
pub struct DecodeStream<'a, D: Device> {
    /// What the model projected.
    pub projections: StepProjections<'a, D>,
    /// The compressor's weights.
    pub weights: CompressorWeights<'a, D>,
    /// Its state.
    pub state: StateRing<D>,
}

impl<D: Device> DecodeStep<'_, D> {
    fn check(&self, ratio: u32, state: &StateRing<D>) -> Result<DecodeParams, DeviceError> {
        let tokens = u64::from(self.tokens.count);
        let window_rows = self.window.check()?;
        check("window rows", self.window_kv, tokens * u64::from(HEAD_DIM))?;
        check("ring rows of tokens", self.ring_row, tokens)?;
        check("fault word", self.faults, 1)?;
        self.table.check()?;
        let entries_per_block = self.entries.entries_per_block;
        if self.entries.check()? != ratio || self.window.format != self.entries.format {
            return Err(DeviceError::EntriesPerBlock { entries_per_block });
        }
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

impl<D: Device> DecodeStream<'_, D> {
    fn check(&self, which: StateStream, tokens: &StepTokens<D>) -> Result<(), DeviceError> {
        let shape = Shape::of(which);
        shape.check(tokens, &self.projections, self.weights.ape, &self.state)?;
        shape.check_weights(&self.weights)
    }
}

/// Queues `decode_csa_*`. A request with more than one token in the step is refused on the device
/// and counted in `faults`.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Device::launch`].
pub fn decode_csa<D: Device>(
    device: &D,
    stream: &D::Stream,
    step: &DecodeStep<'_, D>,
    main: &DecodeStream<'_, D>,
    index: &DecodeStream<'_, D>,
    keys: &IndexKeys<'_, D>,
) -> Result<(), DeviceError> {
    let tokens = step.tokens;
    if tokens.count == 0 {
        return Ok(());
    }
    let params = step.check(CSA_RATIO, &main.state)?;
    main.check(StateStream::CsaMain, tokens)?;
    index.check(StateStream::CsaIndex, tokens)?;
    super::super::check_length("indexer state", index.state.slots.into(), params.slots.into())?;
    super::super::check_length("indexer ring", index.state.ring.into(), params.state_ring.into())?;
    check_index_keys(keys, &step.entries)?;
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
        token_ring_row: step.ring_row.ptr(),
        table: step.table.table.ptr(),
        ring_data: step.window.data.ptr(),
        ring_scale: step.window.scale.ptr(),
        main_state: main.state.rows.ptr(),
        index_state: index.state.rows.ptr(),
        entry_data: step.entries.data.ptr(),
        entry_scale: step.entries.scale.ptr(),
        index_code: keys.code.ptr(),
        index_scale: keys.scale.ptr(),
        faults: step.faults.ptr(),
        params,
    };
    let variant = (step.entries.format, keys.format);
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel refuses
    // slots, ring rows and blocks outside their buffers.
    unsafe { device.launch(stream, variant, (tokens.count, CSA_PARTS), &operation) }
}

/// Queues `decode_hca_*`; see [`decode_csa`].
///
/// `scratch` needs a place for every token, padded ones too: only the device knows which are. A step
/// of one token a request never has more tokens than the cache has requests, for which there is room.
///
/// # Errors
/// As [`decode_csa`]; [`DeviceError::Length`] too for more tokens than `scratch` has places.
pub fn decode_hca<D: Device>(
    device: &D,
    stream: &D::Stream,
    step: &DecodeStep<'_, D>,
    main: &DecodeStream<'_, D>,
    scratch: &HcaScratch<D>,
) -> Result<(), DeviceError> {
    let tokens = step.tokens;
    if tokens.count == 0 {
        return Ok(());
    }
    let params = step.check(HCA_RATIO, &main.state)?;
    main.check(StateStream::Hca, tokens)?;
    scratch.check(tokens.count)?;
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
        token_ring_row: step.ring_row.ptr(),
        table: step.table.table.ptr(),
        pooled: scratch.pooled().ptr(),
        ring_data: step.window.data.ptr(),
        ring_scale: step.window.scale.ptr(),
        state: main.state.rows.ptr(),
        entry_data: step.entries.data.ptr(),
        entry_scale: step.entries.scale.ptr(),
        faults: step.faults.ptr(),
        params,
    };
    let shares = tokens.count.min(HCA_SHARES.max(tokens.count.div_ceil(HCA_SHARE_TOKENS)));
    // SAFETY: as `decode_csa`; the scratch has a place for every token.
    unsafe { device.launch(stream, step.entries.format, (shares * HCA_SPLITS, 1), &operation) }
}

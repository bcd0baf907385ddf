//! Flush: CSA entries and indexer keys into the paged planes.

use kernels_gpu::params::FlushParams;
use kv_layout::geometry::CSA_RATIO;

use super::block_table::BlockTable;
use super::pools::{Entries, IndexKeys};
use super::step_tokens::{StepTokens, WorkList};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::FlushCsa;

/// Entries to store in the pool.
pub struct Flush<'a, B: Backend> {
    /// The step's tokens.
    pub tokens: &'a StepTokens<'a, B>,
    /// Which of them close a window.
    pub closing: &'a WorkList<'a, B>,
    /// `[capacity, 512]` BF16.
    pub entries: &'a View<B, bf16>,
    /// Which block holds each window.
    pub table: &'a BlockTable<'a, B>,
    /// Slots of the compressor's state. Nothing was pooled for tokens in other slots.
    pub state_slots: u32,
    /// The pool.
    pub to: &'a Entries<'a, B>,
    /// `[1]` count of windows without a block.
    pub faults: &'a Buffer<B, u32>,
}

/// Indexer keys to store in the pool, of the same windows as the entries.
pub struct KeyFlush<'a, B: Backend> {
    /// `[capacity, 128]` BF16, with RoPE, before the Hadamard transform.
    pub keys: &'a View<B, bf16>,
    /// The pool.
    pub to: &'a IndexKeys<'a, B>,
}

/// Queues `flush_csa_*`: entries and indexer keys of the listed windows, each to the row that the block
/// table gives it. A window is left out and counted in the fault word if it has no block, if the step lacks some of
/// its tokens, or if its slot is not one of the state's.
///
/// # Errors
/// [`DeviceError::Argument`] unless a block has 32 entries; [`DeviceError::NotADivisor`] if `entries_per_block` does
/// not divide 128; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn flush_csa<B: Backend>(
    stream: &Stream<B>,
    flush: &Flush<'_, B>,
    keys: &KeyFlush<'_, B>,
) -> Result<(), DeviceError> {
    let Flush { tokens, closing, entries, table, state_slots, to, faults } = *flush;
    let KeyFlush { keys, to: index } = *keys;
    to.check_ratio(CSA_RATIO)?;
    if closing.capacity == 0 {
        return Ok(());
    }
    let operation = FlushCsa {
        entries: entries.ptr(),
        keys: keys.ptr(),
        closing: closing.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        token_index: tokens.index.ptr(),
        table: table.table.ptr(),
        entry_data: to.data.ptr_mut(),
        entry_scale: to.scale.ptr_mut(),
        index_code: index.code.ptr_mut(),
        index_scale: index.scale.ptr_mut(),
        faults: faults.ptr_mut(),
        params: FlushParams {
            capacity: closing.capacity,
            slots: table.slots.min(state_slots),
            max_blocks: table.max_blocks,
            num_blocks: to.num_blocks,
            hadamard: index.hadamard.into(),
            tokens: tokens.count,
        },
    };
    let variant = (to.format, index.format);
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe { stream.launch(variant, &operation) }
}

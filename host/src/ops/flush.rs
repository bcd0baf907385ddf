//! Flush: entries and indexer keys into the paged planes.

use kernels_gpu::params::FlushParams;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM};
use kv_layout::index_row::IndexFormat;

use super::gather::{BlockTable, Entries};
use super::{Plan, StepTokens, check};
use crate::device::{Backend, Buffer, DeviceError, Stream};
use kernels_gpu::launch::{FlushCsa, FlushHca};

/// The indexer keys of one CSA layer.
pub struct IndexKeys<'a, B: Backend> {
    /// `[num_blocks * 32, code_bytes]` u8.
    pub code: &'a Buffer<B, u8>,
    /// `[num_blocks * 32, scale_bytes]` u8.
    pub scale: &'a Buffer<B, u8>,
    /// How keys are stored.
    pub format: IndexFormat,
    /// Whether keys are multiplied by the Hadamard matrix before they are quantised, as the released
    /// model does.
    pub rotate: bool,
}

/// Queues `flush_csa_*`: the entries (`[capacity, 512]` BF16) and indexer keys (`[capacity, 128]`
/// BF16, not yet rotated) of the listed windows, each to the row that the block table gives it. A
/// window without a block is left out and counted in `faults`.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
#[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
pub fn flush_csa<B: Backend>(
    stream: &Stream<B>,
    tokens: &StepTokens<B>,
    plan: &Plan<'_, B>,
    (entries, keys): (&Buffer<B, u16>, &Buffer<B, u16>),
    table: &BlockTable<'_, B>,
    to: &Entries<'_, B>,
    index: &IndexKeys<'_, B>,
    faults: &Buffer<B, u32>,
) -> Result<(), DeviceError> {
    let params = check_flush(tokens, plan, entries, table, to, CSA_RATIO, faults)?;
    check("indexer keys", keys, u64::from(plan.capacity) * u64::from(INDEX_DIM))?;
    check_index_keys(index, to)?;
    let operation = FlushCsa {
        entries: entries.ptr(),
        keys: keys.ptr(),
        plan: plan.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        table: table.table.ptr(),
        entry_data: to.data.ptr_mut(),
        entry_scale: to.scale.ptr_mut(),
        index_code: index.code.ptr_mut(),
        index_scale: index.scale.ptr_mut(),
        faults: faults.ptr_mut(),
        params: FlushParams { rotate: index.rotate.into(), ..params },
    };
    let variant = (to.format, index.format);
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe { stream.launch(variant, &operation) }
}

/// Queues `flush_hca_*`: the entries (`[capacity, 512]` BF16) of the listed windows.
///
/// # Errors
/// As [`flush_csa`].
pub fn flush_hca<B: Backend>(
    stream: &Stream<B>,
    tokens: &StepTokens<B>,
    plan: &Plan<'_, B>,
    entries: &Buffer<B, u16>,
    table: &BlockTable<'_, B>,
    to: &Entries<'_, B>,
    faults: &Buffer<B, u32>,
) -> Result<(), DeviceError> {
    let operation = FlushHca {
        entries: entries.ptr(),
        plan: plan.records.ptr(),
        token_position: tokens.position.ptr(),
        token_slot: tokens.slot.ptr(),
        table: table.table.ptr(),
        entry_data: to.data.ptr_mut(),
        entry_scale: to.scale.ptr_mut(),
        faults: faults.ptr_mut(),
        params: check_flush(tokens, plan, entries, table, to, HCA_RATIO, faults)?,
    };
    // SAFETY: as `flush_csa`.
    unsafe { stream.launch(to.format, &operation) }
}

/// Checks what both flushes share.
fn check_flush<B: Backend>(
    tokens: &StepTokens<B>,
    plan: &Plan<'_, B>,
    entries: &Buffer<B, u16>,
    table: &BlockTable<'_, B>,
    to: &Entries<'_, B>,
    ratio: u32,
    faults: &Buffer<B, u32>,
) -> Result<FlushParams, DeviceError> {
    tokens.check()?;
    plan.check()?;
    table.check()?;
    to.check_ratio(ratio)?;
    check("entries", entries, u64::from(plan.capacity) * u64::from(HEAD_DIM))?;
    check("fault word", faults, 1)?;
    Ok(FlushParams {
        capacity: plan.capacity,
        slots: table.slots,
        max_blocks: table.max_blocks,
        num_blocks: to.num_blocks,
        rotate: 0,
        tokens: tokens.count,
    })
}

/// Checks that there is a key for every entry.
pub(super) fn check_index_keys<B: Backend>(
    index: &IndexKeys<'_, B>,
    entries: &Entries<'_, B>,
) -> Result<(), DeviceError> {
    let rows = u64::from(entries.num_blocks) * u64::from(entries.entries_per_block);
    check("indexer key codes", index.code, rows * index.format.code_bytes())?;
    check("indexer key scales", index.scale, rows * index.format.scale_bytes())
}

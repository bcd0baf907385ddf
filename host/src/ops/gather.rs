//! Gathers of compressed entries for attention, by list or of all entries, and the number of entries that a query sees.

use std::num::NonZeroU32;

use kernels_gpu::params::{CountEntriesParams, GatherEntriesParams};

use super::block_table::BlockTable;
use super::pools::Entries;
use super::step_tokens::StepQueries;
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{CountEntries, GatherAll, GatherEntries};

/// Compressed entries of queries, and where they go.
pub struct EntryGather<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// The blocks of their requests.
    pub table: &'a BlockTable<'a, B>,
    /// The layer's entries.
    pub entries: &'a Entries<'a, B>,
    /// Rows of a query's tile.
    pub rows: u32,
    /// `[queries, rows, 512]` BF16.
    pub tile: &'a Buffer<B, bf16>,
    /// `[1]` count of what is refused.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `gather_entries`: for each query the entries that its row of `selected` names (`[queries,
/// rows]`, -1 = none), zero where there is none.
///
/// An index that the query may not see, or whose block is missing, gives a zero row and is counted
/// in the fault word. So is a query whose slot is past the last or whose position is negative; its tile stays untouched.
///
/// # Errors
/// [`DeviceError::Argument`] for queries past `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape;
/// [`DeviceError::NotADivisor`] if `entries_per_block` does not divide 128;
/// [`DeviceError::BadGrid`] if `rows` is 0, or if all queries have more than 2^31 times 16 rows; as
/// [`Stream::launch`].
pub fn gather_entries<B: Backend>(
    stream: &Stream<B>,
    gather: &EntryGather<'_, B>,
    selected: &View<B, i32>,
) -> Result<(), DeviceError> {
    let EntryGather { queries, table, entries, tile, faults, .. } = *gather;
    if queries.count == 0 {
        return Ok(());
    }
    let params = gather.params()?;
    let operation = GatherEntries {
        selected: selected.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        table: table.table.ptr(),
        entry_data: entries.data.ptr(),
        entry_scale: entries.scale.ptr(),
        tile: tile.ptr_mut(),
        faults: faults.ptr_mut(),
        params,
    };
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes; work of one stream runs in order.
    unsafe { stream.launch(entries.format, &operation) }
}

/// Queues `gather_all`: for each query all entries that it sees, oldest first, and their number into
/// `lengths` (`[queries]`). Rows of the tile past the length keep what they held.
///
/// A query that sees more than `rows` entries gets the first `rows` of them and is counted in the fault
/// word; an entry whose block is missing gives a zero row and is counted too.
///
/// # Errors
/// As [`gather_entries`].
pub fn gather_all<B: Backend>(
    stream: &Stream<B>,
    gather: &EntryGather<'_, B>,
    lengths: &Buffer<B, i32>,
) -> Result<(), DeviceError> {
    let EntryGather { queries, table, entries, tile, faults, .. } = *gather;
    if queries.count == 0 {
        return Ok(());
    }
    let params = gather.params()?;
    let operation = GatherAll {
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        table: table.table.ptr(),
        entry_data: entries.data.ptr(),
        entry_scale: entries.scale.ptr(),
        tile: tile.ptr_mut(),
        lengths: lengths.ptr_mut(),
        faults: faults.ptr_mut(),
        params,
    };
    // SAFETY: as in `gather_entries`.
    unsafe { stream.launch(entries.format, &operation) }
}

/// How many entries queries see.
pub struct EntryCounts<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// Tokens of an entry.
    pub ratio: NonZeroU32,
    /// `[queries]` entries that each sees; 0 for padding.
    pub lengths: &'a Buffer<B, i32>,
}

/// Queues `count_entries`: how many entries each query sees.
///
/// # Errors
/// [`DeviceError::Argument`] for queries past `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn count_entries<B: Backend>(
    stream: &Stream<B>,
    counts: &EntryCounts<'_, B>,
) -> Result<(), DeviceError> {
    let EntryCounts { queries, ratio, lengths } = *counts;
    let StepQueries { position, slot, first, count, .. } = *queries;
    if count == 0 {
        return Ok(());
    }
    queries.check()?;
    let operation = CountEntries {
        token_position: position.ptr(),
        token_slot: slot.ptr(),
        lengths: lengths.ptr_mut(),
        params: CountEntriesParams { first, tokens: count, ratio: ratio.get() },
    };
    // SAFETY: the launch checks every buffer; work of one stream
    // runs in order.
    unsafe { stream.launch((), &operation) }
}

impl<B: Backend> EntryGather<'_, B> {
    /// The scalars of both gathers.
    fn params(&self) -> Result<GatherEntriesParams, DeviceError> {
        let Self { queries, table, entries, rows, .. } = *self;
        queries.check()?;
        let ratio = entries.ratio()?;
        Ok(GatherEntriesParams {
            first: queries.first,
            tokens: queries.count,
            rows,
            // Both are powers of two: they divide the tokens of a block.
            ratio_log2: ratio.ilog2(),
            entries_log2: entries.entries_per_block.ilog2(),
            slots: table.slots,
            max_blocks: table.max_blocks,
            num_blocks: entries.num_blocks,
        })
    }
}

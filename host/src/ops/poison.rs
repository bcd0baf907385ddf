//! The search for rows that no kernel has written, in gathered tiles that attention will read.

use kernels_gpu::params::FindPoisonParams;
use kv_layout::geometry::WINDOW;

use super::StepQueries;
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use crate::ids::LayerId;
use kernels_gpu::launch::FindPoison;

/// The kind of rows in a gathered tile, `[queries, rows, 512]` BF16.
#[derive(Clone, Copy)]
pub enum GatheredRows<'a, B: Backend> {
    /// The window of each query, 128 rows: `[queries]` i32 rows in use.
    Window(&'a View<B, i32>),
    /// The entries that the lists name, `[queries, rows]` i32, -1 = none; and `rows`.
    List(&'a View<B, i32>, u32),
    /// All entries that a query sees: `[queries]` i32 rows in use, and rows of a query's tile.
    All(&'a View<B, i32>, u32),
}

impl<B: Backend> GatheredRows<'_, B> {
    fn rows(&self) -> u32 {
        match *self {
            Self::Window(_) => WINDOW,
            Self::List(_, rows) | Self::All(_, rows) => rows,
        }
    }
}

/// Arguments of [`find_poison`]: a gathered tile.
pub struct PoisonSearch<'a, B: Backend> {
    /// The queries of the gather.
    pub queries: &'a StepQueries<'a, B>,
    /// Their layer.
    pub layer: LayerId,
    /// `[queries, rows, 512]` BF16.
    pub tile: &'a View<B, bf16>,
    /// The kind of its rows.
    pub rows: GatheredRows<'a, B>,
    /// `[2 + 5 * capacity]` the number of rows found so far, and what that number was when the records were last read; then
    /// records of the first rows since, row `i` at place `i % capacity`.
    pub found: &'a Buffer<B, u32>,
}

/// Queues `find_poison`: counts the rows of the tile that no kernel has written since the cache was
/// poisoned, and records them while there is room.
///
/// # Errors
/// [`DeviceError::Argument`] for queries past `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape; as
/// [`Stream::launch`].
pub fn find_poison<B: Backend>(
    stream: &Stream<B>,
    search: &PoisonSearch<'_, B>,
) -> Result<(), DeviceError> {
    let PoisonSearch { queries, layer, tile, rows: ref kind, found } = *search;
    let StepQueries { position, slot, first, count, .. } = *queries;
    let rows = kind.rows();
    if count == 0 || rows == 0 {
        return Ok(());
    }
    queries.check()?;
    let (source, of_rows) = match *kind {
        GatheredRows::Window(lengths) => (FindPoisonParams::WINDOW, lengths),
        GatheredRows::List(selected, _) => (FindPoisonParams::LIST, selected),
        GatheredRows::All(lengths, _) => (FindPoisonParams::ALL, lengths),
    };
    let operation = FindPoison {
        tile: tile.ptr(),
        lengths: of_rows.ptr(),
        selected: of_rows.ptr(),
        token_position: position.ptr(),
        token_slot: slot.ptr(),
        found: found.ptr_mut(),
        params: FindPoisonParams {
            first,
            tokens: count,
            rows,
            layer: layer.0,
            source,
            capacity: capacity(found),
        },
    };
    // SAFETY: the launch checks every buffer, of `lengths` and `selected` the one that this source reads;
    // work of one stream runs in order.
    unsafe { stream.launch((), &operation) }
}

/// Number of records that `found` has room for after its head.
pub(super) fn capacity<B: Backend>(found: &Buffer<B, u32>) -> u32 {
    const MAX_RECORDS: u32 = (u32::MAX - FindPoisonParams::HEAD) / FindPoisonParams::RECORD;
    let words = found.len().saturating_sub(FindPoisonParams::HEAD.into());
    let records = words / u64::from(FindPoisonParams::RECORD);
    u32::try_from(records).unwrap_or(MAX_RECORDS).min(MAX_RECORDS)
}

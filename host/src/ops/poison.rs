//! The search for rows that nobody wrote, in what attention is about to read.

use kernels_gpu::params::FindPoisonParams;
use kv_layout::geometry::{HEAD_DIM, WINDOW};

use super::{GatherQueries, check, product};
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use crate::ids::LayerId;
use kernels_gpu::launch::FindPoison;

/// A gathered tile, `[queries, rows, 512]` BF16, by what its rows are.
#[derive(Clone, Copy)]
pub enum GatheredRows<'a, B: Backend> {
    /// The window of each query: 128 rows, of which `[queries]` are in use.
    Window(&'a View<B, i32>),
    /// The entries that the `[queries, rows]` lists name; -1 = none.
    List(&'a View<B, i32>, u32),
    /// All entries that a query sees, of which `[queries]` rows are in use.
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

/// A gathered tile to look at.
pub struct PoisonSearch<'a, B: Backend> {
    /// Who gathered.
    pub queries: &'a GatherQueries<'a, B>,
    /// In which layer.
    pub layer: LayerId,
    /// `[queries, rows, 512]` BF16.
    pub tile: &'a View<B, bf16>,
    /// What its rows are.
    pub rows: GatheredRows<'a, B>,
    /// `[1 + 4 * capacity]` how many were found, and the first of them.
    pub found: &'a Buffer<B, u32>,
}

/// Queues `find_poison`: rows of the tile that nobody wrote since the cache was poisoned are counted and,
/// while there is room, recorded.
///
/// # Errors
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn find_poison<B: Backend>(
    stream: &Stream<B>,
    search: &PoisonSearch<'_, B>,
) -> Result<(), DeviceError> {
    let PoisonSearch { queries, layer, tile, rows: ref kind, found } = *search;
    let GatherQueries { position, slot, first, count, .. } = *queries;
    let rows = kind.rows();
    if count == 0 || rows == 0 {
        return Ok(());
    }
    let (queries, tile_rows) = (u64::from(count), u64::from(count) * u64::from(rows));
    check("tile", tile, product([tile_rows, HEAD_DIM.into()]))?;
    let end = u64::from(first) + queries;
    check("positions", position, end)?;
    check("slots", slot, end)?;
    let record = FindPoisonParams::RECORD;
    check("poison records", found, 1)?;
    let capacity = (found.len() - 1) / u64::from(record);
    let (source, of_rows) = match *kind {
        GatheredRows::Window(lengths) => (FindPoisonParams::WINDOW, lengths),
        GatheredRows::List(selected, _) => (FindPoisonParams::LIST, selected),
        GatheredRows::All(lengths, _) => (FindPoisonParams::ALL, lengths),
    };
    let list = source == FindPoisonParams::LIST;
    check("lengths or list", of_rows, if list { tile_rows } else { queries })?;
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
            capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
        },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above), of `lengths` and
    // `selected` the one that this source reads; work of one stream runs in order.
    unsafe { stream.launch((), &operation) }
}

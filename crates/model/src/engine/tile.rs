//! A tile of queries, and the conversion of rows to BF16.

use dsv4_kv_device::{Backend, Buffer, Device, DeviceError};
use half::bf16;
use kv_layout::geometry::HEAD_DIM;
use ndarray::ArrayView2;

/// Number of queries in a tile, which are attended at once.
pub const TILE_QUERIES: u32 = 32;

/// Rows for each query of a tile.
pub struct Tile<B: Backend> {
    /// `[TILE_QUERIES, most, 512]`.
    pub rows: Buffer<B, bf16>,
    /// `[TILE_QUERIES]`: number of rows of each query.
    pub lengths: Buffer<B, i32>,
}

impl<B: Backend> Tile<B> {
    /// Allocates a tile for queries with at most `rows` rows.
    pub fn new(device: &Device<B>, rows: u32) -> Result<Self, DeviceError> {
        let elements = u64::from(TILE_QUERIES) * u64::from(rows) * u64::from(HEAD_DIM);
        let rows = device.allocate("tile", elements)?;
        Ok(Self { rows, lengths: device.allocate("tile lengths", TILE_QUERIES.into())? })
    }
}

/// The rows of `x` in BF16, padded with zeros to `width` columns.
pub fn rounded(x: ArrayView2<'_, f32>, width: usize) -> Vec<bf16> {
    let fill = width - x.ncols();
    let row = |row: ndarray::ArrayView1<'_, f32>| {
        let values: Vec<bf16> = row.iter().map(|&value| bf16::from_f32(value)).collect();
        values.into_iter().chain(std::iter::repeat_n(bf16::ZERO, fill))
    };
    x.outer_iter().flat_map(row).collect()
}

//! Keeps the tiles of sampled queries on the device until the step has run.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::kv_layout::geometry::HEAD_DIM;

/// Memory for tiles in a number of places, each with the names of its rows.
pub struct Kept<B: Backend> {
    /// `[places, rows, 512]` BF16.
    tiles: Buffer<B, bf16>,
    /// `[places, words]`
    names: Buffer<B, i32>,
    shape: Shape,
}

/// The shape of what is kept for a query.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Rows of its tile.
    pub rows: u32,
    /// Words that name the rows of the tile: their number, or a list of entries.
    pub words: u32,
}

/// The output of a gather: tiles of several queries, one after the other, and the names of their rows.
pub struct Gathered<'a, B: Backend> {
    /// `[queries, rows, 512]` BF16.
    pub tile: &'a Buffer<B, bf16>,
    /// `[queries, words]`
    pub names: &'a Buffer<B, i32>,
    /// The shape for each query.
    pub shape: Shape,
}

/// Bytes of device memory for `places` tiles.
pub fn bytes(places: u64, shape: Shape) -> u64 {
    places * (2 * elements(shape.rows) + 4 * u64::from(shape.words))
}

fn elements(rows: u32) -> u64 {
    u64::from(rows) * u64::from(HEAD_DIM)
}

impl<B: Backend> Kept<B> {
    /// Allocates `places` tiles.
    pub fn new(device: &Device<B>, places: u64, shape: Shape) -> Result<Self, DeviceError> {
        Ok(Self {
            tiles: device.allocate("kept tiles", places * elements(shape.rows))?,
            names: device.allocate("kept lists", places * u64::from(shape.words))?,
            shape,
        })
    }

    /// Queues copies of a query's tile and of the names of its rows, each up to the size of a place.
    pub fn keep(
        &self,
        stream: &Stream<B>,
        place: u64,
        gathered: &Gathered<'_, B>,
        query: u32,
    ) -> Result<()> {
        const INSIDE: &str = "one place per layer and sampled request";
        let (from, to, query) = (gathered.shape, self.shape, u64::from(query));
        let count = elements(from.rows.min(to.rows));
        let tile = gathered.tile.slice(query * elements(from.rows), count).context(INSIDE)?;
        let kept = self.tiles.slice(place * elements(to.rows), count).context(INSIDE)?;
        stream.copy(&tile, &kept)?;
        let count = from.words.min(to.words).into();
        let names = gathered.names.slice(query * u64::from(from.words), count).context(INSIDE)?;
        let kept = self.names.slice(place * u64::from(to.words), count).context(INSIDE)?;
        stream.copy(&names, &kept)?;
        Ok(())
    }

    /// The names of the rows of a kept tile, `[words]`.
    pub fn fetch_names(&self, stream: &Stream<B>, place: u64) -> Result<Vec<i32>, DeviceError> {
        let mut names = vec![0; self.shape.words as usize];
        stream.download(&self.names, place * u64::from(self.shape.words), &mut names)?;
        Ok(names)
    }

    /// The first `rows` rows of a kept tile, `[rows, 512]` BF16 bits, or as many as were kept.
    pub fn fetch_tile(
        &self,
        stream: &Stream<B>,
        place: u64,
        rows: u32,
    ) -> Result<Vec<u16>, DeviceError> {
        let mut tile = vec![0; elements(rows.min(self.shape.rows)) as usize];
        let numbers: &mut [bf16] = bytemuck::cast_slice_mut(&mut tile);
        stream.download(&self.tiles, place * elements(self.shape.rows), numbers)?;
        Ok(tile)
    }
}

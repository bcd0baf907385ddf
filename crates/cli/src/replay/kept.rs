//! Tiles of sampled queries, kept on the device until the step has run.

use anyhow::{Context, Result};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::kv_layout::geometry::HEAD_DIM;

/// Room for one tile and its length in each of a number of places.
pub struct Kept<D: Device> {
    /// `[places, rows, 512]` BF16.
    tiles: Buffer<D, u16>,
    /// `[places]`
    lengths: Buffer<D, i32>,
    rows: u32,
}

/// What a gather wrote: tiles of several queries, one after the other, and their lengths.
pub struct Gathered<'a, D: Device> {
    /// `[queries, rows, 512]` BF16.
    pub tile: &'a Buffer<D, u16>,
    /// `[queries]`
    pub lengths: &'a Buffer<D, i32>,
    /// Rows of a query's tile.
    pub rows: u32,
}

/// Bytes of device memory for `places` tiles of `rows` rows.
pub fn bytes(places: u64, rows: u32) -> u64 {
    places * (2 * elements(rows) + 4)
}

fn elements(rows: u32) -> u64 {
    u64::from(rows) * u64::from(HEAD_DIM)
}

impl<D: Device> Kept<D> {
    /// Room for `places` tiles of `rows` rows.
    pub fn new(device: &D, places: u64, rows: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            tiles: device.allocate("kept tiles", places * elements(rows))?,
            lengths: device.allocate("kept lengths", places)?,
            rows,
        })
    }

    /// Queues copies of a query's tile, as far as there is room for its rows, and of its length.
    pub fn keep(
        &self,
        device: &D,
        stream: &D::Stream,
        place: u64,
        gathered: &Gathered<'_, D>,
        query: u32,
    ) -> Result<()> {
        const INSIDE: &str = "one place per layer and sampled request";
        let (query, count) = (u64::from(query), elements(self.rows.min(gathered.rows)));
        let tile = gathered.tile.slice(query * elements(gathered.rows), count).context(INSIDE)?;
        let kept = self.tiles.slice(place * elements(self.rows), count).context(INSIDE)?;
        device.copy(stream, &tile, &kept)?;
        let length = gathered.lengths.slice(query, 1).context(INSIDE)?;
        device.copy(stream, &length, &self.lengths.slice(place, 1).context(INSIDE)?)?;
        Ok(())
    }

    /// The first `rows` rows of a kept tile, `[rows, 512]` BF16, or as many as were kept; its length.
    pub fn fetch(
        &self,
        device: &D,
        stream: &D::Stream,
        place: u64,
        rows: u32,
    ) -> Result<(Vec<u16>, i32), DeviceError> {
        let mut tile = vec![0; elements(rows.min(self.rows)) as usize];
        device.download(stream, &self.tiles, place * elements(self.rows), &mut tile)?;
        let mut length = [0];
        device.download(stream, &self.lengths, place, &mut length)?;
        Ok((tile, length[0]))
    }
}

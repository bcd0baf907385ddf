//! What attention reads: for a tile of queries, their windows and their compressed entries as dense
//! BF16 rows. Attention kernels read the tiles where they are; this example brings them to the host.

use std::ops::Range;

use anyhow::Result;
use dsv4_kv::LayerCacheHandle;
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::kv_layout::geometry::{CSA_RATIO, HEAD_DIM, LayerKind, WINDOW};
use half::bf16;

use crate::CONTEXT;
use crate::model::Vectors;

/// Queries of a tile.
pub const TILE_QUERIES: u32 = 32;
/// Compressed entries of a query: as many as there can be.
const ENTRIES: u32 = CONTEXT / CSA_RATIO;

/// Rows for each query of a tile.
struct Tile<B: Backend> {
    /// `[TILE_QUERIES, rows, 512]` BF16.
    values: Buffer<B, u16>,
    /// `[TILE_QUERIES]`: how many of its rows each query has.
    lengths: Buffer<B, i32>,
    rows: u32,
}

impl<B: Backend> Tile<B> {
    fn new(device: &Device<B>, rows: u32) -> Result<Self> {
        let elements = u64::from(TILE_QUERIES * rows * HEAD_DIM);
        let values = device.allocate("tile", elements)?;
        Ok(Self { values, lengths: device.allocate("tile lengths", TILE_QUERIES.into())?, rows })
    }

    /// The rows of the first `queries` queries, as f32.
    fn download(&self, stream: &Stream<B>, queries: usize) -> Result<Vectors> {
        let per_query = (self.rows * HEAD_DIM) as usize;
        let (mut values, mut lengths) = (vec![0; queries * per_query], vec![0; queries]);
        stream.download(&self.values, 0, &mut values)?;
        stream.download(&self.lengths, 0, &mut lengths)?;
        let queries = values.chunks_exact(per_query).zip(lengths);
        let rows = queries.map(|(values, length)| &values[..length as usize * HEAD_DIM as usize]);
        let value = |&bits: &u16| bf16::from_bits(bits).to_f32();
        Ok(rows.map(|values| values.iter().map(value).collect()).collect())
    }
}

/// The tensors that gathers fill, allocated once and used by all layers in turn.
pub struct Tiles<B: Backend> {
    window: Tile<B>,
    entries: Tile<B>,
    /// `[TILE_QUERIES, ENTRIES]`: the entries that each query of a CSA layer reads, -1 = none.
    selected: Buffer<B, i32>,
}

impl<B: Backend> Tiles<B> {
    /// Tiles for [`TILE_QUERIES`] queries.
    pub fn new(device: &Device<B>) -> Result<Self> {
        Ok(Self {
            window: Tile::new(device, WINDOW)?,
            entries: Tile::new(device, ENTRIES)?,
            selected: device.allocate("selected", (TILE_QUERIES * ENTRIES).into())?,
        })
    }

    /// What each of `queries` attends to, `[rows, 512]`: its window, then its compressed entries.
    ///
    /// `kv` has the step's own rows: those of a chunk are not in the window's ring yet.
    pub fn gather(
        &self,
        stream: &Stream<B>,
        cache: &LayerCacheHandle<'_, B>,
        kv: &Buffer<B, u16>,
        start: u32,
        queries: Range<u32>,
    ) -> Result<Vectors> {
        let Self { window, entries, selected } = self;
        cache.gather_swa(stream, kv, queries.clone(), &window.values, &window.lengths)?;
        let mut keys = window.download(stream, queries.len())?;
        match cache.schema().kind {
            LayerKind::Swa => return Ok(keys),
            LayerKind::Csa => {
                let visible = queries.clone().map(|query| ((start + query + 1) / CSA_RATIO) as i32);
                let visible: Vec<i32> = visible.collect();
                stream.upload(&visible, &entries.lengths, 0)?;
                stream.upload(&select(&visible), selected, 0)?;
                cache.gather_kv(stream, queries.clone(), selected, ENTRIES, &entries.values)?;
            }
            LayerKind::Hca => {
                let (tile, lengths) = (&entries.values, &entries.lengths);
                cache.gather_all(stream, queries.clone(), ENTRIES, tile, lengths)?;
            }
        }
        let entries = entries.download(stream, queries.len())?;
        keys.iter_mut().zip(entries).for_each(|(keys, entries)| keys.extend(entries));
        Ok(keys)
    }
}

/// The entries that each query reads of those it sees: all. An indexer picks no fewer while they are
/// at most its top k, 512 and more; in a longer context it would score the layer's indexer keys here.
fn select(visible: &[i32]) -> Vec<i32> {
    let entries =
        |&visible: &i32| (0..ENTRIES as i32).map(move |i| if i < visible { i } else { -1 });
    visible.iter().flat_map(entries).collect()
}

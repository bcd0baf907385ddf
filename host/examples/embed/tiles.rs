//! What attention reads: for a tile of queries, their windows and their compressed entries as dense
//! BF16 rows. Attention kernels read the tiles where they are; this example brings them to the host.

use std::ops::Range;

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::indexer::{ProjectedQueries, Selection};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{HCA_RATIO, HEAD_DIM, WINDOW};
use dsv4_kv::step::{Csa, Hca, UpdatedLayer};
use dsv4_kv::{IndexerWorkspace, WorkspaceLimits};

use crate::model::{CONTEXT, Vectors};

/// Queries of a tile.
pub const TILE_QUERIES: u32 = 32;
/// Entries of an HCA layer: as many as there can be.
const HCA_ENTRIES: u32 = CONTEXT / HCA_RATIO;

/// Rows for each query of a tile.
struct Tile<B: Backend> {
    /// `[TILE_QUERIES, rows, 512]` BF16.
    values: Buffer<B, bf16>,
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
        let (mut values, mut lengths) = (vec![bf16::ZERO; queries * per_query], vec![0; queries]);
        stream.download(&self.values, 0, &mut values)?;
        stream.download(&self.lengths, 0, &mut lengths)?;
        let queries = values.chunks_exact(per_query).zip(lengths);
        let rows = queries.map(|(values, length)| &values[..length as usize * HEAD_DIM as usize]);
        Ok(rows.map(|values| values.iter().map(|x| x.to_f32()).collect()).collect())
    }
}

/// The tensors that gathers fill, allocated once and used by all layers in turn.
pub struct Tiles<B: Backend> {
    window: Tile<B>,
    all: Tile<B>,
    selected: Tile<B>,
    /// `[TILE_QUERIES, k]`: the entries that the indexer picks for each query, -1 = none.
    lists: Buffer<B, i32>,
    /// Memory for scores, which all layers share.
    workspace: IndexerWorkspace<B>,
}

impl<B: Backend> Tiles<B> {
    /// Tiles for [`TILE_QUERIES`] queries.
    pub fn new(device: &Device<B>, model: &ModelConfig) -> Result<Self> {
        let k = model.index_topk;
        Ok(Self {
            window: Tile::new(device, WINDOW)?,
            all: Tile::new(device, HCA_ENTRIES)?,
            selected: Tile::new(device, k)?,
            lists: device.allocate("lists", (TILE_QUERIES * k).into())?,
            workspace: IndexerWorkspace::new(
                device,
                model,
                WorkspaceLimits { context: CONTEXT, queries: TILE_QUERIES, bytes: u64::MAX },
            )?,
        })
    }

    /// The window of each of `queries`, `[rows, 512]`: with keys of the step itself, which a chunk has
    /// not appended yet.
    pub fn window<K>(
        &self,
        layer: &UpdatedLayer<'_, B, K>,
        queries: Range<u32>,
    ) -> Result<Vectors> {
        let Tile { values, lengths, .. } = &self.window;
        layer.gather_window(queries.clone(), values, lengths)?;
        self.window.download(layer.stream(), queries.len())
    }

    /// All entries that each of `queries` sees, `[rows, 512]`.
    pub fn all(&self, layer: &UpdatedLayer<'_, B, Hca>, queries: Range<u32>) -> Result<Vectors> {
        let Tile { values, lengths, rows } = &self.all;
        layer.gather_all(queries.clone(), *rows, values, lengths)?;
        self.all.download(layer.stream(), queries.len())
    }

    /// The entries that the indexer picks for each of `queries`, `[rows, 512]`, from their projected
    /// vectors (`[queries, heads * 128]`) and weights (`[queries, heads]`).
    pub fn selected(
        &self,
        layer: &UpdatedLayer<'_, B, Csa>,
        vectors: &Buffer<B, f32>,
        weights: &Buffer<B, f32>,
        queries: Range<u32>,
    ) -> Result<Vectors> {
        let Self { workspace, lists, selected: Tile { values, lengths, rows: k }, .. } = self;
        let projected = ProjectedQueries { queries: vectors, weights };
        let to = Selection { workspace, queries: queries.clone(), k: *k, selected: lists };
        layer.select_projected(&projected, &to)?;
        layer.gather_entries(queries.clone(), lists, *k, values)?;
        // A list ends where no entry follows. An attention kernel looks at it itself.
        let mut list = vec![0; queries.len() * *k as usize];
        layer.stream().download(lists, 0, &mut list)?;
        let length = |list: &[i32]| list.iter().filter(|&&entry| entry >= 0).count() as i32;
        let counts: Vec<i32> = list.chunks_exact(*k as usize).map(length).collect();
        layer.stream().upload(&counts, lengths, 0)?;
        self.selected.download(layer.stream(), queries.len())
    }
}

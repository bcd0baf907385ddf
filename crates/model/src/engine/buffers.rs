//! The tensors that are copied to and from the device. All layers use the same ones, one after another.

use std::ops::Range;

use dsv4_kv::indexer::{IndexerWorkspace, WorkspaceLimits, padded_columns};
use dsv4_kv::step::EntryLists;
use dsv4_kv::{CacheConfig, KvError};
use dsv4_kv_device::{Backend, Buffer, Device, Memory, Stream};
use half::bf16;
use kv_layout::geometry::{HEAD_DIM, INDEX_DIM, LayerKind, WINDOW};
use ndarray::{Array2, ArrayView1, ArrayView2};

use super::place::{AttentionPlace, Place, most_entries};
use super::tile::{TILE_QUERIES, Tile, rounded};
use crate::attention::Keys;
use crate::error::ModelError;
use crate::layer::{Compressed, Compressor};

/// Channels of a row.
const CHANNELS: usize = HEAD_DIM as usize;

/// The projections of a compressor for the step's tokens, `[step tokens, columns]`.
pub struct Projections<B: Backend> {
    /// Keys.
    pub kv: Buffer<B, f32>,
    /// Gates.
    pub gate: Buffer<B, f32>,
}

/// All tensors of an engine.
pub struct Buffers<B: Backend> {
    /// `[step tokens, 512]`: window rows.
    pub kv: Buffer<B, bf16>,
    /// Projections for entries.
    pub main: Projections<B>,
    /// Projections for indexer keys.
    pub index: Projections<B>,
    /// `[step tokens, latent width]`.
    latent: Buffer<B, bf16>,
    /// `[step tokens, hidden width]`.
    hidden: Buffer<B, bf16>,
    /// The tensors of attention for a tile of queries.
    pub place: Place<B>,
    /// `[TILE_QUERIES, most_selected]`: the entries that the indexer picks; unused places are -1.
    pub lists: Buffer<B, i32>,
    /// The indexer's memory for scores.
    pub workspace: IndexerWorkspace<B>,
    /// Most entries of a list.
    pub most_selected: u32,
    /// Entries of the longest request in an HCA layer.
    pub most_all: u32,
    widths: Widths,
}

/// Columns of the indexer's inputs for each token, padded with zeros because its products take multiples of 32 values.
#[derive(Clone, Copy)]
struct Widths {
    latent: u32,
    hidden: u32,
}

impl<B: Backend> Buffers<B> {
    /// Allocates the tensors for the steps of a cache.
    pub fn new(
        device: &Device<B>,
        config: &CacheConfig,
        (place, heads): (AttentionPlace, u32),
    ) -> Result<Self, ModelError> {
        let tokens = u64::from(config.max_step_tokens);
        let model = &config.model;
        let projections = |columns: u32| -> Result<_, ModelError> {
            let elements = tokens * u64::from(columns);
            let kv = device.allocate("projected keys", elements)?;
            Ok(Projections { kv, gate: device.allocate("projected gates", elements)? })
        };
        let (most_selected, most_all) = most_entries(config);
        let widths = Widths {
            latent: padded_columns(model.q_lora_rank),
            hidden: padded_columns(model.hidden_size),
        };
        let limits =
            WorkspaceLimits { context: config.max_context, queries: TILE_QUERIES, bytes: u64::MAX };
        Ok(Self {
            kv: device.allocate("window rows", tokens * u64::from(HEAD_DIM))?,
            main: projections(2 * HEAD_DIM)?,
            index: projections(2 * INDEX_DIM)?,
            latent: device.allocate("query latent", tokens * u64::from(widths.latent))?,
            hidden: device.allocate("layer input", tokens * u64::from(widths.hidden))?,
            place: Place::new(place, device, (heads, most_all.max(most_selected)))?,
            lists: device.allocate("lists", u64::from(TILE_QUERIES * most_selected))?,
            workspace: IndexerWorkspace::new(device, model, limits)?,
            most_selected,
            most_all,
            widths,
        })
    }

    /// Copies a layer's inputs to the device: window rows, and the projections and activations of `x` and `latent` for
    /// its compressors and its indexer.
    pub fn upload(
        &self,
        stream: &Stream<B>,
        compressed: &Compressed,
        rows: &[bf16],
        x: ArrayView2<'_, f32>,
        latent: ArrayView2<'_, f32>,
    ) -> Result<(), ModelError> {
        stream.upload(rows, &self.kv, 0)?;
        let project = |compressor: &Compressor, to: &Projections<B>| -> Result<_, ModelError> {
            stream.upload(&flat(&compressor.kv.apply(x)), &to.kv, 0)?;
            Ok(stream.upload(&flat(&compressor.gate.apply(x)), &to.gate, 0)?)
        };
        match compressed {
            Compressed::Swa => Ok(()),
            Compressed::Hca(main) => project(main, &self.main),
            Compressed::Csa(csa) => {
                project(&csa.main, &self.main)?;
                project(&csa.index, &self.index)?;
                let Widths { latent: latent_width, hidden } = self.widths;
                stream.upload(&rounded(latent, latent_width as usize), &self.latent, 0)?;
                Ok(stream.upload(&rounded(x, hidden as usize), &self.hidden, 0)?)
            }
        }
    }

    /// The lists for a tile of queries.
    pub fn entry_lists(&self, queries: Range<u32>) -> EntryLists<'_, B> {
        EntryLists { queries, k: self.most_selected, indices: &self.lists }
    }

    /// The latents and layer inputs of some of the step's tokens.
    pub fn activations(&self, queries: Range<u32>) -> (Buffer<B, bf16>, Buffer<B, bf16>) {
        let rows = |buffer: &Buffer<B, bf16>, width: u32| {
            let of = |rows: u32| u64::from(rows) * u64::from(width);
            buffer.slice(of(queries.start), of(queries.end - queries.start))
        };
        let latent = rows(&self.latent, self.widths.latent);
        let hidden = rows(&self.hidden, self.widths.hidden);
        latent.zip(hidden).expect("queries of a step, for which there is room")
    }

    /// Waits for the gathers of the first `queries` queries of the tiles, and copies the rows of each to the host,
    /// `[rows, 512]`: its window, oldest first, then its entries. In a CSA layer the lists say how many entries there
    /// are.
    pub fn download_keys(
        &self,
        stream: &Stream<B>,
        (window, entries): (&Tile<B>, &Tile<B>),
        (kind, queries): (LayerKind, usize),
        lists: Option<&Array2<i32>>,
    ) -> Result<Vec<Keys>, KvError> {
        let mut keys = vec![Vec::new(); queries];
        let in_window = lengths(stream, &window.lengths, queries)?;
        append_rows(stream, &window.rows, WINDOW, &in_window, &mut keys)?;
        match (kind, lists) {
            (LayerKind::Hca, _) => {
                let seen = lengths(stream, &entries.lengths, queries)?;
                append_rows(stream, &entries.rows, self.most_all, &seen, &mut keys)?;
            }
            (LayerKind::Csa, Some(lists)) => {
                let listed = |list: ArrayView1<'_, i32>| list.iter().filter(|&&e| e >= 0).count();
                let listed: Vec<usize> = lists.outer_iter().map(listed).collect();
                append_rows(stream, &entries.rows, self.most_selected, &listed, &mut keys)?;
            }
            _ => {}
        }
        Ok(keys)
    }

    /// Waits for the indexer of a CSA layer, and copies the entries that it picked for the first `queries` queries of
    /// the tile to the host, `[queries, most_selected]`; `None` in other layers.
    pub fn download_lists(
        &self,
        stream: &Stream<B>,
        kind: LayerKind,
        queries: usize,
    ) -> Result<Option<Array2<i32>>, KvError> {
        if kind != LayerKind::Csa {
            return Ok(None);
        }
        let mut picked = Array2::zeros((queries, self.most_selected as usize));
        let values = picked.as_slice_mut().expect("a new array is contiguous");
        stream.download(&self.lists, 0, values)?;
        Ok(Some(picked))
    }

    /// All memory of the tensors, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let Self { kv, main, index, latent, hidden, place, lists, workspace, .. } = self;
        let projections = [main, index].into_iter().flat_map(|p| [p.kv.memory(), p.gate.memory()]);
        let rest = [kv.memory(), latent.memory(), hidden.memory(), lists.memory()];
        projections.chain(place.memory()).chain(rest).chain(workspace.memory()).collect()
    }
}

/// Number of rows of each query.
fn lengths<B: Backend>(
    stream: &Stream<B>,
    from: &Buffer<B, i32>,
    queries: usize,
) -> Result<Vec<usize>, KvError> {
    let mut lengths = vec![0; queries];
    stream.download(from, 0, &mut lengths)?;
    Ok(lengths.into_iter().map(|length| length as usize).collect())
}

/// Appends the first `lengths[query]` of a query's `most` rows to its keys.
fn append_rows<B: Backend>(
    stream: &Stream<B>,
    from: &Buffer<B, bf16>,
    most: u32,
    lengths: &[usize],
    keys: &mut [Vec<f32>],
) -> Result<(), KvError> {
    let per_query = most as usize * CHANNELS;
    let mut rows = Vec::new();
    for (query, (&length, keys)) in lengths.iter().zip(keys).enumerate() {
        rows.resize(length * CHANNELS, bf16::ZERO);
        stream.download(from, (query * per_query) as u64, &mut rows)?;
        keys.extend(rows.iter().map(|value| value.to_f32()));
    }
    Ok(())
}

fn flat(x: &Array2<f32>) -> Vec<f32> {
    x.iter().copied().collect()
}

//! Where attention runs, and what each place needs on the device.

use dsv4_kv::step::{AttentionTensors, QueryForm};
use dsv4_kv::{CacheConfig, KvError};
use dsv4_kv_device::{Backend, Buffer, Device, DeviceError, Memory, Stream};
use half::bf16;
use kv_layout::attention::MOST_HEADS;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, WINDOW};
use ndarray::{Array2, ArrayView2};

use super::tile::{TILE_QUERIES, Tile, rounded};

/// Where attention runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPlace {
    /// On the host, in f32, over rows that the cache gathers.
    Host,
    /// On the device, over the rows where they lie: queries, weights and results in BF16. At most 128 heads.
    Device,
}

impl AttentionPlace {
    /// On the device if that is a GPU, and takes so many heads; else on the host: the emulator takes longer for it.
    #[must_use]
    pub fn of_device<B: Backend>(device: &Device<B>, heads: u32) -> Self {
        match device.info().sm {
            Some(_) if heads <= MOST_HEADS => Self::Device,
            _ => Self::Host,
        }
    }
}

/// Heads of the queries of a tile, on the device.
pub struct Heads<B: Backend> {
    heads: u32,
    /// `[TILE_QUERIES, heads, 512]`: after norm and RoPE.
    query: Buffer<B, bf16>,
    /// `[TILE_QUERIES, heads, 512]`.
    out: Buffer<B, bf16>,
}

/// What attention of a tile of queries reads or writes on the device.
pub enum Place<B: Backend> {
    /// The window of each query, and its entries: rows for the host.
    Host { window: Tile<B>, entries: Tile<B> },
    /// Queries and results.
    Device(Heads<B>),
}

impl<B: Backend> Place<B> {
    /// For queries with `heads` heads and at most `entries` entries.
    pub fn new(
        place: AttentionPlace,
        device: &Device<B>,
        (heads, entries): (u32, u32),
    ) -> Result<Self, DeviceError> {
        let tile = |rows| Tile::new(device, rows);
        Ok(match place {
            AttentionPlace::Host => Self::Host { window: tile(WINDOW)?, entries: tile(entries)? },
            AttentionPlace::Device => {
                if heads > MOST_HEADS {
                    let [value, most] = [heads, MOST_HEADS].map(u64::from);
                    return Err(DeviceError::Argument { what: "heads", value, multiple: 1, most });
                }
                let elements = u64::from(TILE_QUERIES) * u64::from(heads) * u64::from(HEAD_DIM);
                let query = device.allocate("queries", elements)?;
                Self::Device(Heads { heads, query, out: device.allocate("results", elements)? })
            }
        })
    }

    /// Queries of a tile, `[tokens, heads * 512]`, to the device if attention runs there.
    pub fn upload(
        &self,
        stream: &Stream<B>,
        queries: ArrayView2<'_, f32>,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Host { .. } => Ok(()),
            Self::Device(heads) => {
                stream.upload(&rounded(queries, queries.ncols()), &heads.query, 0)
            }
        }
    }

    /// All of it, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        match self {
            Self::Host { window, entries } => [window, entries]
                .into_iter()
                .flat_map(|tile| [tile.rows.memory(), tile.lengths.memory()])
                .collect(),
            Self::Device(Heads { query, out, .. }) => vec![query.memory(), out.memory()],
        }
    }
}

impl<B: Backend> Heads<B> {
    /// What the cache's attention takes of the first `queries` queries of the tile.
    pub fn with<R>(
        &self,
        queries: u32,
        sinks: &Buffer<B, f32>,
        attend: impl FnOnce(&AttentionTensors<'_, B>) -> R,
    ) -> R {
        let elements = u64::from(queries) * u64::from(self.heads) * u64::from(HEAD_DIM);
        let part = |of: &Buffer<B, bf16>| of.slice(0, elements).expect("queries of a tile");
        let (query, out, heads) = (&part(&self.query), &part(&self.out), self.heads);
        let form = QueryForm::Rotated;
        attend(&AttentionTensors { heads, query, form, sinks, out, lse: None })
    }

    /// Waits for attention of the first `queries` queries, and brings back what it gave, `[queries, heads * 512]`.
    pub fn download(&self, stream: &Stream<B>, queries: usize) -> Result<Array2<f32>, KvError> {
        let columns = (self.heads * HEAD_DIM) as usize;
        let mut values = vec![bf16::ZERO; queries * columns];
        stream.download(&self.out, 0, &mut values)?;
        let values = values.iter().map(|value| value.to_f32()).collect();
        Ok(Array2::from_shape_vec((queries, columns), values).expect("a row for each query"))
    }
}

/// Entries that a query reads at most: of the indexer's list, and of an HCA layer.
pub fn most_entries(config: &CacheConfig) -> (u32, u32) {
    let of = |ratio: u32| (config.max_context / ratio).max(1);
    (config.model.index_topk.min(of(CSA_RATIO)), of(HCA_RATIO))
}

//! Where attention runs, and the device tensors of each place.

use dsv4_kv::step::{AttentionTensors, QueryForm};
use dsv4_kv::{CacheConfig, KvError};
use dsv4_kv_device::{Backend, Buffer, Device, DeviceError, Memory, Stream};
use half::bf16;
use kv_layout::attention::MAX_HEADS;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, WINDOW};
use ndarray::{Array2, ArrayView2};

use super::tile::{TILE_QUERIES, Tile, rounded};

/// Where attention runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPlace {
    /// On the host, in f32, over rows that the cache gathers.
    Host,
    /// On the device, over the stored rows in place, with queries, weights and results in BF16. At most 128 heads.
    Device,
}

impl AttentionPlace {
    /// [`Self::Device`] if the device is a GPU and supports this number of heads; else [`Self::Host`], which is faster
    /// than attention on the emulator.
    #[must_use]
    pub fn of_device<B: Backend>(device: &Device<B>, heads: u32) -> Self {
        match device.info().sm {
            Some(_) if heads <= MAX_HEADS => Self::Device,
            _ => Self::Host,
        }
    }
}

/// The queries and results of a tile, when attention runs on the device.
pub struct Heads<B: Backend> {
    heads: u32,
    /// `[TILE_QUERIES, heads, 512]`: queries after norm and RoPE.
    query: Buffer<B, bf16>,
    /// `[TILE_QUERIES, heads, 512]`: results.
    out: Buffer<B, bf16>,
}

/// The device tensors of attention for a tile of queries.
pub enum Place<B: Backend> {
    /// Gathered rows for the host: the window and the entries of each query.
    Host { window: Tile<B>, entries: Tile<B> },
    /// Queries and results.
    Device(Heads<B>),
}

impl<B: Backend> Place<B> {
    /// Allocates tensors for queries with `heads` heads and at most `entries` entries.
    pub fn new(
        place: AttentionPlace,
        device: &Device<B>,
        (heads, entries): (u32, u32),
    ) -> Result<Self, DeviceError> {
        let tile = |rows| Tile::new(device, rows);
        Ok(match place {
            AttentionPlace::Host => Self::Host { window: tile(WINDOW)?, entries: tile(entries)? },
            AttentionPlace::Device => {
                if heads > MAX_HEADS {
                    let [value, most] = [heads, MAX_HEADS].map(u64::from);
                    return Err(DeviceError::Argument { what: "heads", value, multiple: 1, most });
                }
                let elements = u64::from(TILE_QUERIES) * u64::from(heads) * u64::from(HEAD_DIM);
                let query = device.allocate("queries", elements)?;
                Self::Device(Heads { heads, query, out: device.allocate("results", elements)? })
            }
        })
    }

    /// Copies the queries of a tile, `[tokens, heads * 512]`, to the device if attention runs there.
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

    /// All memory of the tensors, for a graph to retain.
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
    /// Calls `attend` with the tensors of the first `queries` queries of the tile.
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

    /// Waits for attention of the first `queries` queries, and copies the results to the host, `[queries, heads *
    /// 512]`.
    pub fn download(&self, stream: &Stream<B>, queries: usize) -> Result<Array2<f32>, KvError> {
        let columns = (self.heads * HEAD_DIM) as usize;
        let mut values = vec![bf16::ZERO; queries * columns];
        stream.download(&self.out, 0, &mut values)?;
        let values = values.iter().map(|value| value.to_f32()).collect();
        Ok(Array2::from_shape_vec((queries, columns), values).expect("a row for each query"))
    }
}

/// Most entries that a query reads: in a CSA layer (the indexer's list), and in an HCA layer.
pub fn most_entries(config: &CacheConfig) -> (u32, u32) {
    let of = |ratio: u32| (config.max_context / ratio).max(1);
    (config.model.index_topk.min(of(CSA_RATIO)), of(HCA_RATIO))
}

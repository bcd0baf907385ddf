//! The memory that the indexers of a model share, and its size before it is allocated.

use kv_layout::config::ModelConfig;
use kv_layout::geometry::{CSA_RATIO, INDEX_DIM, MAX_CONTEXT};
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use serde::Serialize;

use crate::device::{Backend, Buffer, Device, Memory};
use crate::error::KvError;
use crate::ops::maxima_len;

/// Scores are laid out in tiles of so many entries.
const TILE: u32 = 32;
/// Bytes of an element of each buffer: projected queries and weights, queries and weights as scores
/// take them, scores and their maxima.
const ELEMENT_BYTES: [u64; 6] = [4, 4, 1, 4, 4, 4];

/// What a workspace takes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkspaceSize {
    /// Queries that are scored at once; more are taken in parts.
    pub queries: u32,
    /// Bytes that one query needs.
    pub bytes_per_query: u64,
    /// Bytes of all of it.
    pub bytes: u64,
    /// Allocations. A driver may round each up: CUDA to 2 MiB.
    pub buffers: u32,
}

impl WorkspaceSize {
    /// The size for up to `queries` queries at once, of requests of up to `context` tokens, as far as
    /// at most `bytes` bytes hold them.
    ///
    /// # Errors
    /// [`KvError::WorkspaceTooSmall`] if `bytes` do not hold one query; [`KvError::Config`] for more
    /// than 64 heads, a context of 0 or beyond 1,048,576, or no queries or more than 65,535.
    pub fn new(
        model: &ModelConfig,
        context: u32,
        queries: u32,
        bytes: u64,
    ) -> Result<Self, KvError> {
        check("index_n_heads", model.index_heads, QUERY_HEADS)?;
        check("context", context, MAX_CONTEXT)?;
        check("queries", queries, u32::from(u16::MAX))?;
        let elements = elements(model.index_heads, columns(context));
        let needed: u64 =
            elements.iter().zip(ELEMENT_BYTES).map(|(count, bytes)| count * bytes).sum();
        match (bytes / needed).min(queries.into()) {
            0 => Err(KvError::WorkspaceTooSmall { bytes, needed }),
            queries => Ok(Self {
                queries: queries as u32,
                bytes_per_query: needed,
                bytes: queries * needed,
                buffers: ELEMENT_BYTES.len() as u32,
            }),
        }
    }
}

/// Memory of the indexers of one model: projections, queries and scores of as many queries as fit.
pub struct IndexerWorkspace<B: Backend> {
    pub(super) heads: u32,
    pub(super) columns: u32,
    size: WorkspaceSize,
    pub(super) projected: Buffer<B, f32>,
    pub(super) projected_weight: Buffer<B, f32>,
    pub(super) query: Buffer<B, u8>,
    pub(super) weight: Buffer<B, f32>,
    pub(super) scores: Buffer<B, f32>,
    pub(super) maxima: Buffer<B, f32>,
}

impl<B: Backend> IndexerWorkspace<B> {
    /// A workspace of at most `bytes` for up to `queries` queries at once, for requests of up to
    /// `context` tokens: [`WorkspaceSize::new`] says what it takes.
    ///
    /// # Errors
    /// As [`WorkspaceSize::new`]; [`KvError::Device`] if the memory is not there.
    pub fn new(
        device: &Device<B>,
        model: &ModelConfig,
        context: u32,
        queries: u32,
        bytes: u64,
    ) -> Result<Self, KvError> {
        let size = WorkspaceSize::new(model, context, queries, bytes)?;
        let (heads, columns) = (model.index_heads, columns(context));
        let [projected, projected_weight, query, weight, scores, maxima] =
            elements(heads, columns).map(|count| count * u64::from(size.queries));
        Ok(Self {
            heads,
            columns,
            size,
            projected: device.allocate("projected queries", projected)?,
            projected_weight: device.allocate("projected head weights", projected_weight)?,
            query: device.allocate("indexer queries", query)?,
            weight: device.allocate("indexer head weights", weight)?,
            scores: device.allocate("indexer scores", scores)?,
            maxima: device.allocate("maxima of scores", maxima)?,
        })
    }

    /// What it takes on the device.
    #[must_use]
    pub fn size(&self) -> WorkspaceSize {
        self.size
    }

    /// All of it, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![
            self.projected.memory(),
            self.projected_weight.memory(),
            self.query.memory(),
            self.weight.memory(),
            self.scores.memory(),
            self.maxima.memory(),
        ]
    }
}

/// Elements of each buffer for one query, in the order of [`ELEMENT_BYTES`].
fn elements(heads: u32, columns: u32) -> [u64; 6] {
    let heads = u64::from(heads);
    let (projected, query) = (heads * u64::from(INDEX_DIM), IndexFormat::MAX_QUERY_BYTES.into());
    [projected, heads, query, heads, columns.into(), maxima_len(columns)]
}

/// Scores of a row: the entries of a request of `context` tokens, in whole tiles.
pub(super) fn columns(context: u32) -> u32 {
    (context / CSA_RATIO).max(1).next_multiple_of(TILE)
}

fn check(setting: &'static str, value: u32, most: u32) -> Result<(), KvError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(KvError::Config { setting, value: value.into(), least: 1, most: most.into() })
}

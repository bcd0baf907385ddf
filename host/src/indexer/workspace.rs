//! The memory that the indexers of a model share, and its size before it is allocated.

use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use kernels_gpu::indexer::TILE;
use kv_layout::config::ModelConfig;
use kv_layout::geometry::{CSA_RATIO, INDEX_DIM, MAX_CONTEXT};
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use serde::Serialize;

use crate::config::check_setting;
use crate::device::{Backend, Buffer, Device, Memory};
use crate::error::KvError;
use crate::ids::CacheId;
use crate::memory::buffer_spec::{Allocator, BufferSpec};
use crate::ops::{IndexQueries, most_maxima};

/// Limits of a workspace: the steps that it serves, and its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLimits {
    /// Tokens of the longest request: at least the cache's
    /// [`CacheConfig::max_context`](crate::CacheConfig::max_context). Steps of a cache with a longer context refuse to
    /// select with the workspace.
    pub context: u32,
    /// Most queries that are scored at once.
    pub queries: u32,
    /// Most bytes of device memory. If they do not suffice for `queries` queries, fewer are scored at once.
    pub bytes: u64,
}

/// The size of a workspace on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkspaceSize {
    /// Queries that are scored at once; more are taken in parts.
    pub queries: u32,
    /// Bytes that one query needs.
    pub bytes_per_query: u64,
    /// Bytes in total.
    pub bytes: u64,
    /// Number of allocations. A driver may round each up: CUDA to 2 MiB.
    pub buffers: u32,
}

impl WorkspaceSize {
    /// The size of the workspace with these limits.
    ///
    /// # Errors
    /// [`KvError::WorkspaceTooSmall`] if the bytes do not hold one query; [`KvError::Config`] for more
    /// than 64 heads, a context of 0 or beyond 1,048,576, or no queries or more than 65,535.
    pub fn new(model: &ModelConfig, limits: WorkspaceLimits) -> Result<Self, KvError> {
        let WorkspaceLimits { context, queries, bytes } = limits;
        check_setting("index_n_heads", model.index_heads, 1, QUERY_HEADS)?;
        check_setting("context", context, 1, MAX_CONTEXT)?;
        check_setting("queries", queries, 1, u32::from(u16::MAX))?;
        let of_a_query = Specs::of(model.index_heads, columns(context), 1).bytes();
        let needed: u64 = of_a_query.iter().sum();
        match (bytes / needed).min(queries.into()) {
            0 => Err(KvError::WorkspaceTooSmall { bytes, needed }),
            queries => Ok(Self {
                queries: queries as u32,
                bytes_per_query: needed,
                bytes: queries * needed,
                buffers: of_a_query.len() as u32,
            }),
        }
    }
}

/// The buffers of a workspace.
struct Specs {
    projected: BufferSpec<f32>,
    projected_weight: BufferSpec<f32>,
    query: BufferSpec<u8>,
    weight: BufferSpec<f32>,
    scores: BufferSpec<f32>,
    maxima: BufferSpec<f32>,
}

impl Specs {
    /// For `queries` queries of `heads` heads, with `columns` scores each.
    fn of(heads: u32, columns: u32, queries: u32) -> Self {
        let of = |elements: u64| elements * u64::from(queries);
        let heads = u64::from(heads);
        let projected = heads * u64::from(INDEX_DIM);
        let query = IndexFormat::MAX_QUERY_BYTES.into();
        Self {
            projected: BufferSpec::new("projected queries", of(projected)),
            projected_weight: BufferSpec::new("projected head weights", of(heads)),
            query: BufferSpec::new("indexer queries", of(query)),
            weight: BufferSpec::new("indexer head weights", of(heads)),
            scores: BufferSpec::new("indexer scores", of(columns.into())),
            // For the longest context: no step has more columns.
            maxima: BufferSpec::new("maxima of scores", of(most_maxima(columns))),
        }
    }

    /// Bytes of each buffer.
    fn bytes(&self) -> [u64; 6] {
        let Self { projected, projected_weight, query, weight, scores, maxima } = self;
        let floats = [projected, projected_weight, weight, scores, maxima].map(BufferSpec::bytes);
        let [projected, projected_weight, weight, scores, maxima] = floats;
        [projected, projected_weight, query.bytes(), weight, scores, maxima]
    }
}

/// Memory of the indexers of one cache, for all of its layers: projections, queries and scores of as many queries as
/// fit.
///
/// It belongs to the first cache whose step selects with it, also if a launch of that call fails. Steps of one cache
/// run one after another on the device, in whichever streams. Those of two caches may overlap, and would overwrite each
/// other's scores. Threads that select with one workspace take turns: a selection's launches are queued without those
/// of another between them.
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
    memory: Vec<Memory<B>>,
    cache: OnceLock<CacheId>,
    /// Held while the launches of a selection are queued: those of two threads must not alternate, as both use this
    /// memory.
    queueing: Mutex<()>,
}

impl<B: Backend> fmt::Debug for IndexerWorkspace<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexerWorkspace").field("size", &self.size).finish_non_exhaustive()
    }
}

impl<B: Backend> IndexerWorkspace<B> {
    /// A workspace with these limits; [`WorkspaceSize::new`] computes its size.
    ///
    /// # Errors
    /// As [`WorkspaceSize::new`]; [`KvError::Device`] if the device lacks the memory.
    pub fn new(
        device: &Device<B>,
        model: &ModelConfig,
        limits: WorkspaceLimits,
    ) -> Result<Self, KvError> {
        let size = WorkspaceSize::new(model, limits)?;
        let (heads, columns) = (model.index_heads, columns(limits.context));
        let specs = Specs::of(heads, columns, size.queries);
        let mut allocator = Allocator::new(device);
        Ok(Self {
            heads,
            columns,
            size,
            projected: allocator.allocate(specs.projected)?,
            projected_weight: allocator.allocate(specs.projected_weight)?,
            query: allocator.allocate(specs.query)?,
            weight: allocator.allocate(specs.weight)?,
            scores: allocator.allocate(specs.scores)?,
            maxima: allocator.allocate(specs.maxima)?,
            memory: allocator.memory(),
            cache: OnceLock::new(),
            queueing: Mutex::default(),
        })
    }

    /// Its size on the device.
    #[must_use]
    pub fn size(&self) -> WorkspaceSize {
        self.size
    }

    /// Makes it belong to `cache`, unless it belongs to another cache.
    pub(super) fn belong_to(&self, cache: CacheId) -> Result<(), KvError> {
        let owner = *self.cache.get_or_init(|| cache);
        if owner == cache { Ok(()) } else { Err(KvError::ForeignWorkspace) }
    }

    /// Waits until no other thread queues launches that use the workspace, and keeps others from it.
    pub(super) fn queue_alone(&self) -> MutexGuard<'_, ()> {
        // The guarded value is `()`: nothing in it can be broken by a panic.
        self.queueing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffers of quantised queries and head weights.
    pub(super) fn queries(&self) -> IndexQueries<'_, B> {
        IndexQueries { query: &self.query, weight: &self.weight, heads: self.heads }
    }

    /// Its memory, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        self.memory.clone()
    }
}

/// Scores per query: the entries of a request of `context` tokens, rounded up to whole tiles.
pub(super) fn columns(context: u32) -> u32 {
    (context / CSA_RATIO).max(1).next_multiple_of(TILE)
}

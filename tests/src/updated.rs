//! A layer of any kind, after its update.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Stream, bf16};
use dsv4_kv::indexer::ProjectedQueries;
use dsv4_kv::schema::LayerCacheSchema;
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, Csa, CsaInputs, EntryLists, Hca, HcaInputs, Swa,
    UpdatedLayer,
};
use dsv4_kv::{CacheConfig, IndexerWorkspace, KvError, LayerId, Layers, WorkspaceLimits};
use kv_layout::geometry::{INDEX_DIM, LayerKind};

use crate::inputs::{filled, upload};

/// A layer between its update and its append.
pub enum Updated<'s, B: Backend> {
    /// A layer with a window alone.
    Swa(UpdatedLayer<'s, B, Swa>),
    /// A layer with an indexer.
    Csa(UpdatedLayer<'s, B, Csa>),
    /// A layer that reads all its entries.
    Hca(UpdatedLayer<'s, B, Hca>),
}

impl<B: Backend> Updated<'_, B> {
    /// As [`UpdatedLayer::gather_window`].
    ///
    /// # Errors
    /// As [`UpdatedLayer::gather_window`].
    pub fn gather_window(
        &self,
        queries: Range<u32>,
        tile: &Buffer<B, bf16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        match self {
            Self::Swa(layer) => layer.gather_window(queries, tile, lengths),
            Self::Csa(layer) => layer.gather_window(queries, tile, lengths),
            Self::Hca(layer) => layer.gather_window(queries, tile, lengths),
        }
    }

    /// Gathers the windows of the first token, of every 64th and of the last of the `tokens` tokens of a step of one
    /// request. Together these windows have every row that any token of the step sees. Poison in these rows is found as
    /// by [`Self::gather_window`].
    ///
    /// # Errors
    /// As [`Self::gather_window`].
    ///
    /// # Panics
    /// If `tokens` is 0.
    pub fn read_windows(&self, tokens: u32) -> Result<(), KvError> {
        let stream = self.stream();
        let (tile, lengths) = (filled(stream, 128 * 512), filled(stream, 1));
        let last = tokens - 1;
        let mut queries = (0..last).step_by(64).chain([last]);
        queries.try_for_each(|query| self.gather_window(query..query + 1, &tile, &lengths))
    }

    /// As [`UpdatedLayer::gather_entries`]; does nothing in a layer without entries.
    ///
    /// # Errors
    /// As [`UpdatedLayer::gather_entries`].
    pub fn gather_entries(
        &self,
        queries: Range<u32>,
        lists: &EntryLists<'_, B>,
        tile: &Buffer<B, bf16>,
    ) -> Result<(), KvError> {
        match self {
            Self::Swa(_) => Ok(()),
            Self::Csa(layer) => layer.gather_entries(queries, lists, tile),
            Self::Hca(layer) => layer.gather_entries(queries, lists, tile),
        }
    }

    /// As [`UpdatedLayer::gather_all`]; does nothing in a layer without entries.
    ///
    /// # Errors
    /// As [`UpdatedLayer::gather_all`].
    pub fn gather_all(
        &self,
        queries: Range<u32>,
        rows: u32,
        tile: &Buffer<B, bf16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        match self {
            Self::Swa(_) => Ok(()),
            Self::Csa(layer) => layer.gather_all(queries, rows, tile, lengths),
            Self::Hca(layer) => layer.gather_all(queries, rows, tile, lengths),
        }
    }

    /// As `UpdatedLayer::attend`. Only a CSA layer uses `lists`.
    ///
    /// # Errors
    /// As `UpdatedLayer::attend`.
    pub fn attend(
        &self,
        queries: Range<u32>,
        lists: &EntryLists<'_, B>,
        heads: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        match self {
            Self::Swa(layer) => layer.attend(queries, heads),
            Self::Csa(layer) => layer.attend(queries, lists, heads),
            Self::Hca(layer) => layer.attend(queries, heads),
        }
    }

    /// As [`UpdatedLayer::entry_counts`]; does nothing in a layer without entries.
    ///
    /// # Errors
    /// As [`UpdatedLayer::entry_counts`].
    pub fn entry_counts(
        &self,
        queries: Range<u32>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        match self {
            Self::Swa(_) => Ok(()),
            Self::Csa(layer) => layer.entry_counts(queries, lengths),
            Self::Hca(layer) => layer.entry_counts(queries, lengths),
        }
    }

    /// The stream of the step.
    #[must_use]
    pub fn stream(&self) -> &Stream<B> {
        match self {
            Self::Swa(layer) => layer.stream(),
            Self::Csa(layer) => layer.stream(),
            Self::Hca(layer) => layer.stream(),
        }
    }

    /// The layer's pools.
    #[must_use]
    pub fn schema(&self) -> &LayerCacheSchema {
        match self {
            Self::Swa(layer) => layer.schema(),
            Self::Csa(layer) => layer.schema(),
            Self::Hca(layer) => layer.schema(),
        }
    }

    /// Queues scores and lists of `k` entries for the tokens `queries` of the step, with arbitrary query vectors; does
    /// nothing in a layer without an indexer.
    ///
    /// # Errors
    /// As [`UpdatedLayer::select_projected`].
    pub fn score(&self, config: &CacheConfig, queries: Range<u32>, k: u32) -> Result<(), KvError> {
        let Self::Csa(layer) = self else { return Ok(()) };
        let (stream, count, heads) =
            (layer.stream(), queries.len() as u32, config.model.index_heads);
        let workspace = workspace(stream, config, count)?;
        let ones = |elements: u32| upload(stream, &vec![1.0_f32; elements as usize]);
        let (projected, weights) = (ones(count * heads * INDEX_DIM), ones(count * heads));
        let lists = stream.device().allocate("lists", u64::from(count * k))?;
        let projected = ProjectedQueries { queries: &projected, weights: &weights };
        let lists = EntryLists { queries, k, indices: &lists };
        layer.select_projected(&projected, &workspace, &lists)
    }

    /// As [`UpdatedLayer::append`].
    ///
    /// # Errors
    /// As [`UpdatedLayer::append`].
    pub fn append(self) -> Result<(), KvError> {
        match self {
            Self::Swa(layer) => layer.append(),
            Self::Csa(layer) => layer.append(),
            Self::Hca(layer) => layer.append(),
        }
    }
}

/// An indexer workspace for `queries` queries at a time, of requests up to the maximum context of the cache.
fn workspace<B: Backend>(
    stream: &Stream<B>,
    config: &CacheConfig,
    queries: u32,
) -> Result<IndexerWorkspace<B>, KvError> {
    let CacheConfig { model, max_context, .. } = config;
    let limits = WorkspaceLimits { context: *max_context, queries, bytes: u64::MAX };
    IndexerWorkspace::new(stream.device(), model, limits)
}

/// Queues a layer's update: in a CSA layer with two compressors, the main one first; in an HCA layer with one; in an
/// SWA layer with none.
///
/// # Errors
/// If the cache refuses the update.
pub fn update<'s, B: Backend>(
    layers: &'s mut Layers<'_, B>,
    layer: LayerId,
    kv: &Buffer<B, bf16>,
    compressors: &[CompressorInputs<'_, B>],
) -> Result<Updated<'s, B>, KvError> {
    Ok(match *compressors {
        [main, index, ..] => {
            Updated::Csa(layers.csa(layer)?.update(&CsaInputs { kv, main, index })?)
        }
        [main] => Updated::Hca(layers.hca(layer)?.update(&HcaInputs { kv, main })?),
        [] => Updated::Swa(layers.swa(layer)?.update(kv)?),
    })
}

/// Takes a layer that the step has already updated.
///
/// # Errors
/// If the cache refuses.
pub fn resume<'s, B: Backend>(
    layers: &'s mut Layers<'_, B>,
    layer: LayerId,
    kind: LayerKind,
    kv: &Buffer<B, bf16>,
) -> Result<Updated<'s, B>, KvError> {
    Ok(match kind {
        LayerKind::Swa => Updated::Swa(layers.swa(layer)?.already_updated(kv)?),
        LayerKind::Csa => Updated::Csa(layers.csa(layer)?.already_updated(kv)?),
        LayerKind::Hca => Updated::Hca(layers.hca(layer)?.already_updated(kv)?),
    })
}

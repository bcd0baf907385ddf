//! `CsaIndexer`: picks the entries that a CSA layer's queries attend to.
//!
//! One workspace serves all layers, and bounds the memory of scores: a chunk of queries that does not
//! fit is taken in parts. Nothing here allocates, reads back or depends on device data, so that it
//! can be captured.

mod workspace;

use std::ops::Range;

use kv_layout::config::ModelConfig;
use kv_layout::geometry::{INDEX_DIM, LayerKind};

use crate::device::{Backend, Buffer, DeviceError, Memory, Stream};
use crate::error::KvError;
use crate::handle::LayerCacheHandle;
use crate::kernels::{IndexScore, IndexScoreTopk};
use crate::ops::{self, GatherQueries, IndexQueries, Scored, Scores};

use workspace::columns;
pub use workspace::{IndexerWorkspace, WorkspaceSize};

/// The indexer of one CSA layer: its weights.
pub struct CsaIndexer<B: Backend> {
    heads: u32,
    q_lora_rank: u32,
    hidden_size: u32,
    query_weight: Buffer<B, u16>,
    head_weight: Buffer<B, u16>,
}

impl<B: Backend> CsaIndexer<B> {
    /// The indexer with these weights: `query_weight` (`[heads * 128, q_lora_rank]` BF16) and
    /// `head_weight` (`[heads, hidden_size]` BF16), as the checkpoint's `indexer.wq_b` and
    /// `indexer.weights_proj`.
    ///
    /// # Errors
    /// [`KvError::Device`] with [`DeviceError::Length`] if a weight is too short for the model.
    pub fn new(
        model: &ModelConfig,
        query_weight: Buffer<B, u16>,
        head_weight: Buffer<B, u16>,
    ) -> Result<Self, KvError> {
        let ModelConfig { index_heads: heads, q_lora_rank, hidden_size, .. } = *model;
        let needed = |what, buffer: &Buffer<B, u16>, rows: u32, columns: u32| {
            let (found, needed) = (buffer.len(), u64::from(rows) * u64::from(columns));
            if found < needed { Err(DeviceError::Length { what, found, needed }) } else { Ok(()) }
        };
        needed("indexer query weight", &query_weight, heads * INDEX_DIM, q_lora_rank)?;
        needed("indexer head weight", &head_weight, heads, hidden_size)?;
        Ok(Self { heads, q_lora_rank, hidden_size, query_weight, head_weight })
    }

    /// Queues everything from activations to lists: for each query the `k` entries with the largest
    /// scores; see [`LayerCacheHandle::select_entries`]. `latent` is `[queries, q_lora_rank]` BF16
    /// (normed, what the query projection takes too), `hidden` `[queries, hidden_size]` BF16,
    /// `selected` `[queries, k]`.
    ///
    /// Each 16 queries read all of the weights: a long chunk is better projected by the caller.
    ///
    /// # Errors
    /// As [`LayerCacheHandle::select_entries`].
    #[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
    pub fn select(
        &self,
        stream: &Stream<B>,
        layer: &LayerCacheHandle<'_, B>,
        workspace: &IndexerWorkspace<B>,
        queries: Range<u32>,
        (latent, hidden): (&Buffer<B, u16>, &Buffer<B, u16>),
        k: u32,
        selected: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let Self { heads, q_lora_rank, hidden_size, query_weight, head_weight } = self;
        let (heads, q_lora_rank, hidden_size) = (*heads, *q_lora_rank, *hidden_size);
        layer.in_parts(workspace, queries, (k, selected), |part, list| {
            let (to, to_weight) = (&workspace.projected, &workspace.projected_weight);
            let latent = rows("activations", latent, part, q_lora_rank)?;
            let hidden = rows("activations", hidden, part, hidden_size)?;
            let shape = [part.count, heads * INDEX_DIM, q_lora_rank];
            ops::project(stream, &latent, query_weight, to, shape)?;
            let shape = [part.count, heads, hidden_size];
            ops::project(stream, &hidden, head_weight, to_weight, shape)?;
            layer.select_part(stream, workspace, part, (to, to_weight), k, list)
        })
    }

    /// Its weights, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![self.query_weight.memory(), self.head_weight.memory()]
    }
}

/// Queries of the step that are taken together.
#[derive(Clone, Copy)]
struct Part {
    /// The first, by its place in the step.
    first: u32,
    /// The first, by its place among the queries asked for.
    offset: u32,
    count: u32,
}

/// The rows of `buffer` that belong to a part, of `columns` elements each.
fn rows<B: Backend, T: bytemuck::Pod>(
    what: &'static str,
    buffer: &Buffer<B, T>,
    part: Part,
    columns: u32,
) -> Result<Buffer<B, T>, DeviceError> {
    let of = |rows: u32| u64::from(rows) * u64::from(columns);
    buffer.slice(of(part.offset), of(part.count)).ok_or(DeviceError::Length {
        what,
        found: buffer.len(),
        needed: of(part.offset) + of(part.count),
    })
}

impl<B: Backend> LayerCacheHandle<'_, B> {
    /// Queues the choice of the entries that queries `queries` of the step attend to: for each its `k`
    /// entries with the largest scores, largest first, the older entry first among equal ones; all
    /// that it sees, oldest first, if those are no more than `k`. `selected`: `[queries, k]` entries of
    /// the query's request, -1 behind the last: what [`Self::gather_kv`] takes.
    ///
    /// `projected` and `projected_weight` are the indexer's projections, `[queries, heads * 128]` and
    /// `[queries, heads]` f32, without rotation and constants. Runs after the layer's update, whose
    /// keys the queries of the step already see.
    ///
    /// # Errors
    /// [`KvError::WrongLayerKind`] in another layer; [`KvError::NoSuchQueries`]; [`KvError::Config`]
    /// if the workspace is for shorter requests than the cache; [`KvError::Device`] if a tensor is too
    /// short, `k` is above 2048, or a launch failed.
    #[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
    pub fn select_entries(
        &self,
        stream: &Stream<B>,
        workspace: &IndexerWorkspace<B>,
        queries: Range<u32>,
        projected: &Buffer<B, f32>,
        projected_weight: &Buffer<B, f32>,
        k: u32,
        selected: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let heads = workspace.heads;
        self.in_parts(workspace, queries, (k, selected), |part, list| {
            let projected = rows("projected queries", projected, part, heads * INDEX_DIM)?;
            let weight = rows("projected head weights", projected_weight, part, heads)?;
            self.select_part(stream, workspace, part, (&projected, &weight), k, list)
        })
    }

    /// Calls `select` with each part of the queries that the workspace holds, and its lists.
    fn in_parts(
        &self,
        workspace: &IndexerWorkspace<B>,
        queries: Range<u32>,
        (k, selected): (u32, &Buffer<B, i32>),
        select: impl Fn(Part, &Buffer<B, i32>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.check_kind(LayerKind::Csa)?;
        let count = self.check_queries(&queries)?;
        let needed = columns(self.config.max_context);
        if workspace.columns < needed {
            let (value, least) = (u64::from(workspace.columns), u64::from(needed));
            return Err(KvError::Config {
                setting: "context of the indexer's workspace, in entries",
                value,
                least,
                most: u64::from(u32::MAX),
            });
        }
        let whole = Part { first: queries.start, offset: 0, count };
        rows("selected entries", selected, whole, k)?;
        let mut offset = 0;
        while offset < count {
            let part = Part {
                first: queries.start + offset,
                offset,
                count: workspace.size().queries.min(count - offset),
            };
            select(part, &rows("selected entries", selected, part, k)?)?;
            offset += part.count;
        }
        Ok(())
    }

    /// Queues query, scores and lists of a part; see [`Self::select_entries`].
    fn select_part(
        &self,
        stream: &Stream<B>,
        workspace: &IndexerWorkspace<B>,
        part: Part,
        (projected, projected_weight): (&Buffer<B, f32>, &Buffer<B, f32>),
        k: u32,
        selected: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let (tokens, keys, table) =
            (self.step_tokens(), self.index_keys()?, self.workspace.table());
        let queries = GatherQueries {
            position: &tokens.position,
            slot: &tokens.slot,
            index: &tokens.index,
            first: part.first,
            count: part.count,
        };
        let IndexerWorkspace { heads, columns, query, weight, scores, maxima, .. } = workspace;
        let quantised = IndexQueries { query, weight, heads: *heads };
        let scores = Scores { scores, maxima, columns: *columns };
        let planes = (&keys, self.config.num_blocks);
        let (rotary, format) = (&self.workspace.frequencies, keys.format);
        let (from, to) = ((projected, projected_weight), &quantised);
        ops::index_query(stream, &queries, from.0, from.1, rotary, format, to)?;
        if let Some(found) = &self.workspace.poison {
            let (find, scored) = (ops::find_poisoned_keys, Scored { skip: k, columns: *columns });
            find(stream, &queries, self.schema.layer, &table, planes, scored, found)?;
        }
        if ops::one_launch_is_faster(format, *columns, part.count) {
            let (list, of) = (ops::index_score_topk, (*columns, k));
            let keys = (keys.code, keys.scale, self.config.num_blocks);
            let faults = self.fault_word::<IndexScoreTopk>(());
            list(stream, &queries, to, &table, keys, of, selected, &faults)?;
        } else {
            let faults = self.fault_word::<IndexScore>(format);
            ops::index_score(stream, &queries, to, &table, planes, k, &scores, &faults)?;
            ops::index_topk(stream, &queries, &scores, k, selected)?;
        }
        Ok(())
    }
}

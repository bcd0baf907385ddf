//! From activations, or from projections, to the list of entries of each query.

use dsv4_kv_linear::ops::{Bf16Weight, multiply_bf16};
use kv_layout::geometry::INDEX_DIM;
use kv_layout::linear::{MAX_DECODE_BATCH, MAX_NARROW_COLUMNS};

use super::workspace::columns;
use super::{CsaIndexer, IndexerWorkspace, QueryWeight};
use crate::config::check_setting;
use crate::device::shape::check_length;
use crate::device::{Backend, Buffer, DeviceError, Span, Stream, View, bf16};
use crate::error::KvError;
use crate::ops::{
    self, EntrySelection, KeyScores, PoisonedKeySearch, QueryProduct, QueryQuantisation,
    ScoreSelection, Scored, Scores,
};
use crate::step::{Csa, EntryLists, UpdatedLayer};
use kernels_gpu::launch::{IndexScore, IndexScoreChunk, IndexScoreTopk};

/// Inputs of the indexer's projections. Row 0 belongs to the first query that gets a list, not to the step's first.
pub struct Activations<'i, B: Backend> {
    /// `[queries, CsaIndexer::latent_columns]` BF16: the normed query latent, which attention's query projection reads
    /// too.
    pub latent: &'i Buffer<B, bf16>,
    /// `[queries, CsaIndexer::hidden_columns]` BF16: the layer's input.
    pub hidden: &'i Buffer<B, bf16>,
}

/// The indexer's projections, before RoPE, Hadamard transform, quantisation and scaling. Row 0 belongs to the first
/// query that gets a list, not to the step's first.
pub struct ProjectedQueries<'i, B: Backend> {
    /// `[queries, heads * 128]` f32.
    pub queries: &'i Buffer<B, f32>,
    /// `[queries, heads]` f32: a weight for each head.
    pub weights: &'i Buffer<B, f32>,
}

/// A run of the step's queries that is processed together.
#[derive(Clone, Copy)]
struct Part {
    /// Index of the first in the step.
    first: u32,
    /// Index of the first among the queries asked for.
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

/// What is known of an input before its rows are taken.
#[derive(Clone, Copy)]
struct Input {
    what: &'static str,
    span: Span,
    len: u64,
    /// Elements for a query.
    columns: u32,
}

impl Input {
    fn new<B: Backend, T: bytemuck::Pod>(
        what: &'static str,
        buffer: &Buffer<B, T>,
        columns: u32,
    ) -> Self {
        Self { what, span: buffer.span(), len: buffer.len(), columns }
    }
}

impl<B: Backend> UpdatedLayer<'_, B, Csa> {
    /// Queues everything from activations to `lists`. Each of their queries gets the `k` entries with the largest
    /// scores, largest first, the older entry first among equal ones. If a query sees at most `k` entries, it gets all
    /// of them, oldest first. The rest of a list is -1. [`Self::attend`] and [`Self::gather_entries`] take the lists.
    ///
    /// `workspace` holds projections and scores, and belongs to this cache. Queries that do not fit at once are taken
    /// in parts.
    ///
    /// # Errors
    /// [`KvError::IndexerHeads`]; as [`Self::select_projected`].
    pub fn select(
        &self,
        indexer: &CsaIndexer<B>,
        activations: &Activations<'_, B>,
        workspace: &IndexerWorkspace<B>,
        lists: &EntryLists<'_, B>,
    ) -> Result<(), KvError> {
        let CsaIndexer { heads, latent_columns, hidden_columns, query_weight, head_weight } =
            indexer;
        if *heads != workspace.heads {
            return Err(KvError::IndexerHeads { indexer: *heads, workspace: workspace.heads });
        }
        let (to, to_weight) = (&workspace.projected, &workspace.projected_weight);
        let inputs = [
            Input::new("latent", activations.latent, *latent_columns),
            Input::new("hidden", activations.hidden, *hidden_columns),
        ];
        self.in_parts(workspace, inputs, lists, |part, list| {
            let latent = rows("latent", activations.latent, part, *latent_columns)?;
            let hidden = rows("hidden", activations.hidden, part, *hidden_columns)?;
            let head = Bf16Weight { values: head_weight, columns: *heads, inner: *hidden_columns };
            multiply_bf16(self.stream(), head, &hidden, part.count, to_weight)?;
            match query_weight {
                QueryWeight::Bf16(weight) => {
                    let (columns, inner) = (heads * INDEX_DIM, *latent_columns);
                    let query = Bf16Weight { values: weight, columns, inner };
                    // Narrow products have another order of summation, which the fused kernel does not have.
                    if part.count > MAX_DECODE_BATCH && columns > MAX_NARROW_COLUMNS {
                        self.product(workspace, part, (&latent, query), ops::bf16_index_query)?;
                    } else {
                        multiply_bf16(self.stream(), query, &latent, part.count, to)?;
                        let projected = ProjectedQueries { queries: to, weights: to_weight };
                        self.quantise(workspace, part, &projected)?;
                    }
                }
                QueryWeight::Nvfp4(weight) => {
                    self.product(workspace, part, (&latent, weight), ops::nvfp4_index_query)?;
                }
            }
            self.list_part(workspace, part, (list, lists.k))
        })
    }

    /// As [`Self::select`], from projections that the caller has computed.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::ForeignWorkspace`]; [`KvError::Config`] if the workspace is for shorter
    /// requests than the cache; [`KvError::Device`] if a tensor is too short, if lists would replace inputs, if `k` is
    /// above 2048, if a launch failed, or while another capture than the step's own records the stream.
    pub fn select_projected(
        &self,
        projected: &ProjectedQueries<'_, B>,
        workspace: &IndexerWorkspace<B>,
        lists: &EntryLists<'_, B>,
    ) -> Result<(), KvError> {
        let heads = workspace.heads;
        let inputs = [
            Input::new("projected queries", projected.queries, heads * INDEX_DIM),
            Input::new("projected head weights", projected.weights, heads),
        ];
        self.in_parts(workspace, inputs, lists, |part, list| {
            let queries = rows("projected queries", projected.queries, part, heads * INDEX_DIM)?;
            let weights = rows("projected head weights", projected.weights, part, heads)?;
            let projected = ProjectedQueries { queries: &queries, weights: &weights };
            self.quantise(workspace, part, &projected)?;
            self.list_part(workspace, part, (list, lists.k))
        })
    }

    /// Cuts the queries into parts that fit into the workspace, and calls `select` with each part and its lists. What it
    /// refuses by the sizes of inputs, lists or workspace, it refuses before the first part.
    fn in_parts(
        &self,
        workspace: &IndexerWorkspace<B>,
        inputs: [Input; 2],
        lists: &EntryLists<'_, B>,
        select: impl Fn(Part, &Buffer<B, i32>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        let EntryLists { queries, k, indices: selected } = lists;
        self.check_outputs("select", [("selected", selected.span())])?;
        // Otherwise lists of one part would replace inputs of the next.
        let mut aliased = inputs.iter().filter(|input| input.span.overlaps(&selected.span()));
        if let Some(&Input { what: other, .. }) = aliased.next() {
            let (kernel, argument) = ("select", "selected");
            return Err(DeviceError::Aliased { kernel, argument, other }.into());
        }
        let count = self.access.queries(queries.clone())?.count;
        let needed = columns(self.access.core.config.max_context);
        let setting = "context of the indexer's workspace, in entries";
        check_setting(setting, workspace.columns, needed, u32::MAX)?;
        let whole = Part { first: queries.start, offset: 0, count };
        rows("selected entries", selected, whole, *k)?;
        for Input { what, len, columns, .. } in inputs {
            check_length(what, len, u64::from(count) * u64::from(columns))?;
        }
        if count > 0 {
            ops::check_selected(*k)?;
        }
        let _launches = self.access.reading()?;
        workspace.belong_to(self.access.core.id)?;
        let _alone = workspace.queue_alone();
        for offset in (0..count).step_by(workspace.size().queries as usize) {
            let count = workspace.size().queries.min(count - offset);
            let part = Part { first: queries.start + offset, offset, count };
            select(part, &rows("selected entries", selected, part, *k)?)?;
        }
        Ok(())
    }

    /// Queues RoPE, Hadamard transform and quantisation of a part's projected queries, for scoring.
    fn quantise(
        &self,
        workspace: &IndexerWorkspace<B>,
        part: Part,
        projected: &ProjectedQueries<'_, B>,
    ) -> Result<(), KvError> {
        let access = &self.access;
        let (memory, config) = (&access.core.memory, &access.core.config);
        let quantisation = QueryQuantisation {
            queries: &access.queries(part.first..part.first + part.count)?,
            projected: projected.queries,
            projected_weight: projected.weights,
            frequencies: &memory.frequencies,
            format: access.pools.index_keys(config)?.format,
            to: &workspace.queries(),
        };
        Ok(ops::index_query(access.stream, &quantisation)?)
    }

    /// Queues `launch`, which makes the quantised queries of a part from their latents and the query weight. The head
    /// weights must have been projected before.
    fn product<W>(
        &self,
        workspace: &IndexerWorkspace<B>,
        part: Part,
        (latent, weight): (&View<B, bf16>, W),
        launch: impl FnOnce(&Stream<B>, &QueryProduct<'_, B, W>) -> Result<(), DeviceError>,
    ) -> Result<(), KvError> {
        let access = &self.access;
        let (memory, config) = (&access.core.memory, &access.core.config);
        let product = QueryProduct {
            queries: &access.queries(part.first..part.first + part.count)?,
            latent,
            weight,
            projected_weight: &workspace.projected_weight,
            frequencies: &memory.frequencies,
            format: access.pools.index_keys(config)?.format,
            to: &workspace.queries(),
        };
        Ok(launch(access.stream, &product)?)
    }

    /// Queues scores and lists of a part whose queries are quantised.
    fn list_part(
        &self,
        workspace: &IndexerWorkspace<B>,
        part: Part,
        (selected, k): (&Buffer<B, i32>, u32),
    ) -> Result<(), KvError> {
        let access = &self.access;
        let (stream, memory, config) = (access.stream, &access.core.memory, &access.core.config);
        let queries = access.queries(part.first..part.first + part.count)?;
        let (keys, table) = (access.pools.index_keys(config)?, memory.table());
        // One column for each entry of the longest request of the step, or of its bucket. `in_parts` has checked that
        // the workspace has room for the longest request of the cache.
        let columns = columns(access.shape.context);
        let IndexerWorkspace { scores, maxima, .. } = workspace;
        let quantised = workspace.queries();
        let scores = Scores { scores, maxima, columns };
        let (queries, from, table, keys) = (&queries, &quantised, &table, &keys);
        let format = keys.format;
        if let Some(found) = &memory.poison {
            let found = &found[access.group.index()];
            let (layer, scored) = (self.schema().layer, Scored { skip: k, columns });
            let search = PoisonedKeySearch { queries, layer, table, keys, scored, found };
            ops::find_poisoned_keys(stream, &search)?;
        }
        let each = (access.shape.tokens / access.shape.requests.max(1)).min(part.count);
        if ops::one_launch_is_faster(format, columns, part.count, each) {
            let faults = access.fault_word::<IndexScoreTopk>(());
            let lists = ScoreSelection { queries, from, table, keys, columns, k, selected, faults };
            // SAFETY: the cache alone writes StepMeta, in the order of its steps, and the launch runs in that order.
            unsafe { ops::index_score_topk(stream, &lists) }?;
        } else {
            let share_keys = ops::shared_keys_are_faster(format, columns, part.count, each);
            let faults = if share_keys {
                access.fault_word::<IndexScoreChunk>(format)
            } else {
                access.fault_word::<IndexScore>(format)
            };
            let to = &scores;
            let score = KeyScores { queries, from, table, keys, skip: k, to, faults };
            let select = EntrySelection { queries, from: to, k, selected };
            // SAFETY: as above; the workspace is of one cache, and no other thread queues launches that use it.
            unsafe {
                if share_keys {
                    ops::index_score_chunk(stream, &score, each)?;
                } else {
                    ops::index_score(stream, &score)?;
                }
                ops::index_topk(stream, &select)?;
            }
        }
        Ok(())
    }
}

//! The tensors that the steps of a replay read and write besides the cache, and the launches of a layer: its update,
//! the windows of all queries, the gathers of compressed entries (in a CSA layer those that its indexer selects),
//! attention in place on request, and the append.

use std::ops::Range;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Stream, bf16};
use dsv4_kv::indexer::ProjectedQueries;
use dsv4_kv::kv_layout::geometry::{CompressorKind, HEAD_DIM, INDEX_DIM, LayerKind, WINDOW};
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, Csa, CsaInputs, EntryLists, Hca, HcaInputs, UpdatedLayer,
};
use dsv4_kv::{
    CacheConfig, IndexerWorkspace, KvCacheManager, KvError, LayerId, Layers, StepRequest,
    WorkspaceLimits, WorkspaceSize,
};

use super::attend::{self, Attend, HeadSource};
use super::inputs::{self, Inputs};
use super::kept::{Gathered, Shape};
use super::select::{Batch, MAX_QUERIES, Queries, batches};
use super::source::{Source, ValueTensor, shape};
use super::verify::Verifier;
use super::watch::{self, Tile, WINDOW_SHAPE, Watch};

const IN_POOL: &str = "weights and queries lie inside the pool";

/// Rows of the buffer for gathered tiles.
const TILE_ROWS: u32 = 1 << 15;

const _: () = assert!(MAX_QUERIES * WINDOW <= TILE_ROWS);

/// The tensors of a replay's steps, and the sampled requests.
pub struct Tensors<B: Backend> {
    /// Inputs of the step's tokens.
    pub inputs: Inputs<B>,
    /// The pool of weights and of the indexer's inputs.
    floats: Buffer<B, f32>,
    /// The indexer's workspace, in a model with CSA layers.
    indexer: Option<IndexerWorkspace<B>>,
    /// `[MAX_QUERIES, index_topk]`: the lists of a batch.
    selected: Buffer<B, i32>,
    /// `[TILE_ROWS, 512]` BF16.
    tile: Buffer<B, bf16>,
    /// `[MAX_QUERIES]`
    lengths: Buffer<B, i32>,
    /// Heads of the indexer.
    heads: u32,
    /// Number of entries that the indexer selects for a query.
    topk: u32,
    /// Which queries gather entries.
    queries: Queries,
    /// The batches of the step.
    batches: Vec<Batch>,
    /// The number of the step.
    step: u64,
    seed: u64,
    /// Heads of the queries that gather, if they also attend.
    attend: Option<Attend<B>>,
    /// The sampled requests.
    pub watch: Watch<B>,
}

/// Bytes of device memory that a replay needs besides its cache.
pub fn working_bytes(
    config: &CacheConfig,
    indexer: Option<&WorkspaceSize>,
    sample: u32,
    heads: Option<u32>,
) -> u64 {
    let source = inputs::bytes(config) + 4 * Source::floats();
    let tile = 2 * u64::from(TILE_ROWS) * u64::from(HEAD_DIM) + 4 * u64::from(MAX_QUERIES);
    let indexer = indexer.map_or(0, |indexer| indexer.bytes) + 4 * selected(config);
    let attend = heads.map_or(0, attend::bytes);
    source + tile + indexer + attend + watch::bytes(config, sample, heads)
}

/// Number of elements of the lists of the largest batch.
fn selected(config: &CacheConfig) -> u64 {
    u64::from(MAX_QUERIES) * u64::from(config.model.index_topk)
}

/// The tensors of one compressor.
struct Compressor<B: Backend> {
    kv: Buffer<B, f32>,
    gate: Buffer<B, f32>,
    ape: Buffer<B, f32>,
    norm: Buffer<B, f32>,
}

impl<B: Backend> Compressor<B> {
    fn inputs(&self) -> CompressorInputs<'_, B> {
        let Self { kv, gate, ape, norm } = self;
        CompressorInputs { kv, gate, ape, norm }
    }
}

impl<B: Backend> Tensors<B> {
    /// Allocates the tensors and fills the pools. `sample` are the indices of the requests to verify.
    pub fn new(
        stream: &Stream<B>,
        config: &CacheConfig,
        indexer: Option<&WorkspaceSize>,
        seed: u64,
        sample: Vec<usize>,
        (queries, heads): (Queries, Option<u32>),
    ) -> Result<Self, KvError> {
        let (device, model) = (stream.device(), &config.model);
        let source = Source::new(seed, model.layers.len() as u32);
        let floats = stream.upload_new("weights and queries", source.as_floats())?;
        let tile = u64::from(TILE_ROWS) * u64::from(HEAD_DIM);
        let verifier = Verifier::new(config, source);
        let heads = heads.map(|heads| HeadSource::new(seed, heads));
        let attend = heads.as_ref().map(|heads| Attend::new(device, stream, heads)).transpose()?;
        let workspace = |size: &WorkspaceSize| {
            let WorkspaceSize { queries, bytes, .. } = *size;
            let limits = WorkspaceLimits { context: config.max_context, queries, bytes };
            IndexerWorkspace::new(device, model, limits)
        };
        Ok(Self {
            indexer: indexer.map(workspace).transpose()?,
            inputs: Inputs::new(device, config)?,
            floats,
            selected: device.allocate("selected entries", selected(config))?,
            tile: device.allocate("gathered rows", tile)?,
            lengths: device.allocate("gathered lengths", u64::from(MAX_QUERIES))?,
            heads: model.index_heads,
            topk: model.index_topk,
            queries,
            batches: Vec::new(),
            step: 0,
            seed,
            attend,
            watch: Watch::new(device, config, sample, verifier, heads)?,
        })
    }

    /// Begins step `number`; `tokens` are its token ids, in the order of the step.
    pub fn begin_step(
        &mut self,
        stream: &Stream<B>,
        number: u64,
        step: &[StepRequest],
        tokens: &[u32],
    ) -> Result<()> {
        self.step = number;
        let source = self.watch.verifier().source();
        self.inputs.begin_step(stream, source, step, tokens)?;
        self.watch.begin_step(number, step, self.inputs.prefixes(), self.queries, self.seed);
        self.batches = batches(self.queries, step);
        Ok(())
    }

    /// Verifies the step; see [`Watch::check_step`].
    pub fn check_step(&mut self, cache: &KvCacheManager<B>, stream: &Stream<B>) -> Result<()> {
        self.watch.check_step(cache, stream, &self.batches)
    }

    /// Queues all launches of one layer.
    pub fn run_layer(
        &self,
        layers: &mut Layers<'_, B>,
        layer: LayerId,
        kind: LayerKind,
    ) -> Result<()> {
        let kv = &self.inputs.kv(layer.0)?;
        let compressor = |which| self.compressor(layer, which);
        match kind {
            LayerKind::Swa => {
                let updated = layers.swa(layer)?.update(kv)?;
                self.gather_windows(&updated)?;
                self.batches.iter().try_for_each(|batch| {
                    self.attend(&updated, &batch.queries, |heads| {
                        updated.attend(batch.queries.clone(), heads)
                    })
                })?;
                updated.append()?;
            }
            LayerKind::Csa => {
                let main = compressor(CompressorKind::CsaMain)?;
                let index = compressor(CompressorKind::CsaIndex)?;
                let inputs = CsaInputs { kv, main: main.inputs(), index: index.inputs() };
                let updated = layers.csa(layer)?.update(&inputs)?;
                self.gather_windows(&updated)?;
                self.batches.iter().try_for_each(|batch| self.gather_listed(&updated, batch))?;
                updated.append()?;
            }
            LayerKind::Hca => {
                let main = compressor(CompressorKind::Hca)?;
                let updated = layers.hca(layer)?.update(&HcaInputs { kv, main: main.inputs() })?;
                self.gather_windows(&updated)?;
                self.batches.iter().try_for_each(|batch| self.gather_all(&updated, batch))?;
                updated.append()?;
            }
        }
        Ok(())
    }

    fn compressor(&self, layer: LayerId, which: CompressorKind) -> Result<Compressor<B>> {
        let at = self.watch.verifier().source().weights(layer.0, which);
        let (shape, layer) = (shape(which), layer.0);
        let slice =
            |start: usize, len: usize| self.floats.slice(start as u64, len as u64).context(IN_POOL);
        Ok(Compressor {
            kv: self.inputs.values(which, ValueTensor::keys(layer))?,
            gate: self.inputs.values(which, ValueTensor::gates(layer))?,
            ape: slice(at.ape, shape.ratio * shape.columns())?,
            norm: slice(at.norm, shape.channels)?,
        })
    }

    /// Queues the gathers of the windows of all queries.
    fn gather_windows<K>(&self, updated: &UpdatedLayer<'_, B, K>) -> Result<()> {
        let (tokens, layer) = (updated.tokens(), updated.schema().layer);
        let (tile, lengths) = (&self.tile, &self.lengths);
        for first in (0..tokens).step_by(MAX_QUERIES as usize) {
            let queries = first..tokens.min(first + MAX_QUERIES);
            updated.gather_window(queries.clone(), tile, lengths)?;
            let gathered = Gathered { tile, names: lengths, shape: WINDOW_SHAPE };
            self.watch.keep(Tile::Window, updated.stream(), layer, queries, &gathered)?;
        }
        Ok(())
    }

    /// Queues the indexer of a CSA layer for a batch of queries, as many at once as its workspace holds, and the gather
    /// of the selected entries.
    fn gather_listed(&self, updated: &UpdatedLayer<'_, B, Csa>, batch: &Batch) -> Result<()> {
        let (layer, first, k) = (updated.schema().layer, batch.queries.start, self.topk);
        let workspace = self.indexer.as_ref().context("a model with CSA layers has an indexer")?;
        let at = self.watch.verifier().source().query_offsets(self.step, layer.0, first);
        let of = |queries: u32, columns: u32| u64::from(queries) * u64::from(columns);
        let floats = |start: usize, columns: u32| {
            let len = of(batch.queries.len() as u32, columns);
            self.floats.slice(start as u64, len).context(IN_POOL)
        };
        let vectors = floats(at.query, self.heads * INDEX_DIM)?;
        let weights = floats(at.weight, self.heads)?;
        let projected = ProjectedQueries { queries: &vectors, weights: &weights };
        let selected = &self.selected;
        let lists = EntryLists { queries: batch.queries.clone(), k, indices: selected };
        updated.select_projected(&projected, workspace, &lists)?;
        for queries in batch.tiles(k, TILE_ROWS) {
            updated.gather_entries(queries.clone(), &lists, &self.tile)?;
            let (begin, len) = (of(queries.start - first, k), of(queries.len() as u32, k));
            let names = &selected.slice(begin, len).context("a list for each query")?;
            let gathered = Gathered { tile: &self.tile, names, shape: Shape { rows: k, words: k } };
            self.watch.keep(Tile::Entries, updated.stream(), layer, queries, &gathered)?;
        }
        let queries = &batch.queries;
        self.attend(updated, queries, |heads| updated.attend(queries.clone(), &lists, heads))
    }

    /// Queues attention for a batch of queries, if they attend.
    fn attend<K>(
        &self,
        updated: &UpdatedLayer<'_, B, K>,
        queries: &Range<u32>,
        attend: impl FnOnce(&AttentionTensors<'_, B>) -> Result<(), KvError>,
    ) -> Result<()> {
        let Some(to) = &self.attend else { return Ok(()) };
        let (layer, count) = (updated.schema().layer, queries.len() as u32);
        to.with((self.step, layer), (queries.start, count), attend)?;
        let gathered =
            Gathered { tile: &to.out, names: &self.lengths, shape: attend::results(to.heads) };
        self.watch.keep(Tile::Attended, updated.stream(), layer, queries.clone(), &gathered)
    }

    /// Queues the gather of all entries of an HCA layer for a batch of queries.
    fn gather_all(&self, updated: &UpdatedLayer<'_, B, Hca>, batch: &Batch) -> Result<()> {
        let (stream, layer) = (updated.stream(), updated.schema().layer);
        let (tile, lengths, rows) = (&self.tile, &self.lengths, batch.hca_rows);
        for queries in batch.tiles(rows, TILE_ROWS) {
            updated.gather_all(queries.clone(), rows, tile, lengths)?;
            let gathered = Gathered { tile, names: lengths, shape: Shape { rows, words: 1 } };
            self.watch.keep(Tile::Entries, stream, layer, queries, &gathered)?;
        }
        let queries = &batch.queries;
        self.attend(updated, queries, |heads| updated.attend(queries.clone(), heads))
    }
}

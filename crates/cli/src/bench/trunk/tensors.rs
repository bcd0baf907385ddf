//! The tensors of a model's layers: the inputs of a step besides the cache, and its outputs.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Memory, Stream, bf16};
use dsv4_kv::indexer::{Activations, ProjectedQueries};
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, INDEX_DIM, LayerKind, WINDOW};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv::step::EntryLists;
use dsv4_kv::{CacheConfig, CsaIndexer, IndexerWorkspace, LayerId, QueryWeight, WorkspaceLimits};
use dsv4_kv_linear::Nvfp4Linear;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::inputs::{part, random_nvfp4, repeated};
use super::super::load::Weight;
use super::super::projections::{LayerProjections, Projections, random_bf16};
use super::heads::Heads;

/// Number of random values, which are repeated.
const PATTERN: u64 = (1 << 20) + 4;
/// Number of prefill chunks with different projections.
const CHUNKS: u64 = 4;

/// The size of a step.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Tokens of the step.
    pub tokens: u32,
    /// Entries of an HCA layer that each token sees.
    pub all: u32,
    /// Most entries that are gathered per token.
    pub entry_rows: u32,
    /// Most bytes of the indexer's workspace.
    pub workspace_bytes: u64,
    /// Storage format of the indexer's query weight.
    pub weight: Weight,
    /// Number of query heads, if attention in place is measured.
    pub query_heads: Option<u32>,
}

/// The tensors of a cache's layers, for steps of one size.
pub struct Tensors<B: Backend> {
    /// Tokens of the step.
    pub tokens: u32,
    /// Length of a list.
    pub k: u32,
    /// Entries of an HCA layer that a query sees.
    pub all: u32,
    /// Heads of the indexer.
    pub heads: u32,
    /// Storage format of the indexer's keys.
    pub format: IndexFormat,
    layers: Vec<LayerTensors<B>>,
    projections: Projections<B>,
    pub workspace: IndexerWorkspace<B>,
    /// `[tokens, heads * 128]` and `[tokens, heads]`: the inputs of `select_projected`.
    projected: [Buffer<B, f32>; 2],
    /// The queries that `index_query` computes from `projected`.
    pub query: Buffer<B, u8>,
    /// The weights that `index_query` computes from `projected`.
    pub query_weight: Buffer<B, f32>,
    /// `[32]`: rotary frequencies.
    pub frequencies: Buffer<B, f32>,
    /// `[tokens, k]`: lists of entries.
    pub lists: Buffer<B, i32>,
    /// `[tokens, 128, 512]`: gathered windows.
    pub window: Buffer<B, bf16>,
    /// `[tokens, entry rows, 512]`: gathered entries.
    pub entries: Buffer<B, bf16>,
    /// `[tokens]`: number of rows in each gathered window.
    pub window_lengths: Buffer<B, i32>,
    /// `[tokens]`: number of gathered entries of each token.
    pub entry_lengths: Buffer<B, i32>,
    attention: Option<Heads<B>>,
}

/// The inputs of a layer in the step.
pub struct LayerTensors<B: Backend> {
    /// Inputs of its update.
    pub projections: LayerProjections<B>,
    /// `[tokens, latent columns]` and `[tokens, hidden]`: the inputs of the projections of an indexer and a router.
    pub activations: [Buffer<B, bf16>; 2],
    /// The indexer, in a CSA layer.
    pub indexer: Option<CsaIndexer<B>>,
}

impl<B: Backend> Tensors<B> {
    /// Random tensors for the layers of a cache, for steps of this size, and for prefill chunks of as many tokens as
    /// the cache takes.
    pub fn new(stream: &Stream<B>, config: &CacheConfig, size: Size) -> Result<Self> {
        let Size { tokens, all, entry_rows, workspace_bytes, weight, query_heads } = size;
        let (device, model) = (stream.device(), &config.model);
        let count = model.layers.len() as u64;
        let rows = |columns: u32| u64::from(tokens) * u64::from(columns);
        let k = model.index_topk;
        let sizes = [(count, tokens.into()), (CHUNKS, config.max_step_tokens.into())];
        let projections = Projections::new(stream, &sizes)?;
        let latent = random_bf16(stream, "latents", count * rows(model.q_lora_rank))?;
        let hidden = random_bf16(stream, "hidden states", count * rows(model.hidden_size))?;
        let layer = |(layer, indexer)| LayerTensors {
            projections: projections.layer(layer, tokens.into()),
            activations: [&latent, &hidden].map(|of| part(of, layer, count)),
            indexer,
        };
        let layers = (0..).zip(indexers(stream, config, weight)?).map(layer).collect();
        let heads = model.index_heads;
        let limits = WorkspaceLimits {
            context: config.max_context,
            queries: tokens,
            bytes: workspace_bytes,
        };
        let projected = |columns| -> Result<Buffer<B, f32>> {
            let mut random = SmallRng::seed_from_u64(3);
            let len = rows(columns).min(PATTERN);
            let values: Vec<f32> = (0..len).map(|_| random.random_range(-1.0..1.0)).collect();
            Ok(repeated(stream, "projected queries", rows(columns), &values)?)
        };
        let tile = |rows_of_query| rows(rows_of_query) * u64::from(HEAD_DIM);
        Ok(Self {
            tokens,
            k,
            all,
            heads,
            format: config.index_format,
            layers,
            projections,
            workspace: IndexerWorkspace::new(device, model, limits)?,
            projected: [projected(heads * INDEX_DIM)?, projected(heads)?],
            query: device.allocate("queries", rows(IndexFormat::MAX_QUERY_BYTES))?,
            query_weight: device.allocate("head weights", rows(heads))?,
            frequencies: stream
                .upload_new("frequencies", &compress_frequencies(&model.compress_rope))?,
            lists: device.allocate("lists", rows(k))?,
            window: device.allocate("window tile", tile(WINDOW))?,
            entries: device.allocate("entry tile", tile(entry_rows))?,
            window_lengths: device.allocate("window lengths", tokens.into())?,
            entry_lengths: device.allocate("entry lengths", tokens.into())?,
            attention: query_heads.map(|heads| Heads::new(stream, tokens, heads)).transpose()?,
        })
    }

    /// The inputs of a layer.
    pub fn layer(&self, layer: LayerId) -> &LayerTensors<B> {
        &self.layers[layer.0 as usize]
    }

    /// Projections of a prefill chunk. `number` counts layers and chunks.
    pub fn chunk(&self, number: u64, tokens: u32) -> LayerProjections<B> {
        self.projections.layer(number % CHUNKS, tokens.into())
    }

    /// The lists of all queries of the step.
    pub fn lists(&self) -> EntryLists<'_, B> {
        EntryLists { queries: 0..self.tokens, k: self.k, indices: &self.lists }
    }

    /// The inputs of `select_projected`.
    pub fn projected(&self) -> ProjectedQueries<'_, B> {
        let [queries, weights] = &self.projected;
        ProjectedQueries { queries, weights }
    }

    /// The tensors of attention in place.
    pub fn attention(&self) -> Result<&Heads<B>> {
        self.attention.as_ref().context("heads for attention in place")
    }

    /// All memory of the tensors, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let of_layer = |layer: &LayerTensors<B>| {
            let indexer = layer.indexer.iter().flat_map(CsaIndexer::memory);
            indexer.chain(layer.activations.iter().map(|of| of.memory())).collect::<Vec<_>>()
        };
        let layers = self.layers.iter().flat_map(of_layer);
        let [queries, weights] = &self.projected;
        let f32 = [queries, weights, &self.query_weight, &self.frequencies].map(Buffer::memory);
        let i32 = [&self.lists, &self.window_lengths, &self.entry_lengths].map(Buffer::memory);
        let tiles = [&self.window, &self.entries].map(Buffer::memory);
        let all = layers.chain(self.workspace.memory()).chain(self.projections.memory());
        let heads = self.attention.iter().flat_map(Heads::memory);
        all.chain(f32).chain(i32).chain(tiles).chain(heads).chain([self.query.memory()]).collect()
    }
}

impl<B: Backend> LayerTensors<B> {
    /// The activations in the form that `select` takes.
    pub fn activations(&self) -> Activations<'_, B> {
        let [latent, hidden] = &self.activations;
        Activations { latent, hidden }
    }
}

/// The indexer of every CSA layer, each with its own weights.
fn indexers<B: Backend>(
    stream: &Stream<B>,
    config: &CacheConfig,
    weight: Weight,
) -> Result<Vec<Option<CsaIndexer<B>>>> {
    let model = &config.model;
    let (columns, inner) = (model.index_heads * INDEX_DIM, model.q_lora_rank);
    let values = u64::from(columns) * u64::from(inner);
    let matrix = random_nvfp4(columns, inner)?;
    let indexer = |&kind: &LayerKind| -> Result<Option<CsaIndexer<B>>> {
        if kind != LayerKind::Csa {
            return Ok(None);
        }
        let query: QueryWeight<B> = match weight {
            Weight::Bf16 => random_bf16(stream, "query weight", values)?.into(),
            Weight::Nvfp4 => Nvfp4Linear::new(stream, &matrix)?.into(),
        };
        let heads = u64::from(model.index_heads) * u64::from(model.hidden_size);
        let heads = random_bf16(stream, "weight of head weights", heads)?;
        Ok(Some(CsaIndexer::new(model, query, heads)?))
    };
    model.layers.iter().map(indexer).collect()
}

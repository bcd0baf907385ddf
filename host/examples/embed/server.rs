//! One request and its cache: what a step asks of the cache, and in which order.

use std::ops::Range;

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::step::{CompressorInputs, CsaInputs, HcaInputs, UpdatedLayer};
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerId, Layers, RequestId,
    StepRequest,
};

use crate::model::{CONTEXT, Compressor, Layer, Model, Vectors, normed};
use crate::tiles::{TILE_QUERIES, Tiles};

/// One request and its cache.
pub struct Server<'a, B: Backend> {
    cache: KvCacheManager<B>,
    stream: Stream<B>,
    request: RequestId,
    attention: Attention<'a, B>,
}

/// What attention works with, beside the cache, which a step borrows.
struct Attention<'a, B: Backend> {
    model: &'a Model,
    /// Position bias and norm weights of each layer's compressors.
    weights: Vec<Vec<[Buffer<B, f32>; 2]>>,
    tiles: Tiles<B>,
}

/// The tokens of a step in one layer.
struct Tokens<'t> {
    layer: &'t Layer,
    /// Position of the first.
    start: u32,
    /// The residual stream.
    hidden: &'t Vectors,
    /// The same, normed.
    inputs: Vectors,
}

/// What a compressor reads on the device.
struct Compressed<'w, B: Backend> {
    kv: Buffer<B, f32>,
    gate: Buffer<B, f32>,
    weights: &'w [Buffer<B, f32>; 2],
}

impl<B: Backend> Compressed<'_, B> {
    fn inputs(&self) -> CompressorInputs<'_, B> {
        let [ape, norm] = self.weights;
        CompressorInputs { kv: &self.kv, gate: &self.gate, ape, norm }
    }
}

impl<'a, B: Backend> Server<'a, B> {
    /// A cache for one request, and the request.
    pub fn new(device: &Device<B>, config: &ModelConfig, model: &'a Model) -> Result<Self> {
        let cache_config = CacheConfig {
            num_blocks: CONTEXT / BLOCK_TOKENS,
            max_context: CONTEXT,
            max_step_tokens: CONTEXT,
            ..CacheConfig::smallest(config.clone())
        };
        // Takes all device memory that the cache will ever have.
        let mut cache = KvCacheManager::new(device.clone(), cache_config)?;
        let stream = device.stream()?;
        let on_device = |compressor: &Compressor| -> Result<_> {
            let ape = upload(&stream, &compressor.ape)?;
            Ok([ape, upload(&stream, &compressor.norm)?])
        };
        let layers = model.layers.iter();
        let weights = layers.map(|layer| layer.compressors.iter().map(on_device).collect());
        let weights = weights.collect::<Result<_>>()?;
        let attention = Attention { model, weights, tiles: Tiles::new(device, config)? };
        Ok(Self { request: cache.admit()?, cache, stream, attention })
    }

    /// Runs the model over the request's next tokens, a chunk of the prompt or one to decode; the
    /// model's output for each.
    pub fn step(&mut self, tokens: &[usize]) -> Result<Vectors> {
        let Self { cache, stream, request, attention } = self;
        let start = cache.ledger().committed(*request)?;
        let count = tokens.len() as u32;
        // Begin: takes the blocks of the step, all or none, and tells the device which tokens are
        // whose. Of several requests, each would have its part here. From here to the commit the step
        // borrows the cache: nothing is admitted or released meanwhile.
        let parts = [StepRequest { id: *request, start, tokens: count }];
        let mut step = cache.begin_step(stream, Launches::Eager, &parts)?;
        // Run: each layer once. A server captures this loop as a graph, and replays it in every step.
        let embedded = tokens.iter().map(|&token| attention.model.embed(token));
        let mut hidden: Vectors = embedded.collect();
        for (layer, kind) in step.ids() {
            hidden = attention.layer(&mut step, (layer, kind), start, &hidden)?;
        }
        // Commit: all of the tokens are final. Of drafts fewer may be: the others never were. A step
        // that is dropped instead, as by the `?` above, leaves the request with the tokens it had.
        step.commit(&[Accepted::count(*request, count)]).map_err(KvError::from)?;
        // A kernel that met a row it could not read or write says so here.
        cache.check_faults(stream)?;
        Ok(hidden)
    }

    /// Ends the request: its blocks and its slot are free for the next one.
    pub fn finish(mut self) -> Result<()> {
        Ok(self.cache.release(self.request)?)
    }
}

impl<B: Backend> Attention<'_, B> {
    /// One layer over the step's tokens, of which the first is at position `start`.
    fn layer(
        &self,
        step: &mut Layers<'_, B>,
        (id, kind): (LayerId, LayerKind),
        start: u32,
        hidden: &Vectors,
    ) -> Result<Vectors> {
        let layer = &self.model.layers[id.0 as usize];
        let inputs = hidden.iter().map(|hidden| normed(hidden)).collect();
        let tokens = Tokens { layer, start, hidden, inputs };
        let rows = (start..).zip(&tokens.inputs);
        let rows = rows.flat_map(|(position, input)| layer.key(input, position));
        let kv = &upload(step.stream(), &rows.collect::<Vec<_>>())?;
        let compressed = self.project(step.stream(), id, &tokens)?;
        // First the update: the queries of this step see the entries that close in it.
        match (kind, compressed.as_slice()) {
            (LayerKind::Csa, [main, index]) => {
                let inputs = CsaInputs { kv, main: main.inputs(), index: index.inputs() };
                let updated = step.csa(id)?.update(&inputs)?;
                self.attend(&tokens, updated, |updated, queries| {
                    let of = |at: u32| &tokens.inputs[at as usize];
                    let inputs: Vectors = queries.clone().map(|at| of(at).clone()).collect();
                    let (vectors, weights) = layer.index_queries(&inputs);
                    let vectors = upload(updated.stream(), &vectors)?;
                    let weights = upload(updated.stream(), &weights)?;
                    self.tiles.selected(updated, &vectors, &weights, queries)
                })
            }
            (LayerKind::Hca, [main]) => {
                let updated = step.hca(id)?.update(&HcaInputs { kv, main: main.inputs() })?;
                self.attend(&tokens, updated, |updated, queries| self.tiles.all(updated, queries))
            }
            _ => {
                let updated = step.swa(id)?.update(kv)?;
                self.attend(&tokens, updated, |_, queries| Ok(vec![Vec::new(); queries.len()]))
            }
        }
    }

    /// What the model projects for the layer's compressors, and their weights.
    fn project(
        &self,
        stream: &Stream<B>,
        id: LayerId,
        tokens: &Tokens<'_>,
    ) -> Result<Vec<Compressed<'_, B>>> {
        let compressors = tokens.layer.compressors.iter().zip(&self.weights[id.0 as usize]);
        let project = |(compressor, weights): (&Compressor, _)| {
            let kv = upload(stream, &compressor.kv.times_each(&tokens.inputs))?;
            let gate = upload(stream, &compressor.gate.times_each(&tokens.inputs))?;
            Ok(Compressed { kv, gate, weights })
        };
        compressors.map(project).collect()
    }

    /// Attention to the window and to what `entries` gathers, a tile of queries at a time: the keys of
    /// a long chunk would fill the memory. Then the append, which ends the layer: the window comes
    /// last, since the first queries of a chunk need the rows that it replaces.
    fn attend<K>(
        &self,
        tokens: &Tokens<'_>,
        updated: UpdatedLayer<'_, B, K>,
        entries: impl Fn(&UpdatedLayer<'_, B, K>, Range<u32>) -> Result<Vectors>,
    ) -> Result<Vectors> {
        let Tokens { layer, start, hidden, inputs } = tokens;
        let mut outputs = Vectors::new();
        for first in (0..updated.tokens()).step_by(TILE_QUERIES as usize) {
            let queries = first..updated.tokens().min(first + TILE_QUERIES);
            let window = self.tiles.window(&updated, queries.clone())?;
            let entries = entries(&updated, queries.clone())?;
            for ((query, window), entries) in queries.zip(window).zip(entries) {
                let (at, position) = (query as usize, start + query);
                let keys = [window, entries].concat();
                outputs.push(layer.attend(&inputs[at], position, &keys, &hidden[at]));
            }
        }
        updated.append()?;
        Ok(outputs)
    }
}

fn upload<B: Backend, T: bytemuck::Pod>(stream: &Stream<B>, values: &[T]) -> Result<Buffer<B, T>> {
    let buffer = stream.device().allocate("model tensor", values.len() as u64)?;
    stream.upload(values, &buffer, 0)?;
    Ok(buffer)
}

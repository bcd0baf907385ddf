//! One request and its cache: what a step asks of the cache, and in which order.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv::{CacheConfig, KvCacheManager, LayerCacheHandle, LayerId, RequestId, StepRequest};

use crate::CONTEXT;
use crate::model::{Compressor, Model, Vectors, normed};
use crate::tiles::{TILE_QUERIES, Tiles};

/// One request, its cache, and the tensors that live as long.
pub struct Server<'a, B: Backend> {
    model: &'a Model,
    cache: KvCacheManager<B>,
    stream: Stream<B>,
    request: RequestId,
    /// Position bias and norm weights of each layer's compressors.
    weights: Vec<Vec<[Buffer<B, f32>; 2]>>,
    tiles: Tiles<B>,
}

impl<'a, B: Backend> Server<'a, B> {
    /// A cache for one request, and the request.
    pub fn new(device: &Device<B>, config: &ModelConfig, model: &'a Model) -> Result<Self> {
        let config = CacheConfig {
            num_blocks: CONTEXT / BLOCK_TOKENS,
            max_context: CONTEXT,
            max_step_tokens: CONTEXT,
            ..CacheConfig::smallest(config.clone())
        };
        // Takes all device memory that the cache will ever have.
        let mut cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let on_device = |compressor: &Compressor| -> Result<_> {
            let ape = upload(&stream, &compressor.ape)?;
            Ok([ape, upload(&stream, &compressor.norm)?])
        };
        let layers = model.layers.iter();
        let weights = layers.map(|layer| layer.compressors.iter().map(on_device).collect());
        Ok(Self {
            request: cache.admit()?,
            weights: weights.collect::<Result<_>>()?,
            tiles: Tiles::new(device)?,
            model,
            cache,
            stream,
        })
    }

    /// Runs the model over the request's next tokens, a chunk of the prompt or one to decode; the
    /// model's output for each.
    pub fn step(&mut self, tokens: &[usize]) -> Result<Vectors> {
        let start = self.cache.ledger().committed(self.request)?;
        let count = tokens.len() as u32;
        // Takes the blocks of the step, all or none, and tells the device which tokens are whose. Of
        // several requests, each would have its part here.
        let step = [StepRequest { id: self.request, start, tokens: count }];
        self.cache.prepare_forward(&self.stream, &step)?;
        // Lists the windows that a chunk closes, for the compressors of all layers. One token needs
        // no list. A server captures this and the layers as a graph.
        if count > 1 {
            self.cache.build_plan(&self.stream)?;
        }
        let mut hidden: Vectors = tokens.iter().map(|&token| self.model.embed(token)).collect();
        for layer in 0..self.model.layers.len() {
            hidden = self.layer(layer, start, &hidden)?;
        }
        // A kernel that met a row it could not read or write says so here.
        self.cache.check_faults(&self.stream)?;
        // Of drafts fewer than `count` may be accepted: the others never were.
        self.cache.commit(self.request, count)?;
        Ok(hidden)
    }

    /// One layer over the step's tokens, of which the first is at position `start`.
    fn layer(&self, layer: usize, start: u32, hidden: &Vectors) -> Result<Vectors> {
        let cache = self.cache.layer(LayerId(layer as u32))?;
        let weights = &self.model.layers[layer];
        let inputs: Vectors = hidden.iter().map(|hidden| normed(hidden)).collect();
        let rows =
            (start..).zip(&inputs).flat_map(|(position, input)| weights.key(input, position));
        let kv = self.upload(&rows.collect::<Vec<u16>>())?;

        // First the compressors: the queries of this step see the entries that close in it.
        let appended = self.compress(&cache, layer, &inputs, &kv)?;
        // Then attention, a tile of queries at a time: the keys of a long chunk would fill the memory.
        let mut outputs = Vectors::new();
        for first in (0..cache.tokens()).step_by(TILE_QUERIES as usize) {
            let queries = first..cache.tokens().min(first + TILE_QUERIES);
            let (stream, tile) = (&self.stream, queries.clone());
            let keys = self.tiles.gather(stream, &cache, &kv, start, tile)?;
            for (query, keys) in queries.zip(&keys) {
                let at = query as usize;
                outputs.push(weights.attend(&inputs[at], start + query, keys, &hidden[at]));
            }
        }
        // The window last: the first queries of a chunk needed the rows that it replaces.
        if !appended {
            cache.append_swa(&self.stream, &kv)?;
        }
        Ok(outputs)
    }

    /// Gives the layer's compressors what the model projects for them. To decode one token, the same
    /// launch appends it to the window: whether it did.
    fn compress(
        &self,
        cache: &LayerCacheHandle<'_, B>,
        layer: usize,
        inputs: &Vectors,
        kv: &Buffer<B, u16>,
    ) -> Result<bool> {
        let mut tensors = Vec::new();
        let compressors = &self.model.layers[layer].compressors;
        for (compressor, [ape, norm]) in compressors.iter().zip(&self.weights[layer]) {
            let kv = self.upload(&compressor.kv.times_each(inputs))?;
            tensors.push((kv, self.upload(&compressor.gate.times_each(inputs))?, ape, norm));
        }
        let projected: Vec<_> =
            tensors.iter().map(|(kv, gate, ape, norm)| Projected { kv, gate, ape, norm }).collect();
        let (stream, decode) = (&self.stream, cache.tokens() == 1);
        match projected.as_slice() {
            [main, index] if decode => cache.decode_csa(stream, kv, main, index)?,
            [main, index] => cache.update_csa(stream, main, index)?,
            [main] if decode => cache.decode_hca(stream, kv, main)?,
            [main] => cache.update_hca(stream, main)?,
            _ => return Ok(false), // a layer with a window alone
        }
        Ok(decode)
    }

    /// Ends the request: its blocks and its slot are free for the next one.
    pub fn finish(mut self) -> Result<()> {
        Ok(self.cache.release(self.request)?)
    }

    fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<Buffer<B, T>> {
        upload(&self.stream, values)
    }
}

fn upload<B: Backend, T: bytemuck::Pod>(stream: &Stream<B>, values: &[T]) -> Result<Buffer<B, T>> {
    let buffer = stream.device().allocate("model tensor", values.len() as u64)?;
    stream.upload(values, &buffer, 0)?;
    Ok(buffer)
}

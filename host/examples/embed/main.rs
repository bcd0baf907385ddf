//! A serving loop around the cache: a prompt is prefilled in chunks, then tokens are decoded one by
//! one. At the end the same tokens go through a fresh cache in a single step, and every output of the
//! model must be equal to the last bit: a cached decode is a recomputation from scratch.
//!
//! `cargo run --example embed -p dsv4-kv`, on a GPU if there is one, else on the CPU. `model.rs` is
//! the model: random weights in plain Rust. Your server has its own, on the device.

mod model;

use std::ops::Range;

use anyhow::{Result, ensure};
use dsv4_kv::device::{Buffer, CudaDevice, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, HEAD_DIM, LayerKind, WINDOW};
use dsv4_kv::{CacheConfig, KvCacheManager, LayerCacheHandle, LayerId, RequestId, StepRequest};
use half::bf16;

use model::{Model, Outputs};

/// Tokens of the prompt, of a prefill step, and to decode: enough for the window to slide, and for
/// the second HCA entry to close while decoding.
const PROMPT: usize = 250;
const CHUNK: usize = 100;
const DECODED: usize = 16;
/// Most tokens of the request: three blocks.
const CONTEXT: u32 = 3 * BLOCK_TOKENS;
/// Queries whose keys are gathered at once. A tile costs 128 KiB a query and more, so that a long
/// chunk is attended to in parts.
const TILE_QUERIES: u32 = 32;
/// Rows for compressed entries in a tile: all that a query can see.
const TILE_ENTRIES: u32 = CONTEXT / CSA_RATIO;

fn main() -> Result<()> {
    match CudaDevice::new(CudaOptions::default()) {
        Ok(device) => run(&device),
        Err(error) => {
            println!("On the CPU, as there is no usable GPU: {error}");
            run(&EmuDevice::new(EmuOptions::default()))
        }
    }
}

fn run<D: Device>(device: &D) -> Result<()> {
    let config = ModelConfig::preset("tiny").expect("a preset");
    let model = Model::random(&config.layers, 1);
    let mut tokens: Vec<usize> = (0..PROMPT).map(|at| at * at % model::VOCABULARY).collect();

    let mut server = Server::new(device, &config, &model)?;
    let mut served = Vec::new();
    for chunk in tokens.chunks(CHUNK) {
        served.extend(server.step(chunk)?);
    }
    for _ in 0..DECODED {
        let next = model.next_token(&served[served.len() - 1]);
        tokens.push(next);
        served.extend(server.step(&[next])?);
    }
    server.finish()?;

    let mut fresh = Server::new(device, &config, &model)?;
    let recomputed = fresh.step(&tokens)?;
    fresh.finish()?;
    report(&tokens, &served, &recomputed)
}

/// One request, its cache, and the tensors that its attention reads.
struct Server<'a, D: Device> {
    device: D,
    stream: D::Stream,
    model: &'a Model,
    cache: KvCacheManager<D>,
    request: RequestId,
    /// Position bias and norm weights of each layer's compressors.
    weights: Vec<Vec<[Buffer<D, f32>; 2]>>,
    /// `[TILE_QUERIES, 128, 512]` BF16 and `[TILE_QUERIES]`: windows.
    window: (Buffer<D, u16>, Buffer<D, i32>),
    /// `[TILE_QUERIES, TILE_ENTRIES, 512]` BF16 and `[TILE_QUERIES]`: compressed entries.
    entries: (Buffer<D, u16>, Buffer<D, i32>),
    /// `[TILE_QUERIES, TILE_ENTRIES]`: which entries a query of a CSA layer reads, -1 = none.
    selected: Buffer<D, i32>,
}

impl<'a, D: Device> Server<'a, D> {
    /// Allocates everything once. The cache allocates nothing on the device after this.
    fn new(device: &D, config: &ModelConfig, model: &'a Model) -> Result<Self> {
        let config = CacheConfig {
            num_blocks: CONTEXT / BLOCK_TOKENS,
            max_context: CONTEXT,
            max_step_tokens: CONTEXT,
            ..CacheConfig::smallest(config.clone())
        };
        let mut cache = KvCacheManager::new(device.clone(), config)?;
        let stream = device.stream()?;
        let mut weights = Vec::new();
        for layer in &model.layers {
            let on_device = |compressor: &model::Compressor| -> Result<_> {
                let ape = upload(device, &stream, &compressor.ape)?;
                Ok([ape, upload(device, &stream, &compressor.norm)?])
            };
            weights.push(layer.compressors.iter().map(on_device).collect::<Result<_>>()?);
        }
        let tile = |rows: u32| -> Result<_> {
            let elements = u64::from(TILE_QUERIES * rows * HEAD_DIM);
            let lengths = device.allocate("lengths", TILE_QUERIES.into())?;
            Ok((device.allocate("tile", elements)?, lengths))
        };
        Ok(Self {
            model,
            request: cache.admit()?,
            weights,
            window: tile(WINDOW)?,
            entries: tile(TILE_ENTRIES)?,
            selected: device.allocate("selected", (TILE_QUERIES * TILE_ENTRIES).into())?,
            cache,
            stream,
            device: device.clone(),
        })
    }

    /// Runs the model over the next tokens of the request: a chunk of the prompt, or one to decode.
    fn step(&mut self, tokens: &[usize]) -> Result<Outputs> {
        let start = self.cache.ledger().committed(self.request)?;
        let count = tokens.len() as u32;
        // Takes the blocks of the step, all or none, and tells the device which tokens are whose.
        let step = [StepRequest { id: self.request, start, tokens: count }];
        self.cache.prepare_forward(&self.stream, &step)?;
        // Finds the windows that close in this step: once, for all layers.
        self.cache.build_plan(&self.stream)?;
        let mut hidden: Outputs = tokens.iter().map(|&token| self.model.embed(token)).collect();
        for layer in 0..self.model.layers.len() {
            hidden = self.layer(layer, start, &hidden)?;
        }
        // A kernel that met a row it could not read or write says so here.
        self.cache.check_faults(&self.stream)?;
        // With drafts, fewer may be accepted: the others never were.
        self.cache.commit(self.request, count)?;
        Ok(hidden)
    }

    /// One layer over the step's tokens. The order matters: entries that close in this step are seen
    /// by its own queries, and the ring still holds the old rows that the first queries need.
    fn layer(&self, layer: usize, start: u32, hidden: &Outputs) -> Result<Outputs> {
        let cache = self.cache.layer(LayerId(layer as u32))?;
        let weights = &self.model.layers[layer];
        let inputs: Outputs = hidden.iter().map(|hidden| model::normed(hidden)).collect();
        let keys =
            (start..).zip(&inputs).flat_map(|(position, input)| weights.key(input, position));
        let keys = self.upload(&keys.collect::<Vec<u16>>())?;

        self.update(&cache, layer, &inputs)?;
        let mut outputs = Outputs::new();
        for first in (0..cache.tokens()).step_by(TILE_QUERIES as usize) {
            let queries = first..cache.tokens().min(first + TILE_QUERIES);
            let gathered = self.gather(&cache, &keys, start, queries.clone())?;
            for (query, keys) in queries.zip(&gathered) {
                let at = query as usize;
                outputs.push(weights.attend(&inputs[at], start + query, keys, &hidden[at]));
            }
        }
        cache.append_swa(&self.stream, &keys)?;
        Ok(outputs)
    }

    /// Hands the layer's compressors what the model projected for them.
    fn update(
        &self,
        cache: &LayerCacheHandle<'_, D>,
        layer: usize,
        inputs: &Outputs,
    ) -> Result<()> {
        let mut tensors = Vec::new();
        let compressors = &self.model.layers[layer].compressors;
        for (compressor, [ape, norm]) in compressors.iter().zip(&self.weights[layer]) {
            let kv = self.upload(&compressor.kv.times_each(inputs))?;
            tensors.push((kv, self.upload(&compressor.gate.times_each(inputs))?, ape, norm));
        }
        let projected: Vec<_> =
            tensors.iter().map(|(kv, gate, ape, norm)| Projected { kv, gate, ape, norm }).collect();
        match projected.as_slice() {
            [main, index] => cache.update_csa(&self.stream, main, index)?,
            [main] => cache.update_hca(&self.stream, main)?,
            _ => {} // a layer with a window alone
        }
        Ok(())
    }

    /// What each of `queries` attends to, `[rows, 512]`: its window, then its compressed entries.
    fn gather(
        &self,
        cache: &LayerCacheHandle<'_, D>,
        kv: &Buffer<D, u16>,
        start: u32,
        queries: Range<u32>,
    ) -> Result<Outputs> {
        let (stream, count) = (&self.stream, queries.len());
        let (window, lengths) = &self.window;
        cache.gather_swa(stream, kv, queries.clone(), window, lengths)?;
        let mut keys = self.rows(&self.window, WINDOW, count)?;
        let (tile, lengths) = &self.entries;
        match cache.schema().kind {
            LayerKind::Swa => return Ok(keys),
            LayerKind::Csa => {
                // While a query sees no more than `index_topk` entries the indexer picks them all;
                // in a longer context it would score the indexer keys here.
                let visible = queries.clone().map(|query| ((start + query + 1) / CSA_RATIO) as i32);
                let visible: Vec<i32> = visible.collect();
                let list = |&visible: &i32| {
                    (0..TILE_ENTRIES as i32).map(move |i| if i < visible { i } else { -1 })
                };
                let lists: Vec<i32> = visible.iter().flat_map(list).collect();
                self.device.upload(stream, &lists, &self.selected, 0)?;
                self.device.upload(stream, &visible, lengths, 0)?;
                cache.gather_kv(stream, queries, &self.selected, TILE_ENTRIES, tile)?;
            }
            LayerKind::Hca => cache.gather_all(stream, queries, TILE_ENTRIES, tile, lengths)?,
        }
        let entries = self.rows(&self.entries, TILE_ENTRIES, count)?;
        keys.iter_mut().zip(entries).for_each(|(keys, entries)| keys.extend(entries));
        Ok(keys)
    }

    /// The rows of each query in a tile, up to its length, on the host.
    fn rows(
        &self,
        (tile, lengths): &(Buffer<D, u16>, Buffer<D, i32>),
        rows: u32,
        queries: usize,
    ) -> Result<Outputs> {
        let row = HEAD_DIM as usize;
        let mut bits = vec![0; queries * rows as usize * row];
        let mut counts = vec![0; queries];
        self.device.download(&self.stream, tile, 0, &mut bits)?;
        self.device.download(&self.stream, lengths, 0, &mut counts)?;
        let value = |&bits: &u16| bf16::from_bits(bits).to_f32();
        let queries = bits.chunks_exact(rows as usize * row).zip(counts);
        Ok(queries
            .map(|(rows, count)| rows[..count as usize * row].iter().map(value).collect())
            .collect())
    }

    fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<Buffer<D, T>> {
        upload(&self.device, &self.stream, values)
    }

    /// Ends the request: its blocks and its slot are free for the next one.
    fn finish(mut self) -> Result<()> {
        Ok(self.cache.release(self.request)?)
    }
}

fn upload<D: Device, T: bytemuck::Pod>(
    device: &D,
    stream: &D::Stream,
    values: &[T],
) -> Result<Buffer<D, T>> {
    let buffer = device.allocate("input", values.len() as u64)?;
    device.upload(stream, values, &buffer, 0)?;
    Ok(buffer)
}

/// Prints how many outputs are equal, bit for bit.
fn report(tokens: &[usize], served: &Outputs, recomputed: &Outputs) -> Result<()> {
    let equal = |range: Range<usize>| {
        let bits =
            |output: &Vec<f32>| output.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let finite = |at: &usize| served[*at].iter().all(|value| value.is_finite());
        range.filter(finite).filter(|&at| bits(&served[at]) == bits(&recomputed[at])).count()
    };
    let (prompt, all) = (equal(0..PROMPT), equal(PROMPT..tokens.len()));
    println!("decoded tokens      {:?}", &tokens[PROMPT..]);
    println!("                    positions   equal to recomputing");
    println!("prompt in chunks    {PROMPT:>9}   {prompt:>20}");
    println!("decode              {DECODED:>9}   {all:>20}");
    ensure!(prompt + all == tokens.len(), "the cached outputs differ from recomputing");
    Ok(())
}

//! The sliding window: append at decode and prefill sizes, gather at decode sizes.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, LayerKind, WINDOW};
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::{
    CacheConfig, CapturedStep, KvCacheManager, KvError, LayerId, RequestId, StepRequest,
};
use half::bf16;
use indicatif::ProgressBar;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::upload;
use super::{Measurement, measurement, nodes_for};

/// Bytes of a BF16 row.
const ROW_BYTES: u64 = 2 * HEAD_DIM as u64;
/// Bytes of StepMeta that append reads per token, and gather per query.
const APPEND_META_BYTES: u64 = 4;
const GATHER_META_BYTES: u64 = 16;
/// Most tokens of one of the steps that fill the rings.
const FILL_TOKENS: u32 = 8192;

/// Requests in the step, and tokens of each.
const APPENDS: [(u32, u32); 5] = [(1, 1), (32, 1), (256, 1), (4096, 1), (32, 128)];
/// Requests in the step, one query each.
const GATHERS: [u32; 3] = [1, 32, 256];

pub(super) fn measure<B: Backend>(
    device: &Device<B>,
    progress: &ProgressBar,
) -> Result<Vec<Measurement>> {
    let mut results = Vec::new();
    for format in MainFormat::ALL {
        for (requests, tokens) in APPENDS {
            progress.set_message(format!("append {} {requests} x {tokens}", format.name()));
            results.push(append(device, format, requests, tokens)?);
        }
        for requests in GATHERS {
            progress.set_message(format!("gather {} {requests}", format.name()));
            results.push(gather(device, format, requests)?);
        }
    }
    Ok(results)
}

fn append<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    requests: u32,
    tokens: u32,
) -> Result<Measurement> {
    let rows = u64::from(requests * tokens);
    let bytes = rows * (ROW_BYTES + format.row_bytes() + APPEND_META_BYTES);
    let nodes = nodes_for(bytes);
    let bench = Bench::new(device, format, nodes as u32, requests, tokens)?;
    let graph = bench.capture(Vec::new(), |layer, kv, manager, stream| {
        manager.layer(layer)?.append_swa(stream, kv)
    })?;
    let name = format!("append_swa_{}", format.name());
    let size = format!("{requests} x {tokens} tokens");
    measurement(device, (name, size), (bytes, nodes), graph.graph())
}

fn gather<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    requests: u32,
) -> Result<Measurement> {
    let window = u64::from(WINDOW);
    let read = (window - 1) * format.row_bytes() + ROW_BYTES + GATHER_META_BYTES;
    let bytes = u64::from(requests) * (read + window * ROW_BYTES + 4);
    let nodes = nodes_for(bytes);
    let bench = Bench::new(device, format, nodes as u32, requests, 1)?;
    let tile_elements = u64::from(requests) * window * u64::from(HEAD_DIM);
    let tiles = device.allocate::<u16>("tiles", nodes * tile_elements)?;
    let lengths = device.allocate::<i32>("lengths", u64::from(requests))?;
    let retained = vec![tiles.memory(), lengths.memory()];
    let graph = bench.capture(retained, |layer, kv, manager, stream| {
        let tile = tiles.slice(u64::from(layer.0) * tile_elements, tile_elements);
        let tile = tile.expect("one tile a node");
        manager.layer(layer)?.gather_swa(stream, kv, 0..requests, &tile, &lengths)
    })?;
    let name = format!("gather_swa_{}", format.name());
    measurement(device, (name, format!("{requests} queries")), (bytes, nodes), graph.graph())
}

/// A cache of window-only layers, every ring full of random rows, with a step prepared.
struct Bench<B: Backend> {
    stream: Stream<B>,
    manager: KvCacheManager<B>,
    layers: u32,
    step_tokens: u32,
    /// `[layers * step_tokens, 512]` BF16.
    kv: Buffer<B, u16>,
}

impl<B: Backend> Bench<B> {
    fn new(
        device: &Device<B>,
        format: MainFormat,
        layers: u32,
        requests: u32,
        tokens: u32,
    ) -> Result<Self> {
        let model = ModelConfig {
            layers: vec![LayerKind::Swa; layers as usize],
            ..ModelConfig::preset("tiny").context("a preset")?
        };
        let step_tokens = requests * tokens;
        let config = CacheConfig {
            main_format: format,
            max_requests: requests,
            max_step_tokens: step_tokens.max(FILL_TOKENS),
            ..CacheConfig::smallest(model)
        };
        let stream = device.stream()?;
        let mut manager = KvCacheManager::new(device.clone(), config)?;
        let ids = (0..requests).map(|_| manager.admit()).collect::<Result<Vec<_>, _>>()?;
        let kv = random_rows(&stream, u64::from(layers * step_tokens).max(FILL_TOKENS.into()))?;
        fill_rings(&mut manager, &stream, &ids, layers, &kv)?;
        let step = |&id| StepRequest { id, start: WINDOW, tokens };
        manager.prepare_forward(&stream, &ids.iter().map(step).collect::<Vec<_>>())?;
        stream.synchronize()?;
        Ok(Self { stream, manager, layers, step_tokens, kv })
    }

    /// One launch per layer, each on its own part of `kv`.
    fn capture(
        &self,
        mut retained: Vec<Memory<B>>,
        launch: impl Fn(LayerId, &Buffer<B, u16>, &KvCacheManager<B>, &Stream<B>) -> Result<(), KvError>,
    ) -> Result<CapturedStep<B>> {
        retained.push(self.kv.memory());
        let elements = u64::from(self.step_tokens) * u64::from(HEAD_DIM);
        let graph = self.manager.capture(&self.stream, self.step_tokens, retained, |manager| {
            (0..self.layers).try_for_each(|layer| {
                let kv = self.kv.slice(u64::from(layer) * elements, elements);
                launch(LayerId(layer), &kv.expect("rows for every layer"), manager, &self.stream)
            })
        })?;
        self.stream.synchronize()?;
        Ok(graph)
    }
}

/// Gives every request a full window, in steps of at most [`FILL_TOKENS`] tokens.
fn fill_rings<B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    ids: &[RequestId],
    layers: u32,
    kv: &Buffer<B, u16>,
) -> Result<()> {
    for ids in ids.chunks((FILL_TOKENS / WINDOW) as usize) {
        let step = |&id| StepRequest { id, start: 0, tokens: WINDOW };
        manager.prepare_forward(stream, &ids.iter().map(step).collect::<Vec<_>>())?;
        for layer in 0..layers {
            manager.layer(LayerId(layer))?.append_swa(stream, kv)?;
        }
        ids.iter().try_for_each(|&id| manager.commit(id, WINDOW))?;
    }
    Ok(())
}

/// `[rows, 512]` BF16, uniform in [-4, 4).
fn random_rows<B: Backend>(stream: &Stream<B>, rows: u64) -> Result<Buffer<B, u16>> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut value = || bf16::from_f32(random.random_range(-4.0..4.0)).to_bits();
    let values: Vec<u16> = (0..rows * u64::from(HEAD_DIM)).map(|_| value()).collect();
    Ok(upload(stream, "kv rows", &values)?)
}

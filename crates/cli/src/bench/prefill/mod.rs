//! Prefill: the time of a layer of each kind for a chunk of one request, kernel by kernel, and the time per token for
//! the whole model.
//!
//! A cache has some layers of each kind, and several requests. An update overwrites its inputs, so it is measured once
//! per request. Everything else is measured repeatedly in the step of the last request. `queries` is `select` less
//! `select_projected`, plus `index_query`; the scores and lists are `select_projected` less `index_query`.

mod floor;
mod row;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, Memory, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::{Bucket, CacheConfig, CapturedStep, Launches, Layers, StepRequest};

use super::load::{LoadArgs, Weight};
use super::timing::{ColdTimer, LONG_RUNS, median};
use super::trunk::{Filled, PREFILL_TOKENS, Part, Size, Tensors, queue, queue_layer, trunk_of};
use floor::Floor;
pub use floor::{Chunk, bf16_microseconds};
pub use row::{Row, summary, table};

/// Layers of each kind in the cache, which is also the number of launches in a graph.
const LAYERS: usize = 4;
/// Number of requests, each of which runs one chunk.
const REQUESTS: usize = 2 * LONG_RUNS;
/// Drafts that the cache has room for.
const DRAFTS: u32 = 4;
/// Most bytes of the indexer's workspace. A chunk that needs more is processed in parts.
const WORKSPACE_BYTES: u64 = 1 << 30;

/// The reads of layers whose chunk is updated, with the number of layers of each.
const READS: [(Read, Part, usize); 4] = [
    (Read::Windows, Part::Windows, 2 * LAYERS),
    (Read::Select, Part::Select, LAYERS),
    (Read::Projected, Part::SelectProjected, LAYERS),
    (Read::Query, Part::Quantise, LAYERS),
];

/// The measurements with their own graph, besides updates.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    Windows,
    Select,
    Projected,
    Query,
}

/// Microseconds per layer.
struct Times {
    update_csa: f64,
    update_hca: f64,
    append: f64,
    reads: [f64; READS.len()],
}

/// A chunk of a model.
#[derive(Clone, Debug)]
pub struct Case {
    /// A preset.
    pub model: String,
    /// The chunk.
    pub chunk: Chunk,
    /// The weight of the indexer's query projection.
    pub weight: Weight,
}

/// All chunks of all models.
pub(super) fn cases(load: &LoadArgs) -> Vec<Case> {
    let chunks = load
        .past
        .iter()
        .flat_map(|&past| load.chunk.iter().map(move |&tokens| Chunk { tokens, past }));
    let case =
        |model: &String, chunk| Case { model: model.clone(), chunk, weight: load.index_weight };
    let of = |model| chunks.clone().map(move |chunk| case(model, chunk));
    load.model.iter().flat_map(of).collect()
}

/// Measures every kernel of a chunk.
pub(super) fn measure_chunk<B: Backend>(
    device: &Device<B>,
    &Case { model: ref name, chunk, weight }: &Case,
) -> Result<Vec<Row>> {
    let model = trunk_of(name)?;
    let times = measure_layers(device, &model, chunk, weight)?;
    let stream = device.stream()?;
    let of = |read| {
        let found = READS.iter().position(|(of, ..)| *of == read);
        found.map_or(0.0, |index| times.reads[index])
    };
    let (select, projected, query) = (of(Read::Select), of(Read::Projected), of(Read::Query));
    const INDEX_QUERY: &str = "index_query";
    let mut kernels = vec![
        ("update_csa", LayerKind::Csa, times.update_csa, chunk.update_csa()),
        ("update_hca", LayerKind::Hca, times.update_hca, chunk.update_hca()),
    ];
    let queries = select - projected + query;
    kernels.extend([
        ("queries", LayerKind::Csa, queries, chunk.projections(&model)),
        (INDEX_QUERY, LayerKind::Csa, query, chunk.index_query(&model)),
        ("scores + lists", LayerKind::Csa, projected - query, chunk.scores(&model)),
        // These run in every layer; the kind is not used.
        ("window gather", LayerKind::Swa, of(Read::Windows), chunk.windows()),
        ("append", LayerKind::Swa, times.append, chunk.append(DRAFTS)),
    ]);
    let row = |(kernel, kind, microseconds, floor): (&'static str, _, _, Floor)| {
        let layers = match kind {
            // In `select`, this is part of the launch of the product.
            _ if kernel == INDEX_QUERY => 0,
            LayerKind::Swa => model.layers.len() as u32,
            kind => model.count(kind),
        };
        let floor_microseconds = floor.microseconds(&stream, LAYERS as u64)?;
        Ok(Row {
            model: name.clone(),
            kernel: kernel.into(),
            tokens: chunk.tokens,
            past: chunk.past,
            microseconds,
            floor: floor.to_string(),
            floor_microseconds,
            layers,
            nanoseconds_per_token: 1e3 * microseconds * f64::from(layers) / f64::from(chunk.tokens),
        })
    };
    kernels.into_iter().map(row).collect()
}

/// Measures a layer of each kind.
fn measure_layers<B: Backend>(
    device: &Device<B>,
    model: &ModelConfig,
    chunk: Chunk,
    weight: Weight,
) -> Result<Times> {
    let Chunk { tokens, past } = chunk;
    let end = past + tokens;
    let layers = [[LayerKind::Csa; LAYERS], [LayerKind::Hca; LAYERS]].concat();
    let config = CacheConfig {
        max_draft: DRAFTS,
        max_requests: REQUESTS as u32,
        num_blocks: REQUESTS as u32 * end.div_ceil(BLOCK_TOKENS),
        max_context: end,
        max_step_tokens: PREFILL_TOKENS.max(tokens),
        ..CacheConfig::new(ModelConfig { layers, ..model.clone() })
    };
    let size = Size {
        tokens,
        all: 0,
        entry_rows: 1,
        workspace_bytes: WORKSPACE_BYTES,
        weight,
        query_heads: None,
    };
    let mut filled = Filled::new(device, config, size)?;
    filled.advance(past)?;
    let bucket = Bucket { tokens, tokens_per_request: tokens, requests: 1, context: end };
    let [csa, hca] = [LayerKind::Csa, LayerKind::Hca]
        .map(|kind| capture(&mut filled, &bucket, Part::Update(kind)));
    let updates = [csa?, hca?];
    let (memory, timer) = (filled.memory(), ColdTimer::new(device)?);
    let Filled { stream, cache, tensors, ids, .. } = &mut filled;
    let (mut taken, mut appends) = ([Vec::new(), Vec::new()], Vec::new());
    let mut reads = None;
    for (number, &id) in ids.iter().enumerate() {
        let requests = [StepRequest { id, start: past, tokens }];
        let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &requests)?;
        for (graph, taken) in updates.iter().zip(&mut taken) {
            taken.push(timer.time(stream, || Ok(step.replay(graph)?))?);
        }
        if number + 1 == ids.len() {
            reads = Some(time_reads(&timer, (stream, &memory), &mut step, tensors)?);
        }
        // Not as a graph, which would also contain the updates: the launches are queued after a fill that takes longer
        // than queueing.
        let append = || queue(tensors, &mut step, &[Part::Append(LayerKind::Csa)]);
        appends.push(timer.time(stream, append)?);
    }
    cache.check_faults(stream)?;
    let of_layer = |mut all: Vec<f64>| median(all.split_off(LONG_RUNS)) / LAYERS as f64;
    let ([update_csa, update_hca], append) = (taken.map(of_layer), of_layer(appends));
    Ok(Times { update_csa, update_hca, append, reads: reads.context("a chunk")? })
}

/// Repeats each read of the layers whose chunk is updated. Returns microseconds per layer.
fn time_reads<B: Backend>(
    timer: &ColdTimer<B>,
    (stream, memory): (&Stream<B>, &[Memory<B>]),
    layers: &mut Layers<'_, B>,
    tensors: &Tensors<B>,
) -> Result<[f64; READS.len()]> {
    let mut reads = [0.0; READS.len()];
    for (time, (_, part, count)) in reads.iter_mut().zip(READS) {
        let graph =
            layers.record_reads(memory.to_vec(), |layers| queue(tensors, layers, &[part]))?;
        let replay = || Ok(graph.replay()?);
        *time = timer.median(stream, LONG_RUNS, replay)? / count as f64;
    }
    Ok(reads)
}

/// Captures a part of all layers that have it, for steps of `bucket`.
fn capture<B: Backend>(
    filled: &mut Filled<B>,
    bucket: &Bucket,
    part: Part,
) -> Result<CapturedStep<B>> {
    filled.capture(bucket, Vec::new(), |tensors, layers, layer| {
        queue_layer(tensors, layers, layer, &[part])
    })
}

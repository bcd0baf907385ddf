//! The cost of saving checkpoints: a chunk of a prompt in all layers of a model, without checkpoints and with them.
//!
//! Two caches run the same chunks with the same graphs in turn. One has no room for checkpoints, the other saves one at
//! each multiple of [`INTERVAL`] tokens. A request can run a chunk only once, so each run has its own request.

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::{Accepted, Bucket, CacheConfig, CapturedStep, Launches, RequestId, StepRequest};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::load::{LoadArgs, Weight};
use super::timing::{ColdTimer, LONG_RUNS, median};
use super::trunk::{Filled, PREFILL_TOKENS, Part, Size, queue_layer, trunk_of};

/// Tokens between checkpoints of a chunk.
const INTERVAL: u32 = 2048;
/// Most bytes of the indexer's workspace.
const WORKSPACE_BYTES: u64 = 1 << 30;
/// The parts of a chunk that are run in each layer.
const PARTS: [Part; 8] = [
    Part::Update(LayerKind::Swa),
    Part::Update(LayerKind::Csa),
    Part::Update(LayerKind::Hca),
    Part::Select,
    Part::Windows,
    Part::Append(LayerKind::Swa),
    Part::Append(LayerKind::Csa),
    Part::Append(LayerKind::Hca),
];

/// A chunk of a model.
#[derive(Clone, Debug)]
pub struct Case {
    /// A preset.
    pub model: String,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Tokens of the request before the chunk, a multiple of 128.
    pub past: u32,
}

/// A chunk, measured.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// A preset.
    pub model: String,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Tokens of the request before it.
    pub past: u32,
    /// Checkpoints that it saves.
    pub checkpoints: u32,
    /// Median microseconds in a cache without checkpoints: updates, indexer, gathers of windows and appends of all layers.
    pub microseconds: f64,
    /// The same with them.
    pub saving_microseconds: f64,
}

/// All chunks of all models.
pub(super) fn cases(load: &LoadArgs) -> Vec<Case> {
    let chunks = load.past.iter().flat_map(|&past| load.chunk.iter().map(move |&of| (of, past)));
    let case = |model: &String, (tokens, past): (u32, u32)| {
        let past = past.next_multiple_of(BLOCK_TOKENS);
        Case { model: model.clone(), tokens, past }
    };
    let of = |model| chunks.clone().map(move |chunk| case(model, chunk));
    load.model.iter().flat_map(of).collect()
}

/// Measures a chunk without checkpoints and with them.
pub(super) fn measure_case<B: Backend>(device: &Device<B>, case: &Case) -> Result<Vec<Row>> {
    let checkpoints = case.tokens.div_ceil(INTERVAL);
    let mut caches = [Setup::new(device, case, 0)?, Setup::new(device, case, checkpoints)?];
    let timer = ColdTimer::new(device)?;
    let mut times = [Vec::new(), Vec::new()];
    for run in 0..2 * LONG_RUNS {
        for (cache, times) in caches.iter_mut().zip(&mut times) {
            times.push(cache.time(&timer, case, run)?);
        }
    }
    let [microseconds, saving_microseconds] = times.map(|mut of| median(of.split_off(LONG_RUNS)));
    let Case { ref model, tokens, past } = *case;
    let model = model.clone();
    Ok(vec![Row { model, tokens, past, checkpoints, microseconds, saving_microseconds }])
}

/// A cache whose requests can run the chunk next.
struct Setup<B: Backend> {
    filled: Filled<B>,
    graph: CapturedStep<B>,
    bucket: Bucket,
    checkpoints: u32,
}

impl<B: Backend> Setup<B> {
    fn new(device: &Device<B>, case: &Case, checkpoints: u32) -> Result<Self> {
        let &Case { ref model, tokens, past } = case;
        let (end, requests) = (past + tokens, 2 * LONG_RUNS as u32);
        let config = CacheConfig {
            max_requests: requests,
            num_blocks: requests * end.div_ceil(BLOCK_TOKENS),
            max_context: end,
            max_step_tokens: PREFILL_TOKENS.max(tokens),
            num_checkpoints: requests * checkpoints,
            ..CacheConfig::new(trunk_of(model)?)
        };
        let size = Size {
            tokens,
            all: 0,
            entry_rows: 1,
            workspace_bytes: WORKSPACE_BYTES,
            weight: Weight::Bf16,
            query_heads: None,
        };
        let mut filled = Filled::new(device, config, size)?;
        filled.advance(past)?;
        let bucket = Bucket { tokens, tokens_per_request: tokens, requests: 1, context: end };
        let graph = filled.capture(&bucket, Vec::new(), |tensors, layers, layer| {
            queue_layer(tensors, layers, layer, &PARTS)
        })?;
        Ok(Self { filled, graph, bucket, checkpoints })
    }

    /// Runs the chunk of request `run`, and returns its time in microseconds.
    fn time(&mut self, timer: &ColdTimer<B>, case: &Case, run: usize) -> Result<f64> {
        let Self { filled: Filled { stream, cache, ids, .. }, graph, bucket, checkpoints } = self;
        let id: RequestId = *ids.get(run).context("a request for each run")?;
        let &Case { tokens, past, .. } = case;
        for number in 1..=*checkpoints {
            let boundary = past + (number * INTERVAL).min(tokens / BLOCK_TOKENS * BLOCK_TOKENS);
            cache.want_checkpoint(id, boundary)?;
        }
        let request = [StepRequest { id, start: past, tokens }];
        let mut step = cache.begin_step(stream, Launches::Bucket(bucket), &request)?;
        let time = timer.time(stream, || Ok(step.replay(graph)?))?;
        step.commit(&[Accepted { id, accepted: tokens, tokens: &[] }])?;
        cache.check_faults(stream)?;
        let saved = cache.take_saved().len();
        ensure!(saved == *checkpoints as usize, "{saved} of {checkpoints} checkpoints were saved");
        Ok(time)
    }
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["model", "past", "tokens", "us", "checkpoints", "us with them", "slower"]);
    for row in rows {
        let Row { microseconds, saving_microseconds, .. } = *row;
        table.add_row([
            row.model.clone(),
            row.past.to_string(),
            row.tokens.to_string(),
            format!("{microseconds:.0}"),
            row.checkpoints.to_string(),
            format!("{saving_microseconds:.0}"),
            format!("{:.2} %", 100.0 * (saving_microseconds / microseconds - 1.0)),
        ]);
    }
    table
}

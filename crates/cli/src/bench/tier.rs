//! The host tier: a long prefix to host memory and back, beside one copy of as many bytes; and what decode steps lose by
//! it.
//!
//! A prompt is computed, its checkpoint enters the prefix tree, and is moved; then a step of another request takes so many
//! blocks that the device evicts it, and it is brought back. Each run has a prompt of its own, for which host memory, large
//! enough for one of them, evicts the one before.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use dsv4_kv::device::{Backend, Buffer, Device, HostCopies, HostPool};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv::{
    Bucket, CacheConfig, Capacity, CapturedStep, Launches, Prompt, RequestId, StepRequest,
};
use indicatif::ProgressBar;
use serde::Serialize;

use super::load::LoadArgs;
use super::step::step as parts_of_step;
use super::timing::median;
use super::trunk::{Filled, PREFILL_TOKENS, Size, queue_layer, trunk_of};

/// Whether all that the tests of this program do on the CPU: the same calls, few of them.
const SMALL: bool = cfg!(test);
/// Prompts.
const RUNS: u32 = if SMALL { 1 } else { 5 };
/// Copies, after as many that warm up.
const COPIES: usize = if SMALL { 1 } else { 10 };
/// Decode steps that are timed together while a prefix is on its way: no more than it is long.
const STEPS: u32 = 2;

/// A prefix and the decode steps beside it.
#[derive(Clone, Debug)]
pub struct Case {
    /// A preset.
    pub model: String,
    /// Tokens of the prefix, a multiple of 128.
    pub prefix: u32,
    /// Requests that decode, and tokens of each.
    pub decode: (u32, u32),
    /// Tokens of a prefill step.
    pub step_tokens: u32,
}

/// One direction, measured.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// A preset.
    pub model: String,
    /// Tokens of the prefix.
    pub prefix: u32,
    /// `to host` or `from host`.
    pub direction: &'static str,
    /// Bytes of its blocks and its checkpoint.
    pub bytes: u64,
    /// Median microseconds from the call that begins it until it was waited for.
    pub microseconds: f64,
    /// Median microseconds of one copy of as many bytes, likewise.
    pub copy_microseconds: f64,
    /// Median microseconds of a decode step by itself.
    pub step_microseconds: f64,
    /// The same while the prefix is on its way.
    pub beside_microseconds: f64,
}

pub(super) fn measure<B: Backend>(
    device: &Device<B>,
    load: &LoadArgs,
    progress: &ProgressBar,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for model in &load.model {
        let prefix = load.past.iter().copied().max().unwrap_or_default();
        let prefix = prefix.next_multiple_of(BLOCK_TOKENS).max(BLOCK_TOKENS);
        let (model, decode) = (model.clone(), (32, 8192));
        let case = Case { model, prefix, decode, step_tokens: PREFILL_TOKENS };
        progress.set_message(format!("tier: {case:?}"));
        rows.extend(measure_case(device, &case)?);
    }
    Ok(rows)
}

/// Both directions of a case.
pub(super) fn measure_case<B: Backend>(device: &Device<B>, case: &Case) -> Result<Vec<Row>> {
    let mut setup = Setup::new(device, case)?;
    let graph = setup.capture()?;
    let alone = setup.decode(&graph)?;
    let mut taken = [Vec::new(), Vec::new()];
    let mut beside = [Vec::new(), Vec::new()];
    for run in 0..RUNS {
        for (with_steps, taken) in [(false, &mut taken), (true, &mut beside)] {
            let graph = with_steps.then_some(&graph);
            let salt = [run as u8, u8::from(with_steps)];
            taken[0].push(setup.store(&salt, graph)?);
            taken[1].push(setup.restore(&salt, graph)?);
        }
    }
    let bytes = setup.moved()?;
    let copies = copies(device, bytes)?;
    let rows = ["to host", "from host"].into_iter().zip(taken).zip(beside).zip(copies);
    Ok(rows
        .map(|(((direction, taken), beside), copy_microseconds)| Row {
            model: case.model.clone(),
            prefix: case.prefix,
            direction,
            bytes,
            microseconds: median(taken),
            copy_microseconds,
            step_microseconds: alone,
            beside_microseconds: median(beside),
        })
        .collect())
}

/// A cache with requests that decode, and one that brings prompts.
struct Setup<B: Backend> {
    filled: Filled<B>,
    decoding: Vec<RequestId>,
    context: u32,
    prompt: Vec<u32>,
    runs: u64,
}

impl<B: Backend> Setup<B> {
    fn new(device: &Device<B>, case: &Case) -> Result<Self> {
        let (requests, context) = case.decode;
        let smallest = CacheConfig::smallest(trunk_of(&case.model)?);
        // A token more than the prefix, or a step that evicts it, for which a block is missing.
        let max_context = (case.prefix + 1).max(context).max(case.step_tokens);
        let blocks = [requests * context, case.prefix, case.step_tokens - BLOCK_TOKENS];
        let config = CacheConfig {
            max_requests: requests + 1,
            num_blocks: blocks.iter().map(|tokens| tokens.div_ceil(BLOCK_TOKENS)).sum(),
            max_context,
            max_step_tokens: case.step_tokens.max(requests),
            num_checkpoints: 2,
            checkpoint_interval: 0,
            max_draft: 1,
            ..smallest
        };
        let capacity = Capacity::new(&config);
        let prefix = u64::from(case.prefix / BLOCK_TOKENS);
        // Images of blocks are a little larger than their rows.
        let image = capacity.block_bytes.next_multiple_of(256) + 16 * 64;
        let host_bytes = image * prefix + capacity.checkpoint_bytes + 2 * image;
        let all = context / BLOCK_TOKENS;
        let entry_rows = all.max(config.model.index_topk);
        let size = Size {
            tokens: requests,
            all,
            entry_rows,
            workspace_bytes: u64::MAX,
            weight: super::load::Weight::Bf16,
            query_heads: None,
        };
        let mut filled = Filled::new(device, CacheConfig { host_bytes, ..config }, size)?;
        let prompts = filled.ids.pop().context("a request more than decode")?;
        filled.cache.release(prompts)?;
        filled.advance(context - 1)?;
        let decoding = filled.ids.clone();
        let prompt = (0..=case.prefix).collect();
        Ok(Self { filled, decoding, context, prompt, runs: 0 })
    }

    fn bucket(&self) -> Bucket {
        let requests = self.decoding.len() as u32;
        Bucket { tokens: requests, tokens_per_request: 1, requests, context: self.context }
    }

    /// The decode step, all but routers.
    fn capture(&mut self) -> Result<CapturedStep<B>> {
        let (bucket, memory) = (self.bucket(), self.filled.memory());
        let Filled { stream, cache, tensors, .. } = &mut self.filled;
        let (parts, mut queued) = (parts_of_step(), Ok(()));
        let graph = cache.capture(stream, &bucket, memory, |layers| {
            queued = layers.ids().try_for_each(|layer| queue_layer(tensors, layers, layer, &parts));
            Ok(())
        })?;
        queued.map(|()| graph)
    }

    /// Microseconds of a decode step, the median of several, each of which is rejected.
    fn decode(&mut self, graph: &CapturedStep<B>) -> Result<f64> {
        let times = (0..2 * COPIES).map(|_| self.decode_once(graph)).collect::<Result<Vec<_>>>()?;
        Ok(median(times[COPIES..].to_vec()))
    }

    /// Microseconds of a decode step, by events around a few of them.
    fn decode_once(&mut self, graph: &CapturedStep<B>) -> Result<f64> {
        let (bucket, start) = (self.bucket(), self.context - 1);
        let Filled { stream, cache, .. } = &mut self.filled;
        let device = stream.device();
        let (from, to) = (device.event()?, device.event()?);
        let request = |&id: &RequestId| StepRequest { id, start, tokens: 1 };
        let requests: Vec<_> = self.decoding.iter().map(request).collect();
        let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &requests)?;
        stream.record(&from)?;
        step.replay(graph)?;
        (1..STEPS).try_for_each(|_| step.repeat(graph))?;
        stream.record(&to)?;
        drop(step);
        Ok(f64::from(to.milliseconds_since(&from)?) * 1e3 / f64::from(STEPS))
    }

    /// Computes a prompt and stores it; microseconds of that, or of a step meanwhile.
    fn store(&mut self, salt: &[u8], beside: Option<&CapturedStep<B>>) -> Result<f64> {
        let prompt = self.prompt.clone();
        let Filled { stream, cache, .. } = &mut self.filled;
        let told = Prompt { tokens: &prompt, salt, adapter: b"" };
        let admission = cache.admit_with(stream, &told)?;
        ensure!(admission.reused == 0, "a new prompt");
        self.filled.tell(admission.id, 0, &prompt)?;
        let Filled { stream, cache, .. } = &mut self.filled;
        cache.release(admission.id)?;
        stream.synchronize()?;
        let started = Instant::now();
        cache.advance_tier(stream)?;
        let taken = self.finish(started, beside)?;
        self.runs += 1;
        let stored = self.filled.cache.tier_stats().stored_checkpoints;
        ensure!(stored == self.runs, "the prompt was stored");
        Ok(taken)
    }

    /// Evicts the prompt from the device and brings it back; microseconds of that, or of a step meanwhile.
    fn restore(&mut self, salt: &[u8], beside: Option<&CapturedStep<B>>) -> Result<f64> {
        let Filled { stream, cache, .. } = &mut self.filled;
        let id = cache.admit()?;
        let tokens = cache.config().max_step_tokens;
        let free = cache.ledger().free_blocks();
        ensure!(free < tokens.div_ceil(BLOCK_TOKENS), "{free} are free: the step evicts nothing");
        // It is rejected, and what was evicted for it stays so.
        drop(cache.begin_step(stream, Launches::Eager, &[StepRequest { id, start: 0, tokens }])?);
        cache.release(id)?;
        stream.synchronize()?;
        let told = Prompt { tokens: &self.prompt, salt, adapter: b"" };
        let started = Instant::now();
        let wanted = cache.prefetch(stream, &told)?;
        ensure!(wanted.is_some(), "host memory has the prompt, and the device has lost it");
        let taken = self.finish(started, beside)?;
        ensure!(self.filled.cache.tier_stats().restored_checkpoints == self.runs, "it came back");
        Ok(taken)
    }

    /// Waits for what is on its way; microseconds since it was begun, or of a step meanwhile.
    fn finish(&mut self, started: Instant, beside: Option<&CapturedStep<B>>) -> Result<f64> {
        let step = beside.map(|graph| self.decode_once(graph)).transpose()?;
        let Filled { stream, cache, .. } = &mut self.filled;
        cache.settle_tier(stream)?;
        Ok(step.unwrap_or_else(|| started.elapsed().as_secs_f64() * 1e6))
    }

    /// Bytes of one transfer.
    fn moved(&self) -> Result<u64> {
        let stats = self.filled.cache.tier_stats();
        ensure!(stats.bytes_to_host == stats.bytes_from_host, "as much came as went: {stats:?}");
        Ok(stats.bytes_to_host / self.runs)
    }
}

/// Microseconds of one copy of so many bytes to host memory, and of one from there.
fn copies<B: Backend>(device: &Device<B>, bytes: u64) -> Result<[f64; 2]> {
    let stream = device.stream()?;
    let pool = HostPool::new(device, 1, bytes as usize)?;
    let buffer: Buffer<B, u8> = device.allocate("one copy", bytes)?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..2 * COPIES {
        let mut copies = HostCopies::new(&stream)?;
        let started = Instant::now();
        copies.store(&buffer.view(), pool.take(1).context("the unit is free")?)?;
        copies.end()?;
        let units = copies.settle().map_err(|unsettled| unsettled.error)?;
        times[0].push(started.elapsed().as_secs_f64() * 1e6);
        let mut copies = HostCopies::new(&stream)?;
        let started = Instant::now();
        copies.load(units.into_iter().map(Into::into), &buffer)?;
        copies.end()?;
        copies.settle().map_err(|unsettled| unsettled.error)?;
        times[1].push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times.map(|times| median(times[COPIES..].to_vec())))
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "model",
        "tokens",
        "direction",
        "MB",
        "us",
        "GB/s",
        "one copy us",
        "of copy",
        "step us",
        "beside us",
        "slower",
    ]);
    for row in rows {
        let Row { step_microseconds: alone, beside_microseconds: beside, .. } = *row;
        table.add_row([
            row.model.clone(),
            row.prefix.to_string(),
            row.direction.to_string(),
            format!("{:.2}", row.bytes as f64 / 1e6),
            format!("{:.0}", row.microseconds),
            format!("{:.1}", row.bytes as f64 / row.microseconds / 1e3),
            format!("{:.0}", row.copy_microseconds),
            format!("{:.0} %", 100.0 * row.copy_microseconds / row.microseconds),
            format!("{alone:.0}"),
            format!("{beside:.0}"),
            format!("{:.1} %", 100.0 * (beside / alone - 1.0)),
        ]);
    }
    table
}

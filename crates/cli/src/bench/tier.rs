//! The host tier: transfers of a long prefix to host memory and back, beside one copy of as many bytes; and how much
//! they slow decode steps.
//!
//! A prompt is computed, and its checkpoint enters the prefix tree and is moved to host memory. Then a step of another
//! request takes so many blocks that the device evicts the prompt, and it is brought back. Each run has its own prompt.
//! Host memory has room for one, so it evicts the prompt of the run before. A run times either the transfer alone, or
//! decode steps: as many just before the transfer as during it, since the speed of a step depends on what the device
//! did before. Decode steps during one copy of as many bytes show the part of the slowdown that no way of moving the
//! bytes could avoid.

use std::borrow::Cow;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use dsv4_kv::device::{Backend, Buffer, Device, HostCopies, HostPool};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv::{
    Bucket, CacheConfig, Capacity, CapturedStep, Launches, Prompt, RequestId, StepRequest,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::load::LoadArgs;
use super::step::step as parts_of_step;
use super::timing::median;
use super::trunk::{Filled, PREFILL_TOKENS, Size, queue_layer, trunk_of};

/// Whether this is a test on the CPU: it makes the same calls, but few of them.
const SMALL: bool = cfg!(test);
/// Number of prompts.
const RUNS: u32 = if SMALL { 1 } else { 5 };
/// Number of copies alone, and of copies beside decode steps.
const COPIES: usize = if SMALL { 1 } else { 10 };
/// Most decode steps that are timed together.
const MAX_STEPS: u32 = 32;
/// The fraction of a transfer's time that the decode steps may take, so that they end before it does.
const BESIDE: f64 = 0.75;

/// A prefix, and the decode steps beside its transfer.
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
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// A preset.
    pub model: String,
    /// Tokens of the prefix.
    pub prefix: u32,
    /// `to host` or `from host`.
    pub direction: Cow<'static, str>,
    /// Bytes of its blocks and its checkpoint.
    pub bytes: u64,
    /// Median microseconds from the call that begins it until it was waited for.
    pub microseconds: f64,
    /// Median microseconds of one copy of as many bytes, likewise.
    pub copy_microseconds: f64,
    /// Decode steps that were timed together.
    pub steps: u32,
    /// Median microseconds of a decode step just before the prefix goes.
    pub step_microseconds: f64,
    /// The same while it is on its way.
    pub beside_microseconds: f64,
    /// Median microseconds of a decode step just before one copy of as many bytes.
    pub copy_step_microseconds: f64,
    /// The same while that copy is on its way.
    pub copy_beside_microseconds: f64,
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug)]
enum Direction {
    ToHost,
    FromHost,
}

impl Direction {
    const ALL: [Self; 2] = [Self::ToHost, Self::FromHost];

    fn name(self) -> &'static str {
        match self {
            Self::ToHost => "to host",
            Self::FromHost => "from host",
        }
    }
}

/// The times of one direction.
#[derive(Default)]
struct Samples {
    transfers: Vec<f64>,
    /// Decode steps that are timed together.
    steps: u32,
    alone: Vec<f64>,
    beside: Vec<f64>,
}

/// A prefix for each model.
pub(super) fn cases(load: &LoadArgs) -> Vec<Case> {
    let longest = load.past.iter().copied().max().unwrap_or_default();
    let prefix = longest.next_multiple_of(BLOCK_TOKENS).max(BLOCK_TOKENS);
    let case = |model: &String| {
        let (model, decode, step_tokens) = (model.clone(), (32, 8192), PREFILL_TOKENS);
        Case { model, prefix, decode, step_tokens }
    };
    load.model.iter().map(case).collect()
}

/// Measures both directions of a case.
pub(super) fn measure_case<B: Backend>(device: &Device<B>, case: &Case) -> Result<Vec<Row>> {
    let mut setup = Setup::new(device, case)?;
    let graph = setup.capture()?;
    let mut samples = [Samples::default(), Samples::default()];
    for run in 0..RUNS {
        for with_steps in [false, true] {
            let salt = [run as u8, u8::from(with_steps)];
            for (direction, samples) in Direction::ALL.into_iter().zip(&mut samples) {
                setup.prepare(direction, &salt)?;
                if with_steps {
                    setup.time_steps(direction, &salt, &graph, samples)?;
                } else {
                    samples.transfers.push(setup.time_transfer(direction, &salt)?);
                }
            }
        }
    }
    let bytes = setup.moved()?;
    let copies = setup.copies(&graph, bytes, samples[0].steps)?;
    let rows = Direction::ALL.into_iter().zip(samples).zip(copies);
    Ok(rows.map(|((direction, of), copy)| Row::new(case, direction, bytes, of, copy)).collect())
}

impl Row {
    fn new(case: &Case, of: Direction, bytes: u64, samples: Samples, copy: Samples) -> Self {
        let Samples { transfers, steps, alone, beside } = samples;
        Self {
            model: case.model.clone(),
            prefix: case.prefix,
            direction: of.name().into(),
            bytes,
            microseconds: median(transfers),
            copy_microseconds: median(copy.transfers),
            steps,
            step_microseconds: median(alone),
            beside_microseconds: median(beside),
            copy_step_microseconds: median(copy.alone),
            copy_beside_microseconds: median(copy.beside),
        }
    }
}

/// A cache with requests that decode, and room for one more request with the prompts.
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
        let smallest = CacheConfig::new(trunk_of(&case.model)?);
        // The prefix plus one token, or the step that evicts it. The cache lacks one block for that step.
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
        // Images of blocks are a little larger than the rows of the blocks.
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

    /// Captures the decode step, without routers.
    fn capture(&mut self) -> Result<CapturedStep<B>> {
        let (bucket, parts) = (self.bucket(), parts_of_step());
        self.filled.capture(&bucket, Vec::new(), |tensors, layers, layer| {
            queue_layer(tensors, layers, layer, &parts)
        })
    }

    /// Microseconds of a decode step, by events around `steps` steps, all of which are rejected.
    fn decode(&mut self, graph: &CapturedStep<B>, steps: u32) -> Result<f64> {
        let (bucket, start) = (self.bucket(), self.context - 1);
        let Filled { stream, cache, .. } = &mut self.filled;
        let device = stream.device();
        let (from, to) = (device.event()?, device.event()?);
        let request = |&id: &RequestId| StepRequest { id, start, tokens: 1 };
        let requests: Vec<_> = self.decoding.iter().map(request).collect();
        let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &requests)?;
        stream.record(&from)?;
        step.replay(graph)?;
        (1..steps).try_for_each(|_| step.repeat(graph))?;
        stream.record(&to)?;
        drop(step);
        Ok(f64::from(to.milliseconds_since(&from)?) * 1e3 / f64::from(steps))
    }

    /// Prepares the transfer, and waits until the device is idle: computes the prompt, or evicts it.
    fn prepare(&mut self, direction: Direction, salt: &[u8]) -> Result<()> {
        match direction {
            Direction::ToHost => self.compute(salt)?,
            Direction::FromHost => self.evict()?,
        }
        Ok(self.filled.stream.synchronize()?)
    }

    /// Computes a prompt. Its checkpoint can then move to host memory.
    fn compute(&mut self, salt: &[u8]) -> Result<()> {
        let prompt = self.prompt.clone();
        let Filled { stream, cache, .. } = &mut self.filled;
        let told = Prompt { tokens: &prompt, salt, adapter: b"" };
        let admission = cache.admit_with(stream, &told)?;
        ensure!(admission.reused == 0, "a new prompt");
        self.filled.tell(admission.id, 0, &prompt)?;
        self.filled.cache.release(admission.id)?;
        self.runs += 1;
        Ok(())
    }

    /// Evicts the prompt from the device.
    fn evict(&mut self) -> Result<()> {
        let Filled { stream, cache, .. } = &mut self.filled;
        let id = cache.admit()?;
        let tokens = cache.config().max_step_tokens;
        let free = cache.ledger().free_blocks();
        ensure!(free < tokens.div_ceil(BLOCK_TOKENS), "{free} are free: the step evicts nothing");
        // The step is rejected. The prefixes that were evicted for it stay evicted.
        drop(cache.begin_step(stream, Launches::Eager, &[StepRequest { id, start: 0, tokens }])?);
        Ok(cache.release(id)?)
    }

    /// Begins a transfer.
    fn begin(&mut self, direction: Direction, salt: &[u8]) -> Result<()> {
        let Filled { stream, cache, .. } = &mut self.filled;
        match direction {
            Direction::ToHost => cache.advance_tier(stream)?,
            Direction::FromHost => {
                let told = Prompt { tokens: &self.prompt, salt, adapter: b"" };
                let wanted = cache.prefetch(stream, &told)?;
                ensure!(wanted.is_some(), "host memory has the prompt, the device has lost it");
            }
        }
        Ok(())
    }

    /// Waits for the transfer.
    fn settle(&mut self, direction: Direction) -> Result<()> {
        let Filled { stream, cache, .. } = &mut self.filled;
        cache.settle_tier(stream)?;
        let stats = cache.tier_stats();
        let done = match direction {
            Direction::ToHost => stats.stored_checkpoints,
            Direction::FromHost => stats.restored_checkpoints,
        };
        ensure!(done == self.runs, "{done} of {} prefixes went {}", self.runs, direction.name());
        Ok(())
    }

    /// Microseconds of a transfer, from the call that begins it until the host has waited for it.
    fn time_transfer(&mut self, direction: Direction, salt: &[u8]) -> Result<f64> {
        let started = Instant::now();
        self.begin(direction, salt)?;
        self.settle(direction)?;
        Ok(started.elapsed().as_secs_f64() * 1e6)
    }

    /// Times decode steps, then as many during a transfer. The first steps warm up, and show how many fit into the time
    /// of the transfer.
    fn time_steps(
        &mut self,
        direction: Direction,
        salt: &[u8],
        graph: &CapturedStep<B>,
        samples: &mut Samples,
    ) -> Result<()> {
        let one = self.decode(graph, 2)?;
        if samples.steps == 0 {
            samples.steps = steps_within(BESIDE * median(samples.transfers.clone()), one);
        }
        samples.alone.push(self.decode(graph, samples.steps)?);
        self.begin(direction, salt)?;
        samples.beside.push(self.decode(graph, samples.steps)?);
        self.settle(direction)
    }

    /// Bytes of one transfer.
    fn moved(&self) -> Result<u64> {
        let stats = self.filled.cache.tier_stats();
        ensure!(stats.bytes_to_host == stats.bytes_from_host, "as much came as went: {stats:?}");
        Ok(stats.bytes_to_host / self.runs)
    }

    /// Times one copy of `bytes` bytes in each direction, alone and beside decode steps.
    fn copies(&mut self, graph: &CapturedStep<B>, bytes: u64, steps: u32) -> Result<[Samples; 2]> {
        let device = self.filled.stream.device().clone();
        let (stream, pool) = (device.stream()?, HostPool::new(&device, 1, bytes as usize)?);
        let buffer: Buffer<B, u8> = device.allocate("one copy", bytes)?;
        let mut samples = [Samples::default(), Samples::default()];
        for run in 0..2 * COPIES {
            let with_steps = run % 2 == 1;
            for (direction, samples) in Direction::ALL.into_iter().zip(&mut samples) {
                if with_steps {
                    self.decode(graph, 2)?;
                    samples.alone.push(self.decode(graph, steps)?);
                }
                let mut copies = HostCopies::new(&stream)?;
                let unit = pool.take(1).context("the unit is free")?;
                let started = Instant::now();
                match direction {
                    Direction::ToHost => copies.store(&buffer.view(), unit)?,
                    Direction::FromHost => {
                        copies.load(unit.into_iter().map(Into::into), &buffer)?
                    }
                }
                copies.end()?;
                if with_steps {
                    samples.beside.push(self.decode(graph, steps)?);
                }
                copies.settle().map_err(|unsettled| unsettled.error)?;
                if !with_steps {
                    samples.transfers.push(started.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        Ok(samples)
    }
}

/// How many steps of `one` microseconds fit into `microseconds`; at least one.
fn steps_within(microseconds: f64, one: f64) -> u32 {
    ((microseconds / one) as u32).clamp(1, MAX_STEPS)
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
        "steps",
        "step us",
        "beside us",
        "slower",
        "beside a copy",
    ]);
    for row in rows {
        let Row { step_microseconds: alone, beside_microseconds: beside, .. } = *row;
        let copy = row.copy_beside_microseconds / row.copy_step_microseconds;
        table.add_row([
            row.model.clone(),
            row.prefix.to_string(),
            row.direction.to_string(),
            format!("{:.2}", row.bytes as f64 / 1e6),
            format!("{:.0}", row.microseconds),
            format!("{:.1}", row.bytes as f64 / row.microseconds / 1e3),
            format!("{:.0}", row.copy_microseconds),
            format!("{:.0} %", 100.0 * row.copy_microseconds / row.microseconds),
            row.steps.to_string(),
            format!("{alone:.0}"),
            format!("{beside:.0}"),
            format!("{:.1} %", 100.0 * (beside / alone - 1.0)),
            format!("{:.1} %", 100.0 * (copy - 1.0)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_steps_are_timed_as_end_before_the_transfer() {
        assert_eq!(steps_within(6300.0, 1000.0), 6);
        assert_eq!(steps_within(300.0, 1000.0), 1);
        assert_eq!(steps_within(1e9, 1000.0), MAX_STEPS);
    }
}

//! Steps without their launches: the bookkeeping alone, and everything that a cache does to begin, replay and commit a
//! step.

use anyhow::Result;
use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::{
    Accepted, Bucket, KvCacheManager, KvError, Launches, LayerGroup, Ledger, RequestId, StepRequest,
};

use super::inputs::Inputs;
use super::row::Row;
use super::samples::{Clock, Samples, WARM_UP};
use super::setup::{CONTEXT, DRAFTS, MEMORY, STEPS, config};

/// Tokens by which a request grows before another one replaces it.
const GROWTH: u32 = 1024;

/// A kind of step.
#[derive(Clone, Copy)]
pub(super) struct Case {
    /// Requests of the step.
    pub requests: u32,
    /// Tokens per request.
    pub tokens: u32,
    /// Tokens per request that are accepted.
    pub accepted: u32,
}

impl Case {
    fn all() -> Vec<Self> {
        let decode =
            |tokens, accepted| [1, 32, 256].map(|requests| Self { requests, tokens, accepted });
        let prefill = Self { requests: 1, tokens: 2048, accepted: 2048 };
        [&decode(1, 1)[..], &decode(DRAFTS + 1, 3), &[prefill]].concat()
    }

    /// A description of the case.
    pub fn name(self) -> String {
        format!("{} x {} tokens", self.requests, self.tokens)
    }
}

/// The requests of a step, in memory that is reused in every step.
#[derive(Clone)]
pub(super) struct Batch {
    case: Case,
    /// The requests of the step.
    pub parts: Vec<StepRequest>,
    /// The commit of the step.
    pub accepted: Vec<Accepted<'static>>,
}

impl Batch {
    /// A batch of the requests `ids`, each at another position in its windows.
    pub fn new(case: Case, ids: Vec<RequestId>) -> Self {
        let start = |at: u32| CONTEXT + 37 * at % 128;
        let part = |(id, at)| StepRequest { id, start: start(at), tokens: case.tokens };
        let parts: Vec<_> = ids.into_iter().zip(0..).map(part).collect();
        let accepted = parts.iter().map(|part| Accepted::count(part.id, case.accepted)).collect();
        Self { case, parts, accepted }
    }

    /// Each request with the chunks of its prompt.
    pub fn prompts(&self) -> impl Iterator<Item = StepRequest> {
        self.parts.iter().flat_map(|part| {
            let starts = (0..part.start).step_by(CONTEXT as usize);
            let chunk = |start: u32| (part.start - start).min(CONTEXT);
            starts.map(move |start| StepRequest { id: part.id, start, tokens: chunk(start) })
        })
    }

    /// Whether its requests have grown to the limit.
    pub fn is_grown(&self) -> bool {
        let limit = CONTEXT + GROWTH.max(4 * self.case.tokens);
        self.parts.first().is_some_and(|part| part.start >= limit)
    }

    /// Moves each request to its next step.
    pub fn advance(&mut self) {
        self.parts.iter_mut().for_each(|part| part.start += self.case.accepted);
    }
}

/// Measures all rows.
///
/// # Errors
/// If a step is refused.
pub(super) fn measure() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in Case::all() {
        rows.extend(measure_ledger(case)?);
        rows.extend(measure_cache(case)?);
    }
    Ok(rows)
}

/// The bookkeeping alone: checks, blocks, StepMeta, and the commit.
fn measure_ledger(case: Case) -> Result<[Row; 3]> {
    let mut ledger = Ledger::new(&config(case.requests)?)?;
    let mut array = vec![0; ledger.largest_layout().elements()];
    let mut batch = filled_ledger(&mut ledger, &mut array, case)?;
    let (clock, [mut begin, mut commit, mut both]) = (Clock::new(), <[Samples; 3]>::default());
    for _ in 0..WARM_UP + STEPS {
        if batch.is_grown() {
            batch.parts.iter().try_for_each(|part| ledger.release(part.id))?;
            batch = filled_ledger(&mut ledger, &mut array, case)?;
        }
        let group = LayerGroup::Trunk;
        begin.time(clock, || ledger.begin_step(group, &batch.parts, &mut array))?;
        commit.time(clock, || ledger.commit_step(group, &batch.accepted))?;
        both.sum_of_last(&[&begin, &commit]);
        batch.advance();
    }
    Ok([
        Row::new("bookkeeping: begin, with StepMeta", case.name(), &begin, 1),
        Row::new("bookkeeping: commit", case.name(), &commit, 1),
        Row::new("bookkeeping: both", case.name(), &both, 1),
    ])
}

/// Admits requests and prefills their prompts.
pub(super) fn filled_ledger(
    ledger: &mut Ledger,
    array: &mut [i32],
    case: Case,
) -> Result<Batch, KvError> {
    let ids = (0..case.requests).map(|_| ledger.admit()).collect::<Result<_, _>>()?;
    let batch = Batch::new(case, ids);
    for step in batch.prompts() {
        ledger.begin_step(LayerGroup::Trunk, &[step], array)?;
        ledger.commit_step(LayerGroup::Trunk, &[Accepted::count(step.id, step.tokens)])?;
    }
    Ok(batch)
}

/// The whole cache, which adds events, the copy of StepMeta, the launch for new blocks, and the replay of a graph.
fn measure_cache(case: Case) -> Result<[Row; 3]> {
    let bench = CacheBench::new(case.requests)?;
    let CacheBench { mut cache, stream, inputs } = bench;
    let context = cache.config().max_context;
    let (tokens, requests) = (case.tokens * case.requests, case.requests);
    let bucket = Bucket { tokens, tokens_per_request: case.tokens, requests, context };
    let retained = inputs.memory();
    let graph = cache.capture(&stream, &bucket, retained, |layers| inputs.queue(layers))?;
    let mut batch = CacheBench::filled(&mut cache, &stream, &inputs, case)?;
    let (clock, [mut begin, mut replay, mut commit]) = (Clock::new(), <[Samples; 3]>::default());
    for _ in 0..WARM_UP + STEPS {
        if batch.is_grown() {
            batch.parts.iter().try_for_each(|part| cache.release(part.id))?;
            batch = CacheBench::filled(&mut cache, &stream, &inputs, case)?;
        }
        let launches = Launches::Bucket(&bucket);
        let mut step = begin.time(clock, || cache.begin_step(&stream, launches, &batch.parts))?;
        replay.time(clock, || step.replay(&graph))?;
        commit.time(clock, || step.commit(&batch.accepted))?;
        batch.advance();
    }
    Ok([
        Row::new("cache: begin_step", case.name(), &begin, 1),
        Row::new("cache: replay", case.name(), &replay, 1),
        Row::new("cache: commit", case.name(), &commit, 1),
    ])
}

/// A cache on a device that does nothing.
pub(super) struct CacheBench {
    pub cache: KvCacheManager<Null>,
    pub stream: Stream<Null>,
    pub inputs: Inputs,
}

impl CacheBench {
    /// An empty cache for `requests` requests.
    pub fn new(requests: u32) -> Result<Self> {
        let device = NullDevice::null(MEMORY);
        let config = config(requests)?;
        let (stream, inputs) = (device.stream()?, Inputs::new(&device, &config)?);
        Ok(Self { cache: KvCacheManager::new(device, config)?, stream, inputs })
    }

    /// Admits requests and prefills their prompts.
    pub fn filled(
        cache: &mut KvCacheManager<Null>,
        stream: &Stream<Null>,
        inputs: &Inputs,
        case: Case,
    ) -> Result<Batch, KvError> {
        let ids = (0..case.requests).map(|_| cache.admit()).collect::<Result<_, _>>()?;
        let batch = Batch::new(case, ids);
        for part in batch.prompts() {
            let mut step = cache.begin_step(stream, Launches::Eager, &[part])?;
            inputs.queue(&mut step)?;
            step.commit(&[Accepted::count(part.id, part.tokens)])?;
        }
        Ok(batch)
    }
}

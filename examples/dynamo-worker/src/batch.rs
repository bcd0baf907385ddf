//! Runs steps of all running requests on the one engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use anyhow::{Context, Result};
use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PartLayout, TransferStaging};
use dsv4_kv_events::{Publisher, PublisherOptions};
use dsv4_kv_model::sequence::{Sequence, Work};
use dsv4_kv_model::{Chunk, Engine, ModelError};
use dsv4_kv_transfer::Fingerprint;
use dynamo_backend_common::DisaggregationMode;
use tokio::sync::mpsc::UnboundedSender;

use crate::args::Options;
use crate::moves::{self, Asked, Payloads};
use crate::offers::Offers;
use crate::request::{Job, Update};

/// Longest time between two calls that serve subscribers and offers.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// As [`POLL_INTERVAL`], while the answer to a claim is outstanding.
const CLAIM_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The data of a running engine that the rest of the worker needs.
#[derive(Clone)]
pub struct Ready {
    /// Most tokens of a request.
    pub context: u32,
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// Tokens that end a request.
    pub end: Vec<u32>,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Tokens of a step.
    pub step_tokens: u32,
    /// The endpoint of events, if they are published.
    pub events: Option<String>,
    /// The fingerprint that arriving requests must have.
    pub fingerprint: Fingerprint,
    /// The layout of parts that arriving requests must have.
    pub layout: PartLayout,
    /// The offers of a prefill worker.
    pub offers: Option<Arc<Offers>>,
}

/// Logged when a request cannot be taken from another worker.
const LOST: &str = "a request did not come; it is computed here";

/// A request in the cache.
struct Running {
    id: RequestId,
    sequence: Sequence,
    updates: UnboundedSender<Update>,
    /// Tokens of the prompt that were not computed here.
    reused: u32,
}

/// A request that was loaded, and whose prefill worker was asked for it.
struct Arriving {
    asked: Asked,
    sequence: Sequence,
    updates: UnboundedSender<Update>,
    /// Number of its tokens that were computed.
    tokens: u32,
}

/// The engine with its requests.
pub struct Batch<B: Backend> {
    engine: Engine<B>,
    staging: TransferStaging<B>,
    fingerprint: Fingerprint,
    chunk: usize,
    /// What a prefill worker offers.
    payloads: Option<Payloads>,
    publisher: Option<Publisher>,
    waiting: VecDeque<Job>,
    arriving: Vec<Arriving>,
    running: Vec<Running>,
}

impl<B: Backend> Batch<B> {
    /// An engine without requests.
    ///
    /// # Errors
    /// An address or a directory that is not available, an empty revision, or an error of
    /// [`KvCacheManager::new_transfer_staging`](dsv4_kv::KvCacheManager::new_transfer_staging).
    pub fn new(mut engine: Engine<B>, options: &Options) -> Result<Self> {
        let cache = engine.cache_mut();
        let shares = options.checkpoints > 0 && options.mode != DisaggregationMode::Decode;
        let any = "tcp://127.0.0.1:0".to_owned();
        let events =
            PublisherOptions { endpoint: any.clone(), replay_endpoint: any, ..Default::default() };
        let publisher = shares.then(|| Publisher::start(cache, events)).transpose()?;
        let payloads = options.mode.is_prefill().then(|| Payloads::new(options)).transpose()?;
        let staging = cache.new_transfer_staging()?;
        let fingerprint = Fingerprint::new(cache.config(), options.revision.as_bytes(), b"", b"")
            .context("--revision")?;
        let chunk = options.chunk.max(1) as usize;
        let (waiting, arriving, running) = (VecDeque::new(), Vec::new(), Vec::new());
        Ok(Self {
            engine,
            staging,
            fingerprint,
            chunk,
            payloads,
            publisher,
            waiting,
            arriving,
            running,
        })
    }

    /// The data that the rest of the worker needs.
    pub fn ready(&self) -> Ready {
        let (cache, model) = (self.engine.cache(), self.engine.model());
        Ready {
            context: cache.config().max_context,
            vocabulary: model.config.vocab_size,
            end: model.config.eos.clone(),
            blocks: cache.config().num_blocks,
            step_tokens: cache.config().max_step_tokens,
            events: self.publisher.as_ref().map(|publisher| publisher.endpoint().to_owned()),
            fingerprint: self.fingerprint,
            layout: self.staging.layout().clone(),
            offers: self.payloads.as_ref().map(|payloads| Arc::clone(payloads.offers())),
        }
    }

    /// Runs until all senders of jobs are dropped. Jobs that are not done then are dropped; prefill workers whose
    /// requests are among them are told.
    pub fn run(&mut self, jobs: &Receiver<Job>) {
        while self.take(jobs) {
            self.drop_cancelled();
            self.admit();
            self.settle();
            if let Err(error) = self.step() {
                tracing::error!(%error, "a step has failed");
                self.fail_all(&error.to_string());
            }
            self.end_finished();
            self.tell_routers();
        }
        for arriving in std::mem::take(&mut self.arriving) {
            moves::give_up(&mut self.engine, &mut self.staging, arriving.asked);
        }
        self.waiting.clear();
    }

    /// Takes new jobs, and waits a moment if there is nothing to do. Returns `false` once all senders of jobs are
    /// dropped.
    fn take(&mut self, jobs: &Receiver<Job>) -> bool {
        if self.running.is_empty() && (self.waiting.is_empty() || !self.arriving.is_empty()) {
            let pause = if self.arriving.is_empty() { POLL_INTERVAL } else { CLAIM_POLL_INTERVAL };
            match jobs.recv_timeout(pause) {
                Ok(job) => self.waiting.push_back(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match jobs.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|job| !job.updates.is_closed());
        let Self { engine, staging, arriving, running, .. } = self;
        for gone in arriving.extract_if(.., |arriving| arriving.updates.is_closed()) {
            moves::give_up(engine, staging, gone.asked);
        }
        for gone in running.extract_if(.., |running| running.updates.is_closed()) {
            release(engine, gone.id);
        }
    }

    /// Admits waiting jobs, oldest first, while there are slots: blocks are enough for all slots.
    fn admit(&mut self) {
        let most = self.engine.cache().config().max_requests as usize;
        while self.running.len() + self.arriving.len() < most {
            let Some(job) = self.waiting.pop_front() else { break };
            let updates = job.updates.clone();
            if let Err(error) = self.admit_job(job) {
                let _ = updates.send(Update::Failed(error.to_string()));
            }
        }
    }

    fn admit_job(&mut self, job: Job) -> Result<(), ModelError> {
        let Job { prompt, continuation, moved, updates } = job;
        let Some(sequence) = Sequence::new(prompt, continuation) else {
            return Err(ModelError::EmptyPrompt);
        };
        if let Some(fetched) = moved {
            let tokens = fetched.verified().manifest().at.trunk;
            let came = (fetched, self.fingerprint.weights);
            match moves::load(&mut self.engine, &mut self.staging, came) {
                Ok(asked) => {
                    self.arriving.push(Arriving { asked, sequence, updates, tokens });
                    return Ok(());
                }
                Err(error) => tracing::warn!(%error, "{LOST}"),
            }
        }
        self.compute(sequence, updates)
    }

    /// Admits a request whose prompt is computed here, except for the prefix that the cache has.
    fn compute(
        &mut self,
        mut sequence: Sequence,
        updates: UnboundedSender<Update>,
    ) -> Result<(), ModelError> {
        let admission = self.engine.admit_with(sequence.tokens(), b"")?;
        let (id, reused) = (admission.id, admission.reused);
        sequence.reuse(reused as usize);
        self.running.push(Running { id, sequence, updates, reused });
        Ok(())
    }

    /// Admits requests that other workers have handed over since the last call.
    fn settle(&mut self) {
        for arriving in std::mem::take(&mut self.arriving) {
            let Arriving { asked, mut sequence, updates, tokens: reused } = arriving;
            match moves::settle(&mut self.engine, &mut self.staging, asked) {
                Ok(Ok(id)) => {
                    sequence.reuse(reused as usize);
                    self.running.push(Running { id, sequence, updates, reused });
                }
                Ok(Err(asked)) => {
                    self.arriving.push(Arriving { asked, sequence, updates, tokens: reused });
                }
                Err(error) => {
                    tracing::warn!(%error, "{LOST}");
                    let told = updates.clone();
                    if let Err(error) = self.compute(sequence, updates) {
                        let _ = told.send(Update::Failed(error.to_string()));
                    }
                }
            }
        }
    }

    /// Runs a step: one token of every request that decodes, and a chunk of every prompt.
    fn step(&mut self) -> Result<(), ModelError> {
        self.end_finished();
        if self.running.is_empty() {
            return Ok(());
        }
        let Self { engine, running, chunk, payloads, .. } = self;
        let mut budget = engine.cache().config().max_step_tokens as usize;
        let mut works: Vec<Work> = Vec::new();
        for (index, request) in running.iter().enumerate() {
            let others = running.len() - index - 1;
            // A prefill worker leaves the last token of a prompt to the decode worker, which needs its logits.
            let left = payloads.as_ref().map_or(usize::MAX, |_| request.left_to_offer());
            let work = request.sequence.next((*chunk).min(budget - others).min(left));
            budget -= work.tokens.len();
            works.push(work);
        }
        let chunks = running.iter().zip(&works).map(|(request, work)| Chunk {
            id: request.id,
            tokens: &work.tokens,
            logits: work.logits,
        });
        let forward = engine.forward(&chunks.collect::<Vec<_>>())?;
        let advance = |(at, (request, work)): (usize, (&mut Running, &Work))| {
            request.sequence.advance(work, forward.logits(at))
        };
        let parts = running.iter_mut().zip(&works).enumerate();
        let (accepted, generated): (Vec<_>, Vec<_>) = parts.map(advance).unzip();
        forward.commit_some(&accepted)?;
        for (request, generated) in running.iter().zip(generated) {
            for token in generated {
                let _ = request.updates.send(Update::Token(token.picked.token));
            }
        }
        Ok(())
    }

    /// Ends requests that have all their tokens, or offers them once they can be offered.
    fn end_finished(&mut self) {
        let Self { engine, staging, running, payloads, fingerprint, .. } = self;
        let is_prefill = payloads.is_some();
        let is_done = |request: &mut Running| match is_prefill {
            true => request.left_to_offer() == 0,
            false => request.sequence.finish().is_some(),
        };
        for Running { id, sequence, updates, reused } in running.extract_if(.., is_done) {
            if updates.is_closed() {
                // Nobody would get the ticket.
                release(engine, id);
                continue;
            }
            let update = match (payloads.as_mut(), sequence.finish()) {
                (Some(_), _) if sequence.cached() == 0 => Update::Offered(None, reused),
                (Some(payloads), _) => {
                    let request = (id, sequence.tokens());
                    match moves::offer(engine, staging, payloads, *fingerprint, request) {
                        Ok(offered) => Update::Offered(Some(offered), reused),
                        // For example, if there is no room for the payload. The decode worker then computes the prompt
                        // again.
                        Err(error) => {
                            tracing::warn!(
                                "a prompt was computed and cannot be offered: {error:#}"
                            );
                            Update::Offered(None, reused)
                        }
                    }
                }
                (None, Some(finish)) => Update::Finished(finish, reused),
                (None, None) => unreachable!("it is done"),
            };
            release(engine, id);
            // An update that nobody gets takes its offer back.
            let _ = updates.send(update);
        }
    }

    fn fail_all(&mut self, why: &str) {
        for Running { id, updates, .. } in self.running.drain(..) {
            release(&mut self.engine, id);
            let _ = updates.send(Update::Failed(why.to_owned()));
        }
    }

    fn tell_routers(&mut self) {
        if let Some(publisher) = &mut self.publisher
            && let Err(error) = publisher.publish(self.engine.cache_mut())
        {
            tracing::error!(%error, "events are not published any more");
            self.publisher = None;
        }
        if let Some(payloads) = &mut self.payloads {
            payloads.free_ended();
        }
    }
}

impl Running {
    /// Tokens that a prefill worker still has to compute: all of the prompt but the last one.
    fn left_to_offer(&self) -> usize {
        self.sequence.tokens().len() - 1 - self.sequence.cached()
    }
}

fn release<B: Backend>(engine: &mut Engine<B>, id: RequestId) {
    if let Err(error) = engine.release(id) {
        tracing::error!(%error, "a request could not be released");
    }
}

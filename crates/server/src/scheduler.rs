//! Continuous batching: decides which tokens of which requests run in each step of the one engine.
//!
//! ```text
//! each step   1. release requests whose client has disconnected
//!             2. with a cold tier: fetch the prompts of waiting requests from the store; a request can be admitted
//!                when the stored part of its prompt is in host memory, or after the timeout
//!             3. admit waiting requests in order, while a slot and the blocks of their tokens are free; each
//!                reuses the cached prefix of its tokens
//!             4. plan one token of every request; drafts, unless they take the last blocks, then chunks of prompts
//!                share the rest (module `plan`)
//!             5. run the step; if blocks run out, plan it without drafts; if they still do, preempt the newest
//!                request, which is admitted again before all others, and plan anew (module `step`)
//! ```
//!
//! A preempted request gets the same tokens again: a token's logits have the same bits in every batch and chunk, and
//! sampling depends only on seed and position. The oldest request is preempted only while it runs alone and shares
//! blocks, and only once: afterwards it shares nothing, and fits ([`QueueLimits::longest`]). So some request always
//! finishes.

mod step;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use dsv4_kv::{KvError, RequestId};
use dsv4_kv_cold_tier::MAX_FETCHES;
use dsv4_kv_device::Backend;
use dsv4_kv_model::{Engine, ModelError};

use crate::accepted::{Event, Request};
use crate::admission::{fits, longest, shares};
use crate::cold::{Cold, ColdCache};
use crate::error::{Failure, ServerError};
use crate::metrics::Metrics;
use crate::queue::{CloseOnDrop, Phase, Queue, QueueLimits};

/// Longest wait for requests while the store is busy, before the store's results are handled.
const STORE_INTERVAL: Duration = Duration::from_millis(200);

/// How steps are filled. The engine limits their tokens and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Most tokens of one prompt in a step.
    pub chunk: usize,
    /// Most sequences that may wait.
    pub waiting: usize,
}

/// The result of a call of [`Scheduler::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has run a step, or tried to.
    Ran,
    /// There was nothing to run.
    Idle,
}

/// Waiting and running requests, and the engine.
pub struct Scheduler<B: Backend> {
    engine: Engine<B>,
    limits: SchedulerLimits,
    queue: Arc<Queue>,
    /// Preempted requests; they are admitted before those of the queue.
    preempted: VecDeque<Request>,
    /// Running requests, oldest first.
    running: Vec<Running>,
    cold: Cold<B>,
    metrics: Metrics,
    /// Steps in a row that have failed, without those that have failed for NaNs.
    failed_steps: u32,
}

/// A request in the cache.
struct Running {
    id: RequestId,
    request: Request,
}

impl<B: Backend> Scheduler<B> {
    /// A scheduler without requests.
    ///
    /// # Errors
    /// [`ServerError::StepTooShort`].
    pub fn new(
        engine: Engine<B>,
        limits: SchedulerLimits,
        metrics: Metrics,
    ) -> Result<Self, ServerError> {
        let config = engine.cache().config();
        let (step_tokens, requests) = (config.max_step_tokens as usize, config.max_requests);
        if step_tokens < requests as usize {
            return Err(ServerError::StepTooShort { step_tokens, requests });
        }
        let longest = longest(config.max_context, &engine.cache().ledger());
        let vocabulary = engine.model().config.vocab_size;
        let (waiting, drafts) = (limits.waiting, config.max_draft as usize);
        let queue = Queue::new(QueueLimits { vocabulary, longest, waiting, drafts });
        let scheduler = Self {
            engine,
            limits,
            queue: Arc::new(queue),
            preempted: VecDeque::new(),
            running: Vec::new(),
            cold: Cold::none(),
            metrics,
            failed_steps: 0,
        };
        scheduler.report();
        Ok(scheduler)
    }

    /// From now on stores prefixes in a cold tier, and restores them from there.
    ///
    /// # Errors
    /// [`ServerError::Cold`]; the engine must have host memory for prefixes.
    pub fn open_cold(&mut self, cache: &ColdCache) -> Result<(), ServerError> {
        self.cold = Cold::open(&mut self.engine, cache)?;
        Ok(())
    }

    /// The queue to which requests are submitted.
    #[must_use]
    pub fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.queue)
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// Runs until the queue is closed and all accepted requests are done, or until it is aborted.
    ///
    /// # Errors
    /// As [`Self::step`]. In every case the queue accepts no more requests afterwards, and every request that was not
    /// done has got a failure.
    pub fn run(&mut self) -> Result<(), ServerError> {
        let queue = self.queue();
        let _ended = CloseOnDrop(self.queue());
        queue.set_running(true);
        let ended = self.run_all();
        // A panic does not come here either. Clients that got no last event are then told that the server has failed.
        queue.set_running(ended.is_err());
        ended
    }

    /// As [`Self::run`], but does not close the queue afterwards.
    fn run_all(&mut self) -> Result<(), ServerError> {
        while self.queue.phase() != Phase::Aborted {
            match self.step() {
                Ok(Progress::Ran) => {}
                // A preempted request is admitted again once the transfers that kept its blocks are done or have failed
                // too often.
                Ok(Progress::Idle) if !self.preempted.is_empty() || self.wait() => {}
                Ok(Progress::Idle) => break,
                Err(error) => {
                    self.end_all(&Failure::Step(error.to_string()));
                    return Err(error);
                }
            }
        }
        if self.running.is_empty() && self.preempted.is_empty() && self.queue.waiting() == 0 {
            self.queue.tell_done();
        }
        self.end_all(&Failure::ShutDown);
        self.store_all();
        Ok(())
    }

    /// Waits until a request waits: `false` once there will be none. Hands prefixes to the store meanwhile.
    fn wait(&mut self) -> bool {
        while self.cold.is_busy() {
            if let Some(answer) = self.queue.wait_for(STORE_INTERVAL) {
                return answer;
            }
            self.cold.advance(&mut self.engine);
            self.report();
        }
        self.queue.wait()
    }

    /// Stores all prefixes that host memory has and the store lacks, until the queue is aborted.
    fn store_all(&mut self) {
        // If the copy to host memory fails, those prefixes are not stored.
        let _ = self.engine.settle_tier();
        self.cold.advance(&mut self.engine);
        while self.cold.is_busy() && self.queue.phase() != Phase::Aborted {
            self.cold.wait_for_store(&mut self.engine);
        }
        self.report();
    }

    /// Admits requests that fit, and runs a step of all running requests.
    ///
    /// # Errors
    /// [`ServerError::StepsFail`] after several failed steps in a row. Until then a failed step ends the requests in
    /// it, and no others. If it fails for NaNs, only the requests that have them end, and it does not count.
    /// [`ServerError::Engine`] if the cache refuses to admit, to release or to settle a transfer without a reason to.
    /// Do not use the scheduler after either.
    pub fn step(&mut self) -> Result<Progress, ServerError> {
        self.drop_cancelled()?;
        if self.running.is_empty() {
            // Blocks that are being copied to host memory cannot be evicted, and nothing else runs that could be waited
            // for.
            self.settle_tier()?;
        }
        self.cold.advance(&mut self.engine);
        self.ask_store();
        self.admit()?;
        while self.running.is_empty()
            && self.queue.phase() != Phase::Aborted
            && self.queue.waiting() > 0
            && self.cold.wait(&mut self.engine)
        {
            // No request runs, so the wait delays none.
            self.ask_store();
            self.admit()?;
        }
        let progress = if self.running.is_empty() { Progress::Idle } else { Progress::Ran };
        self.run_step()?;
        self.release_finished()?;
        self.report();
        Ok(progress)
    }

    /// Waits for the transfers to and from host memory. Returns whether there were any. A device error counts as a
    /// failed step.
    ///
    /// # Errors
    /// As [`Self::step`].
    fn settle_tier(&mut self) -> Result<bool, ServerError> {
        match self.engine.settle_tier() {
            Err(error @ ModelError::Cache(KvError::Device(_))) => {
                self.count_failure(error)?;
                Ok(false)
            }
            settled => Ok(settled?),
        }
    }

    /// Releases requests whose client has disconnected.
    fn drop_cancelled(&mut self) -> Result<(), ModelError> {
        self.preempted.retain(|request| !request.has_left());
        let Self { engine, running, .. } = self;
        for gone in running.extract_if(.., |running| running.request.has_left()) {
            engine.release(gone.id)?;
        }
        for mut left in self.queue.take_left() {
            self.cold.give_up(&mut self.engine, &mut left);
        }
        Ok(())
    }

    /// Requests the prompts of those that will be admitted next from the store.
    fn ask_store(&mut self) {
        let Self { engine, queue, cold, .. } = self;
        if !cold.is_open() {
            return;
        }
        let most = (engine.cache().config().max_requests as usize).min(MAX_FETCHES);
        queue.for_oldest(most, |request| {
            if !request.has_left() {
                cold.ask(engine, request);
            }
        });
    }

    /// Admits requests, oldest first, while a slot and blocks for their tokens are free. If one does not fit, later
    /// ones wait behind it.
    fn admit(&mut self) -> Result<(), ModelError> {
        while self.running.len() < self.engine.cache().config().max_requests as usize {
            let Some(mut request) = self.next_that_fits()? else { break };
            self.cold.give_up(&mut self.engine, &mut request);
            if let Some(finish) = request.sequence.finish() {
                let _ = request.events.send(Event::Finished(finish));
            } else if !request.has_left() {
                let admitted = self.admit_request(request)?;
                self.running.push(admitted);
            }
        }
        Ok(())
    }

    /// Admits a request, which reuses the cached prefix of its tokens if it may.
    fn admit_request(&mut self, mut request: Request) -> Result<Running, ModelError> {
        let free = self.unpromised_blocks()?;
        let shared = shares(&self.engine.cache().ledger(), &request, free);
        let admission =
            shared.then(|| self.engine.admit_with(request.sequence.tokens(), &request.salt));
        let id = match admission {
            Some(Ok(admission)) => {
                request.sequence.reuse(admission.reused as usize);
                admission.id
            }
            // The prefix can be computed again, if the device still works.
            None | Some(Err(ModelError::Cache(KvError::Device(_)))) => self.engine.admit()?,
            Some(Err(error)) => return Err(error),
        };
        request.tell_admitted(&self.metrics);
        Ok(Running { id, request })
    }

    /// The oldest waiting request, if blocks for its tokens are free and it need not wait for the store any longer.
    fn next_that_fits(&mut self) -> Result<Option<Request>, KvError> {
        let free = self.unpromised_blocks()?;
        let ledger = self.engine.cache().ledger();
        let fits = |request: &Request| fits(&ledger, request, free);
        Ok(match self.preempted.front() {
            Some(first) if fits(first) => self.preempted.pop_front(),
            Some(_) => None,
            None => {
                let cold = &self.cold;
                let is_next = |first: &Request| cold.is_ready(first) && fits(first);
                self.queue.pop_if(|first| first.has_left() || is_next(first))
            }
        })
    }

    /// Blocks that are free or evictable, less those that running requests still need for the tokens that they have.
    fn unpromised_blocks(&self) -> Result<u32, KvError> {
        let ledger = self.engine.cache().ledger();
        let mut free = ledger.free_blocks() + ledger.evictable_blocks();
        for Running { id, request } in &self.running {
            let needed = ledger.blocks_of(request.sequence.tokens().len() as u32);
            let held = ledger.block_table(*id)?.len() as u32;
            free = free.saturating_sub(needed.saturating_sub(held));
        }
        Ok(free)
    }

    /// Preempts the newest request. It is admitted again before all waiting ones.
    fn preempt_newest(&mut self) -> Result<(), ModelError> {
        if let Some(Running { id, mut request }) = self.running.pop() {
            self.engine.release(id)?;
            request.sequence.restart();
            request.preemptions += 1;
            self.preempted.push_front(request);
            self.metrics.preemptions.increment(1);
        }
        Ok(())
    }

    /// Computes the only running request again, without sharing. While it shares, the prefix tree may keep blocks that
    /// the request has also computed itself, and the cache may be too small for both.
    fn readmit_alone(&mut self) -> Result<(), ModelError> {
        self.preempt_newest()?;
        if let Some(mut request) = self.preempted.pop_front() {
            request.shares_nothing = true;
            let admitted = self.admit_request(request)?;
            self.running.push(admitted);
        }
        Ok(())
    }

    /// Releases requests that are done, and sends their last event.
    fn release_finished(&mut self) -> Result<(), ModelError> {
        let Self { engine, running, .. } = self;
        let is_done = |running: &mut Running| running.request.sequence.finish().is_some();
        for Running { id, request } in running.extract_if(.., is_done) {
            engine.release(id)?;
            if let Some(finish) = request.sequence.finish() {
                let _ = request.events.send(Event::Finished(finish));
            }
        }
        Ok(())
    }

    /// Ends all requests with `failure`. Errors of the device are ignored, since nothing runs afterwards.
    fn end_all(&mut self, failure: &Failure) {
        for Running { id, request } in self.running.drain(..) {
            let _ = request.events.send(Event::Failed(failure.clone()));
            let _ = self.engine.release(id);
        }
        for request in self.preempted.drain(..).chain(self.queue.drain()) {
            let _ = request.events.send(Event::Failed(failure.clone()));
        }
        self.report();
    }

    /// Updates the gauges, and the metrics of cache and cold tier.
    fn report(&self) {
        self.queue.set_preempted(self.preempted.len());
        self.metrics.running.set(self.running.len() as f64);
        self.metrics.waiting.set(self.queue.all_waiting() as f64);
        self.metrics.cache.record(self.engine.cache());
        let cold = self.cold.stats();
        self.metrics.cold_stored.absolute(cold.stored);
        self.metrics.cold_restored_tokens.absolute(cold.restored_tokens);
        self.metrics.cold_failures.absolute(cold.damaged + cold.foreign + cold.failed);
    }
}

//! The loop: arrivals, admission, step, commit, release, until the load is done.

use anyhow::{Context, Result};
use dsv4_kv::{RequestId, StepRequest};
use dsv4_kv_prefix::ReuseStats;
use indicatif::ProgressBar;

use super::clock::Clock;
use super::execute::{Execute, KernelWork, is_out_of_blocks};
use super::latency::Latency;
use super::limit::Shortages;
use super::load::Request;
use super::reuse::TooLong;
use super::scheduler::{Job, Limits, Part, Scheduler};
use super::timeline::{Sample, Timeline};
use crate::interrupt::Interrupt;
use crate::texts::Texts;

/// The outcome of a replay.
#[derive(Debug)]
pub struct Replayed {
    /// Its steps over time.
    pub timeline: Timeline,
    /// Whether it was interrupted before the end of its load.
    pub interrupted: bool,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that had to wait for admission: for a slot, for blocks, or for tokens of a step.
    pub waited: u64,
    /// Requests that can never fit.
    pub rejected: u64,
    /// Number of preemptions.
    pub preempted: u64,
    /// Tokens that were generated, the first ones of answers included.
    pub generated: u64,
    /// Tokens that were reused, and reasons why others were not, of prompts that may share blocks.
    pub reuse: ReuseStats,
    /// The other prompts.
    pub too_long: TooLong,
    /// Waiting times of requests.
    pub latency: Latency,
    /// Number of steps in which a resource was short.
    pub shortages: Shortages,
    /// The work of the kernels.
    pub work: KernelWork,
}

/// Replays `load` through `cache`, to its end or until `interrupt` is requested.
pub fn drive<E: Execute>(
    cache: E,
    (load, texts): (&[Request], Texts),
    limits: Limits,
    clock: Clock,
    progress: &ProgressBar,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    let mut drive = Drive::new(cache, (load, texts), limits, clock);
    let interrupted = loop {
        if interrupt.is_requested() {
            break true;
        }
        drive.admit()?;
        match drive.step()? {
            Some(_) => progress.set_position(drive.done()),
            None => break false,
        }
    };
    progress.finish_and_clear();
    drive.end(interrupted)
}

/// A replay in progress.
pub struct Drive<'l, E> {
    pub(super) cache: E,
    load: &'l [Request],
    texts: Texts,
    pub(super) scheduler: Scheduler,
    clock: Clock,
    timeline: Timeline,
    latency: Latency,
    shortages: Shortages,
    limits: Limits,
    /// Index of the first request that has not arrived.
    next: usize,
    /// The cache's handles of the running requests, by index in the load.
    pub(super) ids: Vec<Option<RequestId>>,
    /// The tokens with which requests were admitted, by index, until they are computed.
    pub(super) known: Vec<Vec<u32>>,
    /// Requests that began as copies: the original, and the number of common tokens. The indices of copies follow those
    /// of the load.
    pub(super) forks: Vec<(usize, u32)>,
    too_long: TooLong,
    finished: u64,
    /// Tokens of the requests of the load that ran to their end, or that can never fit.
    ended: u64,
    parts: Vec<Part>,
    step: Vec<StepRequest>,
    /// Token ids of the step.
    tokens: Vec<u32>,
}

impl<'l, E: Execute> Drive<'l, E> {
    /// Starts a replay of `load` through an idle cache.
    pub fn new(
        cache: E,
        (load, texts): (&'l [Request], Texts),
        limits: Limits,
        clock: Clock,
    ) -> Self {
        Self {
            cache,
            load,
            texts,
            scheduler: Scheduler::new(limits),
            clock,
            timeline: Timeline::default(),
            latency: Latency::default(),
            shortages: Shortages::default(),
            limits,
            next: 0,
            ids: vec![None; load.len()],
            known: vec![Vec::new(); load.len()],
            forks: Vec::new(),
            too_long: TooLong::default(),
            finished: 0,
            ended: 0,
            parts: Vec::new(),
            step: Vec::new(),
            tokens: Vec::new(),
        }
    }

    /// Queues the requests that have arrived, and admits those that fit.
    pub fn admit(&mut self) -> Result<()> {
        let arrived = |request: &&Request| request.arrival.at_ms <= self.clock.now_ms();
        for Request { arrival, .. } in self.load[self.next..].iter().take_while(arrived) {
            let tokens = arrival.context_tokens();
            let blocks = self.cache.ledger().blocks_of(tokens);
            let index = self.next;
            if self.scheduler.submit(Job { index, input: arrival.input, tokens, blocks }) {
                self.latency.submit(index);
            } else {
                self.ended += u64::from(tokens);
            }
            self.next += 1;
        }
        while let Some(job) = self.scheduler.admit() {
            let shares = self.scheduler.may_share(&job);
            if self.cache.reads_tokens() {
                self.known[job.index] = self.text(&job);
            }
            let prompt = &self.known[job.index];
            let (id, reused) = self.cache.admit(job.index, shares.then_some(prompt))?;
            self.ids[job.index] = Some(id);
            if !shares {
                self.too_long.prompts += 1;
                self.too_long.tokens += u64::from(job.input);
            }
            self.latency.admit(job.index);
            self.scheduler.skip(reused);
        }
        Ok(())
    }

    /// The tokens that are known when a request is admitted: its prompt, and the tokens that it had generated before a
    /// preemption.
    fn text(&self, job: &Job) -> Vec<u32> {
        let mut first = job.index;
        while let Some(&(of, _)) = self.fork_of(first) {
            first = of;
        }
        let Request { arrival, prompt } = &self.load[first];
        let mut text = Vec::with_capacity(job.input as usize);
        if let Some(prompt) = prompt {
            self.texts.push_prompt(&mut text, prompt, arrival.input);
        }
        let own = text.len() as u32..job.input;
        text.extend(own.map(|at| self.own_token(job.index, at)));
        text
    }

    /// The running requests: index, and number of tokens.
    pub fn progress(&self) -> impl Iterator<Item = (usize, u32)> {
        self.scheduler.progress()
    }

    /// The cache.
    pub fn cache(&self) -> &E {
        &self.cache
    }

    /// The cache's handle of a running request.
    pub fn id_of(&self, index: usize) -> Option<RequestId> {
        self.ids.get(index).copied().flatten()
    }

    /// The first tokens of a request of the load.
    pub fn tokens_of(&self, index: usize, count: u32) -> Vec<u32> {
        let mut tokens = self.text(&Job { index, input: count, tokens: count, blocks: 0 });
        tokens.truncate(count as usize);
        tokens
    }

    /// A token that a request generated, or that the request generated of which it is a copy.
    fn own_token(&self, mut index: usize, position: u32) -> u32 {
        while let Some(&(of, _)) = self.fork_of(index).filter(|(_, common)| position < *common) {
            index = of;
        }
        self.texts.own_token(index as u64, position)
    }

    /// The request of which this one is a copy, and the number of common tokens.
    fn fork_of(&self, index: usize) -> Option<&(usize, u32)> {
        self.forks.get(index.checked_sub(self.load.len())?)
    }

    /// Runs a step, or waits for the next request. Returns the number of tokens of the step, or `None` at the end of
    /// the load.
    pub fn step(&mut self) -> Result<Option<u32>> {
        loop {
            self.scheduler.plan(&mut self.parts);
            if self.parts.is_empty() {
                if let Some(next) = self.load.get(self.next) {
                    self.clock.idle_until(next.arrival.at_ms);
                    return Ok(Some(0));
                }
                return Ok(self.scheduler.has_waiting().then_some(0));
            }
            self.fill_step()?;
            let kernels_before = self.cache.kernel_ms();
            let prepare = match self.cache.step(&self.step, &self.tokens) {
                Ok(prepare) => prepare,
                Err(error) if is_out_of_blocks(&error) => {
                    self.preempt_last()?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let sample = self.sample(prepare.as_secs_f32() * 1e6);
            self.clock.step(sample.prefill + sample.decode);
            self.timeline.push(Sample { at_ms: self.clock.now_ms(), ..sample });
            let kernels = self.cache.kernel_ms() - kernels_before;
            self.latency.step(kernels + prepare.as_secs_f64() * 1e3);
            self.note_shortage(&sample);
            self.release_finished()?;
            return Ok(Some(sample.prefill + sample.decode));
        }
    }

    /// Converts the planned parts to requests of the cache, and collects their tokens.
    fn fill_step(&mut self) -> Result<()> {
        self.step.clear();
        self.tokens.clear();
        for &Part { index, start, tokens, .. } in &self.parts {
            let id = self.ids[index].context("a request in the step was admitted")?;
            self.step.push(StepRequest { id, start, tokens });
            if self.cache.reads_tokens() {
                match self.known[index].get(start as usize..(start + tokens) as usize) {
                    Some(known) => self.tokens.extend_from_slice(known),
                    None => self.tokens.push(self.own_token(index, start)),
                }
            }
        }
        Ok(())
    }

    /// Preempts the request that was admitted last.
    fn preempt_last(&mut self) -> Result<()> {
        let index = self.scheduler.preempt_last().context("a request that runs alone fits")?;
        self.release(index)
    }

    pub(super) fn release(&mut self, index: usize) -> Result<()> {
        self.known[index] = Vec::new();
        let id = self.ids[index].take().context("a request that runs was admitted")?;
        self.cache.release(id)
    }

    fn release_finished(&mut self) -> Result<()> {
        let mut finished = Vec::new();
        for part in &self.parts {
            let end = part.start + part.tokens;
            if end as usize >= self.known[part.index].len() {
                self.known[part.index] = Vec::new();
            }
            if self.load.get(part.index).is_some_and(|of| end >= of.arrival.input) {
                self.latency.prompt_done(part.index);
            }
        }
        self.scheduler.complete(&self.parts, |index| finished.push(index));
        self.finished += finished.len() as u64;
        for &index in &finished {
            let output = self.load.get(index).map_or(0, |of| of.arrival.output);
            self.latency.finish(index, output);
        }
        let of_load = finished.iter().filter_map(|&index| self.load.get(index));
        self.ended += of_load.map(|of| u64::from(of.arrival.context_tokens())).sum::<u64>();
        finished.into_iter().try_for_each(|index| self.release(index))
    }

    /// Records the resource that was short in the step of `sample`.
    fn note_shortage(&mut self, sample: &Sample) {
        let share = |used: u32, of: u32| f64::from(used) / f64::from(of.max(1));
        let Limits { slots, blocks, step_tokens, .. } = self.limits;
        let in_use = (share(sample.blocks, blocks), share(sample.requests, slots));
        let is_full = sample.prefill + sample.decode == step_tokens;
        self.shortages.step(self.scheduler.shortage(), in_use, is_full);
    }

    fn sample(&self, prepare_us: f32) -> Sample {
        let of_kind = |prefill| self.parts.iter().filter(move |part| part.prefill == prefill);
        let tokens = |prefill| of_kind(prefill).map(|part| part.tokens).sum();
        let ledger = self.cache.ledger();
        let (cached, stats) = (ledger.evictable_blocks(), ledger.reuse_stats());
        let tier = self.cache.tier();
        Sample {
            at_ms: 0.0,
            blocks: ledger.total_blocks() - ledger.free_blocks() - cached,
            cached,
            requests: self.scheduler.running(),
            prefill: tokens(true),
            decode: tokens(false),
            prepare_us,
            prompts: stats.prompt_tokens + self.too_long.tokens,
            reused: stats.reused,
            evicted_blocks: stats.evicted_blocks,
            evicted_checkpoints: stats.evicted_checkpoints,
            to_host: tier.bytes_to_host,
            from_host: tier.bytes_from_host,
        }
    }

    /// Progress in tokens of the load: tokens that are computed or reused, and those of requests that never fit. A
    /// preempted request does not count until it is computed again.
    pub fn done(&self) -> u64 {
        let running = self.scheduler.progress().map(|(_, tokens)| u64::from(tokens));
        self.ended + running.sum::<u64>()
    }

    /// Requests that ran to their end.
    pub fn finished(&self) -> u64 {
        self.finished
    }

    /// Stops admissions. Running requests continue to their end.
    pub fn close(&mut self) {
        self.next = self.load.len();
        self.scheduler.clear_queue();
    }

    /// Returns the cache.
    pub fn into_cache(self) -> E {
        self.cache
    }

    fn end(self, interrupted: bool) -> Result<Replayed> {
        let Self { cache, scheduler, timeline, latency, shortages, too_long, finished, .. } = self;
        let reuse = cache.ledger().reuse_stats();
        Ok(Replayed {
            timeline,
            interrupted,
            finished,
            waited: scheduler.waited(),
            rejected: scheduler.rejected(),
            preempted: scheduler.preempted(),
            generated: scheduler.generated(),
            reuse,
            too_long,
            latency,
            shortages,
            work: cache.finish()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::CacheConfig;
    use dsv4_kv::kv_layout::config::ModelConfig;
    use dsv4_kv_trace::{Arrival, Prompt};

    use super::*;
    use crate::replay::execute::Bookkeeping;

    fn request(input: u32, output: u32, id: u64) -> Request {
        let hash_ids = (id..).take(input.div_ceil(512) as usize).collect();
        Request {
            arrival: Arrival { at_ms: 0.0, input, output },
            prompt: Some(Prompt { tokens: input, hash_ids }),
        }
    }

    /// A replay of `load` in 15 blocks, when all steps have run.
    fn run(load: &[Request], slots: u32) -> Drive<'_, Bookkeeping> {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = CacheConfig { num_blocks: 15, max_requests: slots, ..CacheConfig::new(model) };
        let config = CacheConfig { num_checkpoints: 8, max_context: 1024, ..config };
        let cache = Bookkeeping::new(&config).expect("a valid configuration");
        let limits = Limits { slots, blocks: 15, context: 1024, step_tokens: 8192 };
        let (texts, clock) = (Texts::new(1.0), Clock::new(33.0, 8192.0));
        let mut drive = Drive::new(cache, (load, texts), limits, clock);
        loop {
            drive.admit().expect("slots are free");
            if drive.step().expect("what fits is run").is_none() {
                return drive;
            }
        }
    }

    /// Three requests compute the same prompt at once, and take all 15 blocks. When the first has ended, the others
    /// hold its shared blocks besides their own. The fourth is preempted, once, until they have ended.
    #[test]
    fn a_request_for_which_no_blocks_are_left_waits_until_another_has_ended() {
        let request = |output: u32, id: u64| request(600, output, id);
        let load = [request(2, 1), request(40, 1), request(40, 1), request(3, 5)];
        let drive = run(&load, 4);
        let all = load.iter().map(|request| u64::from(request.arrival.context_tokens()));
        assert_eq!(drive.done(), all.sum::<u64>());
        let replayed = drive.end(false).expect("nothing to check");
        assert_eq!((replayed.finished, replayed.preempted), (4, 1));
        assert_eq!((replayed.reuse.prompts, replayed.reuse.reused), (5, 0));
        assert_eq!((replayed.generated, replayed.too_long), (2 + 40 + 40 + 3, TooLong::default()));
        assert_eq!(replayed.timeline.largest().blocks, 15);
    }

    /// Requests of eight blocks, more than half of 15, are admitted without the prefix tree. The plots count their
    /// prompts all the same.
    #[test]
    fn the_prompts_of_requests_that_are_too_long_to_share_count_too() {
        let load =
            [request(600, 1, 1), request(1000, 1, 1), request(600, 1, 1), request(999, 2, 1)];
        let replayed = run(&load, 1).end(false).expect("nothing to check");
        assert_eq!(replayed.too_long, TooLong { prompts: 2, tokens: 1999 });
        assert_eq!((replayed.reuse.prompts, replayed.reuse.reused), (2, 512));
        let largest = replayed.timeline.largest();
        assert_eq!((largest.prompts, largest.reused), (2 * 600 + 1999, 512));
    }
}

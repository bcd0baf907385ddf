//! Continuous batching as a pure state machine: a queue, the running requests, and the next step.
//!
//! Requests are admitted first come, first served. A request is admitted when a slot is free, when the blocks of its
//! full length fit beside those of all running requests, and when the next step has tokens left for it: if it were
//! admitted before its prompt can be computed, it would only find less to reuse. A step takes one token of every
//! request that decodes, then prefill chunks until the budget is used.
//!
//! A step can run out of blocks only if requests compute blocks that the prefix tree also has: then they hold both
//! their own blocks and those of the tree. In that case the request that was admitted last is preempted, and is
//! computed again after another one has ended. A request that needs more than half of all blocks shares nothing, so
//! that a request alone always fits.

use std::collections::VecDeque;

use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;

/// The limits of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most requests that run at once.
    pub slots: u32,
    /// Number of blocks of the pool.
    pub blocks: u32,
    /// Most tokens of a request.
    pub context: u32,
    /// Most tokens of a step.
    pub step_tokens: u32,
}

impl Limits {
    /// Most tokens of a request in an empty cache.
    pub fn most_tokens(&self) -> u32 {
        self.context.min(self.blocks.saturating_mul(BLOCK_TOKENS))
    }
}

/// The resource for which the head of the queue waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// A slot.
    Slots,
    /// Blocks for its full length.
    Blocks,
    /// Tokens of the next step.
    Tokens,
}

/// A request in the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its index in the load.
    pub index: usize,
    /// Tokens that are known at its admission: those of its prompt, and those that it had generated before a
    /// preemption.
    pub input: u32,
    /// Number of tokens at its end.
    pub tokens: u32,
    /// Number of blocks at its end.
    pub blocks: u32,
}

/// The part of one request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its index among the running requests, valid until the step is completed.
    place: usize,
    /// Its index in the load.
    pub index: usize,
    /// Number of tokens before the step.
    pub start: u32,
    /// Number of tokens in the step.
    pub tokens: u32,
    /// Whether they are tokens of its prompt.
    pub prefill: bool,
}

#[derive(Debug)]
struct Running {
    job: Job,
    done: u32,
}

/// The queue, the running requests and the suspended ones.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    queue: VecDeque<Job>,
    running: Vec<Running>,
    /// Suspended requests.
    suspended: Vec<Running>,
    /// Blocks of all running and suspended requests at their full length.
    reserved: u32,
    /// Number of requests at the head of the queue that `waited` already counts.
    known_waiting: usize,
    /// Whether blocks ran out, and no request has finished since.
    is_short: bool,
    waited: u64,
    rejected: u64,
    preempted: u64,
    generated: u64,
}

impl Scheduler {
    /// An idle scheduler.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            queue: VecDeque::new(),
            running: Vec::new(),
            suspended: Vec::new(),
            reserved: 0,
            known_waiting: 0,
            is_short: false,
            waited: 0,
            rejected: 0,
            preempted: 0,
            generated: 0,
        }
    }

    /// Queues a request. If it would not fit into an empty cache, it is counted as rejected and dropped, and the result
    /// is `false`.
    pub fn submit(&mut self, job: Job) -> bool {
        let fits = job.blocks <= self.limits.blocks && job.tokens <= self.limits.context;
        if fits {
            self.queue.push_back(job);
        } else {
            self.rejected += 1;
        }
        fits
    }

    /// Drops all waiting requests.
    pub fn clear_queue(&mut self) {
        self.queue.clear();
        self.known_waiting = 0;
    }

    /// Admits the head of the queue if it fits now. Call it until it returns `None`: the requests that are then left in
    /// the queue have to wait.
    pub fn admit(&mut self) -> Option<Job> {
        let is_short = self.is_short && !self.running.is_empty();
        let room = self.limits.blocks - self.reserved;
        let fits =
            |job: &&Job| !is_short && self.has_slot() && job.blocks <= room && self.has_tokens();
        let Some(&job) = self.queue.front().filter(fits) else {
            self.waited += (self.queue.len() - self.known_waiting) as u64;
            self.known_waiting = self.queue.len();
            return None;
        };
        self.queue.pop_front();
        self.known_waiting = self.known_waiting.saturating_sub(1);
        self.reserved += job.blocks;
        self.running.push(Running { job, done: 0 });
        Some(job)
    }

    /// Whether a request may share blocks with others.
    pub fn may_share(&self, job: &Job) -> bool {
        job.blocks <= self.limits.blocks / 2
    }

    /// Records that the request that was admitted last has `tokens` tokens already.
    pub fn skip(&mut self, tokens: u32) {
        if let Some(running) = self.running.last_mut() {
            running.done = tokens;
        }
    }

    /// Moves the request that was admitted last back to the head of the queue. Returns its index in the load.
    pub fn preempt_last(&mut self) -> Option<usize> {
        let index = self.running.last()?.job.index;
        self.is_short = true;
        self.preempt(index).then_some(index)
    }

    /// Moves a running request back to the head of the queue; `false` if it does not run.
    pub fn preempt(&mut self, index: usize) -> bool {
        let Some(Running { job, done }) = self.take(index) else { return false };
        self.reserved -= job.blocks;
        // The last generated token is known, though no step has processed it yet.
        let input = if done < job.input { job.input } else { done + 1 };
        self.queue.push_front(Job { input, ..job });
        self.known_waiting += 1;
        self.preempted += 1;
        true
    }

    /// Removes a running request; `false` if it does not run.
    pub fn abort(&mut self, index: usize) -> bool {
        let aborted = self.take(index);
        self.reserved -= aborted.as_ref().map_or(0, |running| running.job.blocks);
        aborted.is_some()
    }

    /// Suspends a running request: it gives up its slot, but not its blocks; `false` if it does not run.
    pub fn suspend(&mut self, index: usize) -> bool {
        let suspended = self.take(index);
        let found = suspended.is_some();
        self.suspended.extend(suspended);
        found
    }

    /// Resumes a suspended request; `false` if no slot is free, or if it is not suspended.
    pub fn resume(&mut self, index: usize) -> bool {
        let place = self.suspended.iter().position(|suspended| suspended.job.index == index);
        let Some(place) = place.filter(|_| self.has_slot()) else { return false };
        let resumed = self.suspended.remove(place);
        self.running.push(resumed);
        true
    }

    /// Adds a copy of a running request, if it fits. `index` is the copy's index in the load. Returns the number of
    /// tokens of the copy.
    pub fn fork(&mut self, of: usize, index: usize) -> Option<u32> {
        let &Running { job, done } = self.running.iter().find(|running| running.job.index == of)?;
        let fits = self.has_slot() && job.blocks <= self.limits.blocks - self.reserved;
        fits.then(|| {
            self.reserved += job.blocks;
            self.running.push(Running { job: Job { index, ..job }, done });
            done
        })
    }

    /// The running requests: index in the load, and number of tokens.
    pub fn progress(&self) -> impl Iterator<Item = (usize, u32)> {
        self.running.iter().map(|running| (running.job.index, running.done))
    }

    /// Removes and returns a running request.
    fn take(&mut self, index: usize) -> Option<Running> {
        let place = self.running.iter().position(|running| running.job.index == index)?;
        Some(self.running.remove(place))
    }

    fn has_slot(&self) -> bool {
        self.running.len() < self.limits.slots as usize
    }

    /// Whether the next step has tokens left after all running requests have theirs.
    fn has_tokens(&self) -> bool {
        let tokens =
            |&Running { job, done }: &Running| u64::from(job.input.saturating_sub(done).max(1));
        self.running.iter().map(tokens).sum::<u64>() < self.limits.step_tokens.into()
    }

    /// Plans the next step into `parts`; empty if no request runs.
    pub fn plan(&self, parts: &mut Vec<Part>) {
        parts.clear();
        let mut budget = self.limits.step_tokens;
        for prefill in [false, true] {
            for (place, &Running { job, done }) in self.running.iter().enumerate() {
                if (done < job.input) != prefill || budget == 0 {
                    continue;
                }
                let tokens = if prefill { budget.min(job.input - done) } else { 1 };
                budget -= tokens;
                parts.push(Part { place, index: job.index, start: done, tokens, prefill });
            }
        }
    }

    /// Records that a planned step has run. Calls `finish` for every request that it finished.
    pub fn complete(&mut self, parts: &[Part], mut finish: impl FnMut(usize)) {
        for part in parts {
            let Running { job, done } = &mut self.running[part.place];
            *done += part.tokens;
            // The last known token gives the next one, also at the end of a prompt.
            self.generated += u64::from(*done >= job.input);
        }
        self.running.retain(|&Running { job, done }| {
            let finished = done == job.tokens;
            if finished {
                self.reserved -= job.blocks;
                self.is_short = false;
                finish(job.index);
            }
            !finished
        });
    }

    /// The resource for which the head of the queue waits; `None` if the queue is empty. Call it before the step is
    /// completed.
    pub fn shortage(&self) -> Option<Shortage> {
        self.queue.front()?;
        Some(match (self.has_slot(), self.has_tokens()) {
            (false, _) => Shortage::Slots,
            (true, false) => Shortage::Tokens,
            (true, true) => Shortage::Blocks,
        })
    }

    /// Whether requests wait to be admitted.
    pub fn has_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Requests that run.
    pub fn running(&self) -> u32 {
        self.running.len() as u32
    }

    /// Number of requests that had to wait for admission, each counted once.
    pub fn waited(&self) -> u64 {
        self.waited
    }

    /// Number of preemptions.
    pub fn preempted(&self) -> u64 {
        self.preempted
    }

    /// Tokens that were generated: those of steps that decode, and the first ones after a prefill.
    pub fn generated(&self) -> u64 {
        self.generated
    }

    /// Requests that can never fit.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(index: usize, input: u32, output: u32) -> Job {
        let tokens = input + output - 1;
        Job { index, input, tokens, blocks: tokens.div_ceil(128) }
    }

    fn limits() -> Limits {
        Limits { slots: 4, blocks: 10, context: 1280, step_tokens: 100 }
    }

    /// Admits, plans and completes one step. Returns its parts as (index, start, tokens), and the finished requests.
    fn step(scheduler: &mut Scheduler) -> (Vec<(usize, u32, u32)>, Vec<usize>) {
        while scheduler.admit().is_some() {}
        let mut parts = Vec::new();
        scheduler.plan(&mut parts);
        let mut finished = Vec::new();
        scheduler.complete(&parts, |index| finished.push(index));
        (parts.iter().map(|part| (part.index, part.start, part.tokens)).collect(), finished)
    }

    #[test]
    fn decode_comes_first_and_chunks_fill_the_budget() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 40, 3));
        scheduler.submit(job(1, 150, 1));
        assert_eq!(step(&mut scheduler), (vec![(0, 0, 40), (1, 0, 60)], vec![]));
        // Request 0 decodes; the first of its three tokens came from the prefill.
        assert_eq!(step(&mut scheduler), (vec![(0, 40, 1), (1, 60, 90)], vec![1]));
        assert_eq!(step(&mut scheduler), (vec![(0, 41, 1)], vec![0]));
        assert_eq!(step(&mut scheduler), (vec![], vec![]));
        assert_eq!((scheduler.running(), scheduler.reserved), (0, 0));
    }

    #[test]
    fn a_request_that_turns_to_decode_is_not_booked_twice_in_a_step() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 30, 5));
        scheduler.submit(job(1, 30, 5));
        step(&mut scheduler);
        assert_eq!(step(&mut scheduler).0, [(0, 30, 1), (1, 30, 1)]);
        assert_eq!(step(&mut scheduler).0, [(0, 31, 1), (1, 31, 1)]);
    }

    #[test]
    fn blocks_of_the_full_length_are_kept_free_and_the_queue_is_fair() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 10, 900)); // 8 of 10 blocks, once it is done
        scheduler.submit(job(1, 300, 1)); // 3 blocks: must wait
        scheduler.submit(job(2, 10, 1)); // would fit, but came later
        assert_eq!(scheduler.admit().map(|job| job.index), Some(0));
        assert_eq!(scheduler.admit(), None);
        assert_eq!(scheduler.admit(), None);
        assert_eq!(scheduler.waited(), 2, "each is counted once");
        while scheduler.running() > 0 && scheduler.queue.len() == 2 {
            step(&mut scheduler);
        }
        assert_eq!(step(&mut scheduler).0, [(1, 0, 100)]);
        assert_eq!(step(&mut scheduler).0, [(1, 100, 100)]);
        assert_eq!(scheduler.waited(), 2);
    }

    #[test]
    fn who_would_get_no_tokens_is_not_admitted() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 150, 2));
        scheduler.submit(job(1, 10, 1));
        assert_eq!(scheduler.admit().map(|job| job.index), Some(0));
        assert_eq!((scheduler.admit(), scheduler.shortage()), (None, Some(Shortage::Tokens)));
        assert_eq!(step(&mut scheduler).0, [(0, 0, 100)]);
        assert_eq!(step(&mut scheduler).0, [(0, 100, 50), (1, 0, 10)]);
    }

    #[test]
    fn slots_are_a_limit_too() {
        let mut scheduler = Scheduler::new(limits());
        (0..6).for_each(|index| assert!(scheduler.submit(job(index, 1, 2))));
        assert_eq!(step(&mut scheduler).0.len(), 4);
        assert_eq!(scheduler.waited(), 2);
        assert_eq!(step(&mut scheduler).1, [0, 1, 2, 3]);
        assert_eq!(step(&mut scheduler).0, [(4, 0, 1), (5, 0, 1)]);
        assert_eq!(scheduler.waited(), 2);
    }

    #[test]
    fn what_can_never_fit_is_rejected_and_blocks_nobody() {
        let mut scheduler = Scheduler::new(Limits { context: 600, ..limits() });
        scheduler.submit(job(0, 1281, 1)); // 11 blocks
        scheduler.submit(job(1, 601, 1)); // too long a context
        scheduler.submit(job(2, 600, 1));
        assert_eq!(step(&mut scheduler).0, [(2, 0, 100)]);
        assert_eq!((scheduler.rejected(), scheduler.waited()), (2, 0));
    }

    #[test]
    fn what_is_reused_is_not_planned() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 300, 2));
        scheduler.admit().expect("it fits");
        scheduler.skip(256);
        assert_eq!(step(&mut scheduler).0, [(0, 256, 44)]);
        assert_eq!(step(&mut scheduler), (vec![(0, 300, 1)], vec![0]));
    }

    #[test]
    fn a_preempted_request_comes_next_and_what_it_generated_is_computed_in_chunks() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 10, 50));
        scheduler.submit(job(1, 20, 50));
        (0..5).for_each(|_| drop(step(&mut scheduler)));
        scheduler.submit(job(2, 5, 1));
        assert!(scheduler.preempt(1));
        assert_eq!((scheduler.preempted(), scheduler.reserved), (1, 1));
        // The 20 + 4 tokens that it had, and the token that the last of them generated.
        assert_eq!(step(&mut scheduler).0, [(0, 14, 1), (1, 0, 25), (2, 0, 5)]);
        assert_eq!(step(&mut scheduler).0, [(0, 15, 1), (1, 25, 1)]);
        assert_eq!(scheduler.preempt_last(), Some(1));
        assert_eq!(scheduler.admit(), None, "before another one has ended");
        assert_eq!(scheduler.preempt_last(), Some(0));
        assert_eq!(scheduler.preempt_last(), None);
        assert_eq!((scheduler.reserved, scheduler.waited()), (0, 0));
    }

    /// A request is preempted in its prompt, and after three of its six tokens. What is computed again gives no token
    /// again.
    #[test]
    fn every_token_of_an_answer_is_generated_once() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(0, 150, 6));
        for (steps, generated) in [(1, 0), (4, 3)] {
            (0..steps).for_each(|_| drop(step(&mut scheduler)));
            assert_eq!(scheduler.generated(), generated);
            assert!(scheduler.preempt(0));
        }
        while scheduler.has_waiting() || scheduler.running() > 0 {
            step(&mut scheduler);
        }
        assert_eq!(scheduler.generated(), 6);
    }

    #[test]
    fn a_request_of_more_than_half_of_the_blocks_shares_nothing() {
        let scheduler = Scheduler::new(limits());
        assert!(scheduler.may_share(&job(0, 640, 1)) && !scheduler.may_share(&job(1, 641, 1)));
    }

    #[test]
    fn suspended_requests_keep_their_blocks_and_copies_need_as_many() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.submit(job(1, 10, 2));
        scheduler.submit(job(0, 600, 40)); // 5 of 10 blocks
        step(&mut scheduler);
        assert!(scheduler.suspend(0) && !scheduler.suspend(0) && !scheduler.resume(1));
        assert_eq!((scheduler.running(), scheduler.reserved), (1, 6));
        assert_eq!(step(&mut scheduler), (vec![(1, 10, 1)], vec![1]));
        assert!(scheduler.resume(0) && !scheduler.resume(0));
        assert_eq!(scheduler.fork(0, 7), Some(90));
        assert_eq!((scheduler.fork(0, 8), scheduler.fork(9, 8)), (None, None));
        assert_eq!(scheduler.progress().collect::<Vec<_>>(), [(0, 90), (7, 90)]);
        assert!(scheduler.abort(0) && !scheduler.abort(0));
        assert_eq!((step(&mut scheduler).0, scheduler.reserved), (vec![(7, 90, 100)], 5));
    }
}

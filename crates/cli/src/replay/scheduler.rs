//! Continuous batching as a pure state machine: a queue, the requests that run, and the next step.
//!
//! A request is admitted, first come first served, when a slot is free, the blocks of its full length fit beside those
//! of all running requests, and the next step has tokens left for it: one that is admitted before its prompt can be
//! computed would only find less to reuse. A step takes one token of every request that decodes, then prefill chunks
//! while the budget lasts.
//!
//! A step can run out of blocks only where requests compute what the prefix tree has too: they hold their own blocks
//! and the tree's. Then the request that was admitted last is preempted, to be computed again when another one has
//! ended. One that has more than half of all blocks shares nothing, so that a request alone always fits.

use std::collections::VecDeque;

/// What the cache has room for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that run at once.
    pub slots: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Tokens of one request.
    pub context: u32,
    /// Tokens of one step.
    pub step_tokens: u32,
}

/// What the head of the queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// A slot.
    Slots,
    /// Blocks of its full length.
    Blocks,
    /// Tokens of the next step.
    Tokens,
}

/// A request as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its place in the load.
    pub index: usize,
    /// Tokens that are known when it is admitted: those of its prompt, and what it had generated when it was preempted.
    pub input: u32,
    /// Tokens it has in the end.
    pub tokens: u32,
    /// Blocks it holds in the end.
    pub blocks: u32,
}

/// What a request does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its place among the running requests, until the step is completed.
    place: usize,
    /// Its place in the load.
    pub index: usize,
    /// Tokens it has before the step.
    pub start: u32,
    /// Tokens it adds.
    pub tokens: u32,
    /// Whether they are of its prompt.
    pub prefill: bool,
}

#[derive(Debug)]
struct Running {
    job: Job,
    done: u32,
}

/// The queue and the running requests.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    queue: VecDeque<Job>,
    running: Vec<Running>,
    /// Requests without a slot.
    suspended: Vec<Running>,
    /// Blocks of all running and suspended requests at their full length.
    reserved: u32,
    /// How many at the head of the queue are already counted in `waited`.
    known_waiting: usize,
    /// Whether blocks ran out, and no request has ended since.
    is_short: bool,
    waited: u64,
    rejected: u64,
    preempted: u64,
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
        }
    }

    /// Queues a request; `false` of one that would not fit into an empty cache, which is counted and dropped.
    pub fn submit(&mut self, job: Job) -> bool {
        let fits = job.blocks <= self.limits.blocks && job.tokens <= self.limits.context;
        if fits {
            self.queue.push_back(job);
        } else {
            self.rejected += 1;
        }
        fits
    }

    /// Forgets all requests that wait.
    pub fn clear_queue(&mut self) {
        self.queue.clear();
        self.known_waiting = 0;
    }

    /// Admits the head of the queue if it fits now. Call until it gives `None`: the requests then
    /// left in the queue have to wait.
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

    /// The request that was admitted last has so many tokens already.
    pub fn skip(&mut self, tokens: u32) {
        if let Some(running) = self.running.last_mut() {
            running.done = tokens;
        }
    }

    /// The request that was admitted last goes back to the head of the queue; its place in the load.
    pub fn preempt_last(&mut self) -> Option<usize> {
        let index = self.running.last()?.job.index;
        self.is_short = true;
        self.preempt(index).then_some(index)
    }

    /// A request that runs goes back to the head of the queue; `false` if it does not run.
    pub fn preempt(&mut self, index: usize) -> bool {
        let Some(Running { job, done }) = self.take(index) else { return false };
        self.reserved -= job.blocks;
        // A token that was generated is known, though no step has had it.
        let input = if done < job.input { job.input } else { done + 1 };
        self.queue.push_front(Job { input, ..job });
        self.known_waiting += 1;
        self.preempted += 1;
        true
    }

    /// A request that runs is no more; `false` if it does not run.
    pub fn abort(&mut self, index: usize) -> bool {
        let aborted = self.take(index);
        self.reserved -= aborted.as_ref().map_or(0, |running| running.job.blocks);
        aborted.is_some()
    }

    /// A request that runs gives its slot up, not its blocks; `false` if it does not run.
    pub fn suspend(&mut self, index: usize) -> bool {
        let suspended = self.take(index);
        let found = suspended.is_some();
        self.suspended.extend(suspended);
        found
    }

    /// A suspended request runs again; `false` if no slot is free, or it is not suspended.
    pub fn resume(&mut self, index: usize) -> bool {
        let place = self.suspended.iter().position(|suspended| suspended.job.index == index);
        let Some(place) = place.filter(|_| self.has_slot()) else { return false };
        let resumed = self.suspended.remove(place);
        self.running.push(resumed);
        true
    }

    /// A request begins as a copy of one that runs, if it fits; else `None`. The copy's place in the load is `index`.
    /// How many tokens it has.
    pub fn fork(&mut self, of: usize, index: usize) -> Option<u32> {
        let &Running { job, done } = self.running.iter().find(|running| running.job.index == of)?;
        let fits = self.has_slot() && job.blocks <= self.limits.blocks - self.reserved;
        fits.then(|| {
            self.reserved += job.blocks;
            self.running.push(Running { job: Job { index, ..job }, done });
            done
        })
    }

    /// The requests that run: their places in the load, and how many tokens each has.
    pub fn progress(&self) -> impl Iterator<Item = (usize, u32)> {
        self.running.iter().map(|running| (running.job.index, running.done))
    }

    /// A request that runs, taken out.
    fn take(&mut self, index: usize) -> Option<Running> {
        let place = self.running.iter().position(|running| running.job.index == index)?;
        Some(self.running.remove(place))
    }

    fn has_slot(&self) -> bool {
        self.running.len() < self.limits.slots as usize
    }

    /// Whether the next step has tokens left when all that run have theirs.
    fn has_tokens(&self) -> bool {
        let tokens =
            |&Running { job, done }: &Running| u64::from(job.input.saturating_sub(done).max(1));
        self.running.iter().map(tokens).sum::<u64>() < self.limits.step_tokens.into()
    }

    /// The next step, into `parts`; empty when nothing runs.
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

    /// Records a step that was planned and run; hands every request that it finished to `finish`.
    pub fn complete(&mut self, parts: &[Part], mut finish: impl FnMut(usize)) {
        for part in parts {
            self.running[part.place].done += part.tokens;
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

    /// What the head of the queue waits for; `None` if nobody waits. Ask before a step is completed.
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

    /// Requests that had to wait for a slot or for blocks, each counted once.
    pub fn waited(&self) -> u64 {
        self.waited
    }

    /// How often a request was preempted.
    pub fn preempted(&self) -> u64 {
        self.preempted
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

    /// Admits, plans and completes one step: its parts as (index, start, tokens), and who finished.
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
        // Of 20 + 4 tokens that it had, and the one that the last of them gave.
        assert_eq!(step(&mut scheduler).0, [(0, 14, 1), (1, 0, 25), (2, 0, 5)]);
        assert_eq!(step(&mut scheduler).0, [(0, 15, 1), (1, 25, 1)]);
        assert_eq!(scheduler.preempt_last(), Some(1));
        assert_eq!(scheduler.admit(), None, "before another one has ended");
        assert_eq!(scheduler.preempt_last(), Some(0));
        assert_eq!(scheduler.preempt_last(), None);
        assert_eq!((scheduler.reserved, scheduler.waited()), (0, 0));
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

//! The queue of waiting requests, between the threads that accept them and the scheduler's thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsv4_kv_model::sequence::{Continuation, Sequence};
use tokio::sync::mpsc::unbounded_channel;

pub use crate::accepted::{Event, Events};
use crate::accepted::{Fetch, Request};
use crate::error::{Failure, Refusal};

/// A prompt and how it is continued.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// How it is continued.
    pub continuation: Continuation,
    /// Only sequences with the same salt share cached prefixes.
    pub salt: Vec<u8>,
}

/// The limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Size of the model's vocabulary.
    pub vocabulary: u32,
    /// Most tokens of a sequence, prompt and generated ones. A sequence of that length fits in the cache if it is
    /// alone.
    pub longest: u32,
    /// Most sequences that may wait.
    pub waiting: usize,
    /// Most drafts of a sequence in a step. One that asks for more gets these.
    pub drafts: usize,
}

/// Reserved places of a queue. Dropping them frees them.
#[derive(Debug)]
pub(crate) struct Places {
    queue: Arc<Queue>,
    count: usize,
    /// When they were reserved. Reading and encoding the prompts counts as waiting.
    since: Instant,
}

impl Drop for Places {
    fn drop(&mut self) {
        if self.count > 0 {
            self.queue.lock().taken -= self.count;
        }
    }
}

/// Sequences in the order of their arrival. A request for which there is no place is refused at once.
#[derive(Debug)]
pub struct Queue {
    limits: QueueLimits,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether every accepted request has got its last event, and the scheduler accepts no more.
    is_done: AtomicBool,
    /// Whether the scheduler runs. It stays set if the scheduler panics.
    is_running: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Request>,
    /// Number of waiting requests that the scheduler has taken out for a moment ([`Queue::for_oldest`]), without those
    /// whose client had disconnected by then.
    out: usize,
    /// Places that are reserved for requests whose prompts are being read.
    taken: usize,
    /// Requests that were preempted and wait to be admitted again. The scheduler has them.
    preempted: usize,
    phase: Phase,
}

impl State {
    /// Whether the scheduler has nothing to do, but may get work later.
    fn is_idle(&mut self) -> bool {
        self.waiting.is_empty() && self.phase == Phase::Open
    }

    fn has_work(&self) -> bool {
        !self.waiting.is_empty() && self.phase != Phase::Aborted
    }

    /// Number of waiting requests whose client has not disconnected.
    fn here(&self) -> usize {
        self.waiting.iter().filter(|request| !request.has_left()).count() + self.out
    }
}

/// The phase of the server's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    /// It accepts requests.
    #[default]
    Open,
    /// It accepts none, and completes those that it has accepted.
    Closed,
    /// It ends, and aborts its requests.
    Aborted,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: QueueLimits) -> Self {
        let (state, changed) = Default::default();
        let (is_done, is_running) = Default::default();
        Self { limits, state, changed, is_done, is_running }
    }

    /// Submits all of these, or none.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        for Submission { prompt, continuation, .. } in &submissions {
            self.check(prompt, continuation.max_tokens)?;
        }
        self.append(None, submissions)
    }

    /// As [`Self::submit`], into places that were reserved for them. Each prompt must have passed [`Self::check`]: a
    /// check reads the whole prompt, and this is called by threads that serve connections.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn submit_to(
        &self,
        places: Places,
        submissions: Vec<Submission>,
    ) -> Result<Vec<Events>, Refusal> {
        self.append(Some(places), submissions)
    }

    fn append(
        &self,
        places: Option<Places>,
        submissions: Vec<Submission>,
    ) -> Result<Vec<Events>, Refusal> {
        let submitted = places.as_ref().map_or_else(Instant::now, |places| places.since);
        let (mut requests, mut events) = (Vec::new(), Vec::new());
        for Submission { prompt, continuation, salt } in submissions {
            let drafts = continuation.drafts.min(self.limits.drafts);
            let sequence = Sequence::new(prompt, Continuation { drafts, ..continuation });
            let sequence = sequence.ok_or(Refusal::EmptyPrompt)?;
            let (sender, receiver) = unbounded_channel();
            requests.push(Request {
                sequence,
                salt,
                events: sender,
                submitted,
                last: submitted,
                was_admitted: false,
                preemptions: 0,
                shares_nothing: false,
                fetch: Fetch::New,
            });
            events.push(receiver);
        }
        let mut state = self.lock();
        // Freed under the same lock that submits, so that no other request can get these places.
        if let Some(mut places) = places {
            state.taken -= std::mem::take(&mut places.count);
        }
        self.find_room(&mut state, requests.len())?;
        state.waiting.extend(requests);
        self.changed.notify_all();
        Ok(events)
    }

    /// Reserves places for sequences, before memory is taken for their prompts. No other request gets these places
    /// while they are held.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn take_places(self: &Arc<Self>, sequences: usize) -> Result<Places, Refusal> {
        let mut state = self.lock();
        self.find_room(&mut state, sequences)?;
        state.taken += sequences;
        Ok(Places { queue: Arc::clone(self), count: sequences, since: Instant::now() })
    }

    fn find_room(&self, state: &mut State, sequences: usize) -> Result<(), Refusal> {
        let most = self.limits.waiting;
        if sequences > most {
            return Err(Refusal::TooManySequences { sequences, most });
        }
        if state.phase != Phase::Open {
            return Err(Refusal::ShuttingDown);
        }
        // Requests of disconnected clients take no place. Those that wait for the cold tier stay until the scheduler
        // has cancelled their fetch, between steps.
        let is_asked = |request: &Request| matches!(request.fetch, Fetch::Asked { .. });
        state.waiting.retain(|request| !request.has_left() || is_asked(request));
        let waiting = state.here() + state.taken;
        if waiting + sequences > most {
            return Err(Refusal::QueueFull { waiting, most });
        }
        Ok(())
    }

    /// The limits of the queue.
    #[must_use]
    pub fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Checks that a sequence would be accepted if there were a place.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check(&self, prompt: &[u32], max_tokens: usize) -> Result<(), Refusal> {
        let QueueLimits { vocabulary, longest, .. } = self.limits;
        if prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token >= vocabulary) {
            return Err(Refusal::TokenOutOfVocabulary { token, vocabulary });
        }
        if prompt.len().saturating_add(max_tokens) > longest as usize {
            return Err(Refusal::TooLong { prompt: prompt.len(), max_tokens, longest });
        }
        Ok(())
    }

    /// Accepts no more requests; those that were accepted are completed.
    pub fn close(&self) {
        self.enter(Phase::Closed);
    }

    /// Accepts no more requests, and aborts those that are not complete.
    pub fn abort(&self) {
        self.enter(Phase::Aborted);
    }

    fn enter(&self, phase: Phase) {
        let mut state = self.lock();
        if phase > state.phase {
            state.phase = phase;
        }
        self.changed.notify_all();
    }

    /// Whether requests are accepted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase() == Phase::Open
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// Number of waiting requests whose client has not disconnected.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().here()
    }

    /// As [`Self::waiting`], with preempted requests and those whose prompts are being read.
    pub(crate) fn all_waiting(&self) -> usize {
        let state = self.lock();
        state.here() + state.taken + state.preempted
    }

    /// Notes how many requests are preempted.
    pub(crate) fn set_preempted(&self, preempted: usize) {
        self.lock().preempted = preempted;
    }

    /// Removes and returns the requests whose client has disconnected.
    pub(crate) fn take_left(&self) -> Vec<Request> {
        let mut state = self.lock();
        if !state.waiting.iter().any(Request::has_left) {
            return Vec::new();
        }
        let (left, here) = state.waiting.drain(..).partition(Request::has_left);
        state.waiting = here;
        Vec::from(left)
    }

    /// Removes and returns the oldest request, if `fits` returns `true` for it.
    pub(crate) fn pop_if(&self, fits: impl FnOnce(&Request) -> bool) -> Option<Request> {
        let mut state = self.lock();
        let first = state.waiting.front()?;
        if fits(first) { state.waiting.pop_front() } else { None }
    }

    /// Calls `each` for the `count` oldest waiting requests, if the prompt of any of them was not requested from the
    /// cold tier yet. `each` may hash whole prompts, so the queue is not locked meanwhile: the requests are out of it,
    /// keep their places, and return to the front. Only the scheduler calls this, and it alone takes requests from the
    /// front of an open queue.
    pub(crate) fn for_oldest(&self, count: usize, each: impl FnMut(&mut Request)) {
        let mut state = self.lock();
        let count = count.min(state.waiting.len());
        if !state.waiting.range(..count).any(|request| request.fetch == Fetch::New) {
            return;
        }
        let mut oldest: Vec<_> = state.waiting.drain(..count).collect();
        state.out = oldest.iter().filter(|request| !request.has_left()).count();
        drop(state);
        oldest.iter_mut().for_each(each);
        let mut state = self.lock();
        state.out = 0;
        oldest.into_iter().rev().for_each(|request| state.waiting.push_front(request));
    }

    /// Removes and returns all waiting requests.
    pub(crate) fn drain(&self) -> Vec<Request> {
        self.lock().waiting.drain(..).collect()
    }

    /// Waits until a request waits or the queue is no longer open. Returns whether there is work: `false` once the
    /// queue is closed and empty, or aborted.
    pub(crate) fn wait(&self) -> bool {
        let state = self.changed.wait_while(self.lock(), State::is_idle);
        state.unwrap_or_else(PoisonError::into_inner).has_work()
    }

    /// As [`Self::wait`], but returns `None` after `most`.
    pub(crate) fn wait_for(&self, most: Duration) -> Option<bool> {
        let waited = self.changed.wait_timeout_while(self.lock(), most, State::is_idle);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (!timeout.timed_out()).then(|| state.has_work())
    }

    /// Notes that every accepted request has got its last event.
    pub(crate) fn tell_done(&self) {
        self.is_done.store(true, Ordering::Release);
    }

    /// Whether every accepted request has got its last event.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// Notes whether the scheduler runs.
    pub(crate) fn set_running(&self, is_running: bool) {
        self.is_running.store(is_running, Ordering::Release);
    }

    /// Why a sequence got no last event, and gets none any more. A scheduler that ends in order sends one to each
    /// sequence while it runs.
    pub(crate) fn failure(&self) -> Failure {
        match self.is_running.load(Ordering::Acquire) {
            true => Failure::Server,
            false => Failure::ShutDown,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Aborts the queue when the scheduler or the server ends, also by a panic. Waiting requests are dropped with their senders.
pub(crate) struct CloseOnDrop(pub Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.abort();
        self.0.drain();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use dsv4_kv_model::sample::GREEDY;

    use super::*;

    /// A request of one token.
    fn one() -> Submission {
        let continuation = Continuation {
            sampling: GREEDY,
            max_tokens: 1,
            end: Vec::new(),
            drafts: 0,
            top_logprobs: 0,
            prompt_logits: false,
        };
        Submission { prompt: vec![1], continuation, salt: Vec::new() }
    }

    /// Reserved places are not given to others until their request is submitted or dropped; then they are free.
    #[test]
    fn places_are_held_from_the_check_on() {
        let limits = QueueLimits { vocabulary: 8, longest: 8, waiting: 4, drafts: 0 };
        let queue = Arc::new(Queue::new(limits));
        let one = one();
        let full = |waiting| Some(Refusal::QueueFull { waiting, most: 4 });
        let places = queue.take_places(3).expect("there are four");
        assert_eq!(queue.take_places(2).err(), full(3));
        assert_eq!(queue.submit(vec![one.clone(); 2]).err(), full(3));
        let _last = queue.submit(vec![one.clone()]).expect("there is one");
        let _three = queue.submit_to(places, vec![one.clone(); 3]).expect("they are held");
        assert_eq!(queue.take_places(1).err(), full(4));
        queue.drain();
        drop(queue.take_places(4).expect("all are free"));
        let empty = Submission { prompt: Vec::new(), ..one };
        let places = queue.take_places(4).expect("those that were dropped are free");
        assert_eq!(queue.submit_to(places, vec![empty]).err(), Some(Refusal::EmptyPrompt));
        assert!(queue.take_places(4).is_ok(), "those of a refused request are free");
    }

    /// The time for which places are held counts as waiting.
    #[test]
    fn a_request_has_waited_since_its_place_was_taken() {
        let queue =
            Arc::new(Queue::new(QueueLimits { vocabulary: 8, longest: 8, waiting: 4, drafts: 0 }));
        let places = queue.take_places(3).expect("there are four");
        assert_eq!((queue.waiting(), queue.all_waiting()), (0, 3));
        let time = Duration::from_millis(30);
        std::thread::sleep(time);
        let _events = queue.submit_to(places, vec![one()]).expect("it is held");
        assert_eq!((queue.waiting(), queue.all_waiting()), (1, 1));
        let request = queue.pop_if(|_| true).expect("it waits");
        assert!(request.submitted.elapsed() >= time && request.last == request.submitted);
        queue.set_preempted(2);
        assert_eq!((queue.waiting(), queue.all_waiting()), (0, 2));
    }

    /// While the prompts of waiting requests are hashed, others may be accepted; places and order stay.
    #[test]
    fn work_on_waiting_requests_delays_nobody() {
        let queue =
            Arc::new(Queue::new(QueueLimits { vocabulary: 8, longest: 8, waiting: 4, drafts: 0 }));
        let salted = |salt: u8| vec![Submission { salt: vec![salt], ..one() }];
        let mut events: Vec<_> =
            (0..3).map(|salt| queue.submit(salted(salt)).expect("there is room")).collect();
        let ((begin, begun), (go, goes)) = (channel(), channel::<()>());
        let worked = Arc::clone(&queue);
        let work = std::thread::spawn(move || {
            worked.for_oldest(2, |request| {
                begin.send(()).expect("it is waited for");
                let _ = goes.recv();
                request.fetch = Fetch::Done;
            });
        });
        let most = Duration::from_secs(20);
        begun.recv_timeout(most).expect("it works on the first");
        let (tell, told) = channel();
        let asked = Arc::clone(&queue);
        std::thread::spawn(move || {
            let is_free = asked.take_places(1).is_ok();
            let _ = tell.send((is_free, asked.take_places(2).err(), asked.all_waiting()));
        });
        let full = Refusal::QueueFull { waiting: 3, most: 4 };
        assert_eq!(told.recv_timeout(most), Ok((true, Some(full), 3)), "the queue is locked");
        events.push(queue.submit(salted(3)).expect("there is room"));
        drop(go);
        work.join().expect("it has ended");
        assert_eq!(queue.waiting(), 4);
        let order = queue.drain().into_iter().map(|request| (request.salt[0], request.fetch));
        let (done, new) = (Fetch::Done, Fetch::New);
        assert_eq!(Vec::from_iter(order), [(0, done), (1, done), (2, new), (3, new)]);
    }
}

//! Requests that wait, between the threads that take them and the scheduler's.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsv4_kv_model::sequence::{Continuation, Finish, Generated, Sequence};
use dsv4_kv_tier::FetchId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::error::{Failure, Refusal};
use crate::metrics::Metrics;

/// What becomes of a sequence, in order. A receiver that is dropped cancels its sequence; a sender that is
/// dropped without [`Event::Finished`] or [`Event::Failed`] means [`Failure::ShutDown`].
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A token.
    Token(Generated),
    /// The end; nothing follows.
    Finished(Finish),
    /// The end, for another reason than its tokens; nothing follows.
    Failed(Failure),
}

/// The events of one sequence. Its channel has no limit: `max_tokens` is one.
pub type Events = UnboundedReceiver<Event>;

/// A prompt and how it is continued.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// How it is continued.
    pub continuation: Continuation,
    /// Only completions with the same salt share what they have computed.
    pub salt: Vec<u8>,
}

/// What a queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Tokens that the model has.
    pub vocabulary: u32,
    /// Most tokens of a sequence, prompt and generated: it always fits if it is alone.
    pub longest: u32,
    /// Most sequences that may wait.
    pub waiting: usize,
}

/// How far the cold tier is with a request's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// It was not asked.
    New,
    /// It was asked.
    Asked {
        /// For what.
        id: FetchId,
        /// When.
        since: Instant,
    },
    /// It has no more of it than what is in host memory, or is not to be asked.
    Done,
}

/// A sequence that waits or runs.
#[derive(Debug)]
pub(crate) struct Request {
    pub sequence: Sequence,
    pub salt: Vec<u8>,
    pub events: UnboundedSender<Event>,
    /// When it came.
    pub submitted: Instant,
    /// When the last token came, or the request.
    pub last: Instant,
    /// Whether it has been in the cache.
    pub was_admitted: bool,
    /// How often it was taken out of the cache since, because blocks ran out.
    pub preemptions: u32,
    /// How far the cold tier is with its prompt.
    pub fetch: Fetch,
}

impl Request {
    /// Whether its client has left.
    pub fn has_left(&self) -> bool {
        self.events.is_closed()
    }

    /// Sends tokens to the client. One that has left is found before the next step.
    pub fn tell(&mut self, generated: Vec<Generated>, metrics: &Metrics) {
        let new = generated.len();
        if new == 0 {
            return;
        }
        let before = self.sequence.generated().len() - new;
        let passed = self.last.elapsed();
        self.last = Instant::now();
        if before == 0 {
            metrics.prompt_tokens.increment((self.sequence.tokens().len() - new) as u64);
            metrics.time_to_first_token.record(passed);
        }
        // Tokens that one step has verified came together: each took a part of its time. Those of the first token's step have none of
        // their own, and are not counted.
        if before > 0 {
            (0..new).for_each(|_| metrics.inter_token.record(passed / new as u32));
        }
        metrics.generated_tokens.increment(new as u64);
        for token in generated {
            let _ = self.events.send(Event::Token(token));
        }
    }
}

/// Places of a queue, which are free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Places {
    queue: Arc<Queue>,
    count: usize,
}

impl Drop for Places {
    fn drop(&mut self) {
        if self.count > 0 {
            self.queue.lock().taken -= self.count;
        }
    }
}

/// Sequences in the order in which they came. A request that gets no place is refused at once.
#[derive(Debug)]
pub struct Queue {
    limits: QueueLimits,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the scheduler has told every request its end, and takes none any more.
    is_done: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Request>,
    /// Places of requests that are being read.
    taken: usize,
    phase: Phase,
}

impl State {
    /// Whether there is nothing to do yet.
    fn is_idle(&mut self) -> bool {
        self.waiting.is_empty() && self.phase == Phase::Open
    }

    fn has_work(&self) -> bool {
        !self.waiting.is_empty() && self.phase != Phase::Aborted
    }

    /// How many wait whose client is there.
    fn here(&self) -> usize {
        self.waiting.iter().filter(|request| !request.has_left()).count()
    }
}

/// How far the server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    /// It takes requests.
    #[default]
    Open,
    /// It takes none, and ends those that it has taken.
    Closed,
    /// It ends.
    Aborted,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: QueueLimits) -> Self {
        let (state, changed, is_done) = Default::default();
        Self { limits, state, changed, is_done }
    }

    /// Takes all of these, or none.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        self.submit_to(None, submissions)
    }

    /// The same, to places that were taken for them.
    pub(crate) fn submit_to(
        &self,
        places: Option<Places>,
        submissions: Vec<Submission>,
    ) -> Result<Vec<Events>, Refusal> {
        let (mut requests, mut events) = (Vec::new(), Vec::new());
        for Submission { prompt, continuation, salt } in submissions {
            self.check(&prompt, continuation.max_tokens)?;
            let sequence = Sequence::new(prompt, continuation).ok_or(Refusal::EmptyPrompt)?;
            let (sender, receiver) = unbounded_channel();
            let now = Instant::now();
            requests.push(Request {
                sequence,
                salt,
                events: sender,
                submitted: now,
                last: now,
                was_admitted: false,
                preemptions: 0,
                fetch: Fetch::New,
            });
            events.push(receiver);
        }
        let mut state = self.lock();
        // Under the same lock, so that nobody else gets them.
        if let Some(mut places) = places {
            state.taken -= std::mem::take(&mut places.count);
        }
        self.find_room(&mut state, requests.len())?;
        state.waiting.extend(requests);
        self.changed.notify_all();
        Ok(events)
    }

    /// Places for so many sequences, that nobody else gets while they are held: a request takes memory for its prompts once it
    /// has them.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn take_places(self: &Arc<Self>, sequences: usize) -> Result<Places, Refusal> {
        let mut state = self.lock();
        self.find_room(&mut state, sequences)?;
        state.taken += sequences;
        Ok(Places { queue: Arc::clone(self), count: sequences })
    }

    fn find_room(&self, state: &mut State, sequences: usize) -> Result<(), Refusal> {
        let most = self.limits.waiting;
        if sequences > most {
            return Err(Refusal::TooManySequences { sequences, most });
        }
        if state.phase != Phase::Open {
            return Err(Refusal::ShuttingDown);
        }
        // Who has left takes no place. Where the cold cache was asked, the scheduler takes that back first, between steps.
        let is_asked = |request: &Request| matches!(request.fetch, Fetch::Asked { .. });
        state.waiting.retain(|request| !request.has_left() || is_asked(request));
        let waiting = state.here() + state.taken;
        if waiting + sequences > most {
            return Err(Refusal::QueueFull { waiting, most });
        }
        Ok(())
    }

    /// What it takes.
    #[must_use]
    pub fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Whether it would take a sequence, were there room.
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

    /// Takes no more requests.
    pub fn close(&self) {
        self.enter(Phase::Closed);
    }

    /// Takes no more requests, and ends those that are not done yet.
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

    /// Whether requests are taken.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase() == Phase::Open
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// How many wait, without those whose client has left.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().here()
    }

    /// Takes those whose client has left.
    pub(crate) fn take_left(&self) -> Vec<Request> {
        let mut state = self.lock();
        if state.here() == state.waiting.len() {
            return Vec::new();
        }
        let (left, here) = state.waiting.drain(..).partition(Request::has_left);
        state.waiting = here;
        Vec::from(left)
    }

    /// The oldest, if `fits` says so.
    pub(crate) fn pop_if(&self, fits: impl FnOnce(&Request) -> bool) -> Option<Request> {
        let mut state = self.lock();
        let first = state.waiting.front()?;
        if fits(first) { state.waiting.pop_front() } else { None }
    }

    /// Does something with the oldest of those that wait, so many of them.
    pub(crate) fn for_oldest(&self, count: usize, each: impl FnMut(&mut Request)) {
        self.lock().waiting.iter_mut().take(count).for_each(each);
    }

    /// Takes all that wait.
    pub(crate) fn drain(&self) -> Vec<Request> {
        self.lock().waiting.drain(..).collect()
    }

    /// Waits until there is something to do: `false` once the queue is closed and empty.
    pub(crate) fn wait(&self) -> bool {
        let state = self.changed.wait_while(self.lock(), State::is_idle);
        state.unwrap_or_else(PoisonError::into_inner).has_work()
    }

    /// The same, but no longer than `most`: `None` then.
    pub(crate) fn wait_for(&self, most: Duration) -> Option<bool> {
        let waited = self.changed.wait_timeout_while(self.lock(), most, State::is_idle);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (!timeout.timed_out()).then(|| state.has_work())
    }

    /// Every request has been told its end.
    pub(crate) fn tell_done(&self) {
        self.is_done.store(true, Ordering::Release);
    }

    /// Whether every request that was taken has been told its end.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the queue when the scheduler ends, by a panic too. What still waits then is dropped with its senders.
pub(crate) struct CloseOnDrop(pub Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.abort();
        self.0.drain();
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_model::sample::Sampling;

    use super::*;

    /// Places are nobody else's until their request is submitted, or is gone; then they are free.
    #[test]
    fn places_are_held_from_the_check_on() {
        let limits = QueueLimits { vocabulary: 8, longest: 8, waiting: 4 };
        let queue = Arc::new(Queue::new(limits));
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
        let continuation = Continuation {
            sampling,
            max_tokens: 1,
            end: Vec::new(),
            drafts: 0,
            top_logprobs: 0,
            prompt_logits: false,
        };
        let one = Submission { prompt: vec![1], continuation, salt: Vec::new() };
        let full = |waiting| Some(Refusal::QueueFull { waiting, most: 4 });
        let places = queue.take_places(3).expect("there are four");
        assert_eq!(queue.take_places(2).err(), full(3));
        assert_eq!(queue.submit(vec![one.clone(); 2]).err(), full(3));
        let _last = queue.submit(vec![one.clone()]).expect("there is one");
        let _three = queue.submit_to(Some(places), vec![one.clone(); 3]).expect("they are held");
        assert_eq!(queue.take_places(1).err(), full(4));
        queue.drain();
        drop(queue.take_places(4).expect("all are free"));
        let unknown = Submission { prompt: vec![8], ..one };
        let places = queue.take_places(4).expect("those that were dropped are free");
        let refused = queue.submit_to(Some(places), vec![unknown]).err();
        assert!(matches!(refused, Some(Refusal::TokenOutOfVocabulary { .. })), "{refused:?}");
        assert!(queue.take_places(4).is_ok(), "those of a refused request are free");
    }
}

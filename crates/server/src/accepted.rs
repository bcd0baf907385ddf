//! A sequence that was accepted, while it waits or runs, and the events that its client gets.

use std::time::Instant;

use dsv4_kv_cold_tier::FetchId;
use dsv4_kv_model::sequence::{Finish, Generated, Sequence};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::error::Failure;
use crate::metrics::Metrics;

/// An event of a sequence, in order. Dropping the receiver cancels the sequence. A sender that is dropped without
/// [`Event::Finished`] or [`Event::Failed`] means [`Failure::Server`], or [`Failure::ShutDown`] if the scheduler has
/// ended in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The sequence was admitted to the cache for the first time. Sent before all tokens.
    Admitted {
        /// Tokens of the prompt that are not computed, because earlier sequences have computed them.
        reused: usize,
    },
    /// The next token of the prompt, from the second one on, with its probability. Sent if
    /// [`Continuation::prompt_logits`](dsv4_kv_model::sequence::Continuation::prompt_logits) asks for it.
    Prompt(Generated),
    /// A generated token.
    Token(Generated),
    /// The sequence is complete; no event follows.
    Finished(Finish),
    /// The sequence has failed; no event follows.
    Failed(Failure),
}

/// The events of one sequence. The channel is unbounded; the lengths of prompt and answer limit the number of events.
pub type Events = UnboundedReceiver<Event>;

/// The state of a request's prompt in the cold tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// The prompt was not requested yet.
    New,
    /// The prompt was requested.
    Asked {
        /// The id of the fetch.
        id: FetchId,
        /// When it was requested.
        since: Instant,
        /// Number of prompts that the store had read by then.
        reads: u64,
    },
    /// Nothing to wait for: the store has no more of the prompt than host memory, or is not to be asked.
    Done,
}

/// A sequence that waits or runs.
#[derive(Debug)]
pub(crate) struct Request {
    pub sequence: Sequence,
    pub salt: Vec<u8>,
    pub events: UnboundedSender<Event>,
    /// When it was submitted; if places were reserved for it, when they were.
    pub submitted: Instant,
    /// When its last token was generated; before that, as `submitted`.
    pub last: Instant,
    /// Whether it was ever admitted to the cache.
    pub was_admitted: bool,
    /// How often it was preempted because blocks ran out.
    pub preemptions: u32,
    /// Whether it ran out of blocks when it ran alone, so that it shares none any more.
    pub shares_nothing: bool,
    /// The state of its prompt in the cold tier.
    pub fetch: Fetch,
}

impl Request {
    /// Whether its client has disconnected.
    pub fn has_left(&self) -> bool {
        self.events.is_closed()
    }

    /// Notes that it was admitted, and tells the client the first time. A preempted request is admitted again, and then
    /// reuses tokens that it has computed itself, of which the client is not told.
    pub fn tell_admitted(&mut self, metrics: &Metrics) {
        if !std::mem::replace(&mut self.was_admitted, true) {
            metrics.queue_time.record(self.submitted.elapsed());
            let _ = self.events.send(Event::Admitted { reused: self.sequence.cached() });
        }
    }

    /// Sends scored tokens of the prompt to the client.
    pub fn tell_prompt(&self, scored: Vec<Generated>) {
        for token in scored {
            let _ = self.events.send(Event::Prompt(token));
        }
    }

    /// Sends new tokens to the client, and updates the metrics. The scheduler notices a disconnected client before its
    /// next step.
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
        // Tokens that one step has verified arrive together; each counts as an equal share of the step's time. Tokens
        // that arrive with the first token have no such time, and are not counted.
        if before > 0 {
            (0..new).for_each(|_| metrics.inter_token.record(passed / new as u32));
        }
        metrics.generated_tokens.increment(new as u64);
        for token in generated {
            let _ = self.events.send(Event::Token(token));
        }
    }
}

//! Memory that is no longer needed but cannot be freed: a read may still write it, its bytes did not match the digests or
//! were not compared with any, or the transport could not give it back.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use super::reading::Whole;
use crate::mistake::{Mistake, made};
use crate::transport::{InFlight, Region, TransportError};

/// Time between two attempts to reopen a transport.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Memory that a read may still write, of a transfer that has ended.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub read: InFlight,
    pub share: Share,
    pub began: Duration,
    /// Whether the transport has reported an error. The end of a failed read is never known.
    pub failed: bool,
    /// If the read is the last of its payload: what the bytes are compared with when it has ended.
    pub whole: Option<Whole>,
}

/// Memory that stays until the transport is closed: the transport could not give it back, or reported a read as ended
/// whose bytes do not match the digests or were not compared with any.
#[derive(Debug)]
struct Kept {
    share: Share,
    since: Duration,
    /// The memory itself, if the transport does not have it.
    _region: Option<Region>,
}

/// State of the transport.
#[derive(Debug, Default)]
enum State {
    /// Reads may begin.
    #[default]
    Open,
    /// It will be closed as soon as no read that is needed is under way; no read begins.
    Draining,
    /// It was closed, and could not be reopened.
    Gone(Gone),
}

/// A transport that could not be reopened: the number of attempts, the time of the last one, and its error.
#[derive(Clone, Debug)]
pub(super) struct Gone {
    tries: u32,
    tried: Duration,
    why: String,
}

impl Gone {
    pub fn error(&self) -> TransferError {
        TransferError::NoTransport { tries: self.tries, why: self.why.clone() }
    }
}

/// All quarantined memory, and the state of the transport.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// The time of the last call that passed one.
    pub now: Duration,
    reads: Vec<Quarantined>,
    kept: Vec<Kept>,
    state: State,
}

impl Quarantine {
    pub fn add(&mut self, memory: Quarantined) {
        self.reads.push(memory);
    }

    /// Adds memory that the transport holds until it is closed.
    pub fn keep(&mut self, share: Share) {
        self.keep_since(share, self.now);
    }

    /// As [`Self::keep`], of a read that began at `since`.
    pub fn keep_since(&mut self, share: Share, since: Duration) {
        self.kept.push(Kept { share, since, _region: None });
    }

    /// Adds memory that was taken out of a transport which could not be reopened, and whose reads may still go on.
    pub fn keep_out(&mut self, share: Share, region: Region) {
        self.kept.push(Kept { share, since: self.now, _region: Some(region) });
    }

    /// Whether no read may begin.
    pub fn holds_reads(&self) -> bool {
        !matches!(self.state, State::Open)
    }

    /// Whether no quarantined read can end by itself, so that only closing the transport frees memory.
    pub fn none_ends_by_itself(&self) -> bool {
        self.reads.iter().all(|memory| memory.failed)
    }

    /// [`TransferError::NoTransport`] while there is no transport.
    pub fn check_transport(&self) -> Result<(), TransferError> {
        match &self.state {
            State::Gone(gone) => Err(gone.error()),
            _ => Ok(()),
        }
    }

    /// Notes that the transport was closed, and could not be reopened.
    pub fn lose_transport(&mut self, error: &TransportError) -> Gone {
        let before = if let State::Gone(gone) = &self.state { gone.tries } else { 0 };
        let gone = Gone { tries: before + 1, tried: self.now, why: error.to_string() };
        self.state = State::Gone(gone.clone());
        gone
    }

    /// While there is no transport: whether it is time for the next attempt to reopen it. `None` if there is one.
    pub fn is_to_be_made_again(&self) -> Option<bool> {
        match &self.state {
            State::Gone(gone) => Some(self.now.saturating_sub(gone.tried) >= RETRY_INTERVAL),
            _ => None,
        }
    }

    /// Decides whether reads may begin: none may once any memory has reached its second deadline. Also lifts that
    /// block, since the memory may have been freed since the last call. Returns whether reads are blocked.
    pub fn drain(&mut self, after: Duration) -> bool {
        let is_over = self.is_over(after);
        self.state = if is_over { State::Draining } else { State::Open };
        is_over
    }

    /// Empties the quarantine after the transport was closed and reopened.
    pub fn clear(&mut self) {
        *self = Self { now: self.now, ..Self::default() };
    }

    pub fn take_reads(&mut self) -> Vec<Quarantined> {
        std::mem::take(&mut self.reads)
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.kept.is_empty()
    }

    /// Whether any memory has reached its second deadline, `after` past the begin of its read (or past `keep`).
    fn is_over(&self, after: Duration) -> bool {
        let counts = |memory: &&Quarantined| !memory.failed || !made(Mistake::FailedStay);
        let reads = self.reads.iter().filter(counts).map(|memory| memory.began);
        let kept = self.kept.iter().map(|kept| kept.since);
        reads.chain(kept).any(|since| self.now.saturating_sub(since) >= after)
    }

    pub fn bytes(&self) -> u64 {
        let reads = self.reads.iter().map(|memory| &memory.share);
        reads.chain(self.kept.iter().map(|kept| &kept.share)).map(Share::bytes).sum()
    }
}

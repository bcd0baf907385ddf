//! What nobody waits for and is not free: memory that a read may still write, to which other bytes came than were offered, or
//! that the transport could not give back.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use crate::mistake::{Mistake, made};
use crate::transport::{InFlight, TransportError};

/// How long a transport that could not be made again is left alone.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Memory that a read may write, which nobody waits for.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub read: InFlight,
    pub share: Share,
    pub began: Duration,
    /// The transport says that it has failed; so its end will never be known.
    pub failed: bool,
}

/// Memory that the transport has until it is ended: it could not give it back, or said that a read had ended whose bytes were
/// not there.
#[derive(Debug)]
struct Kept {
    share: Share,
    since: Duration,
}

/// What can be done with the transport.
#[derive(Debug, Default)]
enum State {
    /// Everything.
    #[default]
    Open,
    /// It is to be ended: no read begins.
    Draining,
    /// It was ended, and could not be made again.
    Gone(Gone),
}

/// A transport that could not be made again.
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

/// What nobody waits for and is not free, and what becomes of the transport for it.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// The last time that was told.
    pub now: Duration,
    reads: Vec<Quarantined>,
    kept: Vec<Kept>,
    state: State,
}

impl Quarantine {
    pub fn add(&mut self, memory: Quarantined) {
        self.reads.push(memory);
    }

    /// The transport has this memory until it is ended.
    pub fn keep(&mut self, share: Share) {
        self.kept.push(Kept { share, since: self.now });
    }

    /// Whether no read may begin.
    pub fn holds_reads(&self) -> bool {
        !matches!(self.state, State::Open)
    }

    /// Whether nothing in it may be free without the end of the transport.
    pub fn none_ends_by_itself(&self) -> bool {
        self.reads.iter().all(|memory| memory.failed)
    }

    /// Refuses what needs a transport, if there is none.
    pub fn check_transport(&self) -> Result<(), TransferError> {
        match &self.state {
            State::Gone(gone) => Err(gone.error()),
            _ => Ok(()),
        }
    }

    /// The transport was ended, and could not be made again.
    pub fn lose_transport(&mut self, error: &TransportError) -> Gone {
        let before = if let State::Gone(gone) = &self.state { gone.tries } else { 0 };
        let gone = Gone { tries: before + 1, tried: self.now, why: error.to_string() };
        self.state = State::Gone(gone.clone());
        gone
    }

    /// Whether there is no transport, and it can be tried again to make one; `None` if there is one.
    pub fn is_to_be_made_again(&self) -> Option<bool> {
        match &self.state {
            State::Gone(gone) => Some(self.now.saturating_sub(gone.tried) >= RETRY_INTERVAL),
            _ => None,
        }
    }

    /// Whether no read may begin from now on, since something has been in it until its second deadline. What that was may have
    /// ended by itself since it was asked last.
    pub fn drain(&mut self, after: Duration) -> bool {
        let is_over = self.is_over(after);
        self.state = if is_over { State::Draining } else { State::Open };
        is_over
    }

    /// All of it is free: the transport was ended, and made again.
    pub fn clear(&mut self) {
        *self = Self { now: self.now, ..Self::default() };
    }

    pub fn take_reads(&mut self) -> Vec<Quarantined> {
        std::mem::take(&mut self.reads)
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.kept.is_empty()
    }

    /// Whether something has been in it until its second deadline.
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

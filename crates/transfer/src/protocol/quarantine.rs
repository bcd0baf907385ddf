//! Memory that a read may still write, and the end of the transport, behind which none does.
//!
//! A read that has failed may write as long as one that goes on: only its transport's end stops it. So both have the second
//! deadline. Behind it no read begins until those that somebody waits for have ended, each by its own first deadline at
//! the latest; then the transport is ended and made again, and the others begin. Bytes that came before stay: their memory
//! is taken from the old transport and given to the new one.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use super::reading::{Memory, Reading};
use super::receiver::Receiver;
use crate::mistake::{Mistake, made};
use crate::transport::{InFlight, Polled, Transport, TransportError};

/// How long a transport that could not be made again is left alone.
const AGAIN: Duration = Duration::from_millis(100);

/// Memory that a read may write, which nobody waits for.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub read: InFlight,
    pub share: Share,
    pub began: Duration,
    /// The transport says that it has failed; so its end will never be known.
    pub failed: bool,
}

/// Memory that the transport could not give back, and has until it is ended.
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
struct Gone {
    tries: u32,
    tried: Duration,
    why: String,
}

impl Gone {
    fn error(&self) -> TransferError {
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

    /// The transport could not give memory back.
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

    fn lose_transport(&mut self, error: &TransportError) -> Gone {
        let before = if let State::Gone(gone) = &self.state { gone.tries } else { 0 };
        let gone = Gone { tries: before + 1, tried: self.now, why: error.to_string() };
        self.state = State::Gone(gone.clone());
        gone
    }

    fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.kept.is_empty()
    }

    /// Whether something has been in it until its second deadline.
    fn is_over(&self, after: Duration) -> bool {
        let counts = |memory: &&Quarantined| !memory.failed || !made(Mistake::FailedStay);
        let reads = self.reads.iter().filter(counts).map(|memory| memory.began);
        let kept = self.kept.iter().map(|kept| kept.since);
        reads.chain(kept).any(|since| self.now.saturating_sub(since) >= after)
    }

    fn bytes(&self) -> u64 {
        let reads = self.reads.iter().map(|memory| &memory.share);
        reads.chain(self.kept.iter().map(|kept| &kept.share)).map(Share::bytes).sum()
    }
}

impl<T: Transport> Receiver<T> {
    /// Nobody waits for a read any more, which may go on.
    pub(super) fn shut_in(&mut self, memory: Quarantined) {
        if made(Mistake::NoQuarantine) {
            self.release(memory.read.taken_for_ended(), memory.share);
            return;
        }
        self.quarantine.add(memory);
    }

    /// Frees the memory of reads that have ended, and ends the transport for that of others when it is time.
    pub(super) fn poll_quarantine(&mut self) {
        match &self.quarantine.state {
            State::Gone(gone) => {
                let has_waited = self.quarantine.now.saturating_sub(gone.tried) >= AGAIN;
                if has_waited && !made(Mistake::FenceOnce) {
                    // Until it can be made again, what begins is told why.
                    let _ = self.fence();
                }
            }
            _ => {
                self.free_what_ended();
                // What it is for may have ended by itself meanwhile.
                let is_over = self.quarantine.is_over(self.deadlines.fence);
                self.quarantine.state = if is_over { State::Draining } else { State::Open };
                if is_over && self.can_fence() {
                    // As above.
                    let _ = self.fence();
                }
            }
        }
    }

    fn free_what_ended(&mut self) {
        for memory in std::mem::take(&mut self.quarantine.reads) {
            let Quarantined { read, share, began, failed } = memory;
            if failed {
                self.quarantine.add(Quarantined { read, share, began, failed });
                continue;
            }
            match self.transport.poll(read) {
                Polled::Done(memory) => {
                    self.stats.ended_late += 1;
                    self.release(memory, share);
                }
                Polled::Failed(read, _) => {
                    self.quarantine.add(Quarantined { read, share, began, failed: true });
                }
                Polled::Pending(read) => {
                    self.quarantine.add(Quarantined { read, share, began, failed });
                }
            }
        }
    }

    /// Whether nobody waits for a read that goes on.
    fn can_fence(&self) -> bool {
        let goes_on = |reading: &Reading| matches!(reading.memory, Memory::Read { .. });
        !self.reading.iter().any(goes_on) || made(Mistake::FenceWithoutDraining)
    }

    /// Ends the transport now to free what is quarantined, unless a read goes on that somebody waits for; whether nothing is
    /// quarantined now. [`Self::poll`] does so at the second deadline.
    ///
    /// # Errors
    /// [`TransferError::NoTransport`] if it could not be made again; the memory counts as taken until it can.
    pub fn clear_quarantine(&mut self) -> Result<bool, TransferError> {
        let is_needed = !self.quarantine.is_empty() || self.quarantine.check_transport().is_err();
        if is_needed && self.can_fence() {
            self.fence()?;
        }
        Ok(self.quarantine.is_empty())
    }

    /// Ends the transport, and with it every read, and makes it again. Requests that wait for nothing keep their bytes.
    fn fence(&mut self) -> Result<(), TransferError> {
        for reading in std::mem::take(&mut self.reading) {
            self.take_out(reading);
        }
        let fenced = self.transport.fence();
        let waiting = std::mem::take(&mut self.reading);
        if let Err(error) = fenced {
            self.stats.failed_fences += 1;
            let lost = self.quarantine.lose_transport(&error);
            // Their memory is with nobody, and free.
            let gone = |reading: Reading| (reading.id, Err(lost.error()));
            self.ended.extend(waiting.into_iter().map(gone));
            return Err(lost.error());
        }
        self.stats.fences += 1;
        let now = self.quarantine.now;
        self.quarantine = Quarantine { now, ..Quarantine::default() };
        waiting.into_iter().for_each(|reading| self.put_back(reading));
        Ok(())
    }

    /// The memory of a request is taken from the transport, which would end with it, if no read writes it.
    fn take_out(&mut self, reading: Reading) {
        let Reading { memory: Memory::Idle(memory), .. } = reading else {
            self.reading.push(reading);
            return;
        };
        match self.transport.deregister(memory) {
            Ok(region) => self.reading.push(Reading { memory: Memory::Out(region), ..reading }),
            Err(error) => {
                self.quarantine.keep(reading.share);
                self.ended.push((reading.id, Err(error.into())));
            }
        }
    }

    /// The transport has it again.
    fn put_back(&mut self, reading: Reading) {
        let Reading { memory: Memory::Out(region), .. } = reading else {
            self.reading.push(reading);
            return;
        };
        match self.transport.register(region) {
            Ok(memory) => self.reading.push(Reading { memory: Memory::Idle(memory), ..reading }),
            Err(error) => self.ended.push((reading.id, Err(error.into()))),
        }
    }

    /// Bytes of memory that nobody waits for and that is not free: a read may write it, or the transport could not give it
    /// back.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantine.bytes()
    }
}

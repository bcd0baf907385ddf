//! The target: reads, deadlines, quarantine.

use std::time::Duration;

use super::error::TransferError;
use super::memory::{Budget, Share};
use super::offer::Offer;
use crate::image::{Expected, ImageError, Manifest, decode_manifest, verify};
use crate::mistake::{Mistake, made};
use crate::transport::{InFlight, NotPosted, Polled, Region, Registered, Transport};

/// Which transfer: a number that is unique to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(u64);

/// How long reads may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// After it a read is given up; its memory is quarantined until the read ends by itself.
    pub read: Duration,
    /// After it the transport is ended, with all that it does, so that the memory can be freed.
    pub fence: Duration,
}

/// What a receiver has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    /// Reads that were begun.
    pub begun: u64,
    /// Payloads whose digests were right.
    pub verified: u64,
    /// Payloads whose digests were not.
    pub damaged: u64,
    /// Reads that failed.
    pub failed: u64,
    /// Reads that did not end in time.
    pub late: u64,
    /// Reads that ended in quarantine.
    pub ended_late: u64,
    /// Times that the transport was ended.
    pub fences: u64,
}

/// A payload whose digests are right, in memory that no read writes.
#[derive(Debug)]
pub struct Verified {
    pub(super) manifest: Manifest,
    region: Region,
    _share: Share,
}

impl Verified {
    /// What it says of itself.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its bytes.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.region.bytes()[..self.manifest.payload_bytes() as usize]
    }
}

/// A read that somebody waits for.
#[derive(Debug)]
struct Reading {
    id: TransferId,
    manifest: Manifest,
    read: InFlight,
    share: Share,
    began: Duration,
}

/// Memory that a read may write, which nobody waits for.
#[derive(Debug)]
struct Quarantined {
    read: InFlight,
    share: Share,
    began: Duration,
    /// The transport says that it has failed; so its end will never be known.
    failed: bool,
}

/// What a target reads. Times count from whenever the caller likes.
#[derive(Debug)]
pub struct Receiver<T: Transport> {
    transport: T,
    deadlines: Deadlines,
    budget: Budget,
    next: u64,
    reading: Vec<Reading>,
    quarantined: Vec<Quarantined>,
    stats: ReceiverStats,
}

/// What became of a transfer.
pub type Ended = (TransferId, Result<Verified, TransferError>);

impl<T: Transport> Receiver<T> {
    /// A target whose reads take no more than `most_bytes` of memory, quarantine included.
    #[must_use]
    pub fn new(transport: T, deadlines: Deadlines, most_bytes: u64) -> Self {
        let (reading, quarantined) = (Vec::new(), Vec::new());
        let (budget, stats) = (Budget::new(most_bytes), ReceiverStats::default());
        Self { transport, deadlines, budget, next: 0, reading, quarantined, stats }
    }

    /// Begins to read what was offered. Nothing is read of an offer that the target could not take.
    ///
    /// # Errors
    /// [`TransferError::Image`], [`TransferError::NoMemory`], [`TransferError::Transport`].
    pub fn begin(
        &mut self,
        now: Duration,
        offer: &Offer,
        expected: &Expected<'_>,
    ) -> Result<TransferId, TransferError> {
        let (manifest, behind) = decode_manifest(&offer.manifest)?;
        manifest.check(expected)?;
        if !behind.is_empty() {
            let found = offer.manifest.len() as u64;
            return Err(ImageError::Length { needed: found - behind.len() as u64, found }.into());
        }
        let needed = manifest.payload_bytes();
        let share = self.take_memory(needed)?;
        let memory = self.transport.register(Region::new(needed as usize)?)?;
        let read = match self.transport.post(memory, &offer.payload) {
            Ok(read) => read,
            Err(NotPosted(memory, error)) => {
                // It is kept by the transport if that fails, too.
                let _ = self.transport.deregister(memory);
                return Err(error.into());
            }
        };
        let id = TransferId(self.next);
        self.next += 1;
        self.stats.begun += 1;
        self.reading.push(Reading { id, manifest, read, share, began: now });
        Ok(id)
    }

    fn take_memory(&mut self, needed: u64) -> Result<Share, TransferError> {
        if let Some(share) = self.budget.take(needed) {
            return Ok(share);
        }
        if self.quarantined.iter().all(|memory| memory.failed) {
            self.clear_quarantine()?;
        }
        let (taken, budget) = (self.budget.taken(), self.budget.most);
        let quarantined = self.quarantined_bytes();
        let none = TransferError::NoMemory { needed, taken, quarantined, budget };
        self.budget.take(needed).ok_or(none)
    }

    /// What has ended since the last call: verified, failed, or late. To be called again and again, also when nobody waits:
    /// quarantine ends here.
    pub fn poll(&mut self, now: Duration) -> Vec<Ended> {
        let mut ended = Vec::new();
        for reading in std::mem::take(&mut self.reading) {
            if let Some(result) = self.poll_one(now, reading) {
                ended.push(result);
            }
        }
        if self.poll_quarantine(now) && self.fence().is_ok() {
            let after = self.deadlines.fence;
            let lost = self.reading.drain(..);
            ended.extend(lost.map(|reading| (reading.id, Err(TransferError::Fenced { after }))));
        }
        ended
    }

    fn poll_one(&mut self, now: Duration, reading: Reading) -> Option<Ended> {
        let Reading { id, manifest, read, share, began } = reading;
        match self.transport.poll(read) {
            Polled::Done(memory) => Some((id, self.verify(manifest, memory, share))),
            Polled::Failed(read, error) => {
                self.stats.failed += 1;
                self.quarantined.push(Quarantined { read, share, began, failed: true });
                Some((id, Err(error.into())))
            }
            Polled::Pending(read) if now.saturating_sub(began) < self.deadlines.read => {
                self.reading.push(Reading { id, manifest, read, share, began });
                None
            }
            Polled::Pending(read) => {
                self.stats.late += 1;
                self.quarantine(Quarantined { read, share, began, failed: false });
                Some((id, Err(TransferError::Deadline { after: self.deadlines.read })))
            }
        }
    }

    fn quarantine(&mut self, memory: Quarantined) {
        if made(Mistake::NoQuarantine) {
            let _ = self.transport.deregister(memory.read.ended());
            return;
        }
        self.quarantined.push(memory);
    }

    fn verify(
        &mut self,
        manifest: Manifest,
        memory: Registered,
        share: Share,
    ) -> Result<Verified, TransferError> {
        let region = self.transport.deregister(memory)?;
        let verified = Verified { manifest, region, _share: share };
        match verify(&verified.manifest, verified.payload()) {
            Ok(()) => {
                self.stats.verified += 1;
                Ok(verified)
            }
            Err(error) => {
                self.stats.damaged += 1;
                Err(error.into())
            }
        }
    }

    /// Frees the memory of reads that have ended; whether one has had its second deadline.
    fn poll_quarantine(&mut self, now: Duration) -> bool {
        let mut is_over = false;
        for memory in std::mem::take(&mut self.quarantined) {
            let Quarantined { read, share, began, failed } = memory;
            if failed {
                self.quarantined.push(Quarantined { read, share, began, failed });
                continue;
            }
            match self.transport.poll(read) {
                Polled::Done(memory) => {
                    self.stats.ended_late += 1;
                    // The transport keeps it if that fails.
                    let _ = self.transport.deregister(memory);
                }
                Polled::Failed(read, _) => {
                    self.quarantined.push(Quarantined { read, share, began, failed: true });
                }
                Polled::Pending(read) => {
                    is_over |= now.saturating_sub(began) >= self.deadlines.fence;
                    self.quarantined.push(Quarantined { read, share, began, failed });
                }
            }
        }
        is_over
    }

    /// Ends the transport to free what is quarantined, unless somebody waits for a read; whether nothing is quarantined
    /// now. Memory of a read that has failed stays there until then, or until the transport is ended for another reason.
    ///
    /// # Errors
    /// [`TransferError::Transport`]; the memory stays quarantined then.
    pub fn clear_quarantine(&mut self) -> Result<bool, TransferError> {
        if self.reading.is_empty() && !self.quarantined.is_empty() {
            self.fence()?;
        }
        Ok(self.quarantined.is_empty())
    }

    /// Ends the transport, and with it every read.
    fn fence(&mut self) -> Result<(), TransferError> {
        self.transport.fence()?;
        self.stats.fences += 1;
        self.quarantined.clear();
        Ok(())
    }

    /// Bytes of memory that a read may write, and nobody waits for.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantined.iter().map(|memory| memory.share.bytes()).sum()
    }

    /// Bytes of memory that is taken: by reads, by payloads that were verified and not dropped, and by quarantine.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.budget.taken()
    }

    /// Reads that go on and that somebody waits for.
    #[must_use]
    pub fn reads(&self) -> usize {
        self.reading.len()
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> ReceiverStats {
        self.stats
    }
}

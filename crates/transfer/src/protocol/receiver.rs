//! The target: reads, deadlines, quarantine.

use std::time::Duration;

use super::error::TransferError;
use super::memory::{Budget, Share};
use super::offer::{Offer, Opening, Ready};
use super::reading::{Memory, Reading};
use super::transfer_id::TransferId;
use crate::image::{Expected, Manifest, check_end, decode_manifest, decode_opening, verify};
use crate::mistake::{Mistake, made};
use crate::transport::{Descriptor, InFlight, NotPosted, Polled, Region, Registered, Transport};

/// How long reads may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// After it a read is given up; its memory is quarantined until the read ends by itself.
    pub read: Duration,
    /// After it the transport is ended, with all that it does, so that the memory can be freed.
    pub fence: Duration,
    /// After it a request that was opened is given up, if meanwhile its source has said nothing and nothing was read.
    pub quiet: Duration,
}

/// What a receiver has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    /// Requests that were begun or opened.
    pub begun: u64,
    /// Payloads whose digests were right.
    pub verified: u64,
    /// Payloads whose digests were not.
    pub damaged: u64,
    /// Reads that failed.
    pub failed: u64,
    /// Reads that did not end in time.
    pub late: u64,
    /// Requests whose source fell silent.
    pub quiet: u64,
    /// Reads that ended in quarantine.
    pub ended_late: u64,
    /// Times that the transport was ended.
    pub fences: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Bytes that were read before their request was offered: while it was computed.
    pub early_bytes: u64,
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
    /// Of memory that the transport could not give back, and has until it is ended.
    kept: Vec<Share>,
    stats: ReceiverStats,
}

/// What a transfer did.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
enum Advanced {
    GoesOn(Reading),
    Verified(Verified),
}

/// What became of a transfer.
pub type Ended = (TransferId, Result<Verified, TransferError>);

impl<T: Transport> Receiver<T> {
    /// A target whose reads take no more than `most_bytes` of memory, quarantine included.
    #[must_use]
    pub fn new(transport: T, deadlines: Deadlines, most_bytes: u64) -> Self {
        let (budget, stats) = (Budget::new(most_bytes), ReceiverStats::default());
        let (reading, quarantined, kept) = (Vec::new(), Vec::new(), Vec::new());
        Self { transport, deadlines, budget, next: 0, reading, quarantined, kept, stats }
    }

    /// Takes memory for a request that its source still computes. What the source says of it goes to [`Self::ready`] and
    /// [`Self::offered`].
    ///
    /// # Errors
    /// [`TransferError::Image`], [`TransferError::NoMemory`], [`TransferError::Transport`].
    pub fn open(
        &mut self,
        now: Duration,
        opening: &Opening,
        expected: &Expected<'_>,
    ) -> Result<TransferId, TransferError> {
        let manifest = decode_opening(&opening.manifest)?;
        let reading = self.expect(now, (manifest, &opening.payload), expected)?;
        Ok(self.add(reading))
    }

    /// There is more of a request that was opened: [`Self::poll`] reads it.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`], [`TransferError::OtherSource`], [`TransferError::Image`] for more bytes than it
    /// has. Nothing has changed then.
    pub fn ready(
        &mut self,
        now: Duration,
        id: TransferId,
        ready: &Ready,
    ) -> Result<(), TransferError> {
        self.find(id)?.extend(now, ready)
    }

    /// A request that was opened is there: [`Self::poll`] reads the rest of it, and compares all with its digests.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`], [`TransferError::Image`] for an offer of anything else than what was opened.
    /// Nothing has changed then.
    pub fn offered(
        &mut self,
        now: Duration,
        id: TransferId,
        offer: &Offer,
    ) -> Result<(), TransferError> {
        self.find(id)?.offer(now, offer)
    }

    /// Begins to read what was offered, all at once. Nothing is read of an offer that the target could not take.
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
        check_end(&offer.manifest, behind)?;
        let opened = (manifest.without_digests(), &offer.payload);
        let mut reading = self.expect(now, opened, expected)?;
        reading.ready = manifest.payload_bytes() as usize;
        reading.offered = Some(manifest);
        let reading = self.post(now, reading)?;
        Ok(self.add(reading))
    }

    /// Nobody waits for a transfer any more. Memory that a read may write is quarantined.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`].
    pub fn give_up(&mut self, id: TransferId) -> Result<(), TransferError> {
        self.find(id)?;
        let place = self.reading.iter().position(|reading| reading.id == id);
        if let Some(place) = place {
            let Reading { memory, share, .. } = self.reading.swap_remove(place);
            match memory {
                Memory::Idle(memory) => self.release(memory, share),
                Memory::Read { read, began, .. } => {
                    self.quarantine(Quarantined { read, share, began, failed: false });
                }
            }
        }
        Ok(())
    }

    fn find(&mut self, id: TransferId) -> Result<&mut Reading, TransferError> {
        let found = self.reading.iter_mut().find(|reading| reading.id == id);
        found.ok_or(TransferError::NoSuchTransfer { id })
    }

    fn add(&mut self, reading: Reading) -> TransferId {
        let id = reading.id;
        self.stats.begun += 1;
        self.reading.push(reading);
        id
    }

    /// Takes memory for a request, if it is one that the target could take.
    fn expect(
        &mut self,
        now: Duration,
        (opened, from): (Manifest, &Descriptor),
        expected: &Expected<'_>,
    ) -> Result<Reading, TransferError> {
        opened.check(expected)?;
        let needed = opened.payload_bytes();
        let share = self.take_memory(needed)?;
        let memory = self.transport.register(Region::new(needed as usize)?)?;
        let (id, from) = (TransferId(self.next), from.clone());
        self.next += 1;
        let (memory, offered) = (Memory::Idle(memory), None);
        Ok(Reading { id, opened, offered, from, memory, share, ready: 0, done: 0, since: now })
    }

    /// Begins to read what the source has, if no read goes on.
    fn post(&mut self, now: Duration, mut reading: Reading) -> Result<Reading, TransferError> {
        let memory = match reading.memory {
            Memory::Idle(memory) if reading.done < reading.ready => memory,
            memory => return Ok(Reading { memory, ..reading }),
        };
        let end = reading.ready;
        match self.transport.post(memory, reading.done..end, &reading.from) {
            Ok(read) => {
                reading.memory = Memory::Read { read, end, began: now };
                Ok(reading)
            }
            Err(NotPosted(memory, error)) => {
                self.release(memory, reading.share);
                Err(error.into())
            }
        }
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

    /// Frees memory that no read writes.
    fn release(&mut self, memory: Registered, share: Share) {
        if self.transport.deregister(memory).is_err() {
            self.kept.push(share);
        }
    }

    /// What has ended since the last call: verified, failed, or late. To be called again and again, also when nobody waits:
    /// reads of requests that were opened begin here, and quarantine ends here.
    pub fn poll(&mut self, now: Duration) -> Vec<Ended> {
        let mut ended = Vec::new();
        for reading in std::mem::take(&mut self.reading) {
            let id = reading.id;
            match self.advance(now, reading) {
                Ok(Advanced::GoesOn(reading)) => self.reading.push(reading),
                Ok(Advanced::Verified(verified)) => ended.push((id, Ok(verified))),
                Err(error) => ended.push((id, Err(error))),
            }
        }
        if self.poll_quarantine(now) && self.fence().is_ok() {
            let after = self.deadlines.fence;
            let lost = self.reading.drain(..);
            ended.extend(lost.map(|reading| (reading.id, Err(TransferError::Fenced { after }))));
        }
        ended
    }

    /// Lets a transfer do what it can now.
    fn advance(&mut self, now: Duration, reading: Reading) -> Result<Advanced, TransferError> {
        let mut reading = self.post(now, reading)?;
        while let Memory::Read { read, end, began } = reading.memory {
            match self.transport.poll(read) {
                Polled::Done(memory) => {
                    self.count(&reading.offered, end - reading.done);
                    reading =
                        Reading { memory: Memory::Idle(memory), done: end, since: now, ..reading };
                    reading = self.post(now, reading)?;
                }
                Polled::Failed(read, error) => {
                    self.stats.failed += 1;
                    let share = reading.share;
                    self.quarantined.push(Quarantined { read, share, began, failed: true });
                    return Err(error.into());
                }
                Polled::Pending(read) if now.saturating_sub(began) < self.deadlines.read => {
                    let memory = Memory::Read { read, end, began };
                    return Ok(Advanced::GoesOn(Reading { memory, ..reading }));
                }
                Polled::Pending(read) => {
                    self.stats.late += 1;
                    let share = reading.share;
                    self.quarantine(Quarantined { read, share, began, failed: false });
                    return Err(TransferError::Deadline { after: self.deadlines.read });
                }
            }
        }
        self.rest(now, reading)
    }

    fn count(&mut self, offered: &Option<Manifest>, bytes: usize) {
        self.stats.bytes += bytes as u64;
        self.stats.early_bytes += if offered.is_none() { bytes as u64 } else { 0 };
    }

    /// All that the source has was read.
    fn rest(&mut self, now: Duration, mut reading: Reading) -> Result<Advanced, TransferError> {
        let whole = reading.take_whole();
        let memory = match reading.memory {
            Memory::Idle(memory) => memory,
            memory => return Ok(Advanced::GoesOn(Reading { memory, ..reading })),
        };
        let after = self.deadlines.quiet;
        match whole {
            Some(manifest) => self.verify(manifest, memory, reading.share).map(Advanced::Verified),
            None if now.saturating_sub(reading.since) < after => {
                Ok(Advanced::GoesOn(Reading { memory: Memory::Idle(memory), ..reading }))
            }
            None => {
                self.stats.quiet += 1;
                self.release(memory, reading.share);
                Err(TransferError::Quiet { after })
            }
        }
    }

    fn verify(
        &mut self,
        manifest: Manifest,
        memory: Registered,
        share: Share,
    ) -> Result<Verified, TransferError> {
        let region = match self.transport.deregister(memory) {
            Ok(region) => region,
            Err(error) => {
                self.kept.push(share);
                return Err(error.into());
            }
        };
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

    fn quarantine(&mut self, memory: Quarantined) {
        if made(Mistake::NoQuarantine) {
            self.release(memory.read.taken_for_ended(), memory.share);
            return;
        }
        self.quarantined.push(memory);
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
                    self.release(memory, share);
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
    /// now. Memory of a read that has failed stays there until then, or until the transport is ended for another reason,
    /// and so does memory that the transport could not give back.
    ///
    /// # Errors
    /// [`TransferError::Transport`]; the memory stays quarantined then.
    pub fn clear_quarantine(&mut self) -> Result<bool, TransferError> {
        if self.reading.is_empty() && self.is_anything_held() {
            self.fence()?;
        }
        Ok(!self.is_anything_held())
    }

    fn is_anything_held(&self) -> bool {
        !self.quarantined.is_empty() || !self.kept.is_empty()
    }

    /// Ends the transport, and with it every read.
    fn fence(&mut self) -> Result<(), TransferError> {
        self.transport.fence()?;
        self.stats.fences += 1;
        self.quarantined.clear();
        self.kept.clear();
        Ok(())
    }

    /// Bytes of memory that nobody waits for and that is not free: a read may write it, or the transport could not give it
    /// back.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        let quarantined = self.quarantined.iter().map(|memory| &memory.share);
        quarantined.chain(&self.kept).map(Share::bytes).sum()
    }

    /// Bytes of memory that is taken: by reads, by payloads that were verified and not dropped, and by quarantine.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.budget.taken()
    }

    /// Requests that somebody waits for.
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

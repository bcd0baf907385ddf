//! The target: its reads, and their deadlines.

use std::time::Duration;

use super::error::TransferError;
use super::memory::{Budget, Pool, Share};
use super::offer::{Offer, Opening, Ready};
use super::quarantine::{Quarantine, Quarantined};
use super::reading::{Memory, Reading, Whole};
use super::sources::{Sources, Taken};
use super::transfer_id::TransferId;
use super::verified::{Verified, verify};
use crate::image::{Digests, Expected, Manifest, check_end, decode_manifest, decode_opening};
use crate::mistake::{Mistake, made};
use crate::transport::{
    Descriptor, MemoryKind, NotPosted, Polled, RegionMut, Registered, Storage, Transport,
};

/// Most bytes of one read to host memory, so that they are still in the CPU's cache when they are hashed.
const PIECE: usize = 4 << 20;

/// Deadlines of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// When a read has taken this long, its transfer fails, and the memory is quarantined until the read ends with
    /// bytes that match their digests, or until the transport is fenced.
    pub read: Duration,
    /// When this time has passed since the begin of a read that does not end or has failed, or since other memory was
    /// quarantined, the transport is fenced to free the memory. Reads that are still needed may end first, within
    /// [`Self::read`]; new reads wait for the fence.
    pub fence: Duration,
    /// An opened request fails if, for this long, its source has sent nothing and no read has ended. Its memory is
    /// quarantined if anything was read into it.
    pub quiet: Duration,
}

/// Counters of a receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    /// Requests that were begun or opened.
    pub begun: u64,
    /// Payloads that matched their digests.
    pub verified: u64,
    /// Payloads that did not match their digests.
    pub damaged: u64,
    /// Reads that failed.
    pub failed: u64,
    /// Reads that did not end in time.
    pub late: u64,
    /// Requests that failed because their source fell silent.
    pub quiet: u64,
    /// Reads that ended in quarantine.
    pub ended_late: u64,
    /// How often the transport was closed and reopened.
    pub fences: u64,
    /// How often it could not be reopened.
    pub failed_fences: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Bytes that were read before the offer of their request: while the request was computed.
    pub early_bytes: u64,
}

/// The reads of a target. It has at most one transfer per source at a time, and none of a source that was asked. Two
/// receivers of one cache must not receive the same offer. Times are durations since an instant that the caller
/// chooses.
#[derive(Debug)]
pub struct Receiver<T: Transport> {
    pub(super) transport: T,
    /// The memory for payloads.
    pub(super) storage: Storage,
    pub(super) pool: Pool,
    /// Most bytes of one read to host memory.
    piece: usize,
    pub(super) deadlines: Deadlines,
    pub(super) budget: Budget,
    sources: Sources,
    pub(super) reading: Vec<Reading>,
    pub(super) quarantine: Quarantine,
    /// Transfers that ended outside of [`Self::poll`], which returns them at the next call.
    pub(super) ended: Vec<Ended>,
    pub(super) stats: ReceiverStats,
}

/// The result of advancing a transfer.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
enum Advanced {
    GoesOn(Reading),
    Verified(Verified),
}

/// The result of a transfer.
pub type Ended = (TransferId, Result<Verified, TransferError>);

impl<T: Transport> Receiver<T> {
    /// A target whose reads take at most `most_bytes` of host memory, including quarantine and memory that is kept for
    /// reuse.
    #[must_use]
    pub fn new(transport: T, deadlines: Deadlines, most_bytes: u64) -> Self {
        Self::with_storage(transport, deadlines, (Storage::host(), most_bytes))
    }

    /// A target whose reads take at most `most_bytes` of `storage`, including quarantine. Memory of the cache's own
    /// device is an example: payloads are then unpacked from where they are.
    #[must_use]
    pub fn with_storage(
        transport: T,
        deadlines: Deadlines,
        (storage, most_bytes): (Storage, u64),
    ) -> Self {
        let (budget, stats) = (Budget::new(most_bytes), ReceiverStats::default());
        let (reading, ended, quarantine) = (Vec::new(), Vec::new(), Quarantine::default());
        let (pool, sources, piece) = (Pool::default(), Sources::default(), PIECE);
        Self {
            transport,
            storage,
            pool,
            piece,
            deadlines,
            budget,
            sources,
            reading,
            quarantine,
            ended,
            stats,
        }
    }

    /// Sets the most bytes of one read; the default is 4 MiB. It applies if the storage is of the host: each piece is
    /// hashed before the next one is read. A receiver whose storage is of a device reads a payload at once.
    #[must_use]
    pub fn with_pieces(self, bytes: usize) -> Self {
        Self { piece: bytes.max(1), ..self }
    }

    /// Takes memory for a request that its source still computes. Pass the source's later messages to [`Self::ready`]
    /// and [`Self::offered`].
    ///
    /// # Errors
    /// As [`Self::begin`].
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

    /// Notes that more bytes of an opened request are ready: [`Self::poll`] reads them.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`], [`TransferError::OtherSource`], [`TransferError::Image`] for more bytes than
    /// the payload has. Nothing has changed then.
    pub fn ready(
        &mut self,
        now: Duration,
        id: TransferId,
        ready: &Ready,
    ) -> Result<(), TransferError> {
        self.find(id)?.extend(now, ready)
    }

    /// Notes the offer of an opened request: [`Self::poll`] reads the rest of it, and compares all bytes with the
    /// digests.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`], [`TransferError::Image`] for an offer that differs from the opening. Nothing
    /// has changed then.
    pub fn offered(
        &mut self,
        now: Duration,
        id: TransferId,
        offer: &Offer,
    ) -> Result<(), TransferError> {
        self.find(id)?.offer(now, offer)
    }

    /// Begins to read an offer that had no opening. Reads nothing if the target could not take the offer.
    ///
    /// # Errors
    /// [`TransferError::Image`], [`TransferError::NoMemory`], [`TransferError::Transport`],
    /// [`TransferError::NoTransport`]; [`TransferError::TakenBefore`] and [`TransferError::AskedBefore`] for an offer
    /// that arrived before. Nothing has changed then. An offer whose read failed before its source was asked may begin
    /// again.
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

    /// Gives a transfer up. Its memory is quarantined if anything was read into it: the bytes were not compared with
    /// digests, and some may still arrive.
    ///
    /// # Errors
    /// [`TransferError::NoSuchTransfer`].
    pub fn give_up(&mut self, id: TransferId) -> Result<(), TransferError> {
        self.find(id)?;
        let place = self.reading.iter().position(|reading| reading.id == id);
        if let Some(place) = place {
            let reading = self.reading.swap_remove(place);
            self.let_go(reading);
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

    /// Takes memory for a request, after checking that the target could take the request.
    fn expect(
        &mut self,
        now: Duration,
        (opened, from): (Manifest, &Descriptor),
        expected: &Expected<'_>,
    ) -> Result<Reading, TransferError> {
        opened.check(expected)?;
        self.quarantine.now = now;
        self.quarantine.check_transport()?;
        let taken = self.sources.take(opened.source)?;
        let needed = opened.payload_bytes();
        let (share, region) = self.take_memory(needed)?;
        let memory = self.transport.register(region)?;
        let (id, from, digests) =
            (TransferId::new(opened.source), from.clone(), Digests::default());
        let (memory, offered, ready, done) = (Memory::Idle(memory), None, 0, 0);
        let (goal, began, since) = (0, now, now);
        let reading = Reading {
            id,
            taken,
            opened,
            offered,
            from,
            memory,
            share,
            digests,
            ready,
            done,
            goal,
            began,
            since,
        };
        Ok(reading)
    }

    /// Begins to read what the source has ready, if no read of this transfer is under way and the transport does not
    /// wait to be fenced.
    fn post(&mut self, now: Duration, mut reading: Reading) -> Result<Reading, TransferError> {
        let is_held = self.quarantine.holds_reads() && !made(Mistake::ReadsWhileDraining);
        let mut memory = match reading.memory {
            Memory::Idle(memory) if reading.done < reading.ready && !is_held => memory,
            Memory::Idle(memory) => {
                let goal = reading.done;
                return Ok(Reading { memory: Memory::Idle(memory), goal, ..reading });
            }
            memory => return Ok(Reading { memory, ..reading }),
        };
        if reading.done == reading.goal {
            (reading.goal, reading.began) = (reading.ready, now);
        }
        let piece = if self.storage.kind() == MemoryKind::Host { self.piece } else { usize::MAX };
        let end = reading.goal.min(reading.done.saturating_add(piece));
        let scrubbed = self.scrub(&mut memory, reading.done..end, &reading.opened.sections);
        let posted = match scrubbed {
            Ok(()) => self.transport.post(memory, reading.done..end, &reading.from),
            Err(error) => Err(NotPosted(memory, error)),
        };
        match posted {
            Ok(read) => {
                reading.memory = Memory::Read { read, end };
                Ok(reading)
            }
            Err(NotPosted(memory, error)) => {
                self.give_back(memory, reading.share, reading.done);
                Err(error.into())
            }
        }
    }

    /// Advances all transfers, and returns those that have ended since the last call: verified, failed, or late. Call
    /// it regularly, even when no transfer is open: it begins the reads of opened requests, frees quarantined memory,
    /// and tries to reopen a transport that could not be reopened.
    pub fn poll(&mut self, now: Duration) -> Vec<Ended> {
        self.quarantine.now = now;
        for _ in 0..self.reading.len() {
            // One at a time, so that a panic in the transport loses no other transfer.
            let reading = self.reading.remove(0);
            let id = reading.id;
            match self.advance(now, reading) {
                Ok(Advanced::GoesOn(reading)) => self.reading.push(reading),
                Ok(Advanced::Verified(verified)) => self.ended.push((id, Ok(verified))),
                Err(error) => self.ended.push((id, Err(error))),
            }
        }
        self.poll_quarantine();
        std::mem::take(&mut self.ended)
    }

    /// Advances a transfer as far as it can go now.
    fn advance(&mut self, now: Duration, reading: Reading) -> Result<Advanced, TransferError> {
        let mut reading = self.post(now, reading)?;
        while let Memory::Read { read, end } = reading.memory {
            let began = reading.began;
            match self.transport.poll(read) {
                Polled::Done(mut memory) => {
                    self.count(&reading.offered, end - reading.done);
                    let sections = &reading.opened.sections;
                    let digests = &mut reading.digests;
                    let digest = |region: RegionMut<'_>| {
                        region
                            .host()
                            .into_iter()
                            .for_each(|all| digests.extend(sections, &all[..end]));
                    };
                    if let Err(error) = self.transport.with_region(&mut memory, digest) {
                        self.give_back(memory, reading.share, end);
                        return Err(error.into());
                    }
                    reading =
                        Reading { memory: Memory::Idle(memory), done: end, since: now, ..reading };
                    reading = self.post(now, reading)?;
                }
                Polled::Failed(read, error) => {
                    self.stats.failed += 1;
                    let share = reading.share;
                    let whole = None;
                    self.quarantine.add(Quarantined { read, share, began, failed: true, whole });
                    return Err(error.into());
                }
                Polled::Pending(read) if now.saturating_sub(began) < self.deadlines.read => {
                    let memory = Memory::Read { read, end };
                    return Ok(Advanced::GoesOn(Reading { memory, ..reading }));
                }
                Polled::Pending(read) => {
                    self.stats.late += 1;
                    let error = TransferError::Deadline {
                        source_of: reading.opened.source,
                        after: self.deadlines.read,
                        done: reading.done as u64,
                        needed: reading.opened.payload_bytes(),
                    };
                    self.let_go(Reading { memory: Memory::Read { read, end }, ..reading });
                    return Err(error);
                }
            }
        }
        self.rest(now, reading)
    }

    fn count(&mut self, offered: &Option<Manifest>, bytes: usize) {
        self.stats.bytes += bytes as u64;
        self.stats.early_bytes += if offered.is_none() { bytes as u64 } else { 0 };
    }

    /// Handles a transfer without a read under way: verifies it if it is complete, else checks whether its source is
    /// silent.
    fn rest(&mut self, now: Duration, mut reading: Reading) -> Result<Advanced, TransferError> {
        let whole = reading.take_whole(reading.done);
        let memory = match reading.memory {
            Memory::Idle(memory) => memory,
            memory => return Ok(Advanced::GoesOn(Reading { memory, ..reading })),
        };
        let after = self.deadlines.quiet;
        if reading.done < reading.ready {
            // The transfer waits for the transport, not for the source.
            reading.since = now;
        }
        match whole {
            Some(whole) => {
                let Reading { taken, share, .. } = reading;
                self.verify(whole, taken, (memory, share)).map(Advanced::Verified)
            }
            None if now.saturating_sub(reading.since) < after => {
                Ok(Advanced::GoesOn(Reading { memory: Memory::Idle(memory), ..reading }))
            }
            None => {
                self.stats.quiet += 1;
                self.give_back(memory, reading.share, reading.done);
                let (source_of, done) = (reading.opened.source, reading.done as u64);
                let needed = reading.opened.payload_bytes();
                Err(TransferError::Quiet { source_of, after, done, needed })
            }
        }
    }

    fn verify(
        &mut self,
        Whole { manifest, digests }: Whole,
        taken: Taken,
        (mut memory, share): (Registered, Share),
    ) -> Result<Verified, TransferError> {
        let compare = |region: RegionMut<'_>| verify(&manifest, &region, digests);
        let compared = self.transport.with_region(&mut memory, compare);
        if let Err(error) = compared.map_err(TransferError::from).flatten() {
            self.stats.damaged += 1;
            // The transport may have reported the end of the read too early, and the right bytes may still arrive. So
            // it keeps the memory until it is fenced, as for failed reads.
            self.quarantine.keep(share);
            return Err(error);
        }
        match self.transport.deregister(memory) {
            Ok(region) => {
                self.stats.verified += 1;
                Ok(Verified { manifest, region: self.pool.lend(region), _share: share, taken })
            }
            Err(error) => {
                self.quarantine.keep(share);
                Err(error.into())
            }
        }
    }

    /// Bytes of memory that is taken: by reads, by verified payloads that were not dropped, and by quarantine.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.budget.taken()
    }

    /// Bytes of memory of former payloads that is kept for reuse. Together with [`Self::taken_bytes`] it stays within
    /// the receiver's limit.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// Number of transfers that have not ended.
    #[must_use]
    pub fn reads(&self) -> usize {
        self.reading.len()
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> ReceiverStats {
        self.stats
    }
}

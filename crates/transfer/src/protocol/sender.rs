//! The source: its offers, and whether it still holds them.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::transfer::{Export, MoveError, PartsMut, Positions};

use super::buffers::EMPTY_BYTES;
use super::error::TransferError;
use super::offer::{Offer, Ready};
use super::open_transfer::OpenTransfer;
use crate::image::{Fingerprint, ImageError, ImageKind, Manifest, Section, Source, places};
use crate::mistake::{Mistake, made};
use crate::transport::{Descriptor, RegionMut, Registered, Storage, Transport, TransportError};

/// An open transfer that cannot be offered, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{1}")]
pub struct NotOffered(pub Box<OpenTransfer>, pub TransferError);

/// The offers of a source. It holds the payload of each offer until the offer is claimed, given up by its target, taken
/// back, or expired. Times are durations since an instant that the caller chooses.
#[derive(Debug)]
pub struct Sender<T: Transport> {
    transport: T,
    /// The memory for payloads.
    storage: Storage,
    /// A random number. It distinguishes this sender from earlier ones at the same address.
    epoch: u64,
    next: u64,
    /// Most of the bytes that `held` counts.
    limit: u64,
    /// Bytes of open transfers and offers, and of memory that is kept after them. An open transfer that is dropped counts for
    /// ever, since its memory is never freed.
    held: u64,
    offered: HashMap<u64, Offered>,
    /// How long the memory of an offer that ended without a claim, or of a transfer that was abandoned, is kept.
    linger: Duration,
    /// That memory, and the time at which [`Self::expire`] first saw it.
    lingering: Vec<(Registered, Option<Duration>)>,
}

/// A payload that may be claimed.
#[derive(Debug)]
struct Offered {
    memory: Registered,
    until: Duration,
}

impl<T: Transport> Sender<T> {
    /// A source of payloads in host memory, which targets read by `transport`. Open transfers and offers hold at most
    /// `most_bytes`, together with memory that is kept after them ([`Self::with_linger`]).
    #[must_use]
    pub fn new(transport: T, most_bytes: u64) -> Self {
        Self::with_storage(transport, (Storage::host(), most_bytes))
    }

    /// A source of payloads in at most `most_bytes` of `storage`, which targets read by `transport`. Memory of the
    /// cache's own device is an example: blocks are then packed straight into the payload.
    #[must_use]
    pub fn with_storage(transport: T, (storage, most_bytes): (Storage, u64)) -> Self {
        // Random, because std seeds its hasher randomly.
        let epoch = RandomState::new().hash_one("epoch");
        let (limit, offered) = (most_bytes, HashMap::new());
        let (linger, lingering) = (Duration::ZERO, Vec::new());
        Self { transport, storage, epoch, next: 1, limit, held: 0, offered, linger, lingering }
    }

    /// Keeps the memory of an offer that ends without a claim, or of a transfer that is abandoned after parts were copied to
    /// it, for `linger` more, at least until a call of [`Self::expire`] with a time so much later than another one; the
    /// default is not at all. A target may still read it: it reads parts as soon as they are ready, its read has missed the
    /// deadline, or a message has come late. With NIXL over TCP a source whose memory is freed
    /// meanwhile crashes: give it [`Deadlines::fence`](super::Deadlines::fence) and
    /// [`Deadlines::read`](super::Deadlines::read) of its targets together, after which they read no more. The memory of a
    /// claimed offer is freed at once: its target has all bytes.
    #[must_use]
    pub fn with_linger(self, linger: Duration) -> Self {
        Self { linger, ..self }
    }

    /// Takes memory for the payload of a request that will be at the positions `at`, with these tokens: of a prompt,
    /// before it is computed.
    ///
    /// # Errors
    /// [`TransferError::Image`] unless there are `at.trunk` tokens; [`TransferError::MovedOn`] for a request that is
    /// past `at`; [`TransferError::SenderFull`]; [`TransferError::Transport`].
    pub fn open<B: Backend>(
        &mut self,
        export: &Export<'_, B>,
        fingerprint: Fingerprint,
        (at, tokens): (Positions, &[u32]),
    ) -> Result<OpenTransfer, TransferError> {
        if tokens.len() != at.trunk as usize {
            return Err(ImageError::Tokens { tokens: tokens.len(), at }.into());
        }
        let found = export.positions();
        if found.trunk > at.trunk || found.draft > at.draft {
            return Err(TransferError::MovedOn { opened: at, found });
        }
        let parts = export.layout().parts(at).into_iter();
        let sections: Vec<_> = parts.map(|part| Section { part, digest: 0 }).collect();
        let source = self.next_source();
        let (kind, tokens) = (ImageKind::Request, tokens.to_vec());
        let manifest = Manifest { kind, fingerprint, at, source, tokens, sections };
        let (memory, payload) = self.take_memory(manifest.payload_bytes())?;
        Ok(OpenTransfer { memory, payload, manifest, id: export.id(), there: 0 })
    }

    /// The source, epoch and lease, of the next payload.
    pub(super) fn next_source(&self) -> Source {
        Source { epoch: self.epoch, lease: self.next }
    }

    pub(super) fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Memory for the payload of the next lease, and the descriptor by which peers read it.
    pub(super) fn take_memory(
        &mut self,
        needed: u64,
    ) -> Result<(Registered, Descriptor), TransferError> {
        let needed = if needed == 0 { EMPTY_BYTES } else { needed };
        let (held, limit) = (self.held, self.limit);
        let fits = held.checked_add(needed).is_some_and(|all| all <= limit);
        if !fits && !made(Mistake::LimitIgnored) {
            return Err(TransferError::SenderFull { needed, held, limit });
        }
        let memory = self.transport.register(self.storage.region(needed as usize)?)?;
        self.held += memory.len() as u64;
        match self.transport.publish(&memory) {
            Ok(payload) => {
                self.next += 1;
                Ok((memory, payload))
            }
            Err(error) => {
                // If this fails, the transport keeps the memory.
                let _ = self.free(memory);
                Err(error.into())
            }
        }
    }

    /// Frees memory. If the transport does not give it back, it still counts as held.
    pub(super) fn free(&mut self, memory: Registered) -> Result<(), TransportError> {
        let bytes = memory.len() as u64;
        self.transport.deregister(memory)?;
        self.held -= bytes;
        Ok(())
    }

    /// Copies the parts of the request that are final and were not copied yet to the transfer: full blocks, and everything
    /// else once the request has reached the transfer's positions.
    ///
    /// # Errors
    /// [`TransferError::NotHeld`] for another sender's transfer; [`TransferError::OtherRequest`];
    /// [`TransferError::MovedOn`] for a request that is past the transfer's positions; [`TransferError::Cache`],
    /// [`TransferError::Transport`]. The transfer has as many parts as before.
    pub fn take<B: Backend>(
        &mut self,
        transfer: &mut OpenTransfer,
        export: &mut Export<'_, B>,
    ) -> Result<Ready, TransferError> {
        self.check_own(transfer)?;
        let parts = transfer.next(export)?;
        if !parts.is_empty() {
            let bytes = transfer.bytes(parts.clone());
            let OpenTransfer { memory, manifest, .. } = transfer;
            let sections = &manifest.sections[parts.clone()];
            let device = export.device().clone();
            let work = |payload: RegionMut<'_>| {
                let (part, of) = ((payload, bytes.clone()), (sections, &device));
                fill(part, of, |into| copy(export, parts.clone(), into))
            };
            let sections = self.transport.with_region(memory, work)??;
            self.transport.flush(memory, bytes)?;
            manifest.sections.splice(parts.clone(), sections);
            transfer.there = parts.end;
        }
        Ok(transfer.ready())
    }

    /// Frees an open transfer without offering it ([`Self::with_linger`]).
    ///
    /// # Errors
    /// [`TransferError::NotHeld`] for another sender's transfer, which is dropped: its bytes count as held by that sender
    /// for ever. [`TransferError::Transport`].
    pub fn abandon(&mut self, transfer: OpenTransfer) -> Result<(), TransferError> {
        self.check_own(&transfer)?;
        // A target may read what was copied.
        if transfer.there > 0 && !self.linger.is_zero() {
            self.lingering.push((transfer.memory, None));
            return Ok(());
        }
        Ok(self.free(transfer.memory)?)
    }

    /// Refuses another sender's transfer: its bytes are not in this sender's account.
    fn check_own(&self, transfer: &OpenTransfer) -> Result<(), TransferError> {
        let source_of = transfer.manifest.source;
        let is_own = source_of.epoch == self.epoch;
        if is_own { Ok(()) } else { Err(TransferError::NotHeld { source_of }) }
    }

    /// Offers an open transfer whose parts were all copied. Returns the message for the control channel. The offer can be
    /// claimed until [`Self::expire`] is called with a time later than `until`.
    ///
    /// # Errors
    /// [`TransferError::NotWhole`], and [`TransferError::NotHeld`] for another sender's transfer, with the transfer.
    pub fn offer(&mut self, transfer: OpenTransfer, until: Duration) -> Result<Offer, NotOffered> {
        if let Err(error) = self.check_own(&transfer) {
            return Err(NotOffered(Box::new(transfer), error));
        }
        if !transfer.is_whole() {
            let (there, needed) = (transfer.there, transfer.manifest.sections.len());
            let error = TransferError::NotWhole { there, needed };
            return Err(NotOffered(Box::new(transfer), error));
        }
        let OpenTransfer { memory, payload, manifest, .. } = transfer;
        Ok(self.hold((memory, payload), &manifest, until))
    }

    /// Enters a payload as an offer, which can be claimed from now on.
    pub(super) fn hold(
        &mut self,
        (memory, payload): (Registered, Descriptor),
        manifest: &Manifest,
        until: Duration,
    ) -> Offer {
        self.offered.insert(manifest.source.lease, Offered { memory, until });
        Offer { manifest: manifest.encode(), payload }
    }

    /// A target has all bytes and asks whether it may admit the request. `true` once, and only while the sender holds
    /// the offer. The request then belongs to the target, and the caller releases its own copy.
    pub fn claim(&mut self, source: Source) -> bool {
        source.epoch == self.epoch && self.end(source.lease, true)
    }

    /// A target reports that it does not want its offer and has not admitted it: frees the memory
    /// ([`Self::with_linger`]). `false` if the offer
    /// was claimed, taken back or expired before, or is another sender's. `false` does not say who has the request: the
    /// target whose claim was answered with yes, or no cache at all if that target is the one that gives up.
    pub fn give_up(&mut self, source: Source) -> bool {
        source.epoch == self.epoch && self.take_back(source.lease)
    }

    /// Takes an offer back: it can no longer be claimed, and its memory is free ([`Self::with_linger`]). `false` if it was
    /// claimed or taken back before.
    pub fn take_back(&mut self, lease: u64) -> bool {
        self.end(lease, false)
    }

    /// Ends an offer. `is_read` says that nobody reads its memory any more.
    fn end(&mut self, lease: u64, is_read: bool) -> bool {
        let Some(Offered { memory, .. }) = self.offered.remove(&lease) else { return false };
        if is_read || self.linger.is_zero() {
            // If this fails, the transport keeps the memory; the lease is over in any case.
            let _ = self.free(memory);
        } else {
            self.lingering.push((memory, None));
        }
        true
    }

    /// Takes back all offers whose time is before `now`, and returns their sources. Their requests belong to the caller
    /// again, which can continue or release them. Frees memory that was kept for its time ([`Self::with_linger`]).
    pub fn expire(&mut self, now: Duration) -> Vec<Source> {
        let is_over = |offered: &Offered| offered.until < now && !made(Mistake::LeaseIgnored);
        let over = self.offered.iter().filter(|(_, offered)| is_over(offered));
        let mut leases: Vec<_> = over.map(|(&lease, _)| lease).collect();
        leases.sort_unstable();
        leases.retain(|&lease| self.take_back(lease));
        for _ in 0..self.lingering.len() {
            // One at a time, so that a panic in the transport loses no other memory.
            let (memory, since) = self.lingering.remove(0);
            let since = since.unwrap_or(now);
            if now.saturating_sub(since) < self.linger {
                self.lingering.push((memory, Some(since)));
            } else {
                // If this fails, the transport keeps the memory.
                let _ = self.free(memory);
            }
        }
        let epoch = self.epoch;
        leases.into_iter().map(|lease| Source { epoch, lease }).collect()
    }

    /// Number of offers that were not claimed yet.
    #[must_use]
    pub fn offers(&self) -> usize {
        self.offered.len()
    }

    /// Bytes of open transfers and offers, of memory that is kept after them ([`Self::with_linger`]), and of memory that the
    /// transport could not give back.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }
}

/// Lets `copy` write bytes of a payload: in place if the payload is in host memory or on `device`, else through host
/// memory. Returns the sections with their digests.
pub(super) fn fill<B: Backend>(
    (mut payload, bytes): (RegionMut<'_>, Range<usize>),
    (sections, device): (&[Section], &Device<B>),
    copy: impl FnOnce(PartsMut<'_, B>) -> Result<(), MoveError>,
) -> Result<Vec<Section>, TransferError> {
    let places: Vec<_> = places(sections, bytes.start).collect();
    if payload.host().is_some() {
        copy(PartsMut::Host(&mut payload.bytes_mut()[bytes]))?;
    } else if let Some(all) = payload.buffer_of(device) {
        let part = all.slice(bytes.start as u64, bytes.len() as u64);
        copy(PartsMut::Device(part.expect("the payload has all its parts")))?;
    } else {
        // The payload is on another device.
        let mut own = vec![0; bytes.len()];
        copy(PartsMut::Host(&mut own))?;
        payload.write(bytes.start, &own)?;
    }
    let digests = sections.iter().zip(payload.digests(&places)?);
    Ok(digests.map(|(&Section { part, .. }, digest)| Section { part, digest }).collect())
}

/// Copies parts of a request to `into`, without gaps.
fn copy<B: Backend>(
    export: &mut Export<'_, B>,
    parts: Range<usize>,
    mut into: PartsMut<'_, B>,
) -> Result<(), MoveError> {
    let (layout, at) = (export.layout(), export.positions());
    let (held, bytes) = (layout.blocks(at.trunk) as usize, layout.block_bytes() as usize);
    let of_state: usize = layout.state(at).map(|part| part.bytes as usize).sum();
    let blocks = parts.start.min(held)..parts.end.min(held);
    let state = blocks.len() * bytes;
    if !blocks.is_empty() {
        export.blocks_to(blocks.start as u32..blocks.end as u32, into.part(0..state))?;
    }
    // The parts of the state all become final at once.
    if parts.end > held { export.state_to(into.part(state..state + of_state)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Fabric, Loopback};

    /// A payload without bytes takes a mapping too: a sender has room for a limited number of them.
    #[test]
    fn empty_payloads_count() {
        let mut sender = Sender::new(Loopback::new(&Fabric::default()), 2 * EMPTY_BYTES);
        let taken = [0, 1].map(|_| sender.take_memory(0).expect("there is room"));
        assert_eq!(sender.held_bytes(), 2 * EMPTY_BYTES);
        let refused = sender.take_memory(0).map(drop);
        assert!(matches!(refused, Err(TransferError::SenderFull { .. })), "{refused:?}");
        drop(taken);
    }
}

//! The source: what it offers, and whether it still holds it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::transfer::{Export, MoveError, PartsMut, Positions};

use super::draft::Draft;
use super::error::TransferError;
use super::offer::{Offer, Ready};
use crate::image::{Fingerprint, ImageError, ImageKind, Manifest, Section, Source, places};
use crate::mistake::{Mistake, made};
use crate::transport::{Descriptor, RegionMut, Registered, Storage, Transport, TransportError};

/// A payload that is not whole, and why it cannot be offered.
#[derive(Debug, thiserror::Error)]
#[error("{1}")]
pub struct NotOffered(pub Box<Draft>, pub TransferError);

/// What a source offers. It holds the payload of each offer until that is claimed, given up by its target, taken back, or
/// until its time ends. Times count from whenever the caller likes.
#[derive(Debug)]
pub struct Sender<T: Transport> {
    transport: T,
    /// Of which payloads are made.
    storage: Storage,
    /// Tells this sender from those that had its address before it.
    epoch: u64,
    next: u64,
    /// Most bytes of drafts and offers.
    limit: u64,
    /// Bytes of drafts and offers. A draft that is dropped is among them for ever, as its memory is.
    held: u64,
    offered: HashMap<u64, Offered>,
}

/// A payload that may be claimed.
#[derive(Debug)]
struct Offered {
    memory: Registered,
    until: Duration,
}

impl<T: Transport> Sender<T> {
    /// A source of payloads in host memory, which are read by `transport`. Drafts and offers take no more than `most_bytes`
    /// together.
    #[must_use]
    pub fn new(transport: T, most_bytes: u64) -> Self {
        Self::with_storage(transport, (Storage::host(), most_bytes))
    }

    /// A source of payloads in so many bytes of this memory, which `transport` reads: of the cache's own device for instance,
    /// where they are packed.
    #[must_use]
    pub fn with_storage(transport: T, (storage, most_bytes): (Storage, u64)) -> Self {
        // Random: std's keys for hashing are.
        let epoch = RandomState::new().hash_one("epoch");
        let (limit, offered) = (most_bytes, HashMap::new());
        Self { transport, storage, epoch, next: 1, limit, held: 0, offered }
    }

    /// Memory for the payload of a request that will be so far, with these tokens: of a prompt, before it is computed.
    ///
    /// # Errors
    /// [`TransferError::Image`] for more or fewer tokens than positions; [`TransferError::MovedOn`] for a request that is
    /// farther; [`TransferError::SenderFull`]; [`TransferError::Transport`].
    pub fn draft<B: Backend>(
        &mut self,
        export: &Export<'_, B>,
        fingerprint: Fingerprint,
        (at, tokens): (Positions, &[u32]),
    ) -> Result<Draft, TransferError> {
        if tokens.len() != at.trunk as usize {
            return Err(ImageError::Tokens { tokens: tokens.len(), at }.into());
        }
        let found = export.positions();
        if found.trunk > at.trunk || found.draft > at.draft {
            return Err(TransferError::MovedOn { drafted: at, found });
        }
        let parts = export.layout().parts(at).into_iter();
        let sections: Vec<_> = parts.map(|part| Section { part, digest: 0 }).collect();
        let source = self.next_source();
        let (kind, tokens) = (ImageKind::Request, tokens.to_vec());
        let manifest = Manifest { kind, fingerprint, at, source, tokens, sections };
        let (memory, payload) = self.take_memory(manifest.payload_bytes())?;
        Ok(Draft { memory, payload, manifest, id: export.id(), there: 0 })
    }

    /// What the next payload will be called.
    pub(super) fn next_source(&self) -> Source {
        Source { epoch: self.epoch, lease: self.next }
    }

    pub(super) fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Memory for the payload of the next lease, and what peers need to read it.
    pub(super) fn take_memory(
        &mut self,
        needed: u64,
    ) -> Result<(Registered, Descriptor), TransferError> {
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
                // The transport keeps it if that fails.
                let _ = self.free(memory);
                Err(error.into())
            }
        }
    }

    /// Memory that the transport does not give back counts as held.
    pub(super) fn free(&mut self, memory: Registered) -> Result<(), TransportError> {
        let bytes = memory.len() as u64;
        self.transport.deregister(memory)?;
        self.held -= bytes;
        Ok(())
    }

    /// Copies to a payload what is final now of its request and not there yet: blocks that are full, and all that is left
    /// once the request is as far as the draft says.
    ///
    /// # Errors
    /// [`TransferError::NotHeld`] for another sender's draft; [`TransferError::OtherRequest`]; [`TransferError::MovedOn`] for
    /// a request that has gone past the draft's positions; [`TransferError::Cache`], [`TransferError::Transport`]. The draft
    /// is as it was.
    pub fn take<B: Backend>(
        &mut self,
        draft: &mut Draft,
        export: &mut Export<'_, B>,
    ) -> Result<Ready, TransferError> {
        self.check_own(draft)?;
        let parts = draft.next(export)?;
        if !parts.is_empty() {
            let bytes = draft.bytes(parts.clone());
            let Draft { memory, manifest, .. } = draft;
            let sections = &manifest.sections[parts.clone()];
            let device = export.device().clone();
            let work = |payload: RegionMut<'_>| {
                let (part, of) = ((payload, bytes.clone()), (sections, &device));
                fill(part, of, |into| copy(export, parts.clone(), into))
            };
            let sections = self.transport.with_region(memory, work)??;
            self.transport.flush(memory, bytes)?;
            manifest.sections.splice(parts.clone(), sections);
            draft.there = parts.end;
        }
        Ok(draft.ready())
    }

    /// Gives a payload up that was not offered.
    ///
    /// # Errors
    /// [`TransferError::NotHeld`] for another sender's draft, which is dropped: that sender holds its bytes from then on.
    /// [`TransferError::Transport`].
    pub fn abandon(&mut self, draft: Draft) -> Result<(), TransferError> {
        self.check_own(&draft)?;
        Ok(self.free(draft.memory)?)
    }

    /// Refuses another sender's draft, whose bytes are not among those that this one holds.
    fn check_own(&self, draft: &Draft) -> Result<(), TransferError> {
        let source_of = draft.manifest.source;
        let is_own = source_of.epoch == self.epoch;
        if is_own { Ok(()) } else { Err(TransferError::NotHeld { source_of }) }
    }

    /// Offers a payload that is whole: what goes over the control channel. It can be claimed until [`Self::expire`] is called
    /// with a later time than `until`.
    ///
    /// # Errors
    /// [`TransferError::NotWhole`], and [`TransferError::NotHeld`] for another sender's draft, with the draft.
    pub fn offer(&mut self, draft: Draft, until: Duration) -> Result<Offer, NotOffered> {
        if let Err(error) = self.check_own(&draft) {
            return Err(NotOffered(Box::new(draft), error));
        }
        if !draft.is_whole() {
            let (there, needed) = (draft.there, draft.manifest.sections.len());
            let error = TransferError::NotWhole { there, needed };
            return Err(NotOffered(Box::new(draft), error));
        }
        let Draft { memory, payload, manifest, .. } = draft;
        Ok(self.hold((memory, payload), &manifest, until))
    }

    /// From now on it can be claimed.
    pub(super) fn hold(
        &mut self,
        (memory, payload): (Registered, Descriptor),
        manifest: &Manifest,
        until: Duration,
    ) -> Offer {
        self.offered.insert(manifest.source.lease, Offered { memory, until });
        Offer { manifest: manifest.encode(), payload }
    }

    /// A target has all bytes and is about to admit the request: whether it may. It may once, and only while the source
    /// holds what it offered; from then on the request is the target's, and the source gives its own up.
    pub fn claim(&mut self, source: Source) -> bool {
        source.epoch == self.epoch && self.take_back(source.lease)
    }

    /// A target says that it does not want what it was offered, and has not admitted it: its memory is free. `false` if the
    /// offer was claimed, taken back or ended before, or is another sender's. Then this says nothing of who has the request: the
    /// target whose claim was answered with yes, or nobody, if that is the one that gives up.
    pub fn give_up(&mut self, source: Source) -> bool {
        source.epoch == self.epoch && self.take_back(source.lease)
    }

    /// Takes an offer back: nobody can claim it any more, and its memory is free for something else. `false` if it was
    /// claimed, or taken back before.
    pub fn take_back(&mut self, lease: u64) -> bool {
        let Some(Offered { memory, .. }) = self.offered.remove(&lease) else { return false };
        // A failed call keeps the memory, and the lease is over all the same.
        let _ = self.free(memory);
        true
    }

    /// Takes back all offers whose time is before `now`: which. Their requests are the caller's again, to go on here or to be
    /// released.
    pub fn expire(&mut self, now: Duration) -> Vec<Source> {
        let is_over = |offered: &Offered| offered.until < now && !made(Mistake::LeaseIgnored);
        let over = self.offered.iter().filter(|(_, offered)| is_over(offered));
        let mut leases: Vec<_> = over.map(|(&lease, _)| lease).collect();
        leases.sort_unstable();
        leases.retain(|&lease| self.take_back(lease));
        let epoch = self.epoch;
        leases.into_iter().map(|lease| Source { epoch, lease }).collect()
    }

    /// Offers that nobody has claimed yet.
    #[must_use]
    pub fn offers(&self) -> usize {
        self.offered.len()
    }

    /// Bytes of drafts and offers, and of memory that the transport could not give back.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }
}

/// Lets `copy` write bytes of a payload, in the memory of its cache's device if it is there; their sections.
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
        // Of another device.
        let mut own = vec![0; bytes.len()];
        copy(PartsMut::Host(&mut own))?;
        payload.write(bytes.start, &own)?;
    }
    let digests = sections.iter().zip(payload.digests(&places)?);
    Ok(digests.map(|(&Section { part, .. }, digest)| Section { part, digest }).collect())
}

/// Copies parts of a request, one behind the other.
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
    // The state is final as a whole.
    if parts.end > held { export.state_to(into.part(state..state + of_state)) } else { Ok(()) }
}

//! The source: what it offers, and whether it still holds it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use dsv4_kv::transfer::{PartLayout, Positions};

use super::error::TransferError;
use super::offer::Offer;
use crate::image::{Fingerprint, Manifest, Section, Source};
use crate::transport::{Region, Registered, Transport};

/// Memory for the payload of a request, which is filled part by part: blocks as they become full, the state last.
#[derive(Debug)]
#[must_use = "memory that is dropped is lost to its transport; offer or abandon it"]
pub struct Draft {
    memory: Registered,
}

/// What a source offers. It holds the payload of each offer until that is claimed, or taken back.
#[derive(Debug)]
pub struct Sender<T: Transport> {
    transport: T,
    /// Tells this sender from those that had its address before it.
    epoch: u64,
    next: u64,
    offered: HashMap<u64, Registered>,
}

impl<T: Transport> Sender<T> {
    /// A source of payloads that are read by `transport`.
    #[must_use]
    pub fn new(transport: T) -> Self {
        // Random: std's keys for hashing are.
        let epoch = RandomState::new().hash_one("epoch");
        Self { transport, epoch, next: 1, offered: HashMap::new() }
    }

    /// Memory for the payload of a request that will be so far.
    ///
    /// # Errors
    /// [`TransferError::Transport`].
    pub fn draft(&mut self, layout: &PartLayout, at: Positions) -> Result<Draft, TransferError> {
        let bytes = layout.parts(at).iter().map(|part| part.bytes as usize).sum();
        Ok(Draft { memory: self.transport.register(Region::new(bytes)?)? })
    }

    /// Lets `work` fill a payload.
    ///
    /// # Errors
    /// [`TransferError::Transport`].
    pub fn fill<R>(
        &mut self,
        draft: &mut Draft,
        work: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TransferError> {
        Ok(self.transport.with_bytes(&mut draft.memory, work)?)
    }

    /// Gives a payload up that was not offered.
    ///
    /// # Errors
    /// [`TransferError::Transport`].
    pub fn abandon(&mut self, draft: Draft) -> Result<(), TransferError> {
        self.transport.deregister(draft.memory)?;
        Ok(())
    }

    /// Offers a payload that is filled: what goes over the control channel. Of the payload each part gets its digest now.
    ///
    /// # Errors
    /// [`TransferError::Transport`]; the payload is given up then.
    pub fn offer(
        &mut self,
        draft: Draft,
        (fingerprint, layout): (Fingerprint, &PartLayout),
        (at, tokens): (Positions, &[u32]),
    ) -> Result<Offer, TransferError> {
        let Draft { mut memory } = draft;
        let parts = layout.parts(at);
        let digests = self.transport.with_bytes(&mut memory, |bytes| {
            let mut rest = &bytes[..];
            let section = |part: &dsv4_kv::transfer::Part| {
                let own = rest.split_off(..part.bytes as usize)?;
                Some(Section::of(*part, own))
            };
            parts.iter().map_while(section).collect()
        })?;
        let source = Source { epoch: self.epoch, lease: self.next };
        let manifest =
            Manifest { fingerprint, at, source, tokens: tokens.to_vec(), sections: digests };
        let payload = self.transport.publish(&memory)?;
        self.next += 1;
        self.offered.insert(source.lease, memory);
        Ok(Offer { manifest: manifest.encode(), payload })
    }

    /// A target has all bytes and is about to admit the request: whether it may. It may once, and only while the source
    /// holds what it offered; from then on the request is the target's, and the source gives its own up.
    pub fn claim(&mut self, source: Source) -> bool {
        source.epoch == self.epoch && self.take_back(source.lease)
    }

    /// Takes an offer back: nobody can claim it any more, and its memory is free for something else. `false` if it was
    /// claimed, or taken back before.
    pub fn take_back(&mut self, lease: u64) -> bool {
        let Some(memory) = self.offered.remove(&lease) else { return false };
        // A failed call keeps the memory, and the lease is over all the same.
        let _ = self.transport.deregister(memory);
        true
    }

    /// Offers that nobody has claimed yet.
    #[must_use]
    pub fn offers(&self) -> usize {
        self.offered.len()
    }
}

//! The source: what it offers, and whether it still holds it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use dsv4_kv::transfer::{Part, PartLayout, Positions};

use super::error::TransferError;
use super::offer::Offer;
use crate::image::{Fingerprint, ImageError, Manifest, Section, Source};
use crate::transport::{Region, Registered, Transport};

/// Memory for the payload of a request, which is filled part by part: blocks as they become full, the state last.
#[derive(Debug)]
#[must_use = "memory that is dropped is lost to its transport; offer or abandon it"]
pub struct Draft {
    memory: Registered,
    at: Positions,
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
        Ok(Draft { memory: self.transport.register(Region::new(bytes)?)?, at })
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
    /// [`TransferError::OtherDraft`], [`TransferError::Image`] for tokens or a layout that are not the draft's,
    /// [`TransferError::Transport`]; the payload is given up then.
    pub fn offer(
        &mut self,
        draft: Draft,
        (fingerprint, layout): (Fingerprint, &PartLayout),
        (at, tokens): (Positions, &[u32]),
    ) -> Result<Offer, TransferError> {
        let source = Source { epoch: self.epoch, lease: self.next };
        let tokens = tokens.to_vec();
        let manifest = Manifest { fingerprint, at, source, tokens, sections: Vec::new() };
        let Draft { mut memory, at: drafted } = draft;
        let offer = match manifest.at == drafted {
            true => self.describe(manifest, layout, &mut memory),
            false => Err(TransferError::OtherDraft { drafted, offered: at }),
        };
        match offer {
            Ok(_) => {
                self.next += 1;
                self.offered.insert(source.lease, memory);
            }
            // The transport keeps it if that fails.
            Err(_) => drop(self.transport.deregister(memory)),
        }
        offer
    }

    fn describe(
        &mut self,
        mut manifest: Manifest,
        layout: &PartLayout,
        memory: &mut Registered,
    ) -> Result<Offer, TransferError> {
        let (at, tokens) = (manifest.at, manifest.tokens.len());
        if tokens != at.trunk as usize {
            return Err(ImageError::Tokens { tokens, at }.into());
        }
        let parts = layout.parts(at);
        let needed = parts.iter().map(|part| part.bytes).sum();
        let found = memory.len() as u64;
        let length = ImageError::Length { needed, found };
        // Memory has a byte at least.
        if found != needed.max(1) {
            return Err(length.into());
        }
        let sections = self.transport.with_bytes(memory, |bytes| {
            let mut rest = &bytes[..];
            let section =
                |part: &Part| Some(Section::of(*part, rest.split_off(..part.bytes as usize)?));
            parts.iter().map(section).collect::<Option<Vec<_>>>()
        })?;
        manifest.sections = sections.ok_or(length)?;
        let payload = self.transport.publish(memory)?;
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

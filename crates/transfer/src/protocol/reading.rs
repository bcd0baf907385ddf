//! A request whose payload is being read.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use super::offer::{Offer, Ready};
use super::sources::Taken;
use super::transfer_id::TransferId;
use crate::image::{Digests, ImageError, Manifest, check_end, decode_manifest};
use crate::mistake::{Mistake, made};
use crate::transport::{Descriptor, InFlight, Region, Registered};

/// A transfer that was neither given up nor ended.
#[derive(Debug)]
pub(super) struct Reading {
    pub id: TransferId,
    pub taken: Taken,
    /// The manifest of the opening, without digests.
    pub opened: Manifest,
    /// The manifest of the offer, once it has arrived.
    pub offered: Option<Manifest>,
    /// Where the payload is.
    pub from: Descriptor,
    pub memory: Memory,
    pub share: Share,
    /// Digests of the sections that were read to host memory so far.
    pub digests: Digests,
    /// Bytes that the source has ready.
    pub ready: usize,
    /// Bytes that were read.
    pub done: usize,
    /// The end, in bytes, of the pieces whose common deadline is [`Deadlines::read`](super::Deadlines::read) after
    /// `began`.
    pub goal: usize,
    /// When the first of these pieces was begun.
    pub began: Duration,
    /// When the source last sent a message, or the last read ended.
    pub since: Duration,
}

/// What the bytes of a payload are compared with.
#[derive(Debug)]
pub(super) struct Whole {
    /// The manifest of the offer.
    pub manifest: Manifest,
    /// The digests that were computed while the payload was read.
    pub digests: Digests,
}

/// Memory for a payload.
#[derive(Debug)]
pub(super) enum Memory {
    /// No read writes it.
    Idle(Registered),
    /// A read writes it.
    Read {
        read: InFlight,
        /// The end, in bytes, of the piece that it reads.
        end: usize,
    },
    /// Taken out of the transport while the transport is fenced.
    Out(Region),
}

impl Reading {
    /// Notes that the source has more bytes ready.
    pub fn extend(&mut self, now: Duration, ready: &Ready) -> Result<(), TransferError> {
        let (asked, source_of) = (self.opened.source, ready.source);
        if source_of != asked {
            return Err(TransferError::OtherSource { asked, source_of });
        }
        let (needed, found) = (self.opened.payload_bytes(), ready.bytes);
        if found > needed {
            return Err(ImageError::Length { needed, found }.into());
        }
        self.ready = self.ready.max(found as usize);
        self.since = now;
        Ok(())
    }

    /// Notes the offer: the source has all bytes ready.
    pub fn offer(&mut self, now: Duration, offer: &Offer) -> Result<(), TransferError> {
        let (manifest, behind) = decode_manifest(&offer.manifest)?;
        check_end(&offer.manifest, behind)?;
        let is_opened = manifest.without_digests() == self.opened;
        if !is_opened && !made(Mistake::OpeningIgnored) {
            let (opened, found) = (self.opened.at, manifest.at);
            return Err(ImageError::OtherThanOpened { opened, found }.into());
        }
        if !is_opened {
            // The parts may differ from those that were digested.
            self.digests = Digests::default();
        }
        self.ready = self.opened.payload_bytes() as usize;
        self.offered = Some(manifest);
        self.since = now;
        Ok(())
    }

    /// What a payload of which `read` bytes were read is compared with, if these are all and the offer has come.
    pub fn take_whole(&mut self, read: usize) -> Option<Whole> {
        let is_whole = read as u64 == self.opened.payload_bytes();
        let manifest = self.offered.take_if(|_| is_whole)?;
        Some(Whole { manifest, digests: std::mem::take(&mut self.digests) })
    }

    /// As [`Self::take_whole`], for the end of the read under way.
    pub fn whole_after_read(&mut self) -> Option<Whole> {
        let Memory::Read { end, .. } = self.memory else { return None };
        self.take_whole(end)
    }
}

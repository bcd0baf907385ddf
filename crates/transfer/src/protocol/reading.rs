//! A request that comes, until all of it has been read.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use super::offer::{Offer, Ready};
use super::sources::Taken;
use super::transfer_id::TransferId;
use crate::image::{Digests, ImageError, Manifest, check_end, decode_manifest};
use crate::mistake::{Mistake, made};
use crate::transport::{Descriptor, InFlight, Region, Registered};

/// A request that somebody waits for.
#[derive(Debug)]
pub(super) struct Reading {
    pub id: TransferId,
    pub taken: Taken,
    /// What was opened, without digests.
    pub opened: Manifest,
    /// What was offered, once it was.
    pub offered: Option<Manifest>,
    /// Where the payload is.
    pub from: Descriptor,
    pub memory: Memory,
    pub share: Share,
    /// Of what was read to memory of the host.
    pub digests: Digests,
    /// Bytes that the source has.
    pub ready: usize,
    /// Bytes that were read.
    pub done: usize,
    /// Bytes that are read until [`Deadlines::read`](super::Deadlines::read) behind `began`, piece by piece.
    pub goal: usize,
    /// When the first of these pieces was begun.
    pub began: Duration,
    /// When the source last said something, or the last read ended.
    pub since: Duration,
}

/// Memory for a payload.
#[derive(Debug)]
pub(super) enum Memory {
    /// No read writes it.
    Idle(Registered),
    /// A read writes it.
    Read {
        read: InFlight,
        /// The end of what it reads.
        end: usize,
    },
    /// The transport has it not, since it is made again.
    Out(Region),
}

impl Reading {
    /// The source has more.
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

    /// The source has all of it.
    pub fn offer(&mut self, now: Duration, offer: &Offer) -> Result<(), TransferError> {
        let (manifest, behind) = decode_manifest(&offer.manifest)?;
        check_end(&offer.manifest, behind)?;
        let is_opened = manifest.without_digests() == self.opened;
        if !is_opened && !made(Mistake::OpeningIgnored) {
            let (opened, found) = (self.opened.at, manifest.at);
            return Err(ImageError::OtherThanOpened { opened, found }.into());
        }
        if !is_opened {
            // Their parts may be others.
            self.digests = Digests::default();
        }
        self.ready = self.opened.payload_bytes() as usize;
        self.offered = Some(manifest);
        self.since = now;
        Ok(())
    }

    /// What was offered, if all of it has been read.
    pub fn take_whole(&mut self) -> Option<Manifest> {
        let is_whole = self.done as u64 == self.opened.payload_bytes();
        self.offered.take_if(|_| is_whole)
    }
}

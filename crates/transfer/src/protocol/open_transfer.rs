//! The payload of a request that will move, filled while the request is computed.

use std::ops::Range;

use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::Export;

use super::error::TransferError;
use super::offer::{Opening, Ready};
use crate::image::{Manifest, Section, Source};
use crate::transport::{Descriptor, Registered};

/// Memory for the payload of a request, which is filled part by part: blocks as they become full, the state last.
#[derive(Debug)]
#[must_use = "memory that is dropped is lost to its transport; offer or abandon it"]
pub struct OpenTransfer {
    pub(super) memory: Registered,
    pub(super) payload: Descriptor,
    /// The manifest that will be offered. It has the digests of the parts that were copied; the others are 0.
    pub(super) manifest: Manifest,
    /// The request.
    pub(super) id: RequestId,
    /// Number of parts that were copied.
    pub(super) there: usize,
}

impl OpenTransfer {
    /// The lease under which the sender holds it.
    #[must_use]
    pub fn source(&self) -> Source {
        self.manifest.source
    }

    /// The message to send before any part is copied, so that the target can read blocks as they become ready.
    #[must_use]
    pub fn opening(&self) -> Opening {
        Opening { manifest: self.manifest.encode_opening(), payload: self.payload.clone() }
    }

    /// How many bytes are ready: all parts that were copied.
    #[must_use]
    pub fn ready(&self) -> Ready {
        let bytes = self.bytes(0..self.there).end as u64;
        Ready { source: self.manifest.source, bytes }
    }

    /// Whether all parts were copied.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.there == self.manifest.sections.len()
    }

    /// The parts of the request that are final and were not copied yet: full blocks, or all parts once the request has
    /// reached the transfer's positions.
    pub(super) fn next<B: Backend>(
        &self,
        export: &Export<'_, B>,
    ) -> Result<Range<usize>, TransferError> {
        let (opened, found) = (self.manifest.at, export.positions());
        if export.id() != self.id {
            return Err(TransferError::OtherRequest { opened: self.id, found: export.id() });
        }
        if found.trunk > opened.trunk || found.draft > opened.draft {
            return Err(TransferError::MovedOn { opened, found });
        }
        let end = match found == opened {
            true => self.manifest.sections.len(),
            false => export.layout().full_blocks(found) as usize,
        };
        Ok(self.there..end.max(self.there))
    }

    /// The bytes of these parts in the payload.
    pub(super) fn bytes(&self, parts: Range<usize>) -> Range<usize> {
        let bytes = |sections: &[Section]| {
            sections.iter().map(|section| section.part.bytes as usize).sum::<usize>()
        };
        let start = bytes(&self.manifest.sections[..parts.start]);
        start..start + bytes(&self.manifest.sections[parts])
    }
}

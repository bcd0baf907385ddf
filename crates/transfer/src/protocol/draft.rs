//! The payload of a request that is to leave, while it is computed.

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
pub struct Draft {
    pub(super) memory: Registered,
    pub(super) payload: Descriptor,
    /// What will be offered. Digests are of the parts that are there.
    pub(super) manifest: Manifest,
    /// The request.
    pub(super) id: RequestId,
    /// Parts that are there.
    pub(super) there: usize,
}

impl Draft {
    /// What the source holds for it.
    #[must_use]
    pub fn source(&self) -> Source {
        self.manifest.source
    }

    /// What goes over the control channel before anything is there, so that the target can read blocks as they come.
    #[must_use]
    pub fn opening(&self) -> Opening {
        Opening { manifest: self.manifest.encode_opening(), payload: self.payload.clone() }
    }

    /// What is there.
    #[must_use]
    pub fn ready(&self) -> Ready {
        let bytes = self.bytes(0..self.there).end as u64;
        Ready { source: self.manifest.source, bytes }
    }

    /// Whether all of it is there.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.there == self.manifest.sections.len()
    }

    /// The parts that are final now, and not there yet.
    pub(super) fn next<B: Backend>(
        &self,
        export: &Export<'_, B>,
    ) -> Result<Range<usize>, TransferError> {
        let (drafted, found) = (self.manifest.at, export.positions());
        if export.id() != self.id {
            return Err(TransferError::OtherRequest { drafted: self.id, found: export.id() });
        }
        if found.trunk > drafted.trunk || found.draft > drafted.draft {
            return Err(TransferError::MovedOn { drafted, found });
        }
        let end = match found == drafted {
            true => self.manifest.sections.len(),
            false => export.layout().full_blocks(found) as usize,
        };
        Ok(self.there..end.max(self.there))
    }

    /// Where parts lie in the payload.
    pub(super) fn bytes(&self, parts: Range<usize>) -> Range<usize> {
        let bytes = |sections: &[Section]| {
            sections.iter().map(|section| section.part.bytes as usize).sum::<usize>()
        };
        let start = bytes(&self.manifest.sections[..parts.start]);
        start..start + bytes(&self.manifest.sections[parts])
    }
}

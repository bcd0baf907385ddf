//! A payload that was compared with its digests.

use dsv4_kv::device::{Backend, Buffer, Device};
use dsv4_kv::transfer::Parts;

use super::error::TransferError;
use super::memory::{Lent, Share};
use super::sources::Taken;
use crate::image::{Digests, Manifest, places};
use crate::transport::{MemoryKind, Region, TransportError};

/// Where the bytes of a payload are.
pub(super) enum Payload<'v, B: Backend> {
    Host(&'v [u8]),
    Device(Buffer<B, u8>),
    Copied(Vec<u8>),
}

impl<B: Backend> Payload<'_, B> {
    pub fn as_parts(&self) -> Parts<'_, B> {
        match self {
            Self::Host(bytes) => Parts::Host(bytes),
            Self::Device(buffer) => Parts::Device(buffer.clone()),
            Self::Copied(bytes) => Parts::Host(bytes),
        }
    }
}

/// A payload whose digests are right, in memory that no read writes.
#[derive(Debug)]
pub struct Verified {
    pub(super) manifest: Manifest,
    pub(super) region: Lent,
    pub(super) _share: Share,
    pub(super) taken: Taken,
}

impl Verified {
    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its bytes.
    ///
    /// # Panics
    /// If they are in device memory ([`Self::kind`]); [`Self::copy`] copies them.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.region.bytes()[..self.bytes()]
    }

    /// Number of bytes of the payload.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.manifest.payload_bytes() as usize
    }

    /// The kind of memory that holds the bytes.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.region.kind()
    }

    /// A copy of its bytes in host memory.
    ///
    /// # Errors
    /// [`TransportError::Device`].
    pub fn copy(&self) -> Result<Vec<u8>, TransportError> {
        let mut bytes = vec![0; self.bytes()];
        self.region.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Its bytes for a cache on `device`: in place if they are on that device or in host memory, and as a copy in host
    /// memory if they are on another device.
    pub(super) fn parts<B: Backend>(
        &self,
        device: &Device<B>,
    ) -> Result<Payload<'_, B>, TransportError> {
        let all = self.region.buffer_of(device);
        match all.and_then(|all| all.slice(0, self.bytes() as u64)) {
            Some(buffer) => Ok(Payload::Device(buffer)),
            None if self.kind() == MemoryKind::Host => Ok(Payload::Host(self.payload())),
            None => self.copy().map(Payload::Copied),
        }
    }
}

/// Compares the bytes of a payload with the digests of its manifest. `known` has the digests that were computed while
/// the payload was read.
pub(super) fn verify(
    manifest: &Manifest,
    region: &Region,
    mut known: Digests,
) -> Result<(), TransferError> {
    let sections = &manifest.sections;
    match region.host() {
        Some(bytes) => known.extend(sections, &bytes[..manifest.payload_bytes() as usize]),
        None => {
            let places: Vec<_> = places(sections, 0).collect();
            known = Digests::of(sections, &places, region.digests(&places)?);
        }
    }
    Ok(known.compare(sections)?)
}

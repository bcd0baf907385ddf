//! A payload that was compared with its digests.

use super::memory::Share;
use crate::image::Manifest;
use crate::transport::Region;

/// A payload whose digests are right, in memory that no read writes.
#[derive(Debug)]
pub struct Verified {
    pub(super) manifest: Manifest,
    pub(super) region: Region,
    pub(super) _share: Share,
}

impl Verified {
    /// What it says of itself.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its bytes.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.region.bytes()[..self.manifest.payload_bytes() as usize]
    }
}

//! Memory that can be registered.

use std::ops::Range;

use memmap2::MmapMut;

use super::TransportError;

/// Zeroed memory of the host, of whole pages.
#[derive(Debug)]
pub struct Region(MmapMut);

impl Region {
    /// Memory of `len` bytes, at least one.
    ///
    /// # Errors
    /// [`TransportError::Memory`].
    pub fn new(len: usize) -> Result<Self, TransportError> {
        let memory = MmapMut::map_anon(len.max(1));
        memory.map(Self).map_err(|error| TransportError::Memory { bytes: len, error })
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Some of its bytes.
    ///
    /// # Errors
    /// [`TransportError::Outside`].
    pub fn part(&self, bytes: Range<usize>) -> Result<&[u8], TransportError> {
        let len = self.0.len();
        self.0.get(bytes.clone()).ok_or(TransportError::Outside { bytes, len })
    }

    /// Some of its bytes, to write.
    ///
    /// # Errors
    /// [`TransportError::Outside`].
    pub fn part_mut(&mut self, bytes: Range<usize>) -> Result<&mut [u8], TransportError> {
        let len = self.0.len();
        self.0.get_mut(bytes.clone()).ok_or(TransportError::Outside { bytes, len })
    }

    /// Where it is, for as long as it is not dropped: moving it does not move the bytes.
    #[must_use]
    pub fn address(&self) -> *const u8 {
        self.0.as_ptr()
    }
}

//! Memory outside the cache that holds the parts of a request.

use std::ops::Range;

use super::error::MoveError;
use crate::device::{Backend, Buffer, Stream};

/// Memory that parts are copied to: host memory, or memory of the cache's device.
pub enum PartsMut<'p, B: Backend> {
    /// Host memory.
    Host(&'p mut [u8]),
    /// Device memory, which nothing else may access meanwhile. No byte of the parts goes through host memory.
    Device(Buffer<B, u8>),
}

/// Memory that parts are copied from: host memory, or memory of the cache's device.
pub enum Parts<'p, B: Backend> {
    /// Host memory.
    Host(&'p [u8]),
    /// Device memory, which nothing else may write meanwhile and which is not changed. No byte of the parts goes
    /// through host memory.
    Device(Buffer<B, u8>),
}

impl<B: Backend> PartsMut<'_, B> {
    /// The part at `bytes`.
    ///
    /// # Panics
    /// If the memory does not have these bytes.
    #[must_use]
    pub fn part(&mut self, bytes: Range<usize>) -> PartsMut<'_, B> {
        match self {
            Self::Host(own) => PartsMut::Host(&mut own[bytes]),
            Self::Device(own) => PartsMut::Device(part(own, bytes)),
        }
    }

    /// Length in bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Waits until the copies to device memory are done, also if not all of them could be queued: afterwards no copy
    /// writes the caller's memory, unless a capture refuses the wait
    /// ([`DeviceError::ForbiddenInCapture`](crate::device::DeviceError::ForbiddenInCapture)). Copies to host memory
    /// have already ended.
    pub(super) fn settle(
        &self,
        stream: &Stream<B>,
        queued: Result<(), MoveError>,
    ) -> Result<(), MoveError> {
        let waited = match self {
            Self::Host(_) => Ok(()),
            Self::Device(_) => stream.synchronize(),
        };
        queued.and(waited.map_err(MoveError::from))
    }
}

impl<B: Backend> Parts<'_, B> {
    /// The part at `bytes`.
    ///
    /// # Panics
    /// If the memory does not have these bytes.
    #[must_use]
    pub fn part(&self, bytes: Range<usize>) -> Parts<'_, B> {
        match self {
            Self::Host(own) => Parts::Host(&own[bytes]),
            Self::Device(own) => Parts::Device(part(own, bytes)),
        }
    }

    /// Length in bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(buffer) => buffer.len(),
        }
    }
}

/// Fails with [`MoveError::Length`] unless `found` bytes are the `needed` ones.
pub(super) fn check_length(needed: u64, found: u64) -> Result<(), MoveError> {
    if needed == found { Ok(()) } else { Err(MoveError::Length { needed, found }) }
}

/// The part of a device buffer at `bytes`, which must lie inside it.
pub(super) fn part<B: Backend>(of: &Buffer<B, u8>, bytes: Range<usize>) -> Buffer<B, u8> {
    of.slice(bytes.start as u64, bytes.len() as u64).expect("lengths were checked")
}

//! Memory outside of the cache in which the parts of a request lie.

use std::ops::Range;

use super::error::MoveError;
use crate::device::{Backend, Buffer, Stream};

/// Memory that parts are copied to: the host's, or the device's of the cache.
pub enum PartsMut<'p, B: Backend> {
    /// Host memory.
    Host(&'p mut [u8]),
    /// Memory of the device, which nobody else touches meanwhile. Nothing of the parts goes through host memory.
    Device(Buffer<B, u8>),
}

/// Memory that parts are copied from: the host's, or the device's of the cache.
pub enum Parts<'p, B: Backend> {
    /// Host memory.
    Host(&'p [u8]),
    /// Memory of the device, which nobody else writes meanwhile, and which is not changed. Nothing of the parts goes through
    /// host memory.
    Device(Buffer<B, u8>),
}

impl<B: Backend> PartsMut<'_, B> {
    /// Some of its bytes.
    ///
    /// # Panics
    /// If it does not have them.
    #[must_use]
    pub fn part(&mut self, bytes: Range<usize>) -> PartsMut<'_, B> {
        match self {
            Self::Host(own) => PartsMut::Host(&mut own[bytes]),
            Self::Device(own) => PartsMut::Device(part(own, bytes)),
        }
    }

    /// How many bytes it has.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Waits until what was queued for memory of the device is there, also if not all of it could be queued: then nothing is on its
    /// way to the caller's memory any more, unless a capture refuses the wait
    /// ([`DeviceError::ForbiddenInCapture`](crate::device::DeviceError::ForbiddenInCapture)). What went to host
    /// memory is there.
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
    /// Some of its bytes.
    ///
    /// # Panics
    /// If it does not have them.
    #[must_use]
    pub fn part(&self, bytes: Range<usize>) -> Parts<'_, B> {
        match self {
            Self::Host(own) => Parts::Host(&own[bytes]),
            Self::Device(own) => Parts::Device(part(own, bytes)),
        }
    }

    /// How many bytes it has.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(buffer) => buffer.len(),
        }
    }
}

/// Refuses memory of another size than parts of `needed` bytes have.
pub(super) fn check_length(needed: u64, found: u64) -> Result<(), MoveError> {
    if needed == found { Ok(()) } else { Err(MoveError::Length { needed, found }) }
}

/// Some bytes of memory of the device, which has them.
pub(super) fn part<B: Backend>(of: &Buffer<B, u8>, bytes: Range<usize>) -> Buffer<B, u8> {
    of.slice(bytes.start as u64, bytes.len() as u64).expect("lengths were checked")
}

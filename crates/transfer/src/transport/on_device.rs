//! Memory of a device of any backend.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use dsv4_kv::device::{Backend, Buffer, DeviceError, Stream};

use super::digester::Digester;
use super::memory_kind::MemoryKind;
use crate::image::digests;

/// The digester of all memory of one storage. It is created at its first use.
pub(super) type SharedDigester<B> = Arc<Mutex<Option<Digester<B>>>>;

/// Memory of a device.
pub(super) trait OnDevice: Send + Sync + fmt::Debug {
    fn kind(&self) -> MemoryKind;

    fn len(&self) -> usize;

    fn address(&self) -> u64;

    /// Copies bytes out of it, and waits for that.
    fn read(&self, at: usize, into: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes to it, and waits for that.
    fn write(&self, at: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// xxh3-128 of each of these ranges of its bytes. Waits for the device.
    fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError>;

    /// Makes the device's context current in the calling thread.
    fn enter(&self) -> Result<(), DeviceError>;

    fn as_any(&self) -> &dyn Any;
}

/// A buffer of a device, owned by this value alone.
pub(super) struct DeviceBytes<B: Backend> {
    stream: Stream<B>,
    buffer: Buffer<B, u8>,
    kind: MemoryKind,
    digester: SharedDigester<B>,
}

impl<B: Backend> DeviceBytes<B> {
    /// Takes a buffer that has no other owner.
    pub fn new(
        stream: Stream<B>,
        buffer: Buffer<B, u8>,
        kind: MemoryKind,
        digester: SharedDigester<B>,
    ) -> Self {
        Self { stream, buffer, kind, digester }
    }

    pub fn buffer(&self) -> &Buffer<B, u8> {
        &self.buffer
    }
}

impl<B: Backend> OnDevice for DeviceBytes<B> {
    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn len(&self) -> usize {
        self.buffer.len() as usize
    }

    fn address(&self) -> u64 {
        self.buffer.span().address()
    }

    fn read(&self, at: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        self.stream.download(&self.buffer, at as u64, into)
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.stream.upload(from, &self.buffer, at as u64)
    }

    fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError> {
        if !Digester::<B>::takes(sections) {
            let mut bytes = vec![0; sections.iter().map(|of| of.end).max().unwrap_or_default()];
            self.read(0, &mut bytes)?;
            return Ok(digests(&bytes, sections));
        }
        // A panic in another thread does no harm: a digester is either complete or absent, and each launch writes its
        // inputs anew.
        let mut digester = self.digester.lock().unwrap_or_else(PoisonError::into_inner);
        let digester = match &mut *digester {
            Some(digester) => digester,
            none => none.insert(Digester::new(&self.stream)?),
        };
        digester.digests(&self.buffer, sections)
    }

    fn enter(&self) -> Result<(), DeviceError> {
        // Any call of the device makes its context current. This one does not wait, and is allowed while another thread
        // captures.
        self.stream.device().free_memory().map(drop)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<B: Backend> fmt::Debug for DeviceBytes<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.buffer.len();
        f.debug_struct("DeviceBytes")
            .field("kind", &self.kind)
            .field("len", &len)
            .finish_non_exhaustive()
    }
}

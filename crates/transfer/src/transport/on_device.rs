//! Memory of a device, whichever it is.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use dsv4_kv::device::{Backend, Buffer, DeviceError, Stream};

use super::digester::Digester;
use super::memory_kind::MemoryKind;
use crate::image::digests;

/// What computes digests for all memory of a storage, once somebody needs it.
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

    /// xxh3-128 of ranges of its bytes. Waits for the device.
    fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError>;

    /// Makes its context the thread's.
    fn enter(&self) -> Result<(), DeviceError>;

    fn as_any(&self) -> &dyn Any;
}

/// Memory of a device, which is this one's alone.
pub(super) struct DeviceBytes<B: Backend> {
    stream: Stream<B>,
    buffer: Buffer<B, u8>,
    kind: MemoryKind,
    digester: SharedDigester<B>,
}

impl<B: Backend> DeviceBytes<B> {
    /// A buffer that nobody else has.
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
        // A digester is made whole or not at all, and each launch writes anew what it reads.
        let mut digester = self.digester.lock().unwrap_or_else(PoisonError::into_inner);
        let digester = match &mut *digester {
            Some(digester) => digester,
            none => none.insert(Digester::new(&self.stream)?),
        };
        digester.digests(&self.buffer, sections)
    }

    fn enter(&self) -> Result<(), DeviceError> {
        // A call that waits for nothing, and may be made while others capture.
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

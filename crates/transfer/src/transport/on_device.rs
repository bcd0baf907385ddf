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

    /// Fills these bytes, and waits for that.
    fn fill(&self, bytes: Range<usize>, byte: u8) -> Result<(), DeviceError>;

    /// xxh3-128 of each of these ranges of its bytes. Waits for the device.
    fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError>;

    /// Calls `work` while the device's context is current in the calling thread.
    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError>;

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

    fn digests_by_kernel(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError> {
        if sections.is_empty() {
            return Ok(Vec::new());
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

    /// Digests of sections that the kernel cannot digest. Only their bytes are copied to the host.
    fn digests_by_host(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError> {
        let (mut bytes, mut places) = (Vec::new(), Vec::with_capacity(sections.len()));
        for of in sections {
            let start = bytes.len();
            bytes.resize(start + of.len(), 0);
            self.read(of.start, &mut bytes[start..])?;
            places.push(start..bytes.len());
        }
        Ok(digests(&bytes, &places))
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

    fn fill(&self, bytes: Range<usize>, byte: u8) -> Result<(), DeviceError> {
        let Some(part) = self.buffer.slice(bytes.start as u64, bytes.len() as u64) else {
            let (found, needed) = (self.buffer.len(), bytes.end as u64);
            return Err(DeviceError::Length { what: "bytes of a payload", found, needed });
        };
        self.stream.fill(&part, byte)?;
        self.stream.synchronize()
    }

    fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, DeviceError> {
        let takes = |of: &Range<usize>| Digester::<B>::takes(of);
        let (whole, odd): (Vec<_>, Vec<_>) = sections.iter().cloned().partition(takes);
        let mut by_kernel = self.digests_by_kernel(&whole)?.into_iter();
        let mut by_host = self.digests_by_host(&odd)?.into_iter();
        let next = |of| if takes(of) { by_kernel.next() } else { by_host.next() };
        Ok(sections.iter().filter_map(next).collect())
    }

    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError> {
        self.stream.device().backend().within(work)
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

#[cfg(test)]
mod tests {
    use dsv4_kv::device::{EmuDevice, EmuOptions};

    use super::*;

    /// One section that is no whole number of words moves only itself to the host, and the one after it, which begins
    /// in the middle of a word.
    #[test]
    fn an_odd_section_is_digested_alone() {
        let bytes: Vec<u8> = (0..4096_u32).map(|at| (at * 7 / 3) as u8).collect();
        let device = EmuDevice::new(EmuOptions::default());
        let stream = device.stream().unwrap();
        let buffer = device.allocate("payload", bytes.len() as u64).unwrap();
        stream.upload(&bytes, &buffer, 0).unwrap();
        let digester = SharedDigester::default();
        let memory = DeviceBytes::new(stream, buffer, MemoryKind::Emulated, Arc::clone(&digester));
        let sections = [0..1024, 1024..1028, 1028..1032, 1032..4096];
        assert_eq!(memory.digests(&sections).unwrap(), digests(&bytes, &sections));
        assert!(digester.lock().unwrap().is_some(), "the others are the kernel's");
        // Without a section for it the kernel gets no memory.
        *digester.lock().unwrap() = None;
        let odd = [1..3, 8..12];
        assert_eq!(memory.digests(&odd).unwrap(), digests(&bytes, &odd));
        assert!(digester.lock().unwrap().is_none());
    }
}

//! Memory that can be registered.

use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, Range};

use dsv4_kv::device::{Backend, Buffer, Device};
use memmap2::MmapMut;

use super::TransportError;
use super::memory_kind::MemoryKind;
use super::on_device::{DeviceBytes, OnDevice};
use crate::image::digests;

/// Bytes from one word that [`Region::scrub`] writes to the next, and bytes of a word.
const SCRUB_STEP: usize = 4096;
const SCRUB_WORD: usize = 8;
/// The byte with which [`Region::scrub`] fills memory of a device. Payloads have zeros, but not so many of these.
const SCRUB_BYTE: u8 = 0xa5;

/// Memory that can be registered: whole pages of the host, or a buffer of a device ([`Storage`](super::Storage)). New
/// memory is zeroed; memory that a receiver uses again has the bytes of an earlier payload.
#[derive(Debug)]
pub struct Region(Kind);

#[derive(Debug)]
enum Kind {
    Host(MmapMut),
    Device(Box<dyn OnDevice>),
}

impl Region {
    /// Zeroed host memory of `len` bytes, at least one.
    ///
    /// # Errors
    /// [`TransportError::Memory`].
    pub fn new(len: usize) -> Result<Self, TransportError> {
        let memory = MmapMut::map_anon(len.max(1)).map(|memory| {
            // Only advice to the kernel: pages of 2 MiB are several times as fast to allocate and to copy.
            #[cfg(target_os = "linux")]
            let _ = memory.advise(memmap2::Advice::HugePage);
            Kind::Host(memory)
        });
        memory.map(Self).map_err(|error| TransportError::Memory { bytes: len, error })
    }

    pub(super) fn on_device(memory: Box<dyn OnDevice>) -> Self {
        Self(Kind::Device(memory))
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        match &self.0 {
            Kind::Host(_) => MemoryKind::Host,
            Kind::Device(memory) => memory.kind(),
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it has at least one")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Host(memory) => memory.len(),
            Kind::Device(memory) => memory.len(),
        }
    }

    /// Its bytes.
    ///
    /// # Panics
    /// If the memory is on a device; [`Self::read`] copies its bytes to the host.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.host().expect("memory of the host")
    }

    /// Its bytes, mutable.
    ///
    /// # Panics
    /// If the memory is on a device; [`Self::write`] copies bytes there.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kind::Host(memory) => memory,
            Kind::Device(_) => panic!("memory of a device has no bytes that the host sees"),
        }
    }

    /// Its bytes; `None` if the memory is on a device.
    #[must_use]
    pub fn host(&self) -> Option<&[u8]> {
        match &self.0 {
            Kind::Host(memory) => Some(memory),
            Kind::Device(_) => None,
        }
    }

    /// Its buffer; `None` unless it is memory of this device.
    pub(crate) fn buffer_of<B: Backend>(&self, device: &Device<B>) -> Option<&Buffer<B, u8>> {
        let Kind::Device(memory) = &self.0 else { return None };
        let buffer = memory.as_any().downcast_ref::<DeviceBytes<B>>()?.buffer();
        (buffer.device().id() == device.id()).then_some(buffer)
    }

    /// xxh3-128 of each of these byte ranges, computed where the memory is: by the CPU, or by a kernel of the device.
    pub(crate) fn digests(&self, sections: &[Range<usize>]) -> Result<Vec<u128>, TransportError> {
        for of in sections {
            self.range(of.start, of.len())?;
        }
        match &self.0 {
            Kind::Host(memory) => Ok(digests(memory, sections)),
            Kind::Device(memory) => Ok(memory.digests(sections)?),
        }
    }

    /// Copies `into.len()` bytes, from offset `at`, to `into`.
    ///
    /// # Errors
    /// [`TransportError::Outside`], [`TransportError::Device`].
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), TransportError> {
        let bytes = self.range(at, into.len())?;
        match &self.0 {
            Kind::Host(memory) => into.copy_from_slice(&memory[bytes]),
            Kind::Device(memory) => memory.read(at, into)?,
        }
        Ok(())
    }

    /// Copies `from` to offset `at`.
    ///
    /// # Errors
    /// [`TransportError::Outside`], [`TransportError::Device`].
    pub fn write(&mut self, at: usize, from: &[u8]) -> Result<(), TransportError> {
        let bytes = self.range(at, from.len())?;
        match &mut self.0 {
            Kind::Host(memory) => memory[bytes].copy_from_slice(from),
            Kind::Device(memory) => memory.write(at, from)?,
        }
        Ok(())
    }

    /// Overwrites so much of `bytes` that what is there cannot be taken for the bytes of a payload that is about to be
    /// read. Of host memory that is a word in each 4 KiB, and the first and the last word of `bytes` and of each of
    /// these sections, since filling all of it would write as many bytes as the read; of device memory it is all.
    pub(crate) fn scrub(
        &mut self,
        bytes: Range<usize>,
        sections: &[Range<usize>],
    ) -> Result<(), TransportError> {
        self.range(bytes.start, bytes.len())?;
        let memory = match &mut self.0 {
            Kind::Host(memory) => memory,
            Kind::Device(memory) => return Ok(memory.fill(bytes, SCRUB_BYTE)?),
        };
        // Random, so that it is neither what is there nor what comes.
        let word = RandomState::new().hash_one(bytes.start).to_le_bytes();
        let ends = |of: &Range<usize>| [of.start, of.end.saturating_sub(SCRUB_WORD)];
        let steps = bytes.clone().step_by(SCRUB_STEP);
        let starts = steps.chain(sections.iter().chain([&bytes]).flat_map(ends));
        for start in starts.filter(|start| bytes.contains(start)) {
            let to = &mut memory[start..bytes.end.min(start + SCRUB_WORD)];
            to.copy_from_slice(&word[..to.len()]);
        }
        Ok(())
    }

    fn range(&self, at: usize, bytes: usize) -> Result<Range<usize>, TransportError> {
        let (range, len) = (at..at.saturating_add(bytes), self.len());
        if range.end <= len {
            Ok(range)
        } else {
            Err(TransportError::Outside { bytes: range, len })
        }
    }

    /// The address of its first byte, on the host or on the device. It stays the same until the region is dropped, even
    /// if the value is moved.
    #[must_use]
    pub fn address(&self) -> *const u8 {
        match &self.0 {
            Kind::Host(memory) => memory.as_ptr(),
            Kind::Device(memory) => memory.address() as *const u8,
        }
    }

    /// Calls `work`; for device memory while the device's context is current in the calling thread, as libraries that
    /// access the memory need. Afterwards the caller's context is current again.
    ///
    /// # Errors
    /// [`TransportError::Device`], and then `work` was not called.
    pub fn within<R>(&self, work: impl FnOnce() -> R) -> Result<R, TransportError> {
        let Kind::Device(memory) = &self.0 else { return Ok(work()) };
        let (mut work, mut result) = (Some(work), None);
        memory.within(&mut || result = work.take().map(|work| work()))?;
        Ok(result.expect("`within` calls what it is given"))
    }
}

/// Registered memory whose bytes may be read and changed. The region cannot be moved out or replaced, because its
/// transport has given the address to a library or to hardware.
///
/// ```compile_fail,E0596
/// use dsv4_kv_transfer::transport::{Fabric, Loopback, Region, Transport};
///
/// let mut transport = Loopback::new(&Fabric::default());
/// let mut memory = transport.register(Region::new(1)?)?;
/// let other = Region::new(1)?;
/// transport.with_region(&mut memory, |mut region| std::mem::replace(&mut *region, other))?;
/// # Ok::<(), dsv4_kv_transfer::TransportError>(())
/// ```
#[derive(Debug)]
pub struct RegionMut<'r>(pub(super) &'r mut Region);

impl RegionMut<'_> {
    /// Its bytes, mutable.
    ///
    /// # Panics
    /// As [`Region::bytes_mut`].
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    /// Copies `from` to offset `at`.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write(&mut self, at: usize, from: &[u8]) -> Result<(), TransportError> {
        self.0.write(at, from)
    }

    /// As [`Region::scrub`].
    pub(crate) fn scrub(
        &mut self,
        bytes: Range<usize>,
        sections: &[Range<usize>],
    ) -> Result<(), TransportError> {
        self.0.scrub(bytes, sections)
    }
}

impl Deref for RegionMut<'_> {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 4 KiB, and both ends of the range and of each section in it, differ afterwards; nothing outside of the
    /// range does.
    #[test]
    fn what_is_scrubbed_differs() {
        const LEN: usize = 20_000;
        let (bytes, sections) = (3_000..17_003, [0..5_000, 5_000..5_008, 5_008..LEN]);
        for left in [0, 0xff] {
            let mut region = Region::new(LEN).unwrap();
            region.bytes_mut().fill(left);
            region.scrub(bytes.clone(), &sections).unwrap();
            let is_changed = |range: Range<usize>| region.bytes()[range].iter().any(|&b| b != left);
            let steps = bytes.clone().step_by(SCRUB_STEP).map(|start| start..start + SCRUB_STEP);
            let ends = [3_000..3_008, 4_992..5_000, 5_000..5_008, 5_008..5_016, 16_995..17_003];
            for range in steps.chain(ends) {
                assert!(is_changed(range.clone()), "{range:?}");
            }
            assert!(!is_changed(0..bytes.start) && !is_changed(bytes.end..LEN));
        }
    }
}

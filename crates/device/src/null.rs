//! A device that does nothing: it accepts every call, counts some of them, and has no memory.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, Priority, RawMemory, RawPinned};
use crate::device::Device;
use crate::error::DeviceError;
use crate::identity::DeviceInfo;
use crate::operation::Operation;

/// A device that does nothing. Every rule of [`Device`] holds on it. A call costs only the work of the host: for
/// measuring that work, or for counting the calls of a device.
pub type NullDevice = Device<Null>;

impl NullDevice {
    /// A device that does nothing, with `memory` bytes of address space and no storage.
    #[must_use]
    pub fn null(memory: u64) -> Self {
        Self::from_backend(Null::new(memory))
    }
}

/// The raw calls of a device that does nothing. Its memory is only a range of addresses; downloads return zeros.
pub struct Null {
    info: DeviceInfo,
    /// Address of the next allocation; the first is at [`FIRST`].
    next: AtomicU64,
    streams: AtomicU64,
    launches: AtomicU64,
    replays: AtomicU64,
    uploaded: AtomicU64,
}

/// Counts of calls since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullCalls {
    /// Kernels that were launched or captured.
    pub launches: u64,
    /// Graphs that were replayed.
    pub replays: u64,
    /// Bytes that were copied from the host.
    pub uploaded: u64,
}

/// The first address.
const FIRST: u64 = ALIGNMENT;
/// Alignment of allocations, as `cuMemAlloc` gives it.
const ALIGNMENT: u64 = 256;

/// A range of addresses.
pub struct NullMemory {
    address: u64,
    bytes: u64,
}

impl RawMemory for NullMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Ordinary host memory.
pub struct NullPinned(Vec<u128>);

impl RawPinned for NullPinned {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// A stream: an identity.
pub struct NullStream(u64);

impl Null {
    /// A device of `memory` bytes.
    #[must_use]
    pub fn new(memory: u64) -> Self {
        let info =
            DeviceInfo { name: "none (host work alone)".into(), sm: None, total_memory: memory };
        let [streams, launches, replays, uploaded] = Default::default();
        Self { info, next: AtomicU64::new(FIRST), streams, launches, replays, uploaded }
    }

    /// Counts of calls since it was made.
    #[must_use]
    pub fn calls(&self) -> NullCalls {
        let Self { launches, replays, uploaded, .. } = self;
        let [launches, replays, uploaded] =
            [launches, replays, uploaded].map(|count| count.load(Ordering::Relaxed));
        NullCalls { launches, replays, uploaded }
    }
}

/// Adds to a count without a locked instruction, which would delay the thread that is measured. If several threads
/// count at once, the count may be too small.
fn count(calls: &AtomicU64, by: u64) {
    calls.store(calls.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}

// SAFETY: ranges of addresses are handed out once, and nothing is ever read or written behind them; no work is
// ever in flight.
unsafe impl Backend for Null {
    type Memory = NullMemory;
    type PinnedMemory = NullPinned;
    type Stream = NullStream;
    type Event = ();
    type Graph = ();

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn stream_id(&self, stream: &NullStream) -> u64 {
        stream.0
    }

    /// Addresses are handed out once: memory that was freed does not come back.
    fn free_memory(&self) -> Result<u64, DeviceError> {
        let used = self.next.load(Ordering::Relaxed) - FIRST;
        Ok(self.info.total_memory.saturating_sub(used))
    }

    fn allocate(&self, label: &'static str, bytes: u64) -> Result<NullMemory, DeviceError> {
        let end = FIRST.saturating_add(self.info.total_memory);
        let next = |address: u64| {
            let next = address.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(next).filter(|&next| next <= end)
        };
        match self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(address) => Ok(NullMemory { address, bytes }),
            Err(_) => {
                let (requested, free) = (bytes, self.free_memory()?);
                Err(DeviceError::OutOfMemory { label, requested, free })
            }
        }
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<NullPinned, DeviceError> {
        let words = bytes.div_ceil(size_of::<u128>() as u64);
        let (label, free) = ("pinned memory", self.free_memory()?);
        let refused = |_| DeviceError::OutOfMemory { label, requested: bytes, free };
        let mut memory = Vec::new();
        memory.try_reserve_exact(usize::try_from(words).unwrap_or(usize::MAX)).map_err(refused)?;
        memory.resize(words as usize, 0);
        Ok(NullPinned(memory))
    }

    fn stream(&self, _: Priority) -> Result<NullStream, DeviceError> {
        Ok(NullStream(self.streams.fetch_add(1, Ordering::Relaxed)))
    }

    fn event(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn record(&self, _event: &(), _stream: &NullStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&self, _event: &()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn has_passed(&self, _event: &()) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait_in_stream(&self, _stream: &NullStream, _event: &()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn elapsed_ms(&self, _from: &(), _to: &()) -> Result<f32, DeviceError> {
        Ok(0.0)
    }

    unsafe fn launch<O: Operation>(
        &self,
        _stream: &NullStream,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        // Preparing the arguments for a driver is part of the host's work.
        let grid = operation.grid(variant);
        operation.with_arguments(|arguments| {
            std::hint::black_box((O::kernel(variant), grid, arguments));
        });
        count(&self.launches, 1);
        Ok(())
    }

    unsafe fn copy(
        &self,
        _stream: &NullStream,
        _from: u64,
        _to: u64,
        _bytes: u64,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn fill(
        &self,
        _stream: &NullStream,
        _to: u64,
        _byte: u8,
        _bytes: u64,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn upload(
        &self,
        _stream: &NullStream,
        _from: *const u8,
        _to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        count(&self.uploaded, bytes as u64);
        Ok(())
    }

    unsafe fn download(
        &self,
        _stream: &NullStream,
        _from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: `to` is valid for writes of `bytes` bytes, by the caller's promise.
        unsafe { to.write_bytes(0, bytes) };
        Ok(())
    }

    fn synchronize(&self, _stream: &NullStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn begin_capture(&self, _stream: &NullStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn end_capture(&self, _stream: &NullStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn instantiate(&self, _graph: &mut ()) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn replay(&self, _stream: &NullStream, _graph: &()) -> Result<(), DeviceError> {
        count(&self.replays, 1);
        Ok(())
    }
}

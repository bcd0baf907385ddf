//! The emulated device: kernels run on the CPU, one fiber per CUDA thread, checked access by access.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use simt::emu::{Allocation, Memory};

use crate::backend::{Backend, Priority, RawMemory, RawPinned};
use crate::device::Device;
use crate::error::DeviceError;
use crate::identity::DeviceInfo;
use crate::operation::Operation;

/// The options of the emulated device.
#[derive(Clone, Copy, Debug)]
pub struct EmuOptions {
    /// Bytes of device memory; allocations beyond it fail as on a GPU. Only memory that is touched costs host memory.
    pub memory: u64,
    /// Seed of the order in which the threads of a block run.
    pub seed: u64,
}

impl Default for EmuOptions {
    fn default() -> Self {
        Self { memory: 8 << 30, seed: 0 }
    }
}

/// The CPU as a device. Streams run their work at once, in the order it is queued.
pub type EmuDevice = Device<Emulator>;

impl EmuDevice {
    /// A device with the given memory.
    #[must_use]
    pub fn new(options: EmuOptions) -> Self {
        Self::from_backend(Emulator::new(options))
    }

    /// As [`Self::new`], but kernels may race on global memory: for contents that break a kernel's contract on purpose.
    #[must_use]
    pub fn allowing_races(options: EmuOptions) -> Self {
        let memory = Memory::new().allowing_races();
        Self::from_backend(Emulator::with_memory(options, memory))
    }
}

/// The raw calls of the emulated device.
pub struct Emulator {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

struct Shared {
    seed: u64,
    used: AtomicU64,
    memory: Memory,
    /// Held by all work that reads or writes device memory: streams of several threads take turns. A thread that waits
    /// for a launch runs no other work meanwhile, which could take the lock again.
    execution: Mutex<()>,
}

/// A stream of the emulated device: only an identity, since work runs when it is queued.
pub struct EmuStream {
    id: u64,
    /// The work that was queued since a capture of the stream began.
    recording: Mutex<Option<Vec<Node>>>,
}

/// An event: the time when it was last recorded.
#[derive(Default)]
pub struct EmuEvent(Mutex<Option<Instant>>);

/// Captured work.
pub struct EmuGraph(Vec<Node>);

/// One captured piece of work.
type Node = Box<dyn Fn() -> Result<(), DeviceError> + Send + Sync>;

/// Zeroed host memory that serves as device memory.
pub struct EmuMemory {
    // Dropped first: kernels must not find a block that is being freed.
    known: Allocation,
    block: HostBlock,
    bytes: u64,
    owner: Arc<Shared>,
}

impl RawMemory for EmuMemory {
    fn address(&self) -> u64 {
        self.block.address()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for EmuMemory {
    fn drop(&mut self) {
        self.owner.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A zeroed block of host memory.
struct HostBlock {
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is touched only by who owns it, or under `Shared::execution`, by one piece of work at a
// time.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Alignment of the first byte, as `cuMemAlloc` gives it.
    const ALIGNMENT: usize = 256;

    /// A block of `bytes` bytes; `None` if the host lacks the memory.
    ///
    /// The layout has a small alignment, and room to align the first byte is added. For a larger alignment the system's
    /// allocator would write every zero itself, and so touch every page.
    fn zeroed(bytes: u64) -> Option<Self> {
        let size = usize::try_from(bytes).ok()?.checked_add(Self::ALIGNMENT)?;
        let layout = Layout::from_size_align(size, align_of::<u128>()).ok()?;
        // SAFETY: the layout has at least `ALIGNMENT` bytes.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { allocation, layout })
    }

    fn address(&self) -> u64 {
        let exposed = self.allocation.as_ptr().expose_provenance();
        exposed.next_multiple_of(Self::ALIGNMENT) as u64
    }

    /// The first byte.
    fn first(&self) -> *mut u8 {
        host(self.address())
    }

    /// The number of bytes that were asked for.
    fn bytes(&self) -> usize {
        self.layout.size() - Self::ALIGNMENT
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout in `zeroed`, and freed only here.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// Ordinary host memory: the emulated device can copy from anywhere.
pub struct EmuPinned(HostBlock);

impl RawPinned for EmuPinned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were allocated, zeroed, and nobody writes them while `self` is borrowed.
        unsafe { slice::from_raw_parts(self.0.first(), self.0.bytes()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes were allocated, zeroed, and nobody else has them while `self` is borrowed.
        unsafe { slice::from_raw_parts_mut(self.0.first(), self.0.bytes()) }
    }
}

impl Emulator {
    /// A device with the given memory.
    #[must_use]
    pub fn new(options: EmuOptions) -> Self {
        Self::with_memory(options, Memory::new())
    }

    fn with_memory(options: EmuOptions, memory: Memory) -> Self {
        Self {
            info: DeviceInfo {
                name: "emulated (CPU)".into(),
                sm: None,
                total_memory: options.memory,
            },
            shared: Arc::new(Shared {
                seed: options.seed,
                used: AtomicU64::new(0),
                memory,
                execution: Mutex::new(()),
            }),
        }
    }

    fn execute(&self) -> MutexGuard<'_, ()> {
        // The guarded value is `()`: nothing in it can be broken by a panic.
        self.shared.execution.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `node` now, or records it if `stream` is being captured.
    fn queue(
        &self,
        stream: &EmuStream,
        node: impl Fn() -> Result<(), DeviceError> + Send + Sync + 'static,
    ) -> Result<(), DeviceError> {
        if let Some(recording) = &mut *stream.recording() {
            recording.push(Box::new(node));
            return Ok(());
        }
        let _turn = self.execute();
        node()
    }
}

impl EmuStream {
    fn recording(&self) -> MutexGuard<'_, Option<Vec<Node>>> {
        // A panic while pushing leaves a valid vector.
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: memory is a block of its own, registered as long as it lives. Work runs when it is queued, under
// one lock, so that nothing is ever in flight when a call returns.
unsafe impl Backend for Emulator {
    type Memory = EmuMemory;
    type PinnedMemory = EmuPinned;
    type Stream = EmuStream;
    type Event = EmuEvent;
    type Graph = EmuGraph;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn divide(&self, memory: &EmuMemory, parts: &[Range<u64>]) {
        memory.known.divide(parts.iter().filter(|part| !part.is_empty()).cloned());
    }

    fn stream_id(&self, stream: &EmuStream) -> u64 {
        stream.id
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        let used = self.shared.used.load(Ordering::Relaxed);
        Ok(self.info.total_memory.saturating_sub(used))
    }

    fn allocate(&self, label: &'static str, bytes: u64) -> Result<EmuMemory, DeviceError> {
        let free = self.free_memory()?;
        let refused = || DeviceError::OutOfMemory { label, requested: bytes, free };
        let used = &self.shared.used;
        let reserved = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&used| used <= self.info.total_memory)
        });
        reserved.map_err(|_| refused())?;
        let Some(block) = HostBlock::zeroed(bytes.max(1)) else {
            used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(refused());
        };
        // SAFETY: the bytes were just allocated, and live as long as the registration, which is dropped first, and as
        // launches, which keep their buffers until they return. Only work touches them, under `Shared::execution`.
        let known =
            unsafe { self.shared.memory.register(block.address(), block.bytes() as u64, label) };
        Ok(EmuMemory { known, block, bytes, owner: Arc::clone(&self.shared) })
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<EmuPinned, DeviceError> {
        let (label, free) = ("pinned memory", self.free_memory()?);
        let refused = DeviceError::OutOfMemory { label, requested: bytes, free };
        HostBlock::zeroed(bytes).map(EmuPinned).ok_or(refused)
    }

    fn stream(&self, _: Priority) -> Result<EmuStream, DeviceError> {
        // Unique among all emulated devices: a wrapper may put several into one domain.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(EmuStream { id, recording: Mutex::default() })
    }

    fn event(&self) -> Result<EmuEvent, DeviceError> {
        Ok(EmuEvent::default())
    }

    fn record(&self, event: &EmuEvent, _stream: &EmuStream) -> Result<(), DeviceError> {
        *event.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn wait(&self, _event: &EmuEvent) -> Result<(), DeviceError> {
        Ok(())
    }

    fn has_passed(&self, _event: &EmuEvent) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait_in_stream(&self, _stream: &EmuStream, _event: &EmuEvent) -> Result<(), DeviceError> {
        // All work queued before the event was recorded has run already.
        Ok(())
    }

    fn elapsed_ms(&self, from: &EmuEvent, to: &EmuEvent) -> Result<f32, DeviceError> {
        let at = |event: &EmuEvent| *event.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from).as_secs_f32() * 1e3),
            _ => Err(DeviceError::NotRecorded),
        }
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &EmuStream,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        let (shared, operation) = (Arc::clone(&self.shared), *operation);
        self.queue(stream, move || {
            // SAFETY: the registry knows all memory of this device, as the launch was checked to be of, and
            // `Shared::execution` keeps other work away.
            let run = unsafe { operation.emulate(variant, &shared.memory, shared.seed) };
            run.map_err(DeviceError::from)
        })
    }

    unsafe fn copy(
        &self,
        stream: &EmuStream,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        self.queue(stream, move || {
            // SAFETY: two ranges of live memory that do not overlap, by the caller's promise; the turn held
            // by `queue` keeps other work away.
            unsafe { host(from).copy_to_nonoverlapping(host(to), bytes as usize) };
            Ok(())
        })
    }

    unsafe fn fill(
        &self,
        stream: &EmuStream,
        to: u64,
        byte: u8,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        self.queue(stream, move || {
            // SAFETY: a range of live memory, by the caller's promise; the turn held by `queue` keeps other
            // work away.
            unsafe { host(to).write_bytes(byte, bytes as usize) };
            Ok(())
        })
    }

    unsafe fn upload(
        &self,
        _stream: &EmuStream,
        from: *const u8,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let _turn = self.execute();
        // SAFETY: both ranges are valid, by the caller's promise; host and device blocks are distinct.
        unsafe { host(to).copy_from_nonoverlapping(from, bytes) };
        Ok(())
    }

    unsafe fn download(
        &self,
        _stream: &EmuStream,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let _turn = self.execute();
        // SAFETY: both ranges are valid, by the caller's promise; host and device blocks are distinct.
        unsafe { host(from).copy_to_nonoverlapping(to, bytes) };
        Ok(())
    }

    fn synchronize(&self, _stream: &EmuStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn begin_capture(&self, stream: &EmuStream) -> Result<(), DeviceError> {
        *stream.recording() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, stream: &EmuStream) -> Result<EmuGraph, DeviceError> {
        Ok(EmuGraph(stream.recording().take().unwrap_or_default()))
    }

    fn instantiate(&self, _graph: &mut EmuGraph) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn replay(&self, _stream: &EmuStream, graph: &EmuGraph) -> Result<(), DeviceError> {
        let _turn = self.execute();
        graph.0.iter().try_for_each(|node| node())
    }
}

/// The host pointer to an address of the emulated device.
fn host(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

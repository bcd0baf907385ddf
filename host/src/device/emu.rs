//! The emulated device: kernels run on the CPU, one fiber per CUDA thread, checked access by access.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytemuck::Pod;
use simt::emu::{Allocation, Memory};

use super::capture::Captures;
use super::{Buffer, Device, DeviceError, DeviceInfo, Graph, Pinned, RawMemory, RawPinned};
use crate::kernels::Operation;

/// How the emulated device is set up.
#[derive(Clone, Copy, Debug)]
pub struct EmuOptions {
    /// Bytes of device memory; allocations beyond it fail as on a GPU. Only what is touched costs
    /// host memory.
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
#[derive(Clone)]
pub struct EmuDevice {
    shared: Arc<Shared>,
}

struct Shared {
    info: DeviceInfo,
    seed: u64,
    used: AtomicU64,
    memory: Memory,
    captures: Captures,
    next_stream: AtomicUsize,
    /// Held by whatever reads or writes device memory: streams of several threads take turns.
    execution: Mutex<()>,
}

/// A stream of the emulated device: an identity, since work runs when it is queued.
pub struct EmuStream {
    id: usize,
    recording: Mutex<Vec<Node>>,
}

/// One captured piece of work.
type Node = Box<dyn Fn() -> Result<(), DeviceError> + Send + Sync>;

/// Zeroed host memory that plays device memory.
pub struct EmuMemory {
    // Dropped first: kernels must not find a block that is being freed.
    _known: Allocation,
    _block: HostBlock,
    address: u64,
    bytes: u64,
    owner: Arc<Shared>,
}

impl RawMemory for EmuMemory {
    fn address(&self) -> u64 {
        self.address
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

// SAFETY: the block is touched only under `Shared::execution`, by one piece of work at a time.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Alignment of the first byte, as `cuMemAlloc` gives it.
    const ALIGNMENT: usize = 256;

    /// `None` when the host has no such memory.
    ///
    /// The layout's own alignment is small and the room for ours is added: for a larger alignment
    /// the system's allocator writes every zero itself, and so touches every page.
    fn zeroed(bytes: usize) -> Option<Self> {
        let size = bytes.checked_add(Self::ALIGNMENT)?;
        let layout = Layout::from_size_align(size, align_of::<u128>()).ok()?;
        // SAFETY: the layout has at least `ALIGNMENT` bytes.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { allocation, layout })
    }

    fn address(&self) -> u64 {
        let exposed = self.allocation.as_ptr().expose_provenance();
        exposed.next_multiple_of(Self::ALIGNMENT) as u64
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout in `zeroed`, and freed only here.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// Ordinary host memory: the emulated device can copy from anywhere.
pub struct EmuPinned(Vec<u128>);

impl RawPinned for EmuPinned {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

impl EmuDevice {
    /// A device with the given memory.
    #[must_use]
    pub fn new(options: EmuOptions) -> Self {
        let info =
            DeviceInfo { name: "emulated (CPU)".into(), sm: None, total_memory: options.memory };
        Self {
            shared: Arc::new(Shared {
                info,
                seed: options.seed,
                used: AtomicU64::new(0),
                memory: Memory::default(),
                captures: Captures::default(),
                next_stream: AtomicUsize::new(0),
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
        if self.shared.captures.is_capturing(stream.id) {
            stream.recording().push(Box::new(node));
            return Ok(());
        }
        let _turn = self.execute();
        node()
    }
}

impl EmuStream {
    fn recording(&self) -> MutexGuard<'_, Vec<Node>> {
        // A panic while pushing leaves a valid vector.
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for EmuDevice {
    type Memory = EmuMemory;
    type PinnedMemory = EmuPinned;
    type Stream = EmuStream;
    type Event = Mutex<Option<Instant>>;
    type RawGraph = Vec<Node>;

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        let used = self.shared.used.load(Ordering::Relaxed);
        Ok(self.shared.info.total_memory.saturating_sub(used))
    }

    fn allocate<T: Pod>(
        &self,
        label: &'static str,
        len: u64,
    ) -> Result<Buffer<Self, T>, DeviceError> {
        self.shared.captures.forbid("allocating device memory")?;
        let free = self.free_memory()?;
        let refused = |requested| DeviceError::OutOfMemory { label, requested, free };
        let bytes = len.checked_mul(size_of::<T>() as u64).ok_or(refused(u64::MAX))?;
        let size = usize::try_from(bytes).map_err(|_| refused(bytes))?.max(1);
        let reserved =
            self.shared.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|&used| used <= self.shared.info.total_memory)
            });
        if reserved.is_err() {
            return Err(refused(bytes));
        }
        let Some(block) = HostBlock::zeroed(size) else {
            self.shared.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(refused(bytes));
        };
        let address = block.address();
        let known = self.shared.memory.register(address, size as u64, label);
        let owner = Arc::clone(&self.shared);
        Ok(Buffer::new(EmuMemory { _known: known, _block: block, address, bytes, owner }))
    }

    fn allocate_pinned<T: Pod>(&self, len: usize) -> Result<Pinned<Self, T>, DeviceError> {
        self.shared.captures.forbid("allocating pinned memory")?;
        let words = (len * size_of::<T>()).div_ceil(size_of::<u128>());
        Ok(Pinned::new(EmuPinned(vec![0; words]), len))
    }

    fn stream(&self) -> Result<EmuStream, DeviceError> {
        self.shared.captures.forbid("creating a stream")?;
        let id = self.shared.next_stream.fetch_add(1, Ordering::Relaxed);
        Ok(EmuStream { id, recording: Mutex::default() })
    }

    fn event(&self) -> Result<Self::Event, DeviceError> {
        self.shared.captures.forbid("creating an event")?;
        Ok(Mutex::default())
    }

    fn record(&self, event: &Self::Event, _stream: &EmuStream) -> Result<(), DeviceError> {
        self.shared.captures.forbid("recording an event")?;
        *event.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn wait(&self, _event: &Self::Event) -> Result<(), DeviceError> {
        self.shared.captures.forbid("waiting for an event")
    }

    fn elapsed_ms(&self, from: &Self::Event, to: &Self::Event) -> Result<f32, DeviceError> {
        self.shared.captures.forbid("waiting for an event")?;
        let at = |event: &Self::Event| *event.lock().unwrap_or_else(PoisonError::into_inner);
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from).as_secs_f32() * 1e3),
            _ => Err(DeviceError::NotRecorded),
        }
    }

    fn synchronize(&self, _stream: &EmuStream) -> Result<(), DeviceError> {
        self.shared.captures.forbid("waiting for a stream")
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &EmuStream,
        variant: O::Variant,
        grid: (u32, u32),
        operation: &O,
    ) -> Result<(), DeviceError> {
        let kernel = O::info(variant).name;
        super::check_grid(kernel, grid)?;
        self.shared.captures.check_launch(stream.id, kernel, operation)?;
        let (shared, operation) = (Arc::clone(&self.shared), *operation);
        let node = move || {
            operation.emulate(variant, &shared.memory, grid, shared.seed).map_err(DeviceError::from)
        };
        self.queue(stream, node)
    }

    unsafe fn copy_from_pinned<T: Pod>(
        &self,
        stream: &EmuStream,
        from: &Pinned<Self, T>,
        to: &Buffer<Self, T>,
        len: usize,
    ) -> Result<(), DeviceError> {
        let from = from.as_slice();
        super::check_length("copy from pinned memory", from.len() as u64, len as u64)?;
        self.upload(stream, &from[..len], to, 0)
    }

    fn copy<T: Pod>(
        &self,
        stream: &EmuStream,
        from: &Buffer<Self, T>,
        to: &Buffer<Self, T>,
    ) -> Result<(), DeviceError> {
        super::check_copy(&self.shared.captures, stream.id, from, to)?;
        let (from, to) = (from.clone(), to.clone());
        let node = move || {
            // SAFETY: two live buffers of equal length, perhaps overlapping slices of one block;
            // the turn held by `queue` keeps other work away.
            unsafe { host(&from).copy_to(host(&to), from.len() as usize) };
            Ok(())
        };
        self.queue(stream, node)
    }

    fn fill<T: Pod>(
        &self,
        stream: &EmuStream,
        buffer: &Buffer<Self, T>,
        byte: u8,
    ) -> Result<(), DeviceError> {
        self.shared.captures.check_pointer(stream.id, "fill", "to", buffer.ptr().address())?;
        let buffer = buffer.clone();
        let node = move || {
            // SAFETY: a live buffer; the turn held by `queue` keeps other work away.
            unsafe { host(&buffer).write_bytes(byte, buffer.len() as usize) };
            Ok(())
        };
        self.queue(stream, node)
    }

    fn upload<T: Pod>(
        &self,
        _stream: &EmuStream,
        from: &[T],
        to: &Buffer<Self, T>,
        at: u64,
    ) -> Result<(), DeviceError> {
        self.shared.captures.forbid("copying from host memory")?;
        super::check_length("upload", to.len().saturating_sub(at), from.len() as u64)?;
        let _turn = self.execute();
        // SAFETY: the elements exist by the check above; host and device blocks are distinct.
        unsafe { host(to).add(at as usize).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn download<T: Pod>(
        &self,
        _stream: &EmuStream,
        from: &Buffer<Self, T>,
        at: u64,
        to: &mut [T],
    ) -> Result<(), DeviceError> {
        self.shared.captures.forbid("copying to host memory")?;
        super::check_length("download", from.len().saturating_sub(at), to.len() as u64)?;
        let _turn = self.execute();
        // SAFETY: the elements exist by the check above, are `Pod`, and the blocks are distinct.
        unsafe { host(from).add(at as usize).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn capture(
        &self,
        stream: &EmuStream,
        retained: Vec<Arc<EmuMemory>>,
        record: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph<Self>, DeviceError> {
        self.shared.captures.begin(stream.id, &retained)?;
        let recorded = record();
        let ended = self.shared.captures.end();
        let nodes = std::mem::take(&mut *stream.recording());
        recorded.and(ended)?;
        Ok(Graph::new(nodes, retained))
    }

    fn replay(&self, stream: &EmuStream, graph: &Graph<Self>) -> Result<(), DeviceError> {
        if self.shared.captures.is_capturing(stream.id) {
            return Err(DeviceError::NestedCapture);
        }
        let _turn = self.execute();
        graph.raw.iter().try_for_each(|node| node())
    }
}

/// Where a buffer is in host memory.
fn host<T: Pod>(buffer: &Buffer<EmuDevice, T>) -> *mut T {
    std::ptr::with_exposed_provenance_mut(buffer.ptr().address() as usize)
}

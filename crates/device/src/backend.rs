//! The raw calls of a device. They check no rules: [`Device`](crate::Device) does.

use std::ops::Range;

use crate::error::DeviceError;
use crate::identity::DeviceInfo;
use crate::operation::Operation;

/// A block of device memory.
pub trait RawMemory: Send + Sync + 'static {
    /// Address of its first byte on the device, a multiple of 256.
    fn address(&self) -> u64;
    /// Its size in bytes.
    fn bytes(&self) -> u64;
}

/// A block of pinned host memory.
pub trait RawPinned: Send + Sync + 'static {
    /// Its bytes, aligned to 16.
    fn bytes(&self) -> &[u8];
    /// Its bytes, aligned to 16.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// The priority of a stream's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Kernels begin before those of streams of lower priority.
    Highest,
    /// Kernels begin after those of streams of higher priority. This is CUDA's default for a stream.
    Lowest,
}

/// The raw calls of a device. Another crate may implement it, around a backend of this one for instance:
/// [`Device::from_backend`](crate::Device::from_backend).
///
/// [`Device`](crate::Device) calls nothing here before it has checked identity, lengths, alignment, overlap
/// and the rules of captures. Objects of an associated type are only passed to the backend that made them,
/// or to another of its [domain](Self::capture_domain). They keep alive what they need of the backend, and
/// give back what they hold when they are dropped, which is never while a capture is active.
///
/// # Safety
/// - Memory is valid on the device from its allocation to its drop, for as many bytes as it says, and
///   disjoint from all other memory. Dropping memory, or pinned memory, waits for the work that may use it.
/// - Work of a stream runs in the order in which it was queued. Work that a failed call has queued keeps
///   that order too.
/// - When [`synchronize`](Self::synchronize) returns `Ok`, no work that was queued in the stream touches host
///   memory any more.
/// - A call touches no memory but what its arguments name.
pub unsafe trait Backend: Send + Sync + Sized + 'static {
    /// A block of device memory, freed when dropped.
    type Memory: RawMemory;
    /// A block of host memory that copies to and from the device need not stage.
    type PinnedMemory: RawPinned;
    /// An in-order queue of work.
    type Stream: Send + Sync + 'static;
    /// A point in a stream.
    type Event: Send + Sync + 'static;
    /// A captured sequence of work, ready to be replayed once it was [instantiated](Self::instantiate).
    type Graph: Send + Sync + 'static;

    /// Name, compute capability and memory size of the device.
    fn info(&self) -> &DeviceInfo;

    /// The capture domain. Devices of one domain have one capture at a time, and a call that it forbids in every thread
    /// is forbidden on all of them. The domain of a CUDA device is its context. `None` for a device that shares with no
    /// other.
    fn capture_domain(&self) -> Option<u64> {
        None
    }

    /// Whether to wait after every launch and replay, so that a fault names the kernels that may have caused it.
    fn waits_for_launches(&self) -> bool {
        false
    }

    /// Declares ranges of the bytes of `memory`, which do not overlap, as buffers of their own. A device that checks
    /// the accesses of kernels checks those through a pointer into such a range against that range, and those through
    /// any other pointer against all of `memory`.
    fn divide(&self, memory: &Self::Memory, parts: &[Range<u64>]) {
        let _ = (memory, parts);
    }

    /// A number that no other stream of the domain has.
    fn stream_id(&self, stream: &Self::Stream) -> u64;

    /// Whether something else than [`begin_capture`](Self::begin_capture) has begun a capture that records `stream`, such
    /// as the program that owns it.
    ///
    /// # Errors
    /// [`DeviceError::ForbiddenInCapture`] if work in `stream` would end the capture of another one;
    /// [`DeviceError::Cuda`] if the driver cannot tell.
    fn is_recorded(&self, stream: &Self::Stream) -> Result<bool, DeviceError> {
        let _ = stream;
        Ok(false)
    }

    /// Calls `work` while the thread is set up for libraries that use the device's memory: on a GPU its context is
    /// current.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`], and then `work` was not called.
    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError> {
        work();
        Ok(())
    }

    /// Bytes that an allocation could take now.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver cannot tell.
    fn free_memory(&self) -> Result<u64, DeviceError>;

    /// `bytes` bytes of device memory, zero before any work of any stream sees them. `label` names them in
    /// errors.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Cuda`].
    fn allocate(&self, label: &'static str, bytes: u64) -> Result<Self::Memory, DeviceError>;

    /// At least `bytes` bytes of pinned host memory, zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Cuda`].
    fn allocate_pinned(&self, bytes: u64) -> Result<Self::PinnedMemory, DeviceError>;

    /// A new stream of that priority.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn stream(&self, priority: Priority) -> Result<Self::Stream, DeviceError>;

    /// A new event.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn event(&self) -> Result<Self::Event, DeviceError>;

    /// Records `event` at the present end of `stream`.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn record(&self, event: &Self::Event, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Waits until `event` has passed; at once if it was never recorded.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`]; [`DeviceError::Cuda`].
    fn wait(&self, event: &Self::Event) -> Result<(), DeviceError>;

    /// Whether `event` has passed, without waiting; true if it was never recorded.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`]; [`DeviceError::Cuda`].
    fn has_passed(&self, event: &Self::Event) -> Result<bool, DeviceError>;

    /// Makes work that is queued in `stream` from now on wait, on the device, until `event` has passed.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn wait_in_stream(&self, stream: &Self::Stream, event: &Self::Event)
    -> Result<(), DeviceError>;

    /// Milliseconds between two events that have passed.
    ///
    /// # Errors
    /// [`DeviceError::NotRecorded`]; [`DeviceError::Cuda`].
    fn elapsed_ms(&self, from: &Self::Event, to: &Self::Event) -> Result<f32, DeviceError>;

    /// Queues one launch of the kernel of `operation` for `variant`.
    ///
    /// # Safety
    /// As [`Stream::launch`](crate::Stream::launch), and what that checks was checked.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::Fault`] on the emulator.
    unsafe fn launch<O: Operation>(
        &self,
        stream: &Self::Stream,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError>;

    /// Queues a copy of `bytes` bytes on the device.
    ///
    /// # Safety
    /// Both ranges are in live memory of this device until the copy is done, and do not overlap.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError>;

    /// Queues filling `bytes` bytes on the device with `byte`.
    ///
    /// # Safety
    /// The range is in live memory of this device until that is done.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    unsafe fn fill(
        &self,
        stream: &Self::Stream,
        to: u64,
        byte: u8,
        bytes: u64,
    ) -> Result<(), DeviceError>;

    /// Queues a copy of `bytes` bytes to the device.
    ///
    /// # Safety
    /// Until the copy is done, or the stream was waited for: `from` is valid for reads of `bytes` bytes that
    /// nobody writes, and `to` is in live memory of this device.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; the copy may have been queued all the same.
    unsafe fn upload(
        &self,
        stream: &Self::Stream,
        from: *const u8,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError>;

    /// Queues a copy of `bytes` bytes from the device.
    ///
    /// # Safety
    /// Until the copy is done, or the stream was waited for: `to` is valid for writes of `bytes` bytes that
    /// nobody else touches, and `from` is in live memory of this device.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; the copy may have been queued all the same.
    unsafe fn download(
        &self,
        stream: &Self::Stream,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError>;

    /// Waits until all work of `stream` is done; faults of its kernels surface here.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`]; [`DeviceError::Cuda`].
    fn synchronize(&self, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Begins to capture what is queued into `stream`, instead of running it.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; then no capture was begun.
    fn begin_capture(&self, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Ends the capture of `stream`, also if it returns an error.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph, DeviceError>;

    /// Makes a captured graph ready to be replayed.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn instantiate(&self, graph: &mut Self::Graph) -> Result<(), DeviceError>;

    /// Queues everything that `graph` captured.
    ///
    /// # Safety
    /// `graph` was instantiated, no other thread replays it at the same time, and what it touches is live
    /// until its work is done.
    ///
    /// # Errors
    /// As [`Self::launch`].
    unsafe fn replay(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<(), DeviceError>;
}

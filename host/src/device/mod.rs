//! The device: memory, streams, events, launches, capture and replay. One trait, two devices.
//!
//! [`EmuDevice`] runs the kernels on the CPU, [`CudaDevice`] on an NVIDIA GPU. The rules are the
//! same on both, and checked before a driver is asked: inside a capture nothing allocates, nothing
//! waits, and every pointer a launch takes lies in memory that the graph retains.

mod buffer;
mod capture;
mod cuda;
mod emu;
mod error;
pub mod ops;
mod staged;

use std::sync::Arc;

use bytemuck::Pod;

pub use buffer::{Buffer, DevicePtr, Pinned};
pub use capture::Graph;
pub use cuda::{CudaDevice, CudaOptions, CudaStream};
pub use emu::{EmuDevice, EmuOptions, EmuStream};
pub use error::{CudaStatus, DeviceError};
pub use staged::Staged;

use crate::kernels::Operation;

/// What a device is, for people and reports.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Compute capability as in `sm_90`; `None` for the emulated device.
    pub sm: Option<u32>,
    /// Memory of the device, in bytes.
    pub total_memory: u64,
}

/// A device that runs the kernels of the table.
///
/// Work goes into a [`Self::Stream`] and runs there in order. `Clone` is cheap: a handle.
pub trait Device: Clone + Send + Sync + Sized + 'static {
    /// A block of device memory, freed when dropped.
    type Memory: RawMemory;
    /// A block of host memory that copies to and from the device need not stage.
    type PinnedMemory: RawPinned;
    /// An in-order queue of work.
    type Stream: Send + Sync;
    /// A point in a stream.
    type Event: Send + Sync;
    /// A captured sequence of work, without what it touches; see [`Graph`].
    type RawGraph: Send + Sync;

    /// What this device is.
    fn info(&self) -> &DeviceInfo;

    /// Bytes that an allocation could take now.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver cannot tell.
    fn free_memory(&self) -> Result<u64, DeviceError>;

    /// Zeroed device memory of `len` elements. `label` names it in errors.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn allocate<T: Pod>(
        &self,
        label: &'static str,
        len: u64,
    ) -> Result<Buffer<Self, T>, DeviceError>;

    /// Zeroed pinned host memory of `len` elements.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn allocate_pinned<T: Pod>(&self, len: usize) -> Result<Pinned<Self, T>, DeviceError>;

    /// A new stream.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn stream(&self) -> Result<Self::Stream, DeviceError>;

    /// A new event.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn event(&self) -> Result<Self::Event, DeviceError>;

    /// Notes the present end of `stream` in `event`.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn record(&self, event: &Self::Event, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Waits until `event` has passed; at once if it was never recorded.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn wait(&self, event: &Self::Event) -> Result<(), DeviceError>;

    /// Milliseconds between two recorded events; waits for the later one.
    ///
    /// # Errors
    /// [`DeviceError::NotRecorded`]; [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    fn elapsed_ms(&self, from: &Self::Event, to: &Self::Event) -> Result<f32, DeviceError>;

    /// Waits until all work of `stream` is done; faults of its kernels surface here.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`] names the kernels that ran since the last wait;
    /// [`DeviceError::ForbiddenInCapture`] while capturing.
    fn synchronize(&self, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Queues a launch of `operation` on a grid of `(x, y)` blocks.
    ///
    /// # Safety
    /// Every pointer points to live memory of the shape the kernel table gives, for as long as the
    /// launch (or any replay of it) runs; `const` pointers are written by no other work meanwhile.
    ///
    /// # Errors
    /// [`DeviceError::Fault`] on the emulated device, [`DeviceError::Cuda`] on a GPU,
    /// [`DeviceError::BadGrid`] for an empty or oversized grid.
    unsafe fn launch<O: Operation>(
        &self,
        stream: &Self::Stream,
        variant: O::Variant,
        grid: (u32, u32),
        operation: &O,
    ) -> Result<(), DeviceError>;

    /// Queues a copy of the first `len` elements of `from` to the start of `to`.
    ///
    /// # Safety
    /// `from` is not written until the copy (or any replay of it) is done.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if either is shorter; [`DeviceError::Cuda`].
    unsafe fn copy_from_pinned<T: Pod>(
        &self,
        stream: &Self::Stream,
        from: &Pinned<Self, T>,
        to: &Buffer<Self, T>,
        len: usize,
    ) -> Result<(), DeviceError>;

    /// Queues a copy between two buffers of equal length.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if the lengths differ; [`DeviceError::Cuda`].
    fn copy<T: Pod>(
        &self,
        stream: &Self::Stream,
        from: &Buffer<Self, T>,
        to: &Buffer<Self, T>,
    ) -> Result<(), DeviceError>;

    /// Queues filling all of `buffer` with one byte.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    fn fill<T: Pod>(
        &self,
        stream: &Self::Stream,
        buffer: &Buffer<Self, T>,
        byte: u8,
    ) -> Result<(), DeviceError>;

    /// Copies `from` to elements `at..` of `to` and waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if it does not fit; as [`Self::synchronize`].
    fn upload<T: Pod>(
        &self,
        stream: &Self::Stream,
        from: &[T],
        to: &Buffer<Self, T>,
        at: u64,
    ) -> Result<(), DeviceError>;

    /// Copies elements `at..at + to.len()` of `from` to `to` and waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if they do not exist; as [`Self::synchronize`].
    fn download<T: Pod>(
        &self,
        stream: &Self::Stream,
        from: &Buffer<Self, T>,
        at: u64,
        to: &mut [T],
    ) -> Result<(), DeviceError>;

    /// Captures what `record` queues into `stream`; nothing of it runs.
    ///
    /// The graph keeps `retained` alive, and every pointer of every captured launch must lie in it.
    ///
    /// # Errors
    /// What `record` returned; [`DeviceError::ForbiddenInCapture`] if it tried to allocate or to
    /// wait, even if it swallowed that error; [`DeviceError::NotRetained`].
    fn capture(
        &self,
        stream: &Self::Stream,
        retained: Vec<Arc<Self::Memory>>,
        record: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph<Self>, DeviceError>;

    /// Queues everything `graph` captured.
    ///
    /// # Errors
    /// As [`Self::launch`].
    fn replay(&self, stream: &Self::Stream, graph: &Graph<Self>) -> Result<(), DeviceError>;
}

/// A block of device memory.
pub trait RawMemory: Send + Sync + 'static {
    /// Address of its first byte on the device.
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

/// Refuses a grid that no GPU takes.
fn check_grid(kernel: &'static str, (x, y): (u32, u32)) -> Result<(), DeviceError> {
    if x == 0 || y == 0 || x > i32::MAX as u32 || y > u32::from(u16::MAX) {
        return Err(DeviceError::BadGrid { kernel, x, y });
    }
    Ok(())
}

/// Refuses `what` if a buffer has fewer elements than needed.
fn check_length(what: &'static str, found: u64, needed: u64) -> Result<(), DeviceError> {
    if found < needed { Err(DeviceError::Length { what, found, needed }) } else { Ok(()) }
}

/// Checks a copy between two buffers, inside a capture or not.
fn check_copy<D: Device, T: Pod>(
    captures: &capture::Captures,
    stream: usize,
    from: &Buffer<D, T>,
    to: &Buffer<D, T>,
) -> Result<(), DeviceError> {
    check_length("copy", to.len(), from.len())?;
    check_length("copy", from.len(), to.len())?;
    captures.check_pointer(stream, "copy", "from", from.ptr().address())?;
    captures.check_pointer(stream, "copy", "to", to.ptr().address())
}

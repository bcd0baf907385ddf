//! What the driver hands out: memory, streams, events, graphs. Each is given back when dropped.

use std::mem::ManuallyDrop;

use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream};

use super::CudaDevice;
use super::launched::KernelSet;
use crate::device::{RawMemory, RawPinned};

/// A CUDA stream: the device's own, or one the embedder handed in.
pub struct CudaStream {
    pub(super) handle: CUstream,
    pub(super) _owned: Option<Stream>,
}

// SAFETY: a stream handle may be used from any thread; the driver serialises.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn id(&self) -> usize {
        self.handle as usize
    }
}

/// Device memory from `cuMemAlloc`.
pub struct CudaMemory {
    pub(super) buffer: ManuallyDrop<DeviceBuffer<u8>>,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) device: CudaDevice,
}

// SAFETY: a device address is a number to the host; freeing makes the context current first.
unsafe impl Send for CudaMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaMemory {}

impl RawMemory for CudaMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Without its context (the process is ending, or a fault lost it) the memory is gone anyway.
        if self.device.enter().is_ok() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.buffer) }
        }
    }
}

/// Page-locked host memory.
pub struct CudaPinned {
    pub(super) buffer: ManuallyDrop<LockedBuffer<u128>>,
    pub(super) device: CudaDevice,
}

// SAFETY: page-locked memory is ordinary host memory; freeing makes the context current first.
unsafe impl Send for CudaPinned {}
// SAFETY: as above.
unsafe impl Sync for CudaPinned {}

impl RawPinned for CudaPinned {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_slice())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.buffer.as_mut_slice())
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.buffer) }
        }
    }
}

/// An instantiated CUDA graph.
pub struct CudaGraph {
    pub(super) graph: CUgraph,
    pub(super) executable: CUgraphExec,
    /// Kernels in the graph.
    pub(super) kernels: KernelSet,
    pub(super) device: CudaDevice,
}

// SAFETY: graph handles may be used from any thread, one at a time; launching is the only use and
// the driver orders launches of one executable.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: both were made by a successful capture and are destroyed once, here. The
            // driver keeps an executable alive until its launches are done.
            unsafe {
                sys::cuGraphExecDestroy(self.executable);
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// A CUDA event.
pub struct CudaEvent {
    pub(super) handle: CUevent,
    pub(super) device: CudaDevice,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: a live event, destroyed here and nowhere else.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

//! Handles of the driver: memory, streams, events, graphs. Each is released when dropped, and keeps its context alive
//! until then.

use std::mem::ManuallyDrop;
use std::sync::Mutex;

use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUgraph, CUgraphExec, CUresult, CUstream};

use super::context::Cuda;
use super::launched::KernelSet;
use crate::backend::{RawMemory, RawPinned};

/// A CUDA stream: the device's own, or one that the embedder owns.
pub struct CudaStream {
    pub(super) handle: CUstream,
    /// Kernels that were launched before a capture of the stream began, and were not waited for since.
    pub(super) launched_before: Mutex<KernelSet>,
    /// The stream, if it is the device's own.
    owned: Option<ManuallyDrop<Stream>>,
    cuda: Cuda,
}

// SAFETY: a stream handle may be used from any thread; the driver serialises.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// A stream that is destroyed with this.
    pub(super) fn owned(stream: Stream, cuda: &Cuda) -> Self {
        let mut this = Self::borrowed(stream.as_inner(), cuda);
        this.owned = Some(ManuallyDrop::new(stream));
        this
    }

    /// A stream that the embedder owns.
    pub(super) fn borrowed(handle: CUstream, cuda: &Cuda) -> Self {
        Self { handle, launched_before: Mutex::default(), owned: None, cuda: cuda.clone() }
    }

    /// Whether the embedder owns it.
    pub(super) const fn is_borrowed(&self) -> bool {
        self.owned.is_none()
    }

    pub(super) fn id(&self) -> u64 {
        self.handle as u64
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.cuda.shared.launched.remove_clear(self.id());
        let Some(stream) = &mut self.owned else { return };
        // Without its context (the process is ending, or a fault lost it) the stream is gone anyway.
        if let Ok(_callers) = self.cuda.enter() {
            // SAFETY: dropped here and nowhere else; the driver keeps what it needs until the stream's work
            // is done.
            unsafe { ManuallyDrop::drop(stream) }
        }
    }
}

/// Device memory: from `cuMemAlloc`, or memory that the embedder owns.
pub struct CudaMemory {
    /// The memory, if it is the device's own.
    owned: Option<ManuallyDrop<DeviceBuffer<u8>>>,
    address: u64,
    bytes: u64,
    cuda: Cuda,
}

impl CudaMemory {
    /// `bytes` bytes that are freed with this.
    pub(super) fn owned(buffer: DeviceBuffer<u8>, bytes: u64, cuda: &Cuda) -> Self {
        let address = buffer.as_device_ptr().as_raw();
        let owned = Some(ManuallyDrop::new(buffer));
        Self { owned, address, bytes, cuda: cuda.clone() }
    }

    /// Memory that the embedder owns.
    pub(super) fn borrowed(address: u64, bytes: u64, cuda: &Cuda) -> Self {
        Self { owned: None, address, bytes, cuda: cuda.clone() }
    }
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
        let Some(buffer) = &mut self.owned else { return };
        // Without its context the memory is gone anyway.
        if let Ok(_callers) = self.cuda.enter() {
            // SAFETY: dropped here and nowhere else; `cuMemFree` waits for the device.
            unsafe { ManuallyDrop::drop(buffer) }
        }
    }
}

/// Page-locked host memory.
pub struct CudaPinned {
    pub(super) buffer: ManuallyDrop<LockedBuffer<u128>>,
    pub(super) cuda: Cuda,
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
        let Ok(_callers) = self.cuda.enter() else { return };
        // A copy may still read it, and CUDA does not promise that freeing waits for that.
        // SAFETY: no arguments.
        if unsafe { sys::cuCtxSynchronize() } == CUresult::CUDA_SUCCESS {
            // SAFETY: dropped here and nowhere else; no copy is in flight.
            unsafe { ManuallyDrop::drop(&mut self.buffer) }
        }
    }
}

/// A CUDA graph.
pub struct CudaGraph {
    pub(super) graph: CUgraph,
    /// Null until it is instantiated.
    pub(super) executable: CUgraphExec,
    /// Kernels in the graph.
    pub(super) kernels: KernelSet,
    pub(super) cuda: Cuda,
}

// SAFETY: graph handles may be used from any thread.
unsafe impl Send for CudaGraph {}
// SAFETY: as above, one thread at a time; replaying is the only use of a shared one, and its caller promises
// that.
unsafe impl Sync for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(_callers) = self.cuda.enter() else { return };
        if !self.executable.is_null() {
            // SAFETY: instantiated once, destroyed once, here. The driver keeps an executable alive until its
            // launches are done.
            unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
        // SAFETY: made by a successful capture and destroyed once, here.
        unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

/// A CUDA event.
pub struct CudaEvent {
    pub(super) handle: CUevent,
    pub(super) cuda: Cuda,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_callers) = self.cuda.enter() {
            // SAFETY: a live event, destroyed here and nowhere else.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

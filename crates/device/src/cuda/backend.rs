//! The raw calls, as calls of the driver.

use std::ffi::c_void;
use std::mem::{self, ManuallyDrop};
use std::ptr;
use std::sync::PoisonError;

use cust::context::CurrentContext;
use cust::error::CudaError;
use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUresult};

use super::context::Cuda;
use super::handles::{CudaEvent, CudaGraph, CudaMemory, CudaPinned, CudaStream};
use crate::backend::{Backend, Priority, RawMemory};
use crate::error::DeviceError;
use crate::identity::DeviceInfo;
use crate::operation::Operation;

// SAFETY: memory is the driver's, and its drop waits (`CudaMemory`, `CudaPinned`), or it is borrowed, and its owner has
// promised the same (`CudaDevice::buffer_from_raw`); streams are ordered by the driver, and `cuStreamSynchronize` waits
// for copies too.
unsafe impl Backend for Cuda {
    type Memory = CudaMemory;
    type PinnedMemory = CudaPinned;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn capture_domain(&self) -> Option<u64> {
        Some(self.shared.context as u64)
    }

    fn waits_for_launches(&self) -> bool {
        self.shared.check_every_launch
    }

    fn stream_id(&self, stream: &CudaStream) -> u64 {
        stream.id()
    }

    fn is_recorded(&self, stream: &CudaStream) -> Result<bool, DeviceError> {
        // Nobody else has the handle of a stream of its own, and its events are recorded outside captures.
        if !stream.is_borrowed() {
            return Ok(false);
        }
        let _callers = self.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live; the call writes one number.
        let asked = unsafe { sys::cuStreamIsCapturing(stream.handle, &mut status) };
        // The legacy default stream waits for streams that are captured: whatever is queued into it ends their capture.
        if asked == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            let operation = "work in the legacy default stream";
            return Err(DeviceError::ForbiddenInCapture { operation });
        }
        self.check("asking whether a stream is captured", asked)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        work();
        Ok(())
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        let _callers = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes two integers.
        self.check("reading the free memory", unsafe {
            sys::cuMemGetInfo_v2(&mut free, &mut total)
        })?;
        Ok(free as u64)
    }

    fn allocate(&self, label: &'static str, bytes: u64) -> Result<CudaMemory, DeviceError> {
        let _callers = self.enter()?;
        let free = self.free_memory()?;
        let refused = || DeviceError::OutOfMemory { label, requested: bytes, free };
        let size = usize::try_from(bytes).map_err(|_| refused())?.max(1);
        // SAFETY: the memory is zeroed below, before anything reads it.
        let buffer = match unsafe { DeviceBuffer::<u8>::uninitialized(size) } {
            Ok(buffer) => buffer,
            Err(CudaError::OutOfMemory) => return Err(refused()),
            Err(error) => return Err(self.during("allocating device memory")(error)),
        };
        let memory = CudaMemory::owned(buffer, bytes, self);
        // SAFETY: so many bytes were just allocated at the address.
        let status = unsafe { sys::cuMemsetD8_v2(memory.address(), 0, size) };
        self.check("zeroing device memory", status)?;
        // SAFETY: no arguments; waits until the memory is zero, whatever stream comes next.
        self.check("zeroing device memory", unsafe { sys::cuCtxSynchronize() })?;
        Ok(memory)
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<CudaPinned, DeviceError> {
        const WORD: u64 = size_of::<u128>() as u64;
        let _callers = self.enter()?;
        let (label, free) = ("pinned memory", 0);
        let refused = || DeviceError::OutOfMemory { label, requested: bytes, free };
        let words = usize::try_from(bytes.div_ceil(WORD)).map_err(|_| refused())?.max(1);
        if words > isize::MAX as usize / WORD as usize {
            return Err(refused());
        }
        // SAFETY: the memory is zeroed below, before anything reads it.
        let mut buffer = match unsafe { LockedBuffer::<u128>::uninitialized(words) } {
            Ok(buffer) => ManuallyDrop::new(buffer),
            // A size beyond the address space is an invalid value to the driver.
            Err(CudaError::OutOfMemory | CudaError::InvalidValue) => return Err(refused()),
            Err(error) => return Err(self.during("allocating pinned memory")(error)),
        };
        // SAFETY: so many words were just allocated, page-locked for the host to write.
        unsafe { buffer.as_mut_ptr().write_bytes(0, words) };
        Ok(CudaPinned { buffer, cuda: self.clone() })
    }

    fn stream(&self, priority: Priority) -> Result<CudaStream, DeviceError> {
        let _callers = self.enter()?;
        let range = CurrentContext::get_stream_priority_range();
        let range = range.map_err(self.during("asking for the priorities of streams"))?;
        let priority = match priority {
            Priority::Highest => range.greatest,
            Priority::Lowest => range.least,
        };
        let stream = Stream::new(StreamFlags::DEFAULT, Some(priority));
        let stream = stream.map_err(self.during("creating a stream"))?;
        Ok(CudaStream::owned(stream, self))
    }

    fn event(&self) -> Result<CudaEvent, DeviceError> {
        let _callers = self.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle.
        self.check("creating an event", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(CudaEvent { handle, cuda: self.clone() })
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: both handles are live.
        self.check("recording an event", unsafe { sys::cuEventRecord(event.handle, stream.handle) })
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: the event is live.
        self.check("waiting for an event", unsafe { sys::cuEventSynchronize(event.handle) })
    }

    fn has_passed(&self, event: &CudaEvent) -> Result<bool, DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(event.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => self.check("asking for an event", status).map(|()| true),
        }
    }

    fn wait_in_stream(&self, stream: &CudaStream, event: &CudaEvent) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: both handles are live.
        let status = unsafe { sys::cuStreamWaitEvent(stream.handle, event.handle, 0) };
        self.check("waiting for an event in a stream", status)
    }

    fn elapsed_ms(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f32, DeviceError> {
        let _callers = self.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; the call writes one number.
        let status = unsafe { sys::cuEventElapsedTime(&mut milliseconds, from.handle, to.handle) };
        if status == CUresult::CUDA_ERROR_INVALID_HANDLE {
            return Err(DeviceError::NotRecorded);
        }
        self.check("reading two events", status)?;
        Ok(milliseconds)
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &CudaStream,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        let (kernel, index) = (O::info(variant), O::kernel(variant));
        let launch = cuda_loader::Launch {
            function: self.shared.functions[index],
            grid: operation.grid(variant),
            block: kernel.block,
            shared_bytes: kernel.shared,
            stream: stream.handle,
            overlap: self.shared.overlap,
        };
        let status = operation.with_arguments(|arguments: &mut [*mut c_void]| {
            // SAFETY: function and stream are of this backend, live, and its context is current by `enter`. The
            // arguments are those of the kernel table, which is the PTX's by the promise of `Kernels::new`, and so is
            // what kernels read before they wait (D19). That their pointers are good for the launch is the caller's
            // promise.
            unsafe { cuda_loader::launch_kernel(&launch, arguments) }
        });
        self.check(kernel.name, status)?;
        self.shared.launched.insert(stream.id(), index);
        Ok(())
    }

    unsafe fn copy(
        &self,
        stream: &CudaStream,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: two ranges of live memory, by the caller's promise.
        self.check("copying on the device", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream.handle)
        })
    }

    unsafe fn fill(
        &self,
        stream: &CudaStream,
        to: u64,
        byte: u8,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: a range of live memory, by the caller's promise.
        self.check("filling device memory", unsafe {
            sys::cuMemsetD8Async(to, byte, bytes as usize, stream.handle)
        })
    }

    unsafe fn upload(
        &self,
        stream: &CudaStream,
        from: *const u8,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: both ranges are valid until the copy is done, by the caller's promise.
        self.check("copying to the device", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.handle)
        })
    }

    unsafe fn download(
        &self,
        stream: &CudaStream,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: both ranges are valid until the copy is done, by the caller's promise.
        self.check("copying from the device", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.handle)
        })
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: the stream is live.
        let status = unsafe { sys::cuStreamSynchronize(stream.handle) };
        self.check("waiting for a stream", status)?;
        self.shared.launched.clear(stream.id());
        Ok(())
    }

    fn begin_capture(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // Meanwhile other threads may allocate, free and wait, except for waits in this context: a wait in a context in
        // which a stream is captured fails, and invalidates the capture. `Captures` prevents such waits.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        self.check("beginning a capture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.handle, mode)
        })?;
        let before = self.shared.launched.take(stream.id());
        *stream.launched_before.lock().unwrap_or_else(PoisonError::into_inner) = before;
        Ok(())
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph, DeviceError> {
        let mut before = stream.launched_before.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = self.shared.launched.take(stream.id());
        self.shared.launched.add(stream.id(), &mem::take(&mut *before));
        let _callers = self.enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is live; the call writes one handle.
        self.check("ending a capture", unsafe {
            sys::cuStreamEndCapture(stream.handle, &mut graph)
        })?;
        Ok(CudaGraph { graph, executable: ptr::null_mut(), kernels, cuda: self.clone() })
    }

    fn instantiate(&self, graph: &mut CudaGraph) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: a graph from a successful capture; the call writes one handle.
        self.check("instantiating a graph", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut graph.executable, graph.graph, 0)
        })
    }

    unsafe fn replay(&self, stream: &CudaStream, graph: &CudaGraph) -> Result<(), DeviceError> {
        let _callers = self.enter()?;
        // SAFETY: the executable is live and this thread has it alone, and what it touches is live, by the
        // caller's promise.
        let status = unsafe { sys::cuGraphLaunch(graph.executable, stream.handle) };
        self.check("replaying a graph", status)?;
        self.shared.launched.add(stream.id(), &graph.kernels);
        Ok(())
    }
}

//! The device's operations, as calls of the driver.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use bytemuck::Pod;
use cust::error::CudaError;
use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUgraph, CUresult};

use super::handles::{CudaEvent, CudaGraph, CudaMemory, CudaPinned, CudaStream};
use super::launched::KernelSet;
use super::{CudaDevice, check, during};
use crate::device::{self, Buffer, Device, DeviceError, DeviceInfo, Graph, Pinned};
use crate::kernels::Operation;

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type PinnedMemory = CudaPinned;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type RawGraph = CudaGraph;

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes two integers.
        check("reading the free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
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
        // SAFETY: the memory is zeroed below, before anything reads it.
        let buffer = match unsafe { DeviceBuffer::<u8>::uninitialized(size) } {
            Ok(buffer) => buffer,
            Err(CudaError::OutOfMemory) => return Err(refused(bytes)),
            Err(error) => return Err(during("allocating device memory")(error)),
        };
        let address = buffer.as_device_ptr().as_raw();
        let device = self.clone();
        let memory = CudaMemory { buffer: ManuallyDrop::new(buffer), address, bytes, device };
        // SAFETY: the `size` bytes at `address` were just allocated.
        check("zeroing device memory", unsafe { sys::cuMemsetD8_v2(address, 0, size) })?;
        // SAFETY: no arguments; waits until the memory is zero, whatever stream comes next.
        check("zeroing device memory", unsafe { sys::cuCtxSynchronize() })?;
        Ok(Buffer::new(memory))
    }

    fn allocate_pinned<T: Pod>(&self, len: usize) -> Result<Pinned<Self, T>, DeviceError> {
        self.shared.captures.forbid("allocating pinned memory")?;
        self.enter()?;
        let words = (len * size_of::<T>()).div_ceil(size_of::<u128>()).max(1);
        let buffer =
            LockedBuffer::new(&0_u128, words).map_err(during("allocating pinned memory"))?;
        let memory = CudaPinned { buffer: ManuallyDrop::new(buffer), device: self.clone() };
        Ok(Pinned::new(memory, len))
    }

    fn stream(&self) -> Result<CudaStream, DeviceError> {
        self.shared.captures.forbid("creating a stream")?;
        self.enter()?;
        let stream =
            Stream::new(StreamFlags::DEFAULT, None).map_err(during("creating a stream"))?;
        Ok(CudaStream { handle: stream.as_inner(), _owned: Some(stream) })
    }

    fn event(&self) -> Result<CudaEvent, DeviceError> {
        self.shared.captures.forbid("creating an event")?;
        self.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the call writes one handle.
        check("creating an event", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(CudaEvent { handle, device: self.clone() })
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<(), DeviceError> {
        self.shared.captures.forbid("recording an event")?;
        self.enter()?;
        // SAFETY: both handles are live.
        check("recording an event", unsafe { sys::cuEventRecord(event.handle, stream.handle) })
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        self.shared.captures.forbid("waiting for an event")?;
        self.enter()?;
        // SAFETY: the event is live.
        self.waited(unsafe { sys::cuEventSynchronize(event.handle) })
    }

    fn elapsed_ms(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f32, DeviceError> {
        self.wait(to)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; the call writes one number.
        let status = unsafe { sys::cuEventElapsedTime(&mut milliseconds, from.handle, to.handle) };
        if status == CUresult::CUDA_ERROR_INVALID_HANDLE {
            return Err(DeviceError::NotRecorded);
        }
        check("reading two events", status)?;
        Ok(milliseconds)
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.shared.captures.forbid("waiting for a stream")?;
        self.enter()?;
        // SAFETY: the stream is live.
        self.waited(unsafe { sys::cuStreamSynchronize(stream.handle) })?;
        self.shared.launched.take(stream.id());
        Ok(())
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &CudaStream,
        variant: O::Variant,
        grid: (u32, u32),
        operation: &O,
    ) -> Result<(), DeviceError> {
        let kernel = O::info(variant);
        device::check_grid(kernel.name, grid)?;
        self.shared.captures.check_launch(stream.id(), kernel.name, operation)?;
        self.enter()?;
        let index = O::kernel(variant);
        self.shared.launched.add(stream.id(), KernelSet::of(index));
        let launch = cuda_loader::Launch {
            function: self.shared.functions[index],
            grid,
            block: kernel.block,
            shared_bytes: kernel.shared,
            stream: stream.handle,
            overlap: self.shared.overlap,
        };
        let status = operation.with_arguments(|arguments: &mut [*mut c_void]| {
            // SAFETY: the arguments are those of the kernel table, which the PTX was checked
            // against, as it was that every kernel waits first; that their pointers are good for the
            // launch is the caller's promise.
            unsafe { cuda_loader::launch_kernel(&launch, arguments) }
        });
        check(kernel.name, status)?;
        if self.shared.check_every_launch && !self.shared.captures.is_capturing(stream.id()) {
            self.synchronize(stream)?;
        }
        Ok(())
    }

    unsafe fn copy_from_pinned<T: Pod>(
        &self,
        stream: &CudaStream,
        from: &Pinned<Self, T>,
        to: &Buffer<Self, T>,
        len: usize,
    ) -> Result<(), DeviceError> {
        self.shared.captures.forbid("copying from host memory")?;
        let from = from.as_slice();
        device::check_length("copy from pinned memory", from.len() as u64, len as u64)?;
        device::check_length("copy from pinned memory", to.len(), len as u64)?;
        self.enter()?;
        // SAFETY: both ranges exist by the checks above; that `from` stays as it is until the copy
        // is done is the caller's promise.
        check("copying from pinned memory", unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                to.ptr().address(),
                from.as_ptr().cast(),
                len * size_of::<T>(),
                stream.handle,
            )
        })
    }

    fn copy<T: Pod>(
        &self,
        stream: &CudaStream,
        from: &Buffer<Self, T>,
        to: &Buffer<Self, T>,
    ) -> Result<(), DeviceError> {
        device::check_copy(&self.shared.captures, stream.id(), from, to)?;
        self.enter()?;
        let bytes = from.bytes() as usize;
        // SAFETY: two live buffers of equal size.
        check("copying on the device", unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                to.ptr().address(),
                from.ptr().address(),
                bytes,
                stream.handle,
            )
        })
    }

    fn fill<T: Pod>(
        &self,
        stream: &CudaStream,
        buffer: &Buffer<Self, T>,
        byte: u8,
    ) -> Result<(), DeviceError> {
        let address = buffer.ptr().address();
        self.shared.captures.check_pointer(stream.id(), "fill", "to", address)?;
        self.enter()?;
        // SAFETY: a live buffer of that size.
        check("filling device memory", unsafe {
            sys::cuMemsetD8Async(address, byte, buffer.bytes() as usize, stream.handle)
        })
    }

    fn upload<T: Pod>(
        &self,
        stream: &CudaStream,
        from: &[T],
        to: &Buffer<Self, T>,
        at: u64,
    ) -> Result<(), DeviceError> {
        self.shared.captures.forbid("copying from host memory")?;
        device::check_length("upload", to.len().saturating_sub(at), from.len() as u64)?;
        self.enter()?;
        let to = to.ptr().offset(at).address();
        // SAFETY: the elements exist by the check above; `from` outlives the wait below.
        check("copying to the device", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), size_of_val(from), stream.handle)
        })?;
        self.synchronize(stream)
    }

    fn download<T: Pod>(
        &self,
        stream: &CudaStream,
        from: &Buffer<Self, T>,
        at: u64,
        to: &mut [T],
    ) -> Result<(), DeviceError> {
        self.shared.captures.forbid("copying to host memory")?;
        device::check_length("download", from.len().saturating_sub(at), to.len() as u64)?;
        self.enter()?;
        let from = from.ptr().offset(at).address();
        let bytes = size_of_val(to);
        // SAFETY: the elements exist by the check above, are `Pod`, and `to` outlives the wait.
        check("copying from the device", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, bytes, stream.handle)
        })?;
        self.synchronize(stream)
    }

    fn capture(
        &self,
        stream: &CudaStream,
        retained: Vec<Arc<CudaMemory>>,
        record: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph<Self>, DeviceError> {
        self.enter()?;
        self.shared.captures.begin(stream.id(), &retained)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is live and, by `Captures`, not being captured.
        let begun = check("beginning a capture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.handle, mode)
        });
        if let Err(error) = begun {
            self.shared.captures.end()?;
            return Err(error);
        }
        let launched_before = self.shared.launched.take(stream.id());
        let recorded = record();
        let kernels = self.shared.launched.take(stream.id());
        self.shared.launched.add(stream.id(), launched_before);
        let mut graph = ptr::null_mut();
        // SAFETY: the capture was begun above; the call writes one handle.
        let ended = check("ending a capture", unsafe {
            sys::cuStreamEndCapture(stream.handle, &mut graph)
        });
        let kept = self.shared.captures.end();
        let result = recorded.and(kept).and(ended).and_then(|()| self.instantiate(graph, kernels));
        if result.is_err() && !graph.is_null() {
            // SAFETY: the graph was captured and nothing else holds it.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        Ok(Graph::new(result?, retained))
    }

    fn replay(&self, stream: &CudaStream, graph: &Graph<Self>) -> Result<(), DeviceError> {
        if self.shared.captures.is_capturing(stream.id()) {
            return Err(DeviceError::NestedCapture);
        }
        self.enter()?;
        self.shared.launched.add(stream.id(), graph.raw.kernels);
        // SAFETY: the executable lives as long as `graph`, and what it touches is retained there.
        check("replaying a graph", unsafe {
            sys::cuGraphLaunch(graph.raw.executable, stream.handle)
        })
    }
}

impl CudaDevice {
    fn instantiate(&self, graph: CUgraph, kernels: KernelSet) -> Result<CudaGraph, DeviceError> {
        let mut executable = ptr::null_mut();
        // SAFETY: a graph from a successful capture; the call writes one handle.
        check("instantiating a graph", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)
        })?;
        Ok(CudaGraph { graph, executable, kernels, device: self.clone() })
    }
}

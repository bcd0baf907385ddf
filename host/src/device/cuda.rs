//! An NVIDIA GPU through `cust`; capture and graphs through its `sys`.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use cust::context::Context;
use cust::device::DeviceAttribute;
use cust::error::CudaError;
use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUcontext, CUevent, CUfunction, CUgraph, CUgraphExec, CUresult, CUstream};
use kv_layout::kernels::KERNELS;

use super::capture::Captures;
use super::{Buffer, Device, DeviceError, DeviceInfo, Graph, Pinned, RawMemory, RawPinned};
use crate::kernels::Operation;
use crate::ptx;

/// Which GPU, and how it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// The driver's number of the GPU.
    pub ordinal: u32,
    /// Wait after every launch, so that a fault names the one kernel that caused it. Slow.
    pub check_every_launch: bool,
}

/// An NVIDIA GPU with the kernels loaded.
#[derive(Clone)]
pub struct CudaDevice {
    shared: Arc<Shared>,
}

struct Shared {
    info: DeviceInfo,
    check_every_launch: bool,
    captures: Captures,
    /// Kernels launched since the last successful wait, one bit each by table index.
    launched: AtomicU64,
    functions: Vec<CUfunction>,
    context: CUcontext,
    module: ManuallyDrop<Module>,
    // Dropped after `module`, which belongs to it.
    _owned_context: Option<Context>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the context outlives this device; a failure is answered by not unloading.
        if unsafe { sys::cuCtxSetCurrent(self.context) } == CUresult::CUDA_SUCCESS {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.module) }
        }
    }
}

const _: () = assert!(KERNELS.len() <= u64::BITS as usize, "`launched` has one bit per kernel");

// SAFETY: the driver's handles may be used from any thread that has made the context current, which
// every method does first; nothing else in `Shared` is tied to a thread.
unsafe impl Send for Shared {}
// SAFETY: as above; driver calls on one context are thread-safe.
unsafe impl Sync for Shared {}

/// A CUDA stream: the device's own, or one the embedder handed in.
pub struct CudaStream {
    handle: CUstream,
    _owned: Option<Stream>,
}

// SAFETY: a stream handle may be used from any thread; the driver serialises.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    fn id(&self) -> usize {
        self.handle as usize
    }
}

/// Device memory from `cuMemAlloc`.
pub struct CudaMemory {
    buffer: ManuallyDrop<DeviceBuffer<u8>>,
    address: u64,
    bytes: u64,
    device: CudaDevice,
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
    buffer: ManuallyDrop<LockedBuffer<u128>>,
    device: CudaDevice,
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
    graph: CUgraph,
    executable: CUgraphExec,
    /// Kernels in the graph, one bit each.
    kernels: u64,
    device: CudaDevice,
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
    handle: CUevent,
    device: CudaDevice,
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

impl CudaDevice {
    /// Opens a GPU with its primary context and loads the kernels.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], [`DeviceError::NoDevice`], [`DeviceError::TooOld`],
    /// [`DeviceError::PtxTooNew`], [`DeviceError::AbiVersion`] or [`DeviceError::Cuda`].
    pub fn new(options: CudaOptions) -> Result<Self, DeviceError> {
        cuda_loader::driver()?;
        cust::init(cust::CudaFlags::empty()).map_err(during("initialising CUDA"))?;
        let count = cust::device::Device::num_devices().map_err(during("counting devices"))?;
        if options.ordinal >= count {
            return Err(DeviceError::NoDevice { ordinal: options.ordinal, count });
        }
        let device = cust::device::Device::get_device(options.ordinal)
            .map_err(during("opening the device"))?;
        let context = Context::new(device).map_err(during("creating the context"))?;
        let raw = context.as_raw();
        Self::load(device, raw, Some(context), options)
    }

    /// Uses a context that the embedding program owns.
    ///
    /// # Safety
    /// `context` is a live CUDA context of device `options.ordinal` and outlives this device and
    /// everything made from it.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub unsafe fn from_context(
        context: CUcontext,
        options: CudaOptions,
    ) -> Result<Self, DeviceError> {
        cuda_loader::driver()?;
        cust::init(cust::CudaFlags::empty()).map_err(during("initialising CUDA"))?;
        let device = cust::device::Device::get_device(options.ordinal)
            .map_err(during("opening the device"))?;
        Self::load(device, context, None, options)
    }

    /// Uses a stream that the embedding program owns.
    ///
    /// # Safety
    /// `handle` is a live stream of this device's context and outlives the result. To be captured
    /// it must not be the legacy default stream.
    #[must_use]
    pub unsafe fn stream_from_raw(&self, handle: CUstream) -> CudaStream {
        CudaStream { handle, _owned: None }
    }

    fn load(
        device: cust::device::Device,
        context: CUcontext,
        owned_context: Option<Context>,
        options: CudaOptions,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the context is live: just created, or so promised by the embedder.
        check("making the context current", unsafe { sys::cuCtxSetCurrent(context) })?;
        let attribute =
            |which| device.get_attribute(which).map_err(during("reading the compute capability"));
        let sm = 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)?
            + attribute(DeviceAttribute::ComputeCapabilityMinor)?;
        let info = DeviceInfo {
            name: device.name().map_err(during("reading the device's name"))?,
            sm: Some(sm as u32),
            total_memory: device.total_memory().map_err(during("reading the memory size"))? as u64,
        };
        let module = load_module(&info, sm as u32)?;
        let functions =
            KERNELS.iter().map(|kernel| find(&module, kernel.name)).collect::<Result<_, _>>()?;
        Ok(Self {
            shared: Arc::new(Shared {
                info,
                check_every_launch: options.check_every_launch,
                captures: Captures::default(),
                launched: AtomicU64::new(0),
                functions,
                context,
                module: ManuallyDrop::new(module),
                _owned_context: owned_context,
            }),
        })
    }

    /// Makes the device's context current on this thread.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as `shared`.
        check("making the context current", unsafe { sys::cuCtxSetCurrent(self.shared.context) })
    }

    /// Turns a failed wait into the fault of the kernels that may have caused it.
    fn fault(&self, status: CUresult) -> Result<(), DeviceError> {
        let launched = self.shared.launched.swap(0, Ordering::Relaxed);
        if status == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let names = KERNELS.iter().enumerate().filter(|(index, _)| launched >> index & 1 == 1);
        let kernels: Vec<_> = names.map(|(_, kernel)| kernel.name).collect();
        Err(DeviceError::KernelFault { kernels: kernels.join(", "), status: status.into() })
    }
}

/// Loads the PTX for compute capability `sm`, or says why this driver cannot.
fn load_module(info: &DeviceInfo, sm: u32) -> Result<Module, DeviceError> {
    let chosen = ptx::select(&info.name, sm)?;
    let mut version = 0;
    // SAFETY: the call writes one integer.
    check("reading the driver version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    chosen.check_driver(version)?;
    Module::from_ptx(chosen.text, &[]).map_err(during("loading the kernels"))
}

fn find(module: &Module, name: &'static str) -> Result<CUfunction, DeviceError> {
    let function = module.get_function(name).map_err(during("finding a kernel in the module"))?;
    Ok(function.to_raw())
}

/// Names what a failed driver call was doing.
fn during(operation: &'static str) -> impl FnOnce(CudaError) -> DeviceError {
    move |error| DeviceError::Cuda { operation, status: error.into() }
}

fn check(operation: &'static str, status: CUresult) -> Result<(), DeviceError> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(DeviceError::Cuda { operation, status: other.into() }),
    }
}

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
        self.fault(unsafe { sys::cuEventSynchronize(event.handle) })
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
        self.fault(unsafe { sys::cuStreamSynchronize(stream.handle) })
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &CudaStream,
        variant: O::Variant,
        grid: (u32, u32),
        operation: &O,
    ) -> Result<(), DeviceError> {
        let kernel = O::info(variant);
        super::check_grid(kernel.name, grid)?;
        self.shared.captures.check_launch(stream.id(), kernel.name, operation)?;
        self.enter()?;
        let index = O::kernel(variant);
        self.shared.launched.fetch_or(1 << index, Ordering::Relaxed);
        let function = self.shared.functions[index];
        let status = operation.with_arguments(|arguments: &mut [*mut c_void]| {
            // SAFETY: the arguments are those of the kernel table, which the PTX was checked
            // against; that their pointers are good for the launch is the caller's promise.
            unsafe {
                sys::cuLaunchKernel(
                    function,
                    grid.0,
                    grid.1,
                    1,
                    kernel.block,
                    1,
                    1,
                    kernel.shared,
                    stream.handle,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
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
        super::check_length("copy from pinned memory", from.len() as u64, len as u64)?;
        super::check_length("copy from pinned memory", to.len(), len as u64)?;
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
        super::check_copy(&self.shared.captures, stream.id(), from, to)?;
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
        super::check_length("upload", to.len().saturating_sub(at), from.len() as u64)?;
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
        super::check_length("download", from.len().saturating_sub(at), to.len() as u64)?;
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
        let launched_before = self.shared.launched.swap(0, Ordering::Relaxed);
        let recorded = record();
        let kernels = self.shared.launched.swap(launched_before, Ordering::Relaxed);
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
        self.shared.launched.fetch_or(graph.raw.kernels, Ordering::Relaxed);
        // SAFETY: the executable lives as long as `graph`, and what it touches is retained there.
        check("replaying a graph", unsafe {
            sys::cuGraphLaunch(graph.raw.executable, stream.handle)
        })
    }
}

impl CudaDevice {
    fn instantiate(&self, graph: CUgraph, kernels: u64) -> Result<CudaGraph, DeviceError> {
        let mut executable = ptr::null_mut();
        // SAFETY: a graph from a successful capture; the call writes one handle.
        check("instantiating a graph", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)
        })?;
        Ok(CudaGraph { graph, executable, kernels, device: self.clone() })
    }
}

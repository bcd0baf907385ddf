//! An NVIDIA GPU through `cust`; capture and graphs through its `sys`.

mod device;
mod handles;
mod launched;

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cust::context::Context;
use cust::device::DeviceAttribute;
use cust::error::CudaError;
use cust::module::Module;
use cust::sys::{self, CUcontext, CUfunction, CUfunction_attribute, CUresult, CUstream};
use kernels_gpu::table::KERNELS;
use simt::kernel::KernelInfo;

pub use handles::CudaStream;
use launched::Launched;

use super::capture::Captures;
use super::{DeviceError, DeviceInfo};
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
    /// Whether launches may start before the one before has ended.
    overlap: bool,
    captures: Captures,
    launched: Launched,
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

// SAFETY: the driver's handles may be used from any thread that has made the context current, which
// every method does first; nothing else in `Shared` is tied to a thread.
unsafe impl Send for Shared {}
// SAFETY: as above; driver calls on one context are thread-safe.
unsafe impl Sync for Shared {}

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
        let driver = driver_version()?;
        let module = load_module(&info, sm as u32, driver)?;
        let functions =
            KERNELS.iter().map(|kernel| find(&module, kernel)).collect::<Result<_, _>>()?;
        Ok(Self {
            shared: Arc::new(Shared {
                info,
                check_every_launch: options.check_every_launch,
                overlap: driver >= OVERLAP_DRIVER,
                captures: Captures::default(),
                launched: Launched::default(),
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
    fn waited(&self, status: CUresult) -> Result<(), DeviceError> {
        if status == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let kernels = self.shared.launched.suspects().names();
        Err(DeviceError::KernelFault { kernels, status: status.into() })
    }
}

/// The first driver that keeps the overlap of launches when it captures them, for CUDA 12.3.
const OVERLAP_DRIVER: i32 = 12030;

/// What `cuDriverGetVersion` says: 12080 is CUDA 12.8.
fn driver_version() -> Result<i32, DeviceError> {
    let mut version = 0;
    // SAFETY: the call writes one integer.
    check("reading the driver version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

/// Loads the PTX for compute capability `sm`, or says why a driver of this version cannot.
fn load_module(info: &DeviceInfo, sm: u32, driver: i32) -> Result<Module, DeviceError> {
    let text = ptx::select(&info.name, sm)?.text()?;
    ptx::check_driver(&text, driver)?;
    Module::from_ptx(text, &[]).map_err(during("loading the kernels"))
}

fn find(module: &Module, kernel: &KernelInfo) -> Result<CUfunction, DeviceError> {
    let found =
        module.get_function(kernel.name).map_err(during("finding a kernel in the module"))?;
    let function = found.to_raw();
    let limit = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Without this a launch with more than 48 KiB is refused.
    // SAFETY: a function of a loaded module.
    let status = unsafe { sys::cuFuncSetAttribute(function, limit, kernel.shared as i32) };
    check("reserving a kernel's shared memory", status)?;
    Ok(function)
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

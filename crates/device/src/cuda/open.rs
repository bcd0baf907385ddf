//! Opening a GPU and loading kernels.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use bytemuck::Pod;
use cust::device::DeviceAttribute;
use cust::module::Module;
use cust::sys::{
    self, CUcontext, CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUstream,
};
use simt::kernel::KernelInfo;

use super::context::{CallersContext, Cuda, OwnedContext, Shared, check, during};
use super::handles::{CudaMemory, CudaStream};
use super::launched::Launched;
use crate::buffer::{Buffer, Memory};
use crate::capture::{check_thread, domain};
use crate::checks::{check_element, check_shared_memory};
use crate::device::Device;
use crate::error::DeviceError;
use crate::gpu_options::{CudaOptions, Kernels};
use crate::identity::DeviceInfo;
use crate::stream::Stream;

/// An NVIDIA GPU with kernels loaded.
pub type CudaDevice = Device<Cuda>;

impl CudaDevice {
    /// Opens a GPU with its primary context and loads `kernels`.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn open(options: CudaOptions, kernels: &Kernels) -> Result<Self, DeviceError> {
        Cuda::open(options, kernels).map(Self::from_backend)
    }

    /// Uses a context that the embedding program owns.
    ///
    /// # Safety
    /// As [`Cuda::from_context`].
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub unsafe fn from_context(
        context: CUcontext,
        options: CudaOptions,
        kernels: &Kernels,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { Cuda::from_context(context, options, kernels) }.map(Self::from_backend)
    }

    /// Uses a stream that the embedding program owns.
    ///
    /// # Safety
    /// `handle` is a live stream of this device's context and outlives the result and its clones. It is not
    /// `CU_STREAM_PER_THREAD`, which is another stream in each thread. To be captured it must not be the legacy default
    /// stream. No other thread begins a capture of it while a call queues work into it: calls ask only at their beginning.
    #[must_use]
    pub unsafe fn stream_from_raw(&self, handle: CUstream) -> Stream<Cuda> {
        Stream::new(self.own(CudaStream::borrowed(handle, self.backend())), self)
    }

    /// Uses memory that the embedding program owns, `len` elements of `T` from `address` on: kernels read and write it
    /// in place. The buffer does not free it.
    ///
    /// # Safety
    /// It is memory that this device's context can access, in no other buffer, and outlives the result, what is made
    /// from that (slices, views, graphs that retain it) and the work that takes it. Its allocation, and all other work
    /// that touches it, is ordered before or after this device's work on it, by a common stream or by events: no two
    /// run at once unless both only read.
    ///
    /// # Errors
    /// [`DeviceError::BorrowedMemory`] unless `address` is a multiple of 256, as what CUDA allocates is;
    /// [`DeviceError::Element`].
    pub unsafe fn buffer_from_raw<T: Pod>(
        &self,
        address: CUdeviceptr,
        len: u64,
    ) -> Result<Buffer<Cuda, T>, DeviceError> {
        check_element::<T>()?;
        let bytes = len.checked_mul(size_of::<T>() as u64);
        match bytes.filter(|&bytes| address.checked_add(bytes).is_some()) {
            Some(bytes) if address.is_multiple_of(ALIGN) => {
                let memory = CudaMemory::borrowed(address, bytes, self.backend());
                Ok(Buffer::new(Memory::new(memory, self), len))
            }
            _ => Err(DeviceError::BorrowedMemory { address, len, align: ALIGN }),
        }
    }
}

impl Cuda {
    /// Opens a GPU with its primary context and loads `kernels`.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], [`DeviceError::NoDevice`], [`DeviceError::SharedMemory`], [`DeviceError::Cuda`];
    /// [`DeviceError::ForbiddenInCapture`] in a thread that captures, and while a device of the same context does;
    /// those of [`PtxOf`](crate::PtxOf).
    pub fn open(options: CudaOptions, kernels: &Kernels) -> Result<Self, DeviceError> {
        // Checked first: creating a context and releasing it again would change the context that is current in this
        // thread.
        check_thread("opening a GPU")?;
        let device = initialise(options)?;
        let _callers = CallersContext::keep();
        let owned = OwnedContext::retain(device)?;
        Self::load(device, owned.as_raw(), Some(owned), options, kernels)
    }

    /// Uses a context that the embedding program owns.
    ///
    /// # Safety
    /// `context` is a live CUDA context of device `options.ordinal` and outlives this device and
    /// everything made from it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub unsafe fn from_context(
        context: CUcontext,
        options: CudaOptions,
        kernels: &Kernels,
    ) -> Result<Self, DeviceError> {
        let device = initialise(options)?;
        let _callers = CallersContext::keep();
        Self::load(device, context, None, options, kernels)
    }

    fn load(
        device: cust::device::Device,
        context: CUcontext,
        owned_context: Option<OwnedContext>,
        options: CudaOptions,
        kernels: &Kernels,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the context is live: just created, or so promised by the embedder.
        check("making the context current", unsafe { sys::cuCtxSetCurrent(context) })?;
        let info = device_info(device)?;
        let driver = driver_version()?;
        // Before the check of shared memory, so that a GPU that is too old is refused as too old.
        let ptx = (kernels.ptx)(&info, driver)?;
        check_shared_memory(&info.name, kernels.infos, shared_memory(device)?)?;
        let captures = domain(context as u64);
        let (module, functions) = captures.outside("loading kernels", || {
            let module = Module::from_ptx(ptx, &[]).map_err(during("loading the kernels"))?;
            let find = |kernel| find(&module, kernel);
            let functions = kernels.infos.iter().map(find).collect::<Result<_, _>>()?;
            Ok((module, functions))
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                info,
                check_every_launch: options.check_every_launch,
                overlap: driver >= OVERLAP_DRIVER,
                launched: Launched::new(kernels.infos),
                functions,
                context,
                module: ManuallyDrop::new(module),
                _owned_context: owned_context,
            }),
        })
    }
}

/// The alignment that the address of borrowed memory must have, in bytes.
const ALIGN: u64 = 256;

/// The first driver, that for CUDA 12.3, that keeps the overlap of launches when it captures them.
const OVERLAP_DRIVER: i32 = 12030;

/// Initialises the driver, and returns the GPU that was asked for.
fn initialise(options: CudaOptions) -> Result<cust::device::Device, DeviceError> {
    cuda_loader::driver()?;
    cust::init(cust::CudaFlags::empty()).map_err(during("initialising CUDA"))?;
    let count = cust::device::Device::num_devices().map_err(during("counting devices"))?;
    if options.ordinal >= count {
        return Err(DeviceError::NoDevice { ordinal: options.ordinal, count });
    }
    cust::device::Device::get_device(options.ordinal).map_err(during("opening the device"))
}

pub(super) fn device_info(device: cust::device::Device) -> Result<DeviceInfo, DeviceError> {
    let attribute =
        |which| device.get_attribute(which).map_err(during("reading the compute capability"));
    let sm = 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)?
        + attribute(DeviceAttribute::ComputeCapabilityMinor)?;
    Ok(DeviceInfo {
        name: device.name().map_err(during("reading the device's name"))?,
        sm: Some(sm as u32),
        total_memory: device.total_memory().map_err(during("reading the memory size"))? as u64,
    })
}

/// Most bytes of shared memory that a block can have.
fn shared_memory(device: cust::device::Device) -> Result<u32, DeviceError> {
    let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let mut bytes = 0;
    // SAFETY: the call writes one integer; the device is one that the driver has.
    let status = unsafe { sys::cuDeviceGetAttribute(&mut bytes, which, device.as_raw()) };
    check("reading the size of shared memory", status)?;
    Ok(bytes.try_into().unwrap_or(0))
}

/// The version as `cuDriverGetVersion` returns it: 12080 is CUDA 12.8.
pub(super) fn driver_version() -> Result<i32, DeviceError> {
    let mut version = 0;
    // SAFETY: the call writes one integer.
    check("reading the driver version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

fn find(module: &Module, kernel: &KernelInfo) -> Result<CUfunction, DeviceError> {
    let found =
        module.get_function(kernel.name).map_err(during("finding a kernel in the module"))?;
    let function = found.to_raw();
    let limit = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Without this a launch with more than 48 KiB of dynamic shared memory is refused.
    // SAFETY: a function of a loaded module.
    let status = unsafe { sys::cuFuncSetAttribute(function, limit, kernel.shared as i32) };
    check("reserving a kernel's shared memory", status)?;
    Ok(function)
}

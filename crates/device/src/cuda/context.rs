//! The state that all objects of one GPU share: its context, the kernels, and the record of launches.

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use cust::context::Context;
use cust::device::Device;
use cust::error::CudaError;
use cust::module::Module;
use cust::sys::{self, CUcontext, CUdevice, CUfunction, CUresult};

use super::launched::Launched;
use crate::error::{CudaStatus, DeviceError};
use crate::identity::DeviceInfo;

/// The raw calls of an NVIDIA GPU. Cloning gives another handle of the same one.
#[derive(Clone)]
pub struct Cuda {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub info: DeviceInfo,
    pub check_every_launch: bool,
    /// Whether a launch may start before the previous one has ended.
    pub overlap: bool,
    pub launched: Launched,
    pub functions: Vec<CUfunction>,
    pub context: CUcontext,
    pub module: ManuallyDrop<Module>,
    /// The primary context, if it was opened here. Dropped after `module`, which belongs to it.
    pub _owned_context: Option<OwnedContext>,
}

/// The context that was current on this thread, which is made current again when this is dropped; `None` if nothing is to
/// be done then.
#[must_use = "the context of the caller is current again when this is dropped"]
pub(super) struct CallersContext(Option<CUcontext>);

impl CallersContext {
    /// The context that is current now, which may be none.
    pub fn keep() -> Self {
        Self(current().ok().filter(|&context| context.is_null() || is_alive(context)))
    }
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // SAFETY: it was current on this thread, by its owner's doing, or is none; a failure leaves the thread as it
            // was.
            unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}

/// The context that is current on this thread; null if there is none.
fn current() -> Result<CUcontext, DeviceError> {
    let mut current = ptr::null_mut();
    // SAFETY: the call writes the context.
    check("reading the current context", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
    Ok(current)
}

/// Whether a context can be used. Another thread may have destroyed the one that is current on this.
fn is_alive(context: CUcontext) -> bool {
    let mut version = 0;
    // SAFETY: the call writes one number; the driver looks up the context.
    unsafe { sys::cuCtxGetApiVersion(context, &raw mut version) == CUresult::CUDA_SUCCESS }
}

/// The primary context of a GPU, released when this is dropped.
pub(super) struct OwnedContext {
    context: ManuallyDrop<Context>,
    device: CUdevice,
}

impl OwnedContext {
    /// Retains the primary context of `device`, and makes it current.
    pub fn retain(device: Device) -> Result<Self, DeviceError> {
        let context = Context::new(device).map_err(during("creating the context"))?;
        Ok(Self { context: ManuallyDrop::new(context), device: device.as_raw() })
    }

    pub fn as_raw(&self) -> CUcontext {
        self.context.as_raw()
    }
}

impl Drop for OwnedContext {
    fn drop(&mut self) {
        let released = self.as_raw();
        // SAFETY: dropped here and nowhere else.
        unsafe { ManuallyDrop::drop(&mut self.context) };
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the call writes two numbers.
        let asked = unsafe {
            sys::cuDevicePrimaryCtxGetState(self.device, &raw mut flags, &raw mut active)
        };
        // The embedding program may have retained it too.
        let is_gone = asked != CUresult::CUDA_SUCCESS || active == 0;
        // A context that is gone must not stay current: libraries that ask for the thread's context, as UCX, would use
        // it.
        if is_gone && current().is_ok_and(|current| current == released) {
            // SAFETY: no context is one that can be made current; a failure leaves the thread as it was.
            unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _callers = CallersContext::keep();
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

impl Cuda {
    /// Makes the device's context current on this thread, until the guard is dropped. A thread that had none keeps it: to
    /// take it away after each call would take as long as to set it.
    pub(super) fn enter(&self) -> Result<CallersContext, DeviceError> {
        let callers = current()?;
        if callers == self.shared.context {
            return Ok(CallersContext(None));
        }
        // SAFETY: the context lives as long as `shared`.
        check("making the context current", unsafe { sys::cuCtxSetCurrent(self.shared.context) })?;
        Ok(CallersContext(Some(callers).filter(|&callers| !callers.is_null() && is_alive(callers))))
    }

    /// The error of a driver call. After the fault of a kernel calls return the status of that fault, also one that
    /// launches another kernel: then the error names the kernels that may have caused it.
    pub(super) fn check(
        &self,
        operation: &'static str,
        status: CUresult,
    ) -> Result<(), DeviceError> {
        match status {
            CUresult::CUDA_SUCCESS => Ok(()),
            other => Err(self.failed(operation, other.into())),
        }
    }

    /// The error of a call of `cust`, as of [`Self::check`].
    pub(super) fn during(&self, operation: &'static str) -> impl FnOnce(CudaError) -> DeviceError {
        move |error| self.failed(operation, error.into())
    }

    fn failed(&self, operation: &'static str, status: CudaStatus) -> DeviceError {
        if KERNEL_FAULTS.iter().any(|&fault| fault as u32 == status.code) {
            let kernels = self.shared.launched.suspects();
            return DeviceError::KernelFault { kernels, status };
        }
        DeviceError::Cuda { operation, status }
    }
}

/// The statuses that say that a kernel has failed. By the driver's reference the context is lost then, and after most of
/// them all use of CUDA by the process.
const KERNEL_FAULTS: [CUresult; 9] = [
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
];

/// Converts the error of a driver call, with the name of the operation.
pub(super) fn during(operation: &'static str) -> impl FnOnce(CudaError) -> DeviceError {
    move |error| DeviceError::Cuda { operation, status: error.into() }
}

pub(super) fn check(operation: &'static str, status: CUresult) -> Result<(), DeviceError> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(DeviceError::Cuda { operation, status: other.into() }),
    }
}

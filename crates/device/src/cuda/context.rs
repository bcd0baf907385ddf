//! The state that all objects of one GPU share: its context, the kernels, and the record of launches.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cust::context::Context;
use cust::error::CudaError;
use cust::module::Module;
use cust::sys::{self, CUcontext, CUfunction, CUresult};

use super::launched::Launched;
use crate::error::DeviceError;
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

/// The primary context of a GPU, released when this is dropped.
pub(super) struct OwnedContext(pub Context);

impl Drop for OwnedContext {
    fn drop(&mut self) {
        // A released context must not stay current: libraries that ask for the thread's context, as UCX, would use it.
        // SAFETY: no context is one that can be made current; a failure leaves the thread as it was.
        unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    }
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

impl Cuda {
    /// Makes the device's context current on this thread.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as `shared`.
        check("making the context current", unsafe { sys::cuCtxSetCurrent(self.shared.context) })
    }

    /// Turns a failed wait into the fault of the kernels that may have caused it.
    pub(super) fn waited(&self, status: CUresult) -> Result<(), DeviceError> {
        if status == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let kernels = self.shared.launched.suspects();
        Err(DeviceError::KernelFault { kernels, status: status.into() })
    }
}

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

//! The options of a GPU, the list of kernels, and the survey of a machine: with and without the feature `cuda`.

use std::path::PathBuf;

use simt::kernel::KernelInfo;

use crate::error::DeviceError;
use crate::identity::DeviceInfo;

/// Which GPU, and how it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// The driver's number of the GPU.
    pub ordinal: u32,
    /// Wait after every launch and every replay of a graph, so that a fault names the kernel that caused it, or those of the
    /// graph, and beside them only kernels of other streams that were not waited for. Slow.
    pub check_every_launch: bool,
}

/// Returns the PTX of all kernels for a GPU and a driver. `driver`: its version as `cuDriverGetVersion` returns it,
/// 12080 for CUDA 12.8.
pub type PtxOf = fn(gpu: &DeviceInfo, driver: i32) -> Result<String, DeviceError>;

/// The list of kernels, and the function that returns their PTX.
#[derive(Clone, Copy)]
pub struct Kernels {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA loads kernels"))]
    pub(crate) infos: &'static [KernelInfo],
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA loads kernels"))]
    pub(crate) ptx: PtxOf,
}

impl Kernels {
    /// The kernels `infos`, into which [`Operation::kernel`](crate::Operation::kernel) is an index, and their PTX.
    ///
    /// # Safety
    /// The PTX has a kernel of each name in `infos`, with the parameters, the threads a block and the shared memory
    /// that `infos` says; and `infos` are those that the [`Operation`](crate::Operation)s of the program index.
    /// Launches pass arguments as `infos` says, and a kernel uses them as addresses.
    #[must_use]
    pub const unsafe fn new(infos: &'static [KernelInfo], ptx: PtxOf) -> Self {
        Self { infos, ptx }
    }
}

/// The driver of this machine and its GPUs.
#[derive(Clone, Debug)]
pub struct CudaSurvey {
    /// The file that the driver was loaded from.
    pub driver: PathBuf,
    /// Its version as `cuDriverGetVersion` returns it: 12080 is CUDA 12.8.
    pub version: i32,
    /// The GPUs, by the driver's number.
    pub gpus: Vec<DeviceInfo>,
}

//! Which GPU, how it is used, and what a machine has: with and without the feature `cuda`.

use std::path::PathBuf;

use simt::kernel::KernelInfo;

use crate::error::DeviceError;
use crate::identity::DeviceInfo;

/// Which GPU, and how it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// The driver's number of the GPU.
    pub ordinal: u32,
    /// Wait after every launch, so that a fault names the one kernel that caused it. Slow.
    pub check_every_launch: bool,
}

/// Kernels, and where their PTX is.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// The kernels; [`Operation::kernel`](crate::Operation::kernel) is an index into them.
    pub infos: &'static [KernelInfo],
    /// The PTX that has all of them, for a GPU and a driver: its version is as `cuDriverGetVersion` says it,
    /// 12080 for CUDA 12.8.
    pub ptx: fn(gpu: &DeviceInfo, driver: i32) -> Result<String, DeviceError>,
}

/// The driver of this machine and its GPUs.
#[derive(Clone, Debug)]
pub struct CudaSurvey {
    /// The file that the driver was loaded from.
    pub driver: PathBuf,
    /// Its version as `cuDriverGetVersion` says it: 12080 is CUDA 12.8.
    pub version: i32,
    /// The GPUs, by the driver's number.
    pub gpus: Vec<DeviceInfo>,
}

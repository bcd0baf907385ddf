//! What a machine has of CUDA, without opening any of it.

use std::path::PathBuf;

use super::context::during;
use super::open::{device_info, driver_version};
use crate::error::DeviceError;
use crate::identity::DeviceInfo;

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

impl CudaSurvey {
    /// Asks the driver. No context is created and no kernel is loaded.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`]; [`DeviceError::Cuda`] if the driver refuses, as it does where no GPU is.
    pub fn of_machine() -> Result<Self, DeviceError> {
        let driver = cuda_loader::driver()?.path().to_owned();
        cust::init(cust::CudaFlags::empty()).map_err(during("initialising CUDA"))?;
        let version = driver_version()?;
        let gpus = cust::device::Device::devices().map_err(during("counting devices"))?;
        let info = |gpu: cust::error::CudaResult<_>| {
            device_info(gpu.map_err(during("opening the device"))?)
        };
        Ok(Self { driver, version, gpus: gpus.map(info).collect::<Result<_, _>>()? })
    }
}

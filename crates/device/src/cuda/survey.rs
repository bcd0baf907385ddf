//! The driver and the GPUs of a machine, without opening a GPU.

use super::context::during;
use super::open::{device_info, driver_version};
use crate::error::DeviceError;
use crate::gpu_options::CudaSurvey;

impl CudaSurvey {
    /// Asks the driver. No context is created and no kernel is loaded.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`]; [`DeviceError::Cuda`] if the driver refuses, as it does on a machine without a GPU.
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

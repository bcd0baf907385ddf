//! What stands for a GPU without the feature `cuda`: none is found, and none can be opened.

use crate::device::Device;
use crate::error::DeviceError;
use crate::gpu_options::{CudaOptions, CudaSurvey, Kernels};
use crate::null::Null;

/// No device has this backend for a GPU: nothing opens one without the feature `cuda`.
pub type Cuda = Null;

/// A GPU, which nothing opens.
pub type CudaDevice = Device<Cuda>;

impl CudaDevice {
    /// Opens no GPU.
    ///
    /// # Errors
    /// [`DeviceError::NoCuda`].
    pub fn open(_: CudaOptions, _: &Kernels) -> Result<Self, DeviceError> {
        Err(DeviceError::NoCuda)
    }
}

impl CudaSurvey {
    /// Asks no driver.
    ///
    /// # Errors
    /// [`DeviceError::NoCuda`].
    pub fn of_machine() -> Result<Self, DeviceError> {
        Err(DeviceError::NoCuda)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_gpu_is_found_or_opened() {
        let kernels = Kernels { infos: &[], ptx: |_, _| Ok(String::new()) };
        let opened = CudaDevice::open(CudaOptions::default(), &kernels).map(drop);
        let surveyed = CudaSurvey::of_machine().map(drop);
        for refused in [opened, surveyed] {
            assert!(matches!(refused, Err(DeviceError::NoCuda)), "{refused:?}");
        }
    }
}

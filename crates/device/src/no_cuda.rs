//! Stands for a GPU in builds without the feature `cuda`: none is found, and none can be opened.

use crate::device::Device;
use crate::error::DeviceError;
use crate::gpu_options::{CudaOptions, CudaSurvey, Kernels};
use crate::null::Null;

/// Stands for the backend of a GPU. Without the feature `cuda` no GPU can be opened.
pub type Cuda = Null;

/// Stands for a GPU: `open` always fails.
pub type CudaDevice = Device<Cuda>;

impl CudaDevice {
    /// Always fails.
    ///
    /// # Errors
    /// [`DeviceError::NoCuda`].
    pub fn open(_: CudaOptions, _: &Kernels) -> Result<Self, DeviceError> {
        Err(DeviceError::NoCuda)
    }
}

impl CudaSurvey {
    /// Always fails, without asking a driver.
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

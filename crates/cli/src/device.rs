//! The choice of a device.

use clap::ValueEnum;
use dsv4_kv::device::{CudaDevice, CudaOptions};

use crate::error::InputError;

/// Where the kernels are to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// The GPU if there is one that runs the kernels, else the CPU.
    Auto,
    /// The CPU, one fiber per CUDA thread.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

impl DeviceChoice {
    /// The GPU, or `None` for the CPU. With [`Self::Auto`] a note on the error stream says why there
    /// is no GPU.
    pub fn gpu(self) -> Result<Option<CudaDevice>, InputError> {
        let open = || CudaDevice::new(CudaOptions::default());
        match self {
            Self::Cpu => Ok(None),
            Self::Cuda => open().map(Some).map_err(InputError::NoCuda),
            Self::Auto => Ok(open()
                .inspect_err(|error| {
                    eprintln!("note: running on the CPU, as there is no usable GPU: {error}");
                })
                .ok()),
        }
    }
}

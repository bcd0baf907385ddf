//! GPUs of this machine.

use dsv4_kv::device::{CudaDevice, CudaOptions, CudaSurvey, DeviceError, open_cuda};
use dsv4_kv_transfer::TransportError;
use dsv4_kv_transfer::transport::Storage;

/// Number of GPUs of this machine.
pub fn gpus() -> usize {
    CudaSurvey::of_machine().map_or(0, |survey| survey.gpus.len())
}

/// A GPU.
pub struct Gpu {
    pub device: CudaDevice,
    ordinal: u32,
}

impl Gpu {
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        let options = CudaOptions { ordinal, ..CudaOptions::default() };
        Ok(Self { device: open_cuda(options)?, ordinal })
    }

    /// Memory of the host, or of the GPU.
    pub fn storage(&self, kind: &str) -> Result<Storage, TransportError> {
        match kind {
            "host" => Ok(Storage::host()),
            _ => Storage::device(&self.device, self.ordinal),
        }
    }
}

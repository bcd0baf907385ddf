//! The device crate, re-exported, and the opening of a GPU with the kernels of the table.

use kernels_gpu::table::KERNELS;

pub use dsv4_kv_device::*;

use crate::ptx;

/// The kernels of the kernel table, with the embedded PTX.
#[must_use]
pub fn kernels() -> Kernels {
    // SAFETY: `ptx::select` compares the hash of the table that the PTX was compiled with; `Operation`s of this crate, the router
    // and `dsv4-kv-linear` index `KERNELS`.
    unsafe { Kernels::new(KERNELS, embedded_ptx) }
}

fn embedded_ptx(gpu: &DeviceInfo, driver: i32) -> Result<String, DeviceError> {
    let text = ptx::select(&gpu.name, gpu.sm.unwrap_or(0))?.text()?;
    ptx::check_driver(&text, driver)?;
    Ok(text)
}

/// Opens a GPU with its primary context and loads the kernels.
///
/// # Errors
/// As [`Cuda::open`]; [`DeviceError::TooOld`], [`DeviceError::PtxTooNew`] or [`DeviceError::AbiHash`] if no
/// embedded PTX fits.
pub fn open_cuda(options: CudaOptions) -> Result<CudaDevice, DeviceError> {
    CudaDevice::open(options, &kernels())
}

//! The choice of a device, and what its memory holds.

use clap::ValueEnum;
use dsv4_kv::device::{CudaDevice, CudaOptions, DeviceError};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{CacheConfig, Capacity, KvError, WorkspaceLimits, WorkspaceSize};

use crate::error::InputError;
use crate::output;

/// What CUDA rounds an allocation up to.
const ALLOCATION: u64 = 2 << 20;

/// The workspace of the indexer of a model that has one: for up to `queries` queries at once, as far
/// as at most `bytes` bytes hold them.
pub fn indexer(
    config: &CacheConfig,
    queries: u32,
    bytes: u64,
) -> Result<Option<WorkspaceSize>, KvError> {
    let limits = WorkspaceLimits { context: config.max_context, queries, bytes };
    let size = || WorkspaceSize::new(&config.model, limits);
    (config.model.count(LayerKind::Csa) > 0).then(size).transpose()
}

/// Bytes to set aside for the rounding up of the allocations of a cache and of its indexer's
/// workspace on a GPU.
pub fn rounding(config: &CacheConfig, indexer: Option<&WorkspaceSize>) -> u64 {
    let indexer = indexer.map_or(0, |indexer| indexer.buffers);
    u64::from(Capacity::new(config).buffers + indexer) * ALLOCATION
}

/// Says why there is no GPU.
fn note(error: &DeviceError) {
    match error {
        DeviceError::NoCuda => output::note(
            "note: running on the CPU: this program is built without CUDA, as `cargo kv` does where no NVIDIA \
             driver is loaded",
        ),
        _ => output::note(format_args!(
            "note: running on the CPU, as there is no usable GPU: {error}"
        )),
    }
}

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
    /// The GPU that the driver gives this number, or `None` for the CPU. With [`Self::Auto`] a note on the error
    /// stream says why there is no GPU.
    pub fn gpu(self, ordinal: u32) -> Result<Option<CudaDevice>, InputError> {
        let open = || dsv4_kv::open_cuda(CudaOptions { ordinal, ..CudaOptions::default() });
        match self {
            Self::Cpu => Ok(None),
            Self::Cuda => open().map(Some).map_err(InputError::NoCuda),
            Self::Auto => Ok(open().inspect_err(note).ok()),
        }
    }
}

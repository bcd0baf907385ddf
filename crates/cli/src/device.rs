//! The choice of a device, and the memory that is set aside on it.

use clap::ValueEnum;
use dsv4_kv::device::{CudaDevice, CudaOptions, DeviceError};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{CacheConfig, Capacity, KvError, WorkspaceLimits, WorkspaceSize};

use crate::error::InputError;
use crate::output;

/// CUDA rounds each allocation up to a multiple of this.
const ALLOCATION: u64 = 2 << 20;

/// The size of the indexer's workspace, if the model has an indexer: for up to `queries` queries at once, but at most
/// `bytes` bytes.
pub fn indexer(
    config: &CacheConfig,
    queries: u32,
    bytes: u64,
) -> Result<Option<WorkspaceSize>, KvError> {
    let limits = WorkspaceLimits { context: config.max_context, queries, bytes };
    let size = || WorkspaceSize::new(&config.model, limits);
    (config.model.count(LayerKind::Csa) > 0).then(size).transpose()
}

/// Bytes to set aside on a GPU because CUDA rounds up the allocations of a cache and of its indexer's workspace.
pub fn rounding(config: &CacheConfig, indexer: Option<&WorkspaceSize>) -> u64 {
    let indexer = indexer.map_or(0, |indexer| indexer.buffers);
    u64::from(Capacity::new(config).buffers + indexer) * ALLOCATION
}

/// Prints why no GPU is used.
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
    /// Opens the GPU with this ordinal of the driver; `None` for the CPU. With [`Self::Auto`] and no GPU, a note on
    /// standard error says why.
    pub fn gpu(self, ordinal: u32) -> Result<Option<CudaDevice>, InputError> {
        let open = || dsv4_kv::open_cuda(CudaOptions { ordinal, ..CudaOptions::default() });
        match self {
            Self::Cpu => Ok(None),
            Self::Cuda => open().map(Some).map_err(InputError::NoCuda),
            Self::Auto => Ok(open().inspect_err(note).ok()),
        }
    }
}

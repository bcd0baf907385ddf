//! Errors of a device.

#[cfg(feature = "cuda")]
use cust::error::CudaError;
#[cfg(feature = "cuda")]
use cust::sys::CUresult;
use simt::emu::Fault;

use crate::identity::DeviceId;

/// A status of the CUDA driver other than success.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA error {code}: {text}")]
pub struct CudaStatus {
    /// The `CUresult`.
    pub code: u32,
    /// Its description.
    pub text: String,
}

#[cfg(feature = "cuda")]
impl From<CudaError> for CudaStatus {
    fn from(error: CudaError) -> Self {
        Self { code: error as u32, text: error.to_string() }
    }
}

#[cfg(feature = "cuda")]
impl From<CUresult> for CudaStatus {
    fn from(status: CUresult) -> Self {
        let mut text = std::ptr::null();
        // SAFETY: the call writes one pointer, to a string that lives as long as the process.
        let known = unsafe { cust::sys::cuGetErrorString(status, &mut text) };
        let text = if known == CUresult::CUDA_SUCCESS && !text.is_null() {
            // SAFETY: as above.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            "unknown to this driver".to_owned()
        };
        Self { code: status as u32, text }
    }
}

/// The reason why a device refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The program has no code for GPUs.
    #[error("this program is built without CUDA: build it with the feature `cuda`")]
    NoCuda,
    /// No CUDA driver on this machine.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    NoDriver(#[from] cuda_loader::DriverError),
    /// The driver has no such device.
    #[error("CUDA device {ordinal} does not exist; the driver knows {count}")]
    NoDevice {
        /// The device asked for.
        ordinal: u32,
        /// Devices the driver has.
        count: u32,
    },
    /// The GPU is older than the kernels.
    #[error(
        "{name} is sm_{sm}; the kernels need sm_{least} or newer (H100, H200, B200). \
         Use the CPU device instead"
    )]
    TooOld {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        sm: u32,
        /// The least that is supported.
        least: u32,
    },
    /// The GPU has less shared memory than a kernel needs.
    #[error(
        "{name} has {found} bytes of shared memory for a block; the kernel {kernel} needs {needed}, as H100, H200 and B200 \
         have. Use one of those, or the CPU device instead"
    )]
    SharedMemory {
        /// The GPU's name.
        name: String,
        /// The kernel.
        kernel: &'static str,
        /// Bytes that a block of it needs.
        needed: u32,
        /// Most bytes that a block can have.
        found: u32,
    },
    /// The driver is older than the PTX.
    #[error(
        "the kernels are PTX {ptx}, which needs a driver for CUDA {needed} or newer; this driver \
         is for CUDA {driver}. Update the driver"
    )]
    PtxTooNew {
        /// PTX ISA version of the module.
        ptx: String,
        /// CUDA version that understands it.
        needed: String,
        /// CUDA version of the installed driver.
        driver: String,
    },
    /// The embedded PTX was built for another kernel table, or for other row layouts.
    #[error(
        "the embedded PTX was built for ABI {found:016x}, the library is {expected:016x}; run `cargo \
         xtask build-ptx`"
    )]
    AbiHash {
        /// Hash in the PTX manifest.
        found: u64,
        /// Hash of the library.
        expected: u64,
    },
    /// The embedded PTX cannot be decompressed.
    #[error("the embedded PTX is damaged: {0}; run `cargo xtask build-ptx`")]
    DamagedPtx(String),
    /// The embedded PTX manifest is unreadable.
    #[error("the embedded PTX manifest is unreadable: {0}; run `cargo xtask build-ptx`")]
    Manifest(String),
    /// A driver call failed.
    #[error("{operation} failed: {status}")]
    Cuda {
        /// The operation that failed.
        operation: &'static str,
        /// The driver's status.
        status: CudaStatus,
    },
    /// Device or pinned memory is exhausted. Nothing was allocated.
    #[error("no memory for {label}: {requested} bytes wanted, {free} free")]
    OutOfMemory {
        /// What the memory was for.
        label: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// Bytes that were free.
        free: u64,
    },
    /// An element type that no memory can hold.
    #[error(
        "elements of {bytes} bytes, aligned to {align}, cannot be in device memory: they must have at \
         least one byte, and be aligned to at most 16"
    )]
    Element {
        /// Bytes of an element.
        bytes: usize,
        /// Its alignment.
        align: usize,
    },
    /// Memory, or a count, is too small for an operation.
    #[error("{what}: {needed} needed, {found} given")]
    Length {
        /// The operation, tensor or count.
        what: &'static str,
        /// The size given; of a buffer, its number of elements.
        found: u64,
        /// The size needed.
        needed: u64,
    },
    /// A launch may touch more bytes of an argument than it has.
    #[error("{kernel}: {argument} has {found} bytes, of which the launch may touch {needed}")]
    TooShort {
        /// The kernel.
        kernel: &'static str,
        /// The pointer, as the kernel table names it.
        argument: &'static str,
        /// Bytes from the pointer on.
        found: u64,
        /// Bytes that the launch may touch.
        needed: u64,
    },
    /// A buffer's bytes are not those of whole elements of another type.
    #[error(
        "{bytes} bytes from byte {offset} on cannot be elements of {size} bytes, which are aligned to \
         {align}"
    )]
    Cast {
        /// Where the buffer starts in its memory, in bytes.
        offset: u64,
        /// Bytes of the buffer.
        bytes: u64,
        /// Bytes of an element asked for.
        size: u64,
        /// The alignment of such an element.
        align: u64,
    },
    /// Something of one device was used with another.
    #[error(
        "the {what} belongs to {found}, and was used with {used}; allocate or create it on {used}"
    )]
    ForeignDevice {
        /// What it is: an argument's name, or `stream`, `event`, `graph`, `buffer`.
        what: &'static str,
        /// The device it belongs to.
        found: DeviceId,
        /// The device it was used with.
        used: DeviceId,
    },
    /// Memory of the embedder that cannot be a buffer.
    #[error(
        "{len} elements at {address:#x} cannot be a buffer: the address must be a multiple of {align}, as what CUDA \
         allocates is, and address + bytes must not exceed 2^64; pass the whole allocation and slice the buffer"
    )]
    BorrowedMemory {
        /// Its address.
        address: u64,
        /// Elements.
        len: u64,
        /// The alignment that the address must have, in bytes.
        align: u64,
    },
    /// A launch takes a pointer that is not aligned as the kernel needs it.
    #[error("{kernel}: `{argument}` at {address:#x} is no multiple of {align} bytes")]
    Misaligned {
        /// The kernel.
        kernel: &'static str,
        /// Its argument.
        argument: &'static str,
        /// The argument's address.
        address: u64,
        /// The alignment that it must have, in bytes.
        align: u32,
    },
    /// Memory that a launch writes overlaps another of its arguments.
    #[error(
        "{kernel}: `{argument}`, which is written, overlaps `{other}`; give it memory of its own"
    )]
    Aliased {
        /// The kernel, or `copy`.
        kernel: &'static str,
        /// The argument that is written.
        argument: &'static str,
        /// The argument that it overlaps.
        other: &'static str,
    },
    /// A number that a kernel does not support.
    #[error("{what} is {value}; it must be {}", Allowed { multiple: *multiple, most: *most })]
    Argument {
        /// The name of the number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The number must be a multiple of this, which is also the least value allowed.
        multiple: u64,
        /// Greatest value allowed.
        most: u64,
    },
    /// A number that must divide another.
    #[error("{what} is {value}; it must divide {of}")]
    NotADivisor {
        /// The name of the number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The number that it must divide.
        of: u64,
    },
    /// A grid with no blocks, or with more than the hardware takes (2^31 - 1 by 65,535).
    #[error("{kernel}: a grid of {x} x {y} blocks; it must have 1 to 2147483647 by 1 to 65535")]
    BadGrid {
        /// The kernel.
        kernel: &'static str,
        /// Blocks in x.
        x: u32,
        /// Blocks in y.
        y: u32,
    },
    /// An operation that a capture forbids, such as an allocation or a wait.
    #[error("{operation} is not possible while a graph is being captured; do it before")]
    ForbiddenInCapture {
        /// The operation.
        operation: &'static str,
    },
    /// A second capture was begun inside one.
    #[error("a stream of this device is already being captured; end that capture first")]
    NestedCapture,
    /// A capture was begun in a stream into which another thread queues work that has to run.
    #[error(
        "another thread is queueing work into this stream, which a capture would record instead of running it; begin the \
         capture after that call has returned, or capture another stream"
    )]
    StreamInUse,
    /// The time between two events was asked for before both were recorded.
    #[error("an event was never recorded; record both before their times are compared")]
    NotRecorded,
    /// A captured launch takes a pointer into memory that the graph does not keep alive.
    #[error(
        "{kernel} was captured with `{argument}` at {address:#x}, which is in no buffer the graph \
         retains; pass that buffer to `capture`"
    )]
    NotRetained {
        /// The kernel.
        kernel: &'static str,
        /// Its argument.
        argument: &'static str,
        /// The argument's address.
        address: u64,
    },
    /// The emulator met a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A kernel failed on the GPU. From now on every CUDA call of the process on this GPU fails, also of a new device: end the
    /// process and start another.
    #[error(
        "a kernel failed on the GPU ({status}); it is one of those launched since the last \
             wait: {kernels}; this process can no longer use the GPU: start a new one"
    )]
    KernelFault {
        /// Names of the kernels launched on each stream since its last successful wait.
        kernels: String,
        /// The driver's status.
        status: CudaStatus,
    },
}

impl DeviceError {
    /// Whether the call may have queued its work nevertheless: a driver may report an earlier error for work that it has
    /// queued, and the emulator runs a kernel up to its fault. All other errors are refusals, before anything is queued.
    #[must_use]
    pub const fn may_have_queued(&self) -> bool {
        matches!(self, Self::Cuda { .. } | Self::Fault(_) | Self::KernelFault { .. })
    }
}

/// The values that an argument may have, as text.
struct Allowed {
    multiple: u64,
    most: u64,
}

impl std::fmt::Display for Allowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self { multiple, most } if multiple == most => write!(f, "{most}"),
            Self { multiple: 1, most } => write!(f, "from 1 to {most}"),
            Self { multiple, most } => {
                write!(f, "a multiple of {multiple} from {multiple} to {most}")
            }
        }
    }
}

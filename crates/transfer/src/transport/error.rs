//! Why a transport fails.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

/// Why a transport fails.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The host has no such memory.
    #[error("no {bytes} bytes of memory to read into: {error}")]
    Memory {
        /// Bytes wanted.
        bytes: usize,
        /// Why.
        error: io::Error,
    },
    /// The device has no such memory, or failed.
    #[error("memory of a device for payloads: {0}")]
    Device(#[from] dsv4_kv::device::DeviceError),
    /// Memory of a device, of which the host sees no bytes.
    #[error("the bytes of memory {id} are on a device; copy them by `with_region`")]
    OnDevice {
        /// Which memory.
        id: u64,
    },
    /// Memory of a kind that the transport does not know.
    #[error("{transport} moves no memory of this kind: {kind:?}")]
    Kind {
        /// Which transport.
        transport: &'static str,
        /// Which kind.
        kind: super::MemoryKind,
    },
    /// Memory of another transport, or of before a fence.
    #[error("memory {id} is not registered with this transport")]
    Unknown {
        /// Which memory.
        id: u64,
    },
    /// A read into the memory has not ended.
    #[error(
        "a read may still write memory {id}; poll it until it has ended, or fence the transport"
    )]
    Read {
        /// Which memory.
        id: u64,
    },
    /// What a peer sent is no descriptor of this transport, or of memory that is not there any more.
    #[error("the descriptor names no memory that can be read: {why}")]
    Descriptor {
        /// What is wrong with it.
        why: String,
    },
    /// Bytes that memory does not have.
    #[error("bytes {}..{} of memory that has {len}", bytes.start, bytes.end)]
    Outside {
        /// Which bytes.
        bytes: Range<usize>,
        /// How many it has.
        len: usize,
    },
    /// The peer's memory is shorter than what is to be read.
    #[error("the peer's memory has {found} bytes, and {needed} are to be read")]
    TooShort {
        /// Bytes to be read.
        needed: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A file cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// NIXL's library is not there, or cannot be loaded.
    #[error(
        "NIXL's C library cannot be loaded from {path}: {why}; name libnixl_capi.so of a NIXL wheel by DSV4_NIXL or in the options"
    )]
    NoLibrary {
        /// Where it was looked for.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// NIXL's library has no function of this name: it is of another version.
    #[error("NIXL's C library has no {symbol}; versions 1.5.1 and 1.5.2 have it")]
    NoSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// A call of NIXL failed.
    #[error("{call} of NIXL failed with status {status}")]
    Status {
        /// The function.
        call: &'static str,
        /// What it returned.
        status: i32,
    },
    /// NIXL does not take memory of a GPU.
    #[error(
        "register_mem of NIXL failed with status {status} for memory of a GPU: UCX tells it from memory of the host only if it finds libcudart.so.12, as the PyPI package nvidia-cuda-runtime-cu12 has it; name its directory in LD_LIBRARY_PATH"
    )]
    GpuMemory {
        /// What the function returned.
        status: i32,
    },
    /// What a transport that is made to fail says.
    #[error("the read failed: {why}")]
    Failed {
        /// Why.
        why: String,
    },
}

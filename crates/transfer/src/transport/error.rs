//! Reasons why a transport fails.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

/// Why a transport fails.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The host cannot allocate this much memory.
    #[error("no {bytes} bytes of memory to read into: {error}")]
    Memory {
        /// Bytes wanted.
        bytes: usize,
        /// Why.
        error: io::Error,
    },
    /// The device cannot allocate the memory, or failed.
    #[error("memory of a device for payloads: {0}")]
    Device(#[from] dsv4_kv::device::DeviceError),
    /// The memory is on a device, where the host cannot access its bytes.
    #[error("the bytes of memory {id} are on a device; copy them by `with_region`")]
    OnDevice {
        /// The id of the memory.
        id: u64,
    },
    /// The transport does not support this kind of memory.
    #[error("{transport} moves no memory of this kind: {kind:?}")]
    Kind {
        /// The name of the transport.
        transport: &'static str,
        /// The kind of memory.
        kind: super::MemoryKind,
    },
    /// The memory belongs to another transport, or was registered before a fence.
    #[error("memory {id} is not registered with this transport")]
    Unknown {
        /// The id of the memory.
        id: u64,
    },
    /// A read into the memory has not ended.
    #[error(
        "a read may still write memory {id}; poll it until it has ended, or fence the transport"
    )]
    Read {
        /// The id of the memory.
        id: u64,
    },
    /// The peer's message is not a descriptor of this transport, or its memory is gone.
    #[error("the descriptor names no memory that can be read: {why}")]
    Descriptor {
        /// What is wrong with it.
        why: String,
    },
    /// The range lies outside of the memory.
    #[error("bytes {}..{} of memory that has {len}", bytes.start, bytes.end)]
    Outside {
        /// The range.
        bytes: Range<usize>,
        /// Bytes that the memory has.
        len: usize,
    },
    /// The peer's memory ends before the end of the range.
    #[error("the peer's memory has {found} bytes, and {needed} are to be read")]
    TooShort {
        /// The end of the range.
        needed: usize,
        /// Bytes that the peer's memory has.
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
    /// NIXL's library was not found, or cannot be loaded.
    #[error(
        "NIXL's C library cannot be loaded from {path}: {why}; name libnixl_capi.so of a NIXL wheel by DSV4_NIXL or in the options"
    )]
    NoLibrary {
        /// The path that was tried.
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
        /// The status that it returned.
        status: i32,
    },
    /// NIXL cannot register memory of a GPU.
    #[error(
        "register_mem of NIXL failed with status {status} for memory of a GPU: UCX tells it from memory of the host only if it finds libcudart.so.12, as the PyPI package nvidia-cuda-runtime-cu12 has it; name its directory in LD_LIBRARY_PATH"
    )]
    GpuMemory {
        /// The status that it returned.
        status: i32,
    },
    /// Another failure: of a peer that was made to fail by a test, of a plugin's name, or no agent after a failed
    /// fence.
    #[error("the read failed: {why}")]
    Failed {
        /// Why.
        why: String,
    },
}

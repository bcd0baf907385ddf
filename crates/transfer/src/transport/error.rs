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
    /// The directory belongs to another user, or another user may write to it, who could replace payloads.
    #[error(
        "{path} belongs to user {owner} and has mode {mode:o}; {}",
        for_own(*.owner, *.own)
    )]
    NotOwn {
        /// The directory, without links.
        path: PathBuf,
        /// The id of the user to whom it belongs.
        owner: u32,
        /// Its mode.
        mode: u32,
        /// The id of the user to whom the process's new files belong.
        own: u32,
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
    #[error("{call} of NIXL failed with status {status} ({})", status_name(*.status))]
    Status {
        /// The function.
        call: &'static str,
        /// The status that it returned.
        status: i32,
    },
    /// NIXL cannot register memory of a GPU.
    #[error(
        "register_mem of NIXL failed with status {status} ({}) for memory of a GPU: UCX tells it from memory of the host only if it finds libcudart.so.12, as the PyPI package nvidia-cuda-runtime-cu12 has it; name its directory in LD_LIBRARY_PATH",
        status_name(*.status)
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

/// What to do about a directory of user `owner` that is refused, since others than user `own` may write it.
fn for_own(owner: u32, own: u32) -> String {
    if owner == own {
        return "run `chmod go-w` on it, or name a directory that does not exist".into();
    }
    format!(
        "name a directory that belongs to user {own} and that nobody else may write, as of mode 700, or one that does not exist"
    )
}

/// The name of a status of NIXL's C library. Versions 1.5.1 and 1.5.2 have the first four; newer ones have all, with
/// these numbers.
const fn status_name(status: i32) -> &'static str {
    match status {
        -1 => "NIXL_CAPI_ERROR_INVALID_PARAM",
        -2 => "NIXL_CAPI_ERROR_BACKEND",
        -3 => "NIXL_CAPI_ERROR_INVALID_STATE",
        -4 => "NIXL_CAPI_ERROR_EXCEPTION",
        -5 => "NIXL_CAPI_ERROR_NO_TELEMETRY",
        -6 => "NIXL_CAPI_ERROR_NOT_FOUND",
        -7 => "NIXL_CAPI_ERROR_NOT_POSTED",
        -8 => "NIXL_CAPI_ERROR_MISMATCH",
        -9 => "NIXL_CAPI_ERROR_NOT_ALLOWED",
        -10 => "NIXL_CAPI_ERROR_REPOST_ACTIVE",
        -11 => "NIXL_CAPI_ERROR_UNKNOWN",
        -12 => "NIXL_CAPI_ERROR_NOT_SUPPORTED",
        -13 => "NIXL_CAPI_ERROR_REMOTE_DISCONNECT",
        -14 => "NIXL_CAPI_ERROR_CANCELED",
        _ => "a status that is not known here",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_its_name() {
        let said = |status| TransportError::Status { call: "register_mem", status }.to_string();
        let known = "register_mem of NIXL failed with status -2 (NIXL_CAPI_ERROR_BACKEND)";
        assert_eq!(said(-2), known);
        assert!(said(-99).contains("-99 (a status that is not known here)"), "{}", said(-99));
        let gpu = TransportError::GpuMemory { status: -1 }.to_string();
        assert!(gpu.contains("-1 (NIXL_CAPI_ERROR_INVALID_PARAM)"), "{gpu}");
    }
}

//! Status codes: those that `cust_raw` knows, and their texts without a driver.

use std::ffi::{CStr, c_int};

use cust_raw::CUresult;

/// Expands to the lookups over every status of `cust_raw`, so that the list is written once.
macro_rules! statuses {
    ($($name:ident)*) => {
        /// The status with this code; `CUDA_ERROR_UNKNOWN` if `cust_raw` does not know the code.
        ///
        /// `CUresult` is a Rust enum: another number in it, from a newer driver, would be undefined behaviour.
        pub(crate) fn from_code(code: c_int) -> CUresult {
            match code {
                $(x if x == CUresult::$name as c_int => CUresult::$name,)*
                _ => CUresult::CUDA_ERROR_UNKNOWN,
            }
        }

        /// The driver's name of a status.
        pub(crate) fn name(status: CUresult) -> &'static CStr {
            match status {
                $(CUresult::$name => {
                    const NAME: &CStr = c_str(concat!(stringify!($name), "\0"));
                    NAME
                })*
            }
        }
    };
}

pub(crate) const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text must end with its only NUL"),
    }
}

statuses! {
    CUDA_SUCCESS
    CUDA_ERROR_INVALID_VALUE
    CUDA_ERROR_OUT_OF_MEMORY
    CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_DEINITIALIZED
    CUDA_ERROR_PROFILER_DISABLED
    CUDA_ERROR_PROFILER_NOT_INITIALIZED
    CUDA_ERROR_PROFILER_ALREADY_STARTED
    CUDA_ERROR_PROFILER_ALREADY_STOPPED
    CUDA_ERROR_STUB_LIBRARY
    CUDA_ERROR_NO_DEVICE
    CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_DEVICE_NOT_LICENSED
    CUDA_ERROR_INVALID_IMAGE
    CUDA_ERROR_INVALID_CONTEXT
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT
    CUDA_ERROR_MAP_FAILED
    CUDA_ERROR_UNMAP_FAILED
    CUDA_ERROR_ARRAY_IS_MAPPED
    CUDA_ERROR_ALREADY_MAPPED
    CUDA_ERROR_NO_BINARY_FOR_GPU
    CUDA_ERROR_ALREADY_ACQUIRED
    CUDA_ERROR_NOT_MAPPED
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY
    CUDA_ERROR_NOT_MAPPED_AS_POINTER
    CUDA_ERROR_ECC_UNCORRECTABLE
    CUDA_ERROR_UNSUPPORTED_LIMIT
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT
    CUDA_ERROR_NVLINK_UNCORRECTABLE
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    CUDA_ERROR_JIT_COMPILATION_DISABLED
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    CUDA_ERROR_INVALID_SOURCE
    CUDA_ERROR_FILE_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    CUDA_ERROR_OPERATING_SYSTEM
    CUDA_ERROR_INVALID_HANDLE
    CUDA_ERROR_ILLEGAL_STATE
    CUDA_ERROR_NOT_FOUND
    CUDA_ERROR_NOT_READY
    CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
    CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_ASSERT
    CUDA_ERROR_TOO_MANY_PEERS
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    CUDA_ERROR_HARDWARE_STACK_ERROR
    CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_MISALIGNED_ADDRESS
    CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC
    CUDA_ERROR_LAUNCH_FAILED
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    CUDA_ERROR_NOT_PERMITTED
    CUDA_ERROR_NOT_SUPPORTED
    CUDA_ERROR_SYSTEM_NOT_READY
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    CUDA_ERROR_MPS_CONNECTION_FAILED
    CUDA_ERROR_MPS_RPC_FAILURE
    CUDA_ERROR_MPS_SERVER_NOT_READY
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    CUDA_ERROR_STREAM_CAPTURE_MERGE
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_CAPTURED_EVENT
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    CUDA_ERROR_TIMEOUT
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
    CUDA_ERROR_EXTERNAL_DEVICE
    CUDA_ERROR_UNKNOWN
}

/// The description of a status for people: a sentence for those that this crate returns itself, else the name.
pub(crate) fn text(status: CUresult) -> &'static CStr {
    match status {
        CUresult::CUDA_SUCCESS => c"no error",
        CUresult::CUDA_ERROR_NO_DEVICE => c"no CUDA driver is installed, so there is no device",
        CUresult::CUDA_ERROR_NOT_FOUND => c"the CUDA driver is too old to have this function",
        other => name(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes_keep_their_meaning() {
        assert_eq!(from_code(0), CUresult::CUDA_SUCCESS);
        assert_eq!(from_code(2), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(from_code(911), CUresult::CUDA_ERROR_EXTERNAL_DEVICE);
        assert_eq!(from_code(999), CUresult::CUDA_ERROR_UNKNOWN);
    }

    #[test]
    fn codes_of_newer_drivers_become_unknown() {
        // 912 is CUDA_ERROR_INVALID_CLUSTER_SIZE, from CUDA 11.8 on; the others do not exist.
        for code in [912, 9, 33, 1000, -1, c_int::MAX] {
            assert_eq!(from_code(code), CUresult::CUDA_ERROR_UNKNOWN, "{code}");
        }
    }

    #[test]
    fn every_status_has_a_text() {
        assert_eq!(name(CUresult::CUDA_ERROR_NO_DEVICE), c"CUDA_ERROR_NO_DEVICE");
        assert_eq!(text(CUresult::CUDA_ERROR_TIMEOUT), c"CUDA_ERROR_TIMEOUT");
        assert!(text(CUresult::CUDA_ERROR_NO_DEVICE).to_str().unwrap().contains("driver"));
    }
}

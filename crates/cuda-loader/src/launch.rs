//! `cuLaunchKernelEx`, which `cust_raw` does not declare: with it, a launch may overlap the end of the previous one in
//! its stream. Source: CUDA driver API, `CUlaunchConfig` and `CUlaunchAttribute`.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cust_raw::{CUfunction, CUresult, CUstream};

use crate::driver::resolve;
use crate::status;

/// The configuration of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel.
    pub function: CUfunction,
    /// Blocks of the grid, as (x, y).
    pub grid: (u32, u32),
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The stream.
    pub stream: CUstream,
    /// Whether its blocks may start before the previous kernel in the stream has ended (programmatic dependent launch):
    /// as soon as each block of that kernel has ended or executed `griddepcontrol.launch_dependents`. The kernel waits
    /// for its data by `griddepcontrol.wait`.
    pub overlap: bool,
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// `CUlaunchAttribute`: an identifier, and a value of 64 bytes, here an integer. In C the value is a union that
/// contains pointers, so it is aligned to 8 bytes.
#[repr(C, align(8))]
struct Attribute {
    id: c_uint,
    pad: c_uint,
    value: c_int,
    rest: [c_int; 15],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: CUstream,
    attributes: *mut Attribute,
    attribute_count: c_uint,
}

const _: () = assert!(size_of::<Attribute>() == 72 && align_of::<Attribute>() == 8);
const _: () = assert!(size_of::<Config>() == 56 && align_of::<Config>() == 8);

type Function =
    unsafe extern "C" fn(*const Config, CUfunction, *mut *mut c_void, *mut *mut c_void) -> c_int;

/// Queues a launch. `arguments`: a pointer to each argument. `cuLaunchKernelEx` needs a driver for CUDA 11.8 or newer.
///
/// # Safety
/// The function and the stream are live and of the current context; `arguments` are the kernel's, and
/// what they point to is good for the launch; a kernel that may overlap writes no global memory before
/// `griddepcontrol.wait`, and uses nothing that it read there and that work before it may have written.
#[must_use]
pub unsafe fn launch_kernel(launch: &Launch, arguments: &mut [*mut c_void]) -> CUresult {
    static FUNCTION: OnceLock<Result<Function, CUresult>> = OnceLock::new();
    // SAFETY: `Function` is the signature of this function, with the status as the integer that it is
    // in C.
    let function = match FUNCTION.get_or_init(|| unsafe { resolve(c"cuLaunchKernelEx") }) {
        Ok(function) => *function,
        Err(status) => return *status,
    };
    let id = PROGRAMMATIC_STREAM_SERIALIZATION;
    let mut overlap = Attribute { id, pad: 0, value: 1, rest: [0; 15] };
    let config = Config {
        grid: [launch.grid.0, launch.grid.1, 1],
        block: [launch.block, 1, 1],
        shared_bytes: launch.shared_bytes,
        stream: launch.stream,
        attributes: &raw mut overlap,
        attribute_count: launch.overlap.into(),
    };
    // SAFETY: the caller answers for kernel and arguments; the configuration outlives the call.
    status::from_code(unsafe {
        function(&raw const config, launch.function, arguments.as_mut_ptr(), ptr::null_mut())
    })
}

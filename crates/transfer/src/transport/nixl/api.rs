//! The functions of `libnixl_capi.so` that this transport uses, as its header (`src/bindings/rust/wrapper.h` of
//! ai-dynamo/nixl) declares them in versions 1.5.1 and 1.5.2. All return a status: 0 for success, 1 for a transfer that
//! goes on, and a negative number for an error.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

use crate::transport::TransportError;

/// An object of the library.
pub(super) type Handle = *mut c_void;

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),*);)*) => {
        /// The library, and its functions.
        pub(super) struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Api {
            /// Loads the library and finds all functions.
            pub fn load(path: &Path) -> Result<Self, TransportError> {
                let failed = |error: libloading::Error| TransportError::NoLibrary {
                    path: path.to_owned(),
                    why: error.to_string(),
                };
                // SAFETY: what the library does when it is loaded is the duty of who names it: it is NIXL's.
                let library = unsafe { Library::new(path) }.map_err(failed)?;
                $(
                    let symbol = concat!("nixl_capi_", stringify!($name));
                    // SAFETY: the function has these arguments in every version that has its name.
                    let found = unsafe { library.get(symbol) };
                    let $name = *found.map_err(|_| TransportError::NoSymbol { symbol })?;
                )*
                Ok(Self { $($name,)* _library: library })
            }
        }
    };
}

/// The configuration of an agent: `nixl_capi_agent_config_t` of 1.5.1, the version that was tested; that library does
/// not read `workers`. In newer headers the port has two bytes, so that `synchronisation` and `workers` lie four bytes
/// earlier. Both are 0 here, and all fields that are not 0 have the same offset in both versions.
#[repr(C)]
#[derive(Default)]
pub(super) struct AgentConfig {
    /// Whether a progress thread serves peers while no function is called.
    has_thread: bool,
    listens: bool,
    port: c_int,
    synchronisation: c_int,
    workers: c_uint,
    /// Most microseconds that the progress thread sleeps while nothing happens; 0 means that it never sleeps.
    thread_sleep: u64,
    listener_sleep: u64,
    telemetry: bool,
}

impl AgentConfig {
    /// With a progress thread that sleeps at most `thread_sleep` microseconds.
    pub fn with_thread(thread_sleep: u64) -> Self {
        Self { has_thread: true, thread_sleep, ..Self::default() }
    }
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_mem_list(Handle);
    destroy_params(Handle);
    /// Arguments: parameters, name, value. The library copies both strings.
    params_add(Handle, *const c_char, *const c_char);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    /// The last argument says whether the list is sorted. Newer versions do not have it, and ignore it.
    create_reg_dlist(c_int, *mut Handle, bool);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    /// The caller frees the bytes with `free`.
    get_local_md(Handle, *mut Handle, *mut usize);
    /// The caller frees the name with `free`.
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    /// As [`Self::create_reg_dlist`].
    create_xfer_dlist(c_int, *mut Handle, bool);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

/// Host memory.
pub(super) const DRAM: c_int = 0;
/// Memory of a GPU.
pub(super) const VRAM: c_int = 1;
/// The operation that reads a peer's memory.
pub(super) const READ: c_int = 0;
/// The status of a transfer that is under way.
pub(super) const IN_PROGRESS: c_int = 1;

/// Turns a negative status into an error.
pub(super) fn check(call: &'static str, status: c_int) -> Result<(), TransportError> {
    if status >= 0 { Ok(()) } else { Err(TransportError::Status { call, status }) }
}

//! The kernel table, expanded: `extern "ptx-kernel"` entries for the GPU, launchers for the CPU.

/// The view of a device pointer that a body gets: read-only for `const`, writable for `mut`.
#[cfg(target_arch = "nvptx64")]
macro_rules! view {
    (const $pointer:ident) => {
        simt::mem::Global::from_ptr($pointer)
    };
    (mut $pointer:ident) => {
        simt::mem::GlobalMut::from_ptr($pointer)
    };
}

/// Whether a kernel waits for the launch before it in its body, after what needs no global memory.
#[cfg(target_arch = "nvptx64")]
const fn waits_in_body(name: &str) -> bool {
    use crate::table::kernel_index;
    let kernel = kernel_index(name);
    kernel == kernel_index("decode_hca_ue8m0")
        || kernel == kernel_index("decode_hca_f32")
        || kernel == kernel_index("topk_select_short")
        || kernel == kernel_index("topk_select_long")
        || kernel == kernel_index("index_topk_short")
        || kernel == kernel_index("index_topk_long")
}

#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($(
        $name:ident of $operation:ident (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ty ),* ;
            $params:ident
        )
        $doc:literal $launch:tt [$body:expr]
    )*) => {
        mod ptx {
            use crate::*;
            $(
                #[doc = $doc]
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $name(
                    $( $pointer: *$mutability $element, )*
                    params: crate::params::$params,
                ) {
                    // Its launch may overlap the one before, and the next one this one.
                    if !const { $crate::entry::waits_in_body(stringify!($name)) } {
                        simt::grid::wait_for_dependencies();
                        simt::grid::launch_dependents();
                    }
                    // SAFETY: the launcher passes the pointers of the kernel table, with its shapes,
                    // valid for the whole launch, `const` ones unwritten; all threads run the body.
                    unsafe {
                        ($body)(args::$operation { $( $pointer: view!($mutability $pointer), )* params })
                    }
                }
            )*
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! view {
    (const $memory:ident $pointer:ident) => {
        simt::mem::Global::bind($memory, $pointer, stringify!($pointer))?
    };
    (mut $memory:ident $pointer:ident) => {
        simt::mem::GlobalMut::bind($memory, $pointer, stringify!($pointer))?
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! entries {
    ($(
        $name:ident of $operation:ident (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ty ),* ;
            $params:ident
        )
        $doc:literal
        { block: $block:literal, min_blocks: $min_blocks:literal, shared: $shared:literal,
          min_sm: $min_sm:literal $(, cluster: $cluster:literal)? $(, in_order: $in_order:literal)? }
        [$body:expr]
    )*) => {
        /// The kernels on the CPU: one launcher each. `addresses` are the pointer arguments in the
        /// table's order, each inside a live allocation of `memory`; every access is checked
        /// against the allocation its pointer was bound to.
        pub mod emulated {
            use simt::emu::{Fault, Launch, Memory, launch_clusters};

            use crate::*;
            $(
                #[doc = $doc]
                ///
                /// # Errors
                /// The first [`Fault`] the emulator met; the launch stops there.
                pub fn $name(
                    memory: &Memory,
                    grid: (u32, u32),
                    seed: u64,
                    addresses: [u64; [$( stringify!($pointer) ),*].len()],
                    params: crate::params::$params,
                ) -> Result<(), Fault> {
                    let [$( $pointer ),*] = addresses;
                    let arguments =
                        args::$operation { $( $pointer: view!($mutability memory $pointer), )* params };
                    let shape = Launch {
                        kernel: stringify!($name),
                        grid,
                        block: $block,
                        shared_bytes: $shared,
                        seed,
                    };
                    let cluster = crate::blocks_of_cluster!($($cluster)? $($in_order)?);
                    // SAFETY: every pointer is bound to a live allocation that the emulator checks
                    // each access against; all threads of the launch run the body.
                    launch_clusters(&shape, cluster, || unsafe { ($body)(arguments) })
                }
            )*
        }
    };
}

crate::for_each_kernel!(entries);

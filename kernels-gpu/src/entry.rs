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

#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($(
        $name:ident of $operation:ident<$variant:ty> [$($case:tt)+] |$p:ident, $f:ident| (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ident
               $(align $align:literal)? [$($extent:tt)+] ),* ;
            $params:ident
        )
        $doc:literal $launch:tt [$body:expr]
    )*) => {
        mod ptx {
            use super::info;
            use crate::*;
            $(
                #[doc = $doc]
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $name(
                    $( $pointer: *$mutability $element, )*
                    params: crate::params::$params,
                ) {
                    // This launch may overlap the previous one, and the next launch may overlap this one.
                    if !const { info(stringify!($name)).waits_in_body } {
                        simt::grid::wait_for_dependencies();
                        simt::grid::launch_dependents();
                    }
                    // SAFETY: the launcher passes the pointers of the kernel table, with its shapes,
                    // valid for the whole launch, `const` ones unwritten behind the wait; all threads run the body.
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
        $name:ident of $operation:ident<$variant:ty> [$($case:tt)+] |$p:ident, $f:ident| (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ident
               $(align $align:literal)? [$($extent:tt)+] ),* ;
            $params:ident
        )
        $doc:literal
        { block: $block:expr, min_blocks: $min_blocks:literal, shared: $shared:expr,
          min_sm: $min_sm:literal $(, cluster: $cluster:expr)?
          $(, waits_in_body: $waits:literal)?, grid: [$($grid:tt)+] }
        [$body:expr]
    )*) => {
        /// The kernels on the CPU: one launcher each. `addresses` are the pointer arguments in the
        /// table's order, each inside a live allocation of `memory`; every access is checked
        /// against the allocation its pointer was bound to.
        pub mod emulated {
            use simt::emu::{Fault, Launch, Memory, launch_clusters};
            use simt::kernel::KernelInfo;

            use super::info;
            use crate::table::shape::*;
            use crate::*;
            $(
                #[doc = $doc]
                ///
                /// # Errors
                /// The first [`Fault`] the emulator met; the launch stops there.
                pub fn $name(
                    memory: &Memory,
                    seed: u64,
                    addresses: [u64; [$( stringify!($pointer) ),*].len()],
                    params: crate::params::$params,
                ) -> Result<(), Fault> {
                    let [$( $pointer ),*] = addresses;
                    let arguments =
                        args::$operation { $( $pointer: view!($mutability memory $pointer), )* params };
                    let ($p, $f): (_, $variant) = (&params, $($case)+);
                    let _ = (&$p, &$f);
                    let [x, y]: [u32; 2] = [$($grid)+];
                    const INFO: KernelInfo = info(stringify!($name));
                    let shape = Launch {
                        kernel: INFO.name,
                        grid: (x, y),
                        block: INFO.block,
                        shared_bytes: INFO.shared,
                        seed,
                    };
                    // SAFETY: every pointer is bound to a live allocation that the emulator checks
                    // each access against; all threads of the launch run the body.
                    launch_clusters(&shape, INFO.cluster, || unsafe { ($body)(arguments) })
                }
            )*
        }
    };
}

/// The kernel called `name`.
const fn info(name: &str) -> simt::kernel::KernelInfo {
    crate::table::KERNELS[crate::table::kernel_index(name)]
}

crate::for_each_kernel!(entries);

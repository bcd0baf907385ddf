//! The kernel table: every kernel once, as data and as macros.
//!
//! A row is an operation: its name and the format that selects its kernel, documentation, pointers, scalars, launch
//! shape, and a body per format. There is one file per topic. Each file is a macro that adds its rows to those before
//! it and passes them all to the next macro.
//!
//! An operation that exists for several formats is written once, with one kernel per format
//! (decision D6). The table is handed to callback macros, and so expanded into
//! - the `extern "ptx-kernel"` entries and the emulator's launchers (`entry.rs`), by
//!   [`for_each_kernel!`](crate::for_each_kernel);
//! - the arguments of bodies (`args.rs`) and the typed launch arguments of the host (`launch.rs`), by
//!   [`for_each_operation!`](crate::for_each_operation);
//! - [`KERNELS`], which `xtask` compares with the built PTX and the host checks at load.
//!
//! The table is the whole contract of a launch. For each pointer it states the element type, the alignment of the
//! address, and how many elements the launch may touch, as a product of dimensions. It also states the scalars,
//! threads, blocks and shared memory. Dimensions and grid are functions of the scalars and the format, so that no
//! launch states them again. [`ABI_HASH`] is a hash of all this.
//!
//! The order of arguments is fixed: first flat device pointers, so that the PTX backend knows that they are global
//! memory; then one [`crate::params`] struct by value. From the kernel's `griddepcontrol.wait` until the launch ends,
//! nothing writes the memory of `const` pointers.

mod abi;
mod attention;
mod compress;
mod decode;
mod digest;
mod flush;
mod gather;
mod index_list;
mod indexer;
mod linear;
mod poison;
mod router;
pub mod shape;
mod state;
mod step;
mod window;

use simt::kernel::{KernelInfo, PointerInfo};

pub use abi::ABI_HASH;
pub use shape::MULTIPROCESSORS;

/// The table. `$to! { $extra.. row.. }` is what it becomes.
#[doc(hidden)]
#[macro_export]
macro_rules! kernel_table {
    ([$($to:tt)*] $($extra:tt)*) => {
        $crate::window_rows! {
            [step_rows compress_rows state_rows flush_rows decode_rows gather_rows
             indexer_rows index_list_rows poison_rows digest_rows router_rows linear_rows attention_rows end_of_rows [$($to)*] $($extra)*] {}
        }
    };
}

/// Hands all rows to where they go; the last link of the chain.
#[doc(hidden)]
#[macro_export]
macro_rules! end_of_rows {
    ([[$($to:tt)*] $($extra:tt)*] { $($rows:tt)* }) => {
        $($to)*! { $($extra)* $($rows)* }
    };
}

/// The value that the table gives, or the default where it leaves it out.
macro_rules! or_default {
    ($default:expr;) => {
        $default
    };
    ($default:expr; $value:expr) => {
        $value
    };
}

/// Hands the table to the macro named `$callback`, one item an operation:
///
/// ```text
/// callback! { $(
///     Operation<Variant> |p, f| "doc"
///     (pointer: const|mut type [align bytes] [dimension, ..], ..; Params)
///     { block: .., min_blocks: .., shared: .., min_sm: ..
///       [, cluster: ..] [, waits_in_body: true], grid: [x, y] }
///     bodies { [variant] => kernel: body, .. }
/// )* }
/// ```
///
/// - `|p, f|`: the names that scalars and variant have in dimensions and grid, and the variant in `block`, `shared` and `cluster`.
/// - `align`: what the pointer's address is a multiple of, if that is more than its element's size: the
///   widest access through it.
/// - `waits_in_body`: the body waits for the launch before it (`simt::grid::wait_for_dependencies`); of
///   other kernels the entry does.
#[macro_export]
macro_rules! for_each_operation {
    ($callback:ident) => {
        $crate::kernel_table! { [$callback] }
    };
}

/// Hands the table to the macro named `$callback`, one item a kernel:
///
/// ```text
/// callback! { $(
///     kernel of Operation<Variant> [variant] |p, f| (pointer: ..; Params) "doc" { block: .., .. } [body]
/// )* }
/// ```
#[macro_export]
macro_rules! for_each_kernel {
    ($callback:ident) => {
        $crate::kernel_table! { [$crate::flatten_kernels] $callback; }
    };
}

/// One item per variant of each operation; see [`for_each_kernel!`], its only caller.
#[doc(hidden)]
#[macro_export]
macro_rules! flatten_kernels {
    ($callback:ident; $(
        $operation:ident<$variant:ty> |$p:ident, $f:ident|
        $doc:literal $arguments:tt $launch:tt
        bodies { $( $case:tt => $name:ident: $body:expr, )* }
    )*) => {
        $callback! { $( $(
            $name of $operation<$variant> $case |$p, $f| $arguments $doc $launch [$body]
        )* )* }
    };
}

macro_rules! kernel_infos {
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
        /// The kernel table as data.
        pub const KERNELS: &[KernelInfo] = {
            use shape::*;

            use crate::*;
            &[$( KernelInfo {
                name: stringify!($name),
                pointers: &[$( PointerInfo {
                    name: stringify!($pointer),
                    element: stringify!($element),
                    align: or_default!(size_of::<$element>() as u32; $($align)?),
                    mutable: is_mut!($mutability),
                    extent: stringify!($($extent)+),
                } ),*],
                params: <params::$params as params::Parameters>::FIELDS,
                params_size: size_of::<params::$params>() as u32,
                params_align: align_of::<params::$params>() as u32,
                block: {
                    let $f: $variant = $($case)+;
                    let _ = &$f;
                    $block
                },
                min_blocks: $min_blocks,
                shared: {
                    let $f: $variant = $($case)+;
                    let _ = &$f;
                    $shared
                },
                min_sm: $min_sm,
                cluster: {
                    let $f: $variant = $($case)+;
                    let _ = &$f;
                    or_default!(1; $($cluster)?)
                },
                waits_in_body: or_default!(false; $($waits)?),
                grid: stringify!($($grid)+),
            } ),*]
        };
    };
}

macro_rules! is_mut {
    (const) => {
        false
    };
    (mut) => {
        true
    };
}

for_each_kernel!(kernel_infos);

/// Index into [`KERNELS`] of the kernel named `name`; evaluated at compile time by the launchers.
///
/// # Panics
/// If the table has no such kernel.
#[must_use]
pub const fn kernel_index(name: &str) -> usize {
    let mut index = 0;
    while index < KERNELS.len() {
        if equal(KERNELS[index].name.as_bytes(), name.as_bytes()) {
            return index;
        }
        index += 1;
    }
    panic!("the kernel table has no such kernel");
}

const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// Most bytes of shared memory that a block may have on sm_90, sm_100, sm_103 and sm_110; opening a GPU with less is refused (CUDA C++ Programming Guide, table
/// "Technical Specifications per Compute Capability").
const MAX_SHARED: u32 = 227 * 1024;

const _: () = {
    let mut i = 0;
    while i < KERNELS.len() {
        assert!(KERNELS[i].block.is_multiple_of(32) && KERNELS[i].block <= 1024);
        assert!(KERNELS[i].shared <= MAX_SHARED);
        i += 1;
    }
};

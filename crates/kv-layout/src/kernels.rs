//! The kernel table as data and as macros. The table itself is in `kernel_table/`, a file a topic.
//!
//! An operation that exists for several formats is written once, with one kernel per format
//! (decision D6). The table is handed to callback macros, and so expanded into
//! - the `extern "ptx-kernel"` entries and the emulator's launchers (`kernels-gpu/src/entry.rs`),
//!   by [`for_each_kernel!`](crate::for_each_kernel);
//! - the typed launch arguments of the host (`host/src/kernels.rs`), by
//!   [`for_each_operation!`](crate::for_each_operation);
//! - [`KERNELS`], which `xtask` compares with the built PTX and the host checks at load.
//!
//! The order of arguments is fixed: flat device pointers first, so that the PTX backend knows they
//! are global memory, then one [`crate::params`] struct by value. `const` pointers are read-only
//! for the whole launch; no other thread writes what they point to.

/// One pointer argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Its name in the table.
    pub name: &'static str,
    /// The element type it points to, as Rust spells it.
    pub element: &'static str,
    /// Whether the kernel writes through it.
    pub mutable: bool,
}

/// One kernel: what a launch and the PTX must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The PTX entry's name.
    pub name: &'static str,
    /// The pointer arguments, in order; each is one 64-bit `.param`.
    pub pointers: &'static [PointerInfo],
    /// Bytes of the parameter struct, the last `.param`.
    pub params_size: u32,
    /// Alignment of the parameter struct.
    pub params_align: u32,
    /// Threads of a block, a multiple of 32. Patched into the PTX as `.maxntid`.
    pub block: u32,
    /// Blocks that must fit on a multiprocessor at once. Patched in as `.minnctapersm`.
    pub min_blocks: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Least compute capability, as in `sm_90`.
    pub min_sm: u32,
    /// Consecutive blocks of a row of the grid that run as a cluster; 1 = none. Patched in as
    /// `.reqnctapercluster`.
    pub cluster: u32,
}

/// Blocks of a cluster, or those that wait for earlier ones, as the table may leave them out.
#[doc(hidden)]
#[macro_export]
macro_rules! blocks_of_cluster {
    () => {
        1
    };
    ($cluster:literal) => {
        $cluster
    };
}

/// Hands the table to the macro named `$callback`, one item an operation:
///
/// ```text
/// callback! { $(
///     Operation<Variant> "doc" (pointer: const|mut type, ..; Params)
///     { block: .., .. [, cluster: ..] [, in_order: ..] }
///     bodies { variant => kernel: body, .. }
/// )* }
/// ```
///
/// `in_order`: of so many consecutive blocks of a row of the grid later ones may wait for earlier ones, which
/// every device starts first. The emulator runs them one after the other.
#[macro_export]
macro_rules! for_each_operation {
    ($callback:ident) => {
        $crate::kernel_table! { [$callback] }
    };
}

/// Hands the table to the macro named `$callback`, one item a kernel:
///
/// ```text
/// callback! { $( kernel (pointer: const|mut type, ..; Params) "doc" { block: .., .. } [body] )* }
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
        $operation:ident<$variant:ty>
        $doc:literal $arguments:tt $launch:tt
        bodies { $( $case:pat => $name:ident: $body:expr, )* }
    )*) => {
        $callback! { $( $( $name $arguments $doc $launch [$body] )* )* }
    };
}

macro_rules! kernel_infos {
    ($(
        $name:ident (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ty ),* ;
            $params:ident
        )
        $doc:literal
        { block: $block:literal, min_blocks: $min_blocks:literal, shared: $shared:literal,
          min_sm: $min_sm:literal $(, cluster: $cluster:literal)? $(, in_order: $in_order:literal)? }
        [$body:expr]
    )*) => {
        /// The kernel table as data.
        pub const KERNELS: &[KernelInfo] = &[$( KernelInfo {
            name: stringify!($name),
            pointers: &[$( PointerInfo {
                name: stringify!($pointer),
                element: stringify!($element),
                mutable: is_mut!($mutability),
            } ),*],
            params_size: size_of::<$crate::params::$params>() as u32,
            params_align: align_of::<$crate::params::$params>() as u32,
            block: $block,
            min_blocks: $min_blocks,
            shared: $shared,
            min_sm: $min_sm,
            cluster: $crate::blocks_of_cluster!($($cluster)?),
        } ),*];
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

/// Most bytes of shared memory that a block may have, from sm_90 on (CUDA C++ Programming Guide, table
/// "Technical Specifications per Compute Capability").
const MOST_SHARED: u32 = 227 * 1024;

const _: () = {
    let mut i = 0;
    while i < KERNELS.len() {
        assert!(KERNELS[i].block.is_multiple_of(32) && KERNELS[i].block <= 1024);
        assert!(KERNELS[i].shared <= MOST_SHARED);
        i += 1;
    }
};

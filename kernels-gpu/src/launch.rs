//! Typed launch arguments, expanded from the kernel table.
//!
//! There is one struct for each operation: typed device pointers, then its scalars. A format selects the kernel. A
//! struct holds exactly the arguments of the PTX entry, in the same order; the emulator passes the same to the same
//! body. Grid and lengths come from the table.

use std::ffi::c_void;

use dsv4_kv_device::{DevicePtr, DevicePtrMut, Operation, Span, bf16};
use simt::emu::{Fault, Memory};
use simt::kernel::KernelInfo;

use crate::table::shape::*;
use crate::table::{KERNELS, kernel_index};
use crate::*;

/// The type of a pointer argument. Kernels take BF16 as its bits: every `u16` of the table is a BF16.
macro_rules! pointer {
    (const u16) => {
        DevicePtr<bf16>
    };
    (mut u16) => {
        DevicePtrMut<bf16>
    };
    (const $element:ident) => {
        DevicePtr<$element>
    };
    (mut $element:ident) => {
        DevicePtrMut<$element>
    };
}

macro_rules! operations {
    ($(
        $operation:ident<$variant:ty> |$p:ident, $f:ident|
        $doc:literal
        (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ident
               $(align $align:literal)? [$($extent:tt)+] ),* ;
            $params:ident
        )
        { block: $block:expr, min_blocks: $min_blocks:literal, shared: $shared:expr,
          min_sm: $min_sm:literal $(, cluster: $cluster:expr)?
          $(, waits_in_body: $waits:literal)?, grid: [$($grid:tt)+] }
        bodies { $( [$($case:tt)+] => $name:ident: $body:expr, )* }
    )*) => {
        $(
            #[doc = $doc]
            #[derive(Clone, Copy, Debug)]
            pub struct $operation {
                $( $(#[$pointer_doc])* pub $pointer: pointer!($mutability $element), )*
                /// The scalars.
                pub params: params::$params,
            }

            impl $operation {
                /// Every variant of the operation, in the order of the kernel table.
                pub const VARIANTS: &[$variant] = &[$( $($case)+ ),*];

                /// Bytes that a launch with these scalars may touch from each pointer on, in order.
                #[must_use]
                pub fn bytes(
                    params: &params::$params,
                    variant: $variant,
                ) -> [u64; [$( stringify!($pointer) ),*].len()] {
                    let ($p, $f) = (params, variant);
                    let _ = (&$p, &$f);
                    [$( product(&[$($extent)+]).saturating_mul(size_of::<$element>() as u64) ),*]
                }
            }

            impl Operation for $operation {
                type Variant = $variant;

                fn kernel(variant: Self::Variant) -> usize {
                    match variant { $( $($case)+ => const { kernel_index(stringify!($name)) }, )* }
                }

                fn info(variant: Self::Variant) -> &'static KernelInfo {
                    &KERNELS[Self::kernel(variant)]
                }

                fn grid(&self, variant: Self::Variant) -> (u32, u32) {
                    let ($p, $f) = (&self.params, variant);
                    let _ = (&$p, &$f);
                    let [x, y]: [u32; 2] = [$($grid)+];
                    (x, y)
                }

                fn extents(&self, variant: Self::Variant) -> impl AsRef<[u64]> {
                    Self::bytes(&self.params, variant)
                }

                fn pointers(&self) -> impl AsRef<[Span]> {
                    [$( self.$pointer.span() ),*]
                }

                fn with_arguments<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
                    launch(&mut [
                        $( self.$pointer.argument(), )*
                        (&raw const self.params).cast_mut().cast(),
                    ])
                }

                unsafe fn emulate(
                    &self,
                    variant: Self::Variant,
                    memory: &Memory,
                    seed: u64,
                ) -> Result<(), Fault> {
                    let addresses = [$( self.$pointer.address() ),*];
                    let launch = match variant { $( $($case)+ => emulated::$name, )* };
                    // Every access is checked against the allocations that `memory` knows.
                    launch(memory, seed, addresses, self.params)
                }
            }
        )*
    };
}

crate::for_each_operation!(operations);

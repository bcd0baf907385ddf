//! Typed launch arguments, expanded from the kernel table.
//!
//! One struct per operation: typed device pointers, then its scalars. A format picks the kernel.
//! What a struct holds is exactly what the PTX entry takes, in the same order; the emulated device
//! hands the same struct to the same body.

use std::ffi::c_void;

use kernels_gpu::table::{KERNELS, kernel_index};
use kv_layout::geometry::{CsaStream, StateStream};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use kv_layout::router::ExpertWidth;
use simt::emu::{Fault, Memory};
use simt::kernel::KernelInfo;

use crate::device::{DevicePtr, DevicePtrMut, Operation, Span};

/// The type of a pointer argument.
macro_rules! pointer {
    (const $element:ty) => {
        DevicePtr<$element>
    };
    (mut $element:ty) => {
        DevicePtrMut<$element>
    };
}

macro_rules! operations {
    ($(
        $operation:ident<$variant:ty>
        $doc:literal
        (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ty ),* ;
            $params:ident
        )
        $launch:tt
        bodies { $( $case:pat => $name:ident: $body:expr, )* }
    )*) => {
        $(
            #[doc = $doc]
            #[derive(Clone, Copy, Debug)]
            pub struct $operation {
                $( $(#[$pointer_doc])* pub $pointer: pointer!($mutability $element), )*
                /// The scalars.
                pub params: kernels_gpu::params::$params,
            }

            impl Operation for $operation {
                type Variant = $variant;

                fn kernel(variant: Self::Variant) -> usize {
                    match variant { $( $case => const { kernel_index(stringify!($name)) }, )* }
                }

                fn info(variant: Self::Variant) -> &'static KernelInfo {
                    &KERNELS[Self::kernel(variant)]
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
                    grid: (u32, u32),
                    seed: u64,
                ) -> Result<(), Fault> {
                    let addresses = [$( self.$pointer.address() ),*];
                    let launch = match variant { $( $case => kernels_gpu::emulated::$name, )* };
                    // Every access is checked against the allocations that `memory` knows.
                    launch(memory, grid, seed, addresses, self.params)
                }
            }
        )*
    };
}

kernels_gpu::for_each_operation!(operations);

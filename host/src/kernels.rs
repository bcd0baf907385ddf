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

use crate::device::DevicePtr;

/// The launch arguments of one operation, which exists for every `Variant`.
pub trait Operation: Copy + Send + Sync + 'static {
    /// The format or formats that choose among the operation's kernels.
    type Variant: Copy + Send + Sync + 'static;

    /// Index into the kernel table of the kernel for `variant`.
    fn kernel(variant: Self::Variant) -> usize;

    /// The kernel for `variant`, as the table has it.
    fn info(variant: Self::Variant) -> &'static KernelInfo {
        &KERNELS[Self::kernel(variant)]
    }

    /// Hands every pointer argument to `visit`: its name and its address.
    fn for_each_pointer(&self, visit: &mut dyn FnMut(&'static str, u64));

    /// Hands the argument list of `cuLaunchKernel` to `launch`: a pointer to each argument.
    fn with_arguments<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R;

    /// Runs the kernel for `variant` on the CPU.
    ///
    /// # Errors
    /// The first fault the emulator met.
    fn emulate(
        &self,
        variant: Self::Variant,
        memory: &Memory,
        grid: (u32, u32),
        seed: u64,
    ) -> Result<(), Fault>;
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
                $( $(#[$pointer_doc])* pub $pointer: DevicePtr<$element>, )*
                /// The scalars.
                pub params: kernels_gpu::params::$params,
            }

            impl Operation for $operation {
                type Variant = $variant;

                fn kernel(variant: Self::Variant) -> usize {
                    match variant { $( $case => const { kernel_index(stringify!($name)) }, )* }
                }

                fn for_each_pointer(&self, visit: &mut dyn FnMut(&'static str, u64)) {
                    $( visit(stringify!($pointer), self.$pointer.address()); )*
                }

                fn with_arguments<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
                    launch(&mut [
                        $( (&raw const self.$pointer).cast_mut().cast(), )*
                        (&raw const self.params).cast_mut().cast(),
                    ])
                }

                fn emulate(
                    &self,
                    variant: Self::Variant,
                    memory: &Memory,
                    grid: (u32, u32),
                    seed: u64,
                ) -> Result<(), Fault> {
                    let addresses = [$( self.$pointer.address() ),*];
                    let launch = match variant { $( $case => kernels_gpu::emulated::$name, )* };
                    launch(memory, grid, seed, addresses, self.params)
                }
            }
        )*
    };
}

kernels_gpu::for_each_operation!(operations);

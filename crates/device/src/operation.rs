//! A kernel with its arguments.

use std::ffi::c_void;

use simt::emu::{Fault, Memory};
use simt::kernel::KernelInfo;

use crate::span::Span;

/// The launch arguments of one operation, which has a kernel for every `Variant`.
///
/// The caller of [`Stream::launch`](crate::Stream::launch) promises that [`Self::kernel`] indexes the list that the
/// device was opened with, and that [`Self::info`], [`Self::extents`] and the arguments are those of that kernel.
pub trait Operation: Copy + Send + Sync + 'static {
    /// The format or formats that choose among the operation's kernels.
    type Variant: Copy + Send + Sync + 'static;

    /// The index of the kernel for `variant` in the list of [`Kernels`](crate::Kernels).
    fn kernel(variant: Self::Variant) -> usize;

    /// The description of the kernel for `variant`.
    fn info(variant: Self::Variant) -> &'static KernelInfo;

    /// Blocks of the launch, as (x, y).
    fn grid(&self, variant: Self::Variant) -> (u32, u32);

    /// Bytes that the launch may touch from each pointer on, in the order of [`KernelInfo::pointers`].
    fn extents(&self, variant: Self::Variant) -> impl AsRef<[u64]>;

    /// The pointer arguments, in the order of [`KernelInfo::pointers`].
    fn pointers(&self) -> impl AsRef<[Span]>;

    /// Calls `launch` with the argument list of `cuLaunchKernel`: a pointer to each argument.
    fn with_arguments<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R;

    /// Runs the kernel for `variant` on the CPU.
    ///
    /// # Safety
    /// `memory` knows the allocations that the pointers are in. Nobody else touches them meanwhile.
    ///
    /// # Errors
    /// The first fault the emulator met.
    unsafe fn emulate(
        &self,
        variant: Self::Variant,
        memory: &Memory,
        seed: u64,
    ) -> Result<(), Fault>;
}

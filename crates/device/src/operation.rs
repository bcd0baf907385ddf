//! A kernel with its arguments, and what a launch checks of them.

use std::ffi::c_void;

use simt::emu::{Fault, Memory};
use simt::kernel::KernelInfo;

use crate::{DeviceError, DeviceId, Span};

/// The launch arguments of one operation, which exists for every `Variant`.
pub trait Operation: Copy + Send + Sync + 'static {
    /// The format or formats that choose among the operation's kernels.
    type Variant: Copy + Send + Sync + 'static;

    /// The kernel for `variant`: its index in the list that [`Kernels`](crate::Kernels) has.
    fn kernel(variant: Self::Variant) -> usize;

    /// The kernel for `variant`.
    fn info(variant: Self::Variant) -> &'static KernelInfo;

    /// The pointer arguments, in the order of [`KernelInfo::pointers`].
    fn pointers(&self) -> impl AsRef<[Span]>;

    /// Hands the argument list of `cuLaunchKernel` to `launch`: a pointer to each argument.
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
        grid: (u32, u32),
        seed: u64,
    ) -> Result<(), Fault>;
}

/// Refuses a grid that no GPU takes.
pub(crate) fn check_grid(kernel: &'static str, (x, y): (u32, u32)) -> Result<(), DeviceError> {
    if x == 0 || y == 0 || x > i32::MAX as u32 || y > u32::from(u16::MAX) {
        return Err(DeviceError::BadGrid { kernel, x, y });
    }
    Ok(())
}

/// Refuses pointers of another device, misaligned ones, and those of a kernel's outputs that overlap any
/// other.
pub(crate) fn check_pointers(
    kernel: &'static KernelInfo,
    spans: &[Span],
    device: DeviceId,
) -> Result<(), DeviceError> {
    let arguments = || kernel.pointers.iter().zip(spans);
    let kernel = kernel.name;
    for (info, span) in arguments() {
        let (argument, address, align) = (info.name, span.address, info.align);
        check_device(argument, span.device, device)?;
        if !address.is_multiple_of(u64::from(align)) {
            return Err(DeviceError::Misaligned { kernel, argument, address, align });
        }
    }
    for (at, (info, span)) in arguments().enumerate().filter(|(_, (info, _))| info.mutable) {
        let overlaps =
            |(other, (_, with)): &(usize, (_, &Span))| *other != at && span.overlaps(with);
        if let Some((_, (other, _))) = arguments().enumerate().find(overlaps) {
            return Err(DeviceError::Aliased { kernel, argument: info.name, other: other.name });
        }
    }
    Ok(())
}

/// Refuses `what` of device `found` where something of device `used` is needed.
pub(crate) fn check_device(
    what: &'static str,
    found: DeviceId,
    used: DeviceId,
) -> Result<(), DeviceError> {
    if found == used { Ok(()) } else { Err(DeviceError::ForeignDevice { what, found, used }) }
}

//! What is refused before a backend is asked.

use bytemuck::Pod;
use simt::kernel::KernelInfo;

use crate::error::DeviceError;
use crate::identity::DeviceId;
use crate::span::Span;

/// Refuses a grid that no GPU takes.
pub(crate) fn check_grid(kernel: &'static str, (x, y): (u32, u32)) -> Result<(), DeviceError> {
    if x == 0 || y == 0 || x > i32::MAX as u32 || y > u32::from(u16::MAX) {
        return Err(DeviceError::BadGrid { kernel, x, y });
    }
    Ok(())
}

/// Refuses pointers of another device, misaligned ones, those with fewer bytes than the launch may touch
/// (`extents`), and those of a kernel's outputs that overlap any other.
pub(crate) fn check_pointers(
    kernel: &'static KernelInfo,
    spans: &[Span],
    extents: &[u64],
    device: DeviceId,
) -> Result<(), DeviceError> {
    let arguments = || kernel.pointers.iter().zip(spans);
    let kernel = kernel.name;
    for ((info, span), &needed) in arguments().zip(extents) {
        let (argument, address, align) = (info.name, span.address, info.align);
        check_device(argument, span.device, device)?;
        if !address.is_multiple_of(u64::from(align)) {
            return Err(DeviceError::Misaligned { kernel, argument, address, align });
        }
        if span.bytes < needed {
            return Err(DeviceError::TooShort { kernel, argument, found: span.bytes, needed });
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

/// Refuses a type of elements that no memory holds: of no bytes, or aligned more than pinned memory is.
pub(crate) fn check_element<T: Pod>() -> Result<(), DeviceError> {
    let (bytes, align) = (size_of::<T>(), align_of::<T>());
    if bytes == 0 || align > align_of::<u128>() {
        return Err(DeviceError::Element { bytes, align });
    }
    Ok(())
}

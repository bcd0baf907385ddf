//! Checks that are made before a backend is called.

use std::ops::Range;

use bytemuck::Pod;
use simt::kernel::KernelInfo;

use crate::error::DeviceError;
use crate::identity::DeviceId;
use crate::span::Span;

/// Refuses a grid that no GPU supports.
pub(crate) fn check_grid(kernel: &'static str, (x, y): (u32, u32)) -> Result<(), DeviceError> {
    if x == 0 || y == 0 || x > i32::MAX as u32 || y > u32::from(u16::MAX) {
        return Err(DeviceError::BadGrid { kernel, x, y });
    }
    Ok(())
}

/// Refuses pointers of another device, misaligned ones, those with fewer bytes than the launch may touch (`extents`),
/// and outputs of the kernel that overlap any other pointer.
pub(crate) fn check_pointers(
    kernel: &'static KernelInfo,
    spans: &[Span],
    extents: &[u64],
    device: DeviceId,
) -> Result<(), DeviceError> {
    // Every launch takes this path. So a loop without branches first finds out whether anything is wrong; only then is
    // the error determined. Alignments are powers of two.
    let (mut wrong, mut first, mut end) = (false, u64::MAX, 0);
    for (info, (span, needed)) in kernel.pointers.iter().zip(spans.iter().zip(extents)) {
        wrong |= (span.device != device)
            | (span.address & u64::from(info.align).wrapping_sub(1) != 0)
            | (span.bytes < *needed);
        first = first.min(span.address);
        end = end.max(span.end());
    }
    if wrong {
        refuse_argument(kernel, spans, extents, device)?;
    }
    let all = first..end;
    if outputs_may_overlap(kernel, spans, all) { refuse_overlap(kernel, spans) } else { Ok(()) }
}

/// Most pointers of a kernel that [`outputs_may_overlap`] compares.
const LANES: usize = 32;

/// Whether an output may overlap another pointer: `false` if none does, `true` if one does or is close to one.
///
/// Addresses are compared in units so large that `all`, the range of all pointers, has fewer than 2^30 of them. These
/// are 32-bit numbers, of which vector instructions compare four at a time.
fn outputs_may_overlap(kernel: &'static KernelInfo, spans: &[Span], all: Range<u64>) -> bool {
    if spans.len() > LANES {
        return true;
    }
    let base = all.start;
    let unit = (u64::BITS - all.end.saturating_sub(base).leading_zeros()).saturating_sub(30);
    // The first and the last unit of each pointer; an empty one has none.
    let (mut first, mut last) = ([i32::MAX; LANES], [-1; LANES]);
    for (span, (first, last)) in spans.iter().zip(first.iter_mut().zip(&mut last)) {
        if span.bytes > 0 {
            *first = ((span.address - base) >> unit) as i32;
            *last = ((span.end() - 1 - base) >> unit) as i32;
        }
    }
    let mut shared = 0;
    for (at, info) in kernel.pointers.iter().enumerate().take(spans.len()) {
        if info.mutable {
            let (from, to) = (first[at], last[at]);
            let meets = |(first, last): (&i32, &i32)| i32::from((*first <= to) & (from <= *last));
            // An output meets itself, unless it is empty.
            let met: i32 = first.iter().zip(&last).map(meets).sum();
            shared |= met - i32::from(to >= 0);
        }
    }
    shared != 0
}

/// Returns the error for a pointer of another device, a misaligned one or one that is too short.
#[cold]
fn refuse_argument(
    kernel: &'static KernelInfo,
    spans: &[Span],
    extents: &[u64],
    device: DeviceId,
) -> Result<(), DeviceError> {
    let arguments = kernel.pointers.iter().zip(spans).zip(extents);
    let kernel = kernel.name;
    for ((info, span), &needed) in arguments {
        let (argument, address, align) = (info.name, span.address, info.align);
        check_device(argument, span.device, device)?;
        if !address.is_multiple_of(u64::from(align)) {
            return Err(DeviceError::Misaligned { kernel, argument, address, align });
        }
        if span.bytes < needed {
            return Err(DeviceError::TooShort { kernel, argument, found: span.bytes, needed });
        }
    }
    Ok(())
}

/// Returns the error for an output that overlaps another pointer.
#[cold]
fn refuse_overlap(kernel: &'static KernelInfo, spans: &[Span]) -> Result<(), DeviceError> {
    let arguments = || kernel.pointers.iter().zip(spans);
    let kernel = kernel.name;
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

/// Refuses a GPU whose blocks can have `found` bytes of shared memory, if a kernel needs more.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn check_shared_memory(
    name: &str,
    kernels: &[KernelInfo],
    found: u32,
) -> Result<(), DeviceError> {
    match kernels.iter().max_by_key(|kernel| kernel.shared) {
        Some(&KernelInfo { name: kernel, shared: needed, .. }) if needed > found => {
            Err(DeviceError::SharedMemory { name: name.to_owned(), kernel, needed, found })
        }
        _ => Ok(()),
    }
}

/// Refuses an element type that no memory can hold: one of zero bytes, or with a larger alignment than pinned memory
/// has.
pub(crate) fn check_element<T: Pod>() -> Result<(), DeviceError> {
    let (bytes, align) = (size_of::<T>(), align_of::<T>());
    if bytes == 0 || align > align_of::<u128>() {
        return Err(DeviceError::Element { bytes, align });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use simt::kernel::PointerInfo;

    use super::*;

    /// Four pointers, of which the first two are outputs.
    static KERNEL: KernelInfo = {
        const fn pointer(name: &'static str, mutable: bool) -> PointerInfo {
            PointerInfo { name, element: "u8", extent: "1", align: 1, mutable }
        }
        const POINTERS: &[PointerInfo] =
            &[pointer("a", true), pointer("b", true), pointer("c", false), pointer("d", false)];
        KernelInfo { pointers: POINTERS, ..KernelInfo::new("kernel") }
    };

    /// A GPU with a byte less than the largest kernel takes is refused, by that kernel's name.
    #[test]
    fn a_gpu_has_the_shared_memory_of_every_kernel() {
        let of = |name, shared| KernelInfo { shared, ..KernelInfo::new(name) };
        let kernels = [of("small", 100), of("large", 227 * 1024), of("middle", 99 * 1024)];
        let check = |found| check_shared_memory("a GPU", &kernels, found);
        assert!(check(227 * 1024).is_ok() && check_shared_memory("a GPU", &[], 0).is_ok());
        let error = check(227 * 1024 - 1).unwrap_err();
        let DeviceError::SharedMemory { name, kernel, needed, found } = error else {
            panic!("{error}")
        };
        assert_eq!((&*name, kernel, needed, found), ("a GPU", "large", 227 << 10, (227 << 10) - 1));
    }

    /// Wherever four spans lie, and however far apart: refused if and only if an output shares a byte with another.
    #[test]
    fn an_overlap_is_found_wherever_it_is() {
        let device = DeviceId::new();
        let mut refused = 0;
        for far in [0, 1 << 20, 1 << 37, 1 << 62] {
            for case in 0_u64..4096 {
                let spans: Vec<_> = (0..4)
                    .map(|at| {
                        let place = case >> (3 * at) & 7;
                        // Next to each other, or one far from the others; one may be empty.
                        let address = 1000 + 3 * place + if at == case % 4 { far } else { 0 };
                        Span { address, bytes: case % 5, device }
                    })
                    .collect();
                let pairs = (0..2).flat_map(|a| (0..4).map(move |b| (a, b)));
                let mut pairs = pairs.filter(|(a, b)| a != b);
                let overlap = pairs.any(|(a, b)| spans[a].overlaps(&spans[b]));
                let checked = check_pointers(&KERNEL, &spans, &[0; 4], device);
                assert_eq!(checked.is_err(), overlap, "{spans:?}");
                refused += u32::from(overlap);
            }
        }
        assert!((4096..3 * 4096).contains(&refused), "{refused}");
    }
}

//! Every kernel of the table with each of its arguments in the wrong place, or too short: the launch refuses it.

use dsv4_kv::device::DeviceError;

use super::kernels::{OPERATIONS, Wrong, case};

/// Whether a kernel of attention touches none of an argument, as that is of other keys, or of parts or spread queries.
fn is_unused(kernel: &str, argument: &str) -> bool {
    let of = |keys: &str| kernel.starts_with("attend") && kernel.contains(keys);
    match argument {
        "exchange" => !of("spread"),
        "part_sums" | "part_lse" | "arrivals" => !of("attend_all") && !of("spread_parts"),
        "table" | "entry_data" | "entry_scale" => of("window") || of("consecutive"),
        "selected" => ["window", "consecutive", "all"].into_iter().any(of),
        _ => false,
    }
}

/// Offers every kernel of the table each of its arguments an element off its place, where the table asks for
/// more than an element's alignment, and each an element short. How many it refused.
///
/// # Panics
/// If one was not refused with [`DeviceError::Misaligned`], or [`DeviceError::TooShort`].
pub fn refuses_misplaced_arguments() -> usize {
    let mut refused = 0;
    for operation in OPERATIONS {
        for (variant, kernel) in (operation.kernels)().into_iter().enumerate() {
            let kernel = &kernels_gpu::table::KERNELS[kernel];
            for (place, pointer) in kernel.pointers.iter().enumerate() {
                // Numbers other than 0 wherever there is a choice.
                let bytes = [1; 32];
                let element = match pointer.element {
                    "u8" => 1,
                    "u16" => 2,
                    _ => 4,
                };
                if pointer.align > element {
                    let result = (operation.run)(&mut case(&bytes), variant, Wrong::Shifted(place));
                    let found = matches!(result, Err(DeviceError::Misaligned { argument, .. })
                        if argument == pointer.name);
                    assert!(found, "{}, {} off: {result:?}", kernel.name, pointer.name);
                    refused += 1;
                }
                let result = (operation.run)(&mut case(&bytes), variant, Wrong::Short(place));
                let may_be_empty =
                    pointer.extent.contains("if p.") || is_unused(kernel.name, pointer.name);
                if may_be_empty && result.is_ok() {
                    continue;
                }
                let found = matches!(result, Err(DeviceError::TooShort { argument, .. })
                    if argument == pointer.name);
                assert!(found, "{}, {} short: {result:?}", kernel.name, pointer.name);
                refused += 1;
            }
        }
    }
    refused
}

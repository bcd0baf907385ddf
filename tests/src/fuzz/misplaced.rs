//! Every kernel of the table with each of its arguments misaligned or too short: the launch must be refused.

use dsv4_kv::device::DeviceError;

use super::kernels::{OPERATIONS, Wrong, case};

/// Whether an attention kernel touches nothing of an argument, because it belongs to another set of keys, to splits, or
/// to spread queries.
fn is_unused(kernel: &str, argument: &str) -> bool {
    let of = |keys: &str| kernel.starts_with("attend") && kernel.contains(keys);
    match argument {
        "exchange" => !of("spread"),
        "split_out" | "split_softmax" | "arrivals" => !of("attend_all") && !of("spread_splits"),
        "table" | "entry_data" | "entry_scale" => of("window") || of("consecutive"),
        "selected" => ["window", "consecutive", "all"].into_iter().any(of),
        _ => false,
    }
}

/// Launches every kernel of the table with each of its arguments shifted by one element, where the table requires more
/// than the alignment of an element, and with each argument one element short. Returns the number of refused launches.
///
/// # Panics
/// If a launch is not refused with [`DeviceError::Misaligned`] or [`DeviceError::TooShort`].
pub fn refuses_misplaced_arguments() -> usize {
    let mut refused = 0;
    for operation in OPERATIONS {
        for (variant, kernel) in (operation.kernels)().into_iter().enumerate() {
            let kernel = &kernels_gpu::table::KERNELS[kernel];
            for (place, pointer) in kernel.pointers.iter().enumerate() {
                // Bytes that choose numbers other than 0 wherever there is a choice.
                let bytes = [1; 32];
                let run = |wrong| (operation.run)(&mut case(&bytes), variant, wrong).map(drop);
                let element = match pointer.element {
                    "u8" => 1,
                    "u16" => 2,
                    _ => 4,
                };
                if pointer.align > element {
                    let result = run(Wrong::Shifted(place));
                    let found = matches!(result, Err(DeviceError::Misaligned { argument, .. })
                        if argument == pointer.name);
                    assert!(found, "{}, {} off: {result:?}", kernel.name, pointer.name);
                    refused += 1;
                }
                let result = run(Wrong::Short(place));
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

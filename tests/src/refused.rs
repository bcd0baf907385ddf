//! Names in refusals. A test that accepts any refusal does not notice when the intended one is missing.

use dsv4_kv::device::DeviceError;

/// The name of the number, length or buffer that was refused.
///
/// # Panics
/// If nothing was refused, or if the error has no such name.
pub fn named<R>(result: Result<R, DeviceError>) -> &'static str {
    match result.err().expect("it is refused") {
        DeviceError::Argument { what, .. }
        | DeviceError::Length { what, .. }
        | DeviceError::NotADivisor { what, .. } => what,
        DeviceError::TooShort { argument, .. } => argument,
        other => panic!("{other}"),
    }
}

/// The name of the kernel of a launch that was refused because `argument` is too short; empty if the launch succeeded,
/// since there was nothing to launch.
///
/// # Errors
/// Any other refusal.
pub fn kernel_without(
    argument: &str,
    result: Result<(), DeviceError>,
) -> Result<&'static str, DeviceError> {
    match result {
        Err(DeviceError::TooShort { kernel, argument: short, .. }) if short == argument => {
            Ok(kernel)
        }
        other => other.map(|()| ""),
    }
}

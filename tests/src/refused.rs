//! What a refusal names: a test that takes any refusal for the right one does not see when the right one is gone.

use dsv4_kv::device::DeviceError;

/// The number, length or buffer that was refused, by its name.
///
/// # Panics
/// If nothing was refused, or something without such a name.
pub fn named<R>(result: Result<R, DeviceError>) -> &'static str {
    match result.err().expect("it is refused") {
        DeviceError::Argument { what, .. }
        | DeviceError::Length { what, .. }
        | DeviceError::NotADivisor { what, .. } => what,
        DeviceError::TooShort { argument, .. } => argument,
        other => panic!("{other}"),
    }
}

/// The kernel of a launch, which names itself when `argument` is too short for it. None, if there was nothing to launch.
///
/// # Errors
/// What else was refused.
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

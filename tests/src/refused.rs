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

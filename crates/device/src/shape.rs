//! A check of lengths for operations of several launches, before the first one: a launch checks only its own arguments.

use crate::error::DeviceError;

/// Refuses `what` if it has fewer than `needed` elements.
///
/// # Errors
/// [`DeviceError::Length`].
pub fn check_length(what: &'static str, found: u64, needed: u64) -> Result<(), DeviceError> {
    if found < needed { Err(DeviceError::Length { what, found, needed }) } else { Ok(()) }
}

//! Checks of shapes, for the functions that make launches safe.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::View;
use crate::error::DeviceError;

/// Refuses a tensor with fewer than `needed` elements; `what` names it.
///
/// # Errors
/// [`DeviceError::Length`].
pub fn check<B: Backend, T: Pod>(
    what: &'static str,
    buffer: &View<B, T>,
    needed: u64,
) -> Result<(), DeviceError> {
    check_length(what, buffer.len(), needed)
}

/// Refuses `what` if it has fewer than `needed` elements.
///
/// # Errors
/// [`DeviceError::Length`].
pub fn check_length(what: &'static str, found: u64, needed: u64) -> Result<(), DeviceError> {
    if found < needed { Err(DeviceError::Length { what, found, needed }) } else { Ok(()) }
}

/// The product of extents, or, where it has no room in 64 bits, more than any buffer has.
#[must_use]
pub fn product<const N: usize>(extents: [u64; N]) -> u64 {
    extents.into_iter().fold(1, u64::saturating_mul)
}

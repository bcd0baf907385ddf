//! Prefix sums over a warp.

use simt::warp;

/// The sum over this lane and those before it.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn inclusive_sum(value: u32) -> u32 {
    let mut sum = value;
    let mut distance = 1;
    while distance < 32 {
        // SAFETY: the lanes are together, by this function's own contract.
        sum += unsafe { warp::shuffle_up_found_u32(sum, distance) }.unwrap_or(0);
        distance *= 2;
    }
    sum
}

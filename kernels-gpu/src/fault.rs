//! The fault word: a kernel counts in it the inputs that it refuses.

use simt::atomic::DeviceAtomicU32;
use simt::mem::GlobalMut;

/// Counts `refusals` in the launch's fault word, once for the warp.
///
/// # Safety
/// `faults` holds one word, which the launch accesses by this function only.
#[inline(always)]
pub unsafe fn count(faults: GlobalMut<u32>, lane: u32, refusals: u32) {
    if lane == 0 && refusals > 0 {
        // SAFETY: word 0 exists and is only ever accessed atomically.
        unsafe { DeviceAtomicU32::new(faults, 0).add(refusals) };
    }
}

//! The four warps that multiply together.

use simt::thread;

/// Warps of a warpgroup.
pub const WARPS: u32 = 4;
/// Threads of a warpgroup.
pub const THREADS: u32 = 32 * WARPS;

/// Index of the thread in its warpgroup.
#[inline(always)]
#[must_use]
pub fn own_thread() -> u32 {
    thread::thread_idx_x() % THREADS
}

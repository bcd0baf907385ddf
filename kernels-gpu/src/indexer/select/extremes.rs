//! The lowest and the highest value of a block.

use simt::shared::Shared;
use simt::{thread, warp};

/// The most warps of a block.
pub const MAX_WARPS: u32 = 32;

/// The lowest of the warp's `low`, and the highest of its `high`.
///
/// # Safety
/// All lanes of a warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn warp_min_max(low: u32, high: u32) -> (u32, u32) {
    // SAFETY: by this function's own contract.
    unsafe { (warp::reduce_min_u32(low), warp::reduce_max_u32(high)) }
}

/// The lowest of the block's `low`, and the highest of its `high`, from those of each warp ([`warp_min_max`]). Has a
/// barrier.
///
/// # Safety
/// All threads of a block of `THREADS`, a power of two, call it together, and no other thread uses `words` without a
/// barrier between.
#[inline(always)]
#[must_use]
pub unsafe fn block_min_max<const THREADS: u32>(
    words: Shared<u32, { 2 * MAX_WARPS as usize }>,
    (low, high): (u32, u32),
) -> (u32, u32) {
    let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
    let some = lane % (THREADS / 32);
    // SAFETY: each warp writes two words, which are read after the barrier.
    unsafe {
        if lane == 0 {
            words.store(warp_id, low);
            words.store(MAX_WARPS + warp_id, high);
        }
        thread::sync_threads();
        warp_min_max(words.load(some), words.load(MAX_WARPS + some))
    }
}

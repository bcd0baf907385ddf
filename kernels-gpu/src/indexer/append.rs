//! A list in shared memory that all warps of a block append to.

use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{thread, warp};

/// Places in a list for those of four items a lane that are wanted, counted by `counter`.
///
/// # Safety
/// All 32 lanes of the warp call it together; the counter is written and used by this alone.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn append(counters: Shared<u32, 2>, counter: u32, wanted: [bool; 4]) -> [u32; 4] {
    let lane = thread::lane_id();
    let below = (1 << lane) - 1;
    // SAFETY: by this function's own contract.
    unsafe {
        let place = |wanted: bool, count: u32| {
            let lanes = warp::ballot(wanted);
            (count + (lanes & below).count_ones(), count + lanes.count_ones())
        };
        let (a, count) = place(wanted[0], 0);
        let (b, count) = place(wanted[1], count);
        let (c, count) = place(wanted[2], count);
        let (d, count) = place(wanted[3], count);
        let mut first = 0;
        if lane == 0 && count > 0 {
            first = BlockAtomicU32::new(counters, counter).add(count);
        }
        let first = warp::shuffle_idx_u32(first, 0);
        [a, b, c, d].map(|place| first + place)
    }
}

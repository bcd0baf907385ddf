//! [`crate::warp`] on the device.

use super::intrinsics;

/// The membership mask of a full warp.
const ALL_LANES: i32 = -1;

/// The clamp operand of `shfl`: one segment of 32 lanes, whose last is lane 31. `shfl.up` wants the
/// first lane instead, 0.
const LAST_LANE: i32 = 31;

macro_rules! collectives {
    ($($name:ident($value:ident: $type:ty $(, $operand:ident)?) -> $result:ty = $call:expr;)*) => { $(
        #[inline(always)]
        pub unsafe fn $name($value: $type $(, $operand: u32)?) -> $result {
            // SAFETY: the caller brings all 32 lanes, as the mask says.
            unsafe { $call }
        }
    )* };
}

collectives! {
    shuffle_xor(value: u32, lane_mask) -> u32 = intrinsics::shfl_sync_bfly(
        ALL_LANES, value.cast_signed(), lane_mask.cast_signed(), LAST_LANE).cast_unsigned();
    shuffle_idx(value: u32, source_lane) -> u32 = intrinsics::shfl_sync_idx(
        ALL_LANES, value.cast_signed(), source_lane.cast_signed(), LAST_LANE).cast_unsigned();
    ballot(predicate: bool) -> u32 =
        intrinsics::vote_ballot_sync(ALL_LANES, predicate).cast_unsigned();
    all(predicate: bool) -> bool = intrinsics::vote_all_sync(ALL_LANES, predicate);
    any(predicate: bool) -> bool = intrinsics::vote_any_sync(ALL_LANES, predicate);
    reduce_add(value: u32) -> u32 =
        intrinsics::redux_sync_add(value.cast_signed(), ALL_LANES).cast_unsigned();
    reduce_max(value: u32) -> u32 =
        intrinsics::redux_sync_umax(value.cast_signed(), ALL_LANES).cast_unsigned();
    reduce_min(value: u32) -> u32 =
        intrinsics::redux_sync_umin(value.cast_signed(), ALL_LANES).cast_unsigned();
}

#[inline(always)]
pub unsafe fn shuffle_up_found(value: u32, delta: u32) -> Option<u32> {
    // SAFETY: the caller brings all 32 lanes, as the mask says.
    let found = unsafe {
        intrinsics::shfl_sync_up_found(ALL_LANES, value.cast_signed(), delta.cast_signed(), 0)
    };
    found.1.then_some(found.0.cast_unsigned())
}

#[inline(always)]
pub unsafe fn sync_warp() {
    // SAFETY: the caller brings all 32 lanes, as the mask says.
    unsafe { intrinsics::bar_warp_sync(ALL_LANES) }
}

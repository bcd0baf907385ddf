//! Operations of a full warp: shuffles, votes, reductions.
//!
//! # Safety
//! Every `unsafe` function here has one requirement: all 32 lanes of the warp make the same call, from the
//! same place in the source. The member mask is always all lanes. These functions exchange values and
//! do not order memory; only [`sync_warp`] does.
//!
//! A place is the source location of the call into this module. A helper function that calls a collective is one place
//! for all of its callers; give it `#[track_caller]` to distinguish them.

use crate::{imp, math};

pub use crate::limits::WARP_SIZE;

/// `value` of lane `lane_id() ^ lane_mask`. Only the low five bits of `lane_mask` count
/// (`shfl.sync.bfly.b32`, PTX ISA 9.7.9 `shfl.sync`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn shuffle_xor_u32(value: u32, lane_mask: u32) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::shuffle_xor(value, lane_mask) }
}

/// [`shuffle_xor_u32`] of the bits of an `f32`.
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn shuffle_xor_f32(value: f32, lane_mask: u32) -> f32 {
    // SAFETY: the caller brings all 32 lanes.
    f32::from_bits(unsafe { imp::warp::shuffle_xor(value.to_bits(), lane_mask) })
}

/// `value` of lane `source_lane`. Only the low five bits of `source_lane` count
/// (`shfl.sync.idx.b32`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn shuffle_idx_u32(value: u32, source_lane: u32) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::shuffle_idx(value, source_lane) }
}

/// [`shuffle_idx_u32`] of the bits of an `f32`.
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn shuffle_idx_f32(value: f32, source_lane: u32) -> f32 {
    // SAFETY: the caller brings all 32 lanes.
    f32::from_bits(unsafe { imp::warp::shuffle_idx(value.to_bits(), source_lane) })
}

/// `value` of lane `lane_id() - delta`; `None` in a lane below `delta`. Only the low five bits of `delta` count
/// (`shfl.sync.up.b32` with a predicate).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn shuffle_up_found_u32(value: u32, delta: u32) -> Option<u32> {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::shuffle_up_found(value, delta) }
}

/// Bit `l` is set when lane `l` passed `true` (`vote.sync.ballot.b32`, PTX ISA 9.7.13
/// `vote.sync`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn ballot(predicate: bool) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::ballot(predicate) }
}

/// Whether every lane passed `true` (`vote.sync.all.pred`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn all(predicate: bool) -> bool {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::all(predicate) }
}

/// Whether some lane passed `true` (`vote.sync.any.pred`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn any(predicate: bool) -> bool {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::any(predicate) }
}

/// Sum over the warp modulo 2^32, in every lane (`redux.sync.add.u32`, PTX ISA 9.7.13
/// `redux.sync`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_add_u32(value: u32) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::reduce_add(value) }
}

/// Largest value of the warp, in every lane (`redux.sync.max.u32`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_max_u32(value: u32) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::reduce_max(value) }
}

/// Smallest value of the warp, in every lane (`redux.sync.min.u32`).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_min_u32(value: u32) -> u32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::reduce_min(value) }
}

/// Waits for all lanes of the warp. Writes of any lane before the barrier are visible to all lanes after it
/// (`bar.warp.sync`, PTX ISA 9.7.13).
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_warp() {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::warp::sync_warp() }
}

/// Sum over the warp in a fixed tree (xor 16, 8, 4, 2, 1), in every lane, with the same bits on
/// both backends: each step adds the two halves of a butterfly, and addition commutes.
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_add_f32(value: f32) -> f32 {
    let mut sum = value;
    let mut mask = WARP_SIZE / 2;
    while mask > 0 {
        // SAFETY: the caller brings all 32 lanes, and the trip count does not depend on the lane.
        sum += unsafe { shuffle_xor_f32(sum, mask) };
        mask /= 2;
    }
    sum
}

/// Largest value of the warp, in every lane, by [`math::max`]: NaN is ignored next to a number.
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_max_f32(value: f32) -> f32 {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { reduce_max_f32_width::<WARP_SIZE>(value) }
}

/// [`reduce_max_f32`] over each aligned segment of `W` lanes; `W` is a power of two up to 32.
///
/// # Safety
/// - All 32 lanes make this call together.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_max_f32_width<const W: u32>(value: f32) -> f32 {
    const { assert!(W.is_power_of_two() && W <= WARP_SIZE) };
    let mut largest = value;
    let mut mask = W / 2;
    while mask > 0 {
        // SAFETY: the caller brings all 32 lanes, and the trip count does not depend on the lane.
        largest = math::max(largest, unsafe { shuffle_xor_f32(largest, mask) });
        mask /= 2;
    }
    largest
}

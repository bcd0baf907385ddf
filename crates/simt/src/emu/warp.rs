//! [`crate::warp`] on the CPU: each call stops the thread, and returns the result that the scheduler computes.

use super::block::wait;
use super::collective::Operation;
use crate::limits::WARP_SIZE;
use crate::thread::lane_id;

#[track_caller]
pub unsafe fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
    wait(Operation::ShuffleXor, value, lane_mask)
}

#[track_caller]
pub unsafe fn shuffle_idx(value: u32, source_lane: u32) -> u32 {
    wait(Operation::ShuffleIdx, value, source_lane)
}

#[track_caller]
pub unsafe fn shuffle_up_found(value: u32, delta: u32) -> Option<u32> {
    let other = wait(Operation::ShuffleUp, value, delta);
    (lane_id() >= delta % WARP_SIZE).then_some(other)
}

#[track_caller]
pub unsafe fn ballot(predicate: bool) -> u32 {
    wait(Operation::Ballot, u32::from(predicate), 0)
}

#[track_caller]
pub unsafe fn all(predicate: bool) -> bool {
    wait(Operation::All, u32::from(predicate), 0) != 0
}

#[track_caller]
pub unsafe fn any(predicate: bool) -> bool {
    wait(Operation::Any, u32::from(predicate), 0) != 0
}

#[track_caller]
pub unsafe fn reduce_add(value: u32) -> u32 {
    wait(Operation::ReduceAdd, value, 0)
}

#[track_caller]
pub unsafe fn reduce_max(value: u32) -> u32 {
    wait(Operation::ReduceMax, value, 0)
}

#[track_caller]
pub unsafe fn reduce_min(value: u32) -> u32 {
    wait(Operation::ReduceMin, value, 0)
}

#[track_caller]
pub unsafe fn sync_warp() {
    wait(Operation::SyncWarp, 0, 0);
}

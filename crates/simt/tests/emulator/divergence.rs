//! Collectives that not all threads reach.

use simt::emu::{FaultKind, LaneGroup, Operation};
use simt::thread::{lane_id, sync_threads, thread_idx_x, warp_id};
use simt::warp;

use crate::device::{assert_at, fault, fault_kind, run};

/// The groups of a divergence fault.
fn groups(threads: u32, body: impl Fn() + Sync) -> Vec<LaneGroup> {
    match fault_kind(threads, body) {
        FaultKind::Divergence { groups } => groups,
        other => panic!("{other}"),
    }
}

#[test]
fn barrier_that_half_the_block_skips() {
    let line = line!() + 4;
    let groups = groups(64, || {
        if warp_id() == 0 {
            // SAFETY: broken on purpose: warp 1 does not come.
            unsafe { sync_threads() };
        }
    });
    assert_eq!(groups[0].threads, Vec::from_iter(0..32));
    let (operation, location) = groups[0].waiting.expect("warp 0 waits");
    assert_eq!(operation, Operation::SyncThreads);
    assert_at(location, file!(), line);
    assert_eq!(groups[1], LaneGroup { threads: Vec::from_iter(32..64), waiting: None });
}

#[test]
fn barrier_that_one_thread_of_a_warp_skips() {
    let groups = groups(32, || {
        if lane_id() != 7 {
            // SAFETY: broken on purpose: lane 7 does not come.
            unsafe { sync_threads() };
        }
    });
    assert_eq!(groups[1], LaneGroup { threads: vec![7], waiting: None });
}

#[test]
fn barriers_at_two_places() {
    let line = line!() + 4;
    let groups = groups(64, || {
        if warp_id() == 0 {
            // SAFETY: broken on purpose: the warps call from two places.
            unsafe { sync_threads() };
        } else {
            // SAFETY: as above.
            unsafe { sync_threads() };
        }
    });
    assert_at(groups[0].waiting.expect("warp 0 waits").1, file!(), line);
    assert_at(groups[1].waiting.expect("warp 1 waits").1, file!(), line + 3);
}

#[test]
fn shuffle_in_half_a_warp() {
    let fault = fault(32, || {
        if lane_id() < 16 {
            // SAFETY: broken on purpose: lanes 16-31 do not come.
            let _ = unsafe { warp::shuffle_xor_u32(1, 1) };
        }
        // SAFETY: all lanes would come.
        unsafe { warp::sync_warp() };
    });
    let text = fault.to_string();
    assert!(text.starts_with("kernel `test`, block (0, 0): threads diverged"), "{text}");
    assert!(text.contains("threads 0-15 wait at shuffle_xor, "), "{text}");
    assert!(text.contains("threads 16-31 wait at sync_warp, "), "{text}");
    assert!(text.contains("divergence.rs:"), "{text}");
}

#[test]
fn two_shuffles_at_two_places_are_two_instructions() {
    let groups = groups(32, || {
        if lane_id().is_multiple_of(2) {
            // SAFETY: broken on purpose: odd and even lanes call from two places.
            let _ = unsafe { warp::shuffle_xor_u32(1, 2) };
        } else {
            // SAFETY: as above.
            let _ = unsafe { warp::shuffle_xor_u32(3, 4) };
        }
    });
    assert_eq!(groups[0].threads, Vec::from_iter((0..32).step_by(2)));
    assert_eq!(groups[1].threads, Vec::from_iter((1..32).step_by(2)));
    assert_ne!(groups[0].waiting, groups[1].waiting);
}

#[test]
fn vote_after_some_lanes_returned() {
    let groups = groups(64, || {
        if thread_idx_x() == 40 {
            return;
        }
        // SAFETY: broken on purpose: lane 8 of warp 1 has returned.
        let _ = unsafe { warp::any(true) };
    });
    assert_eq!(groups[1], LaneGroup { threads: vec![40], waiting: None });
}

#[test]
fn whole_warps_may_part_ways_between_barriers() {
    run(64, || {
        if warp_id() == 0 {
            // SAFETY: all lanes of warp 0 come.
            let _ = unsafe { warp::ballot(true) };
        }
        // SAFETY: all threads come.
        unsafe { sync_threads() };
        if warp_id() == 1 {
            // SAFETY: all lanes of warp 1 come.
            let _ = unsafe { warp::reduce_add_u32(1) };
        }
    });
}

//! Asynchronous copies from global to shared memory.

use simt::copy::{commit_group, wait_for_groups};
use simt::emu::{FaultKind, ThreadIndex};
use simt::shared::Shared;
use simt::thread::{sync_threads, thread_idx_x};

use crate::device::{Tensor, fault_kind, run};

/// The first 256 words of the block's shared memory.
fn words() -> Shared<u32, 256> {
    // SAFETY: every block here has 1 KiB.
    unsafe { Shared::at(0) }
}

/// 256 words that count up.
fn counting() -> Tensor {
    Tensor::new(&Vec::from_iter(0..256))
}

#[test]
fn groups_are_there_once_they_were_waited_for() {
    let (tensor, result) = (counting(), Tensor::zeros(64));
    let (input, output) = (tensor.input::<u32>(), result.output::<u32>());
    run(32, || {
        let t = thread_idx_x();
        // SAFETY: four words a thread and group, each read after its wait; a barrier before reading
        // others' words.
        unsafe {
            words().copy_from(4 * t, input, u64::from(4 * t));
            commit_group();
            words().copy_from(128 + 4 * t, input, u64::from(128 + 4 * t));
            commit_group();
            wait_for_groups::<1>();
            assert_eq!(words().load_u32x4(4 * t), [4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]);
            wait_for_groups::<0>();
            sync_threads();
            output.store(u64::from(t), words().load(127 - t));
            output.store(u64::from(32 + t), words().load(255 - t));
        }
    });
    let expected = (0..32).map(|t| 127 - t).chain((0..32).map(|t| 255 - t));
    assert_eq!(result.words(), Vec::from_iter(expected));
}

#[test]
fn a_copy_that_nobody_waited_for_is_not_there() {
    let tensor = counting();
    let input = tensor.input::<u32>();
    let kind = fault_kind(32, || {
        // SAFETY: broken on purpose: the group is never waited for.
        unsafe {
            words().copy_from(4 * thread_idx_x(), input, 0);
            commit_group();
            wait_for_groups::<1>();
            let _ = words().load(4 * thread_idx_x());
        }
    });
    assert!(matches!(kind, FaultKind::PoisonedShared { .. }), "{kind}");
}

#[test]
fn what_a_thread_copied_others_read_after_a_barrier_only() {
    let tensor = counting();
    let input = tensor.input::<u32>();
    let kind = fault_kind(64, || {
        let t = thread_idx_x();
        // SAFETY: broken on purpose: the first warp reads what the second copies.
        unsafe {
            if t >= 32 {
                words().copy_from(4 * (t - 32), input, 0);
                commit_group();
                wait_for_groups::<0>();
            } else {
                words().store(4 * t, 1);
            }
        }
    });
    assert!(matches!(kind, FaultKind::SharedRace { .. }), "{kind}");
}

#[test]
fn a_copy_from_behind_an_allocation_is_a_fault_of_its_thread() {
    let tensor = counting();
    let input = tensor.input::<u32>();
    let kind = fault_kind(32, || {
        // SAFETY: broken on purpose: the last thread copies from past the end of the tensor.
        unsafe { words().copy_from(0, input, if thread_idx_x() == 31 { 256 } else { 0 }) };
    });
    let FaultKind::OutOfBounds { thread, index, .. } = kind else { panic!("{kind}") };
    assert_eq!((thread, index), (ThreadIndex(31), 256));
}

#[test]
fn a_copy_that_is_not_wanted_touches_nothing() {
    let tensor = counting();
    let input = tensor.input::<u32>();
    run(32, || {
        let t = thread_idx_x();
        // SAFETY: four words a thread; the copy from past the end of the tensor is not wanted.
        unsafe {
            words().store(4 * t, 1000);
            let is_wanted = t.is_multiple_of(2);
            words().copy_from_if(is_wanted, 4 * t, input, if is_wanted { 0 } else { 256 });
            commit_group();
            wait_for_groups::<0>();
            assert_eq!(words().load(4 * t), if is_wanted { 0 } else { 1000 });
        }
    });
}

#[test]
fn copies_of_eight_bytes_leave_their_neighbours() {
    let (tensor, result) = (counting(), Tensor::zeros(64));
    let (input, output) = (tensor.input::<u32>(), result.output::<u32>());
    run(32, || {
        let t = thread_idx_x();
        // SAFETY: two words a thread are copied, two stored, each read after the wait.
        unsafe {
            words().store_u32x2(4 * t, [1000, 1001]);
            words().copy_8_from_if(true, 4 * t + 2, input, u64::from(2 * t));
            words().copy_8_from_if(false, 4 * t, input, u64::from(2 * t));
            commit_group();
            wait_for_groups::<0>();
            assert_eq!(words().load_u32x4(4 * t), [1000, 1001, 2 * t, 2 * t + 1]);
            output.store(u64::from(t), words().load(4 * t + 3));
        }
    });
    assert_eq!(result.words()[..32], Vec::from_iter((0..32).map(|t| 2 * t + 1)));
}

//! Copies and products in flight: until a copy is waited for, its words must not be accessed and its source must not be
//! written, and until a product is waited for, its operands must not be written, whatever barriers lie between.

use simt::atomic::DeviceAtomicU32;
use simt::copy::{commit_group, wait_for_groups};
use simt::emu::{AccessKind, FaultKind, Launch, launch};
use simt::mem::GlobalMut;
use simt::shared::Shared;
use simt::thread::{NamedBarrier, sync_threads, thread_idx_x, warp_id};
use simt::warp::sync_warp;
use simt::warpgroup::{Panels, fence_proxy_async, start_bf16_m64n64k512, wait_for_products};

use crate::device::{Tensor, assert_at, block_of, fault_kind, run};
use crate::global_race::races;

fn words() -> Shared<u32, 256> {
    // SAFETY: every block here has 1 KiB.
    unsafe { Shared::at(0) }
}

/// The access of the second warp to words into which the first one copies.
#[derive(Clone, Copy)]
enum Other {
    Read,
    Write,
    Copy,
}

/// The first warp starts copies into words that the second warp has written, and waits for them two barriers later. The
/// second warp accesses the words between these barriers, or, if `is_late`, after the wait and another barrier.
fn copies_beside(other: Other, is_late: bool) -> impl Fn(Tensor) -> Result<(), FaultKind> {
    move |tensor| {
        let input = tensor.input::<u32>();
        let body = || {
            let (t, is_first) = (thread_idx_x() % 32, warp_id() == 0);
            // SAFETY: four words a lane; broken on purpose if the second warp is not late.
            unsafe {
                let access = || match other {
                    Other::Read => _ = words().load(4 * t + 3),
                    Other::Write => words().store(4 * t + 3, 7),
                    Other::Copy => {
                        words().copy_from(4 * t, input, 0);
                        commit_group();
                        wait_for_groups::<0>();
                    }
                };
                if !is_first {
                    words().store_u32x4(4 * t, [1, 2, 3, 4]);
                }
                sync_threads();
                if is_first {
                    words().copy_from(4 * t, input, 4);
                    commit_group();
                }
                sync_threads();
                if !is_first && !is_late {
                    access();
                }
                sync_threads();
                if is_first {
                    wait_for_groups::<0>();
                }
                sync_threads();
                if !is_first && is_late {
                    access();
                }
            }
        };
        launch(&block_of(64), body).map_err(|fault| *fault.kind)
    }
}

#[test]
fn words_that_a_copy_writes_are_accessed_before_its_wait() {
    let kinds = [
        (Other::Read, AccessKind::Read),
        (Other::Write, AccessKind::Write),
        (Other::Copy, AccessKind::Write),
    ];
    for (other, kind) in kinds {
        let counting = || Tensor::new(&Vec::from_iter(0..256));
        assert_eq!(copies_beside(other, true)(counting()), Ok(()));
        let found = copies_beside(other, false)(counting());
        let Err(FaultKind::CopyInFlight { access, thread, .. }) = found else {
            panic!("{found:?}")
        };
        assert_eq!(access.kind, kind);
        assert_eq!(access.thread.0, thread.0 + 32);
    }
}

#[test]
fn a_thread_reads_its_own_copy_before_the_wait() {
    let tensor = Tensor::new(&Vec::from_iter(0..256));
    let input = tensor.input::<u32>();
    let kind = fault_kind(32, || {
        // SAFETY: four words a lane; broken on purpose: no wait before the load.
        unsafe {
            words().store_u32x4(4 * thread_idx_x(), [0; 4]);
            words().copy_from(4 * thread_idx_x(), input, 0);
            commit_group();
            let _ = words().load(4 * thread_idx_x() + 1);
            wait_for_groups::<0>();
        }
    });
    let FaultKind::CopyInFlight { access, thread, .. } = kind else { panic!("{kind}") };
    assert_eq!((access.kind, access.thread), (AccessKind::Read, thread));
}

/// The copy's words are accessed after a barrier, and the copy is never waited for.
#[test]
fn a_copy_that_nobody_waits_for_is_in_flight_to_the_end() {
    let tensor = Tensor::new(&Vec::from_iter(0..256));
    let input = tensor.input::<u32>();
    for commits in [false, true] {
        let kind = fault_kind(32, || {
            let word = 4 * thread_idx_x();
            // SAFETY: four words a lane; broken on purpose: the copies are never waited for.
            unsafe {
                words().store_u32x4(word, [0; 4]);
                sync_threads();
                words().copy_from(word, input, 0);
                if commits {
                    commit_group();
                }
                sync_threads();
                let _ = words().load((word + 5) % 128);
            }
        });
        let FaultKind::CopyInFlight { access, .. } = kind else { panic!("{kind}") };
        assert_eq!(access.kind, AccessKind::Read);
    }
}

/// The fault names the read during the copy, and not the reads before it.
#[test]
fn the_access_meanwhile_is_named() {
    let tensor = Tensor::new(&Vec::from_iter(0..256));
    let input = tensor.input::<u32>();
    let line = line!() + 20;
    let kind = fault_kind(64, || {
        let t = thread_idx_x();
        let read = |reads: bool| {
            if reads {
                // SAFETY: written before a barrier.
                let _ = unsafe { words().load(0) };
            }
        };
        // SAFETY: broken on purpose: thread 32 reads while the copy is in flight.
        unsafe {
            if t == 0 {
                words().store_u32x4(0, [0; 4]);
            }
            sync_threads();
            read(t == 32);
            sync_warp();
            read(t == 33);
            sync_threads();
            if t == 0 {
                words().copy_from(0, input, 0);
                commit_group();
            }
            sync_threads();
            read(t == 32);
            sync_threads();
            wait_for_groups::<0>();
        }
    });
    let FaultKind::CopyInFlight { access, thread, location, .. } = kind else { panic!("{kind}") };
    assert_eq!((access.thread.0, thread.0), (32, 0));
    assert_at(location, file!(), line);
}

/// A pipeline of two buffers. A copy into a buffer starts after the barrier that follows the reads of the buffer, or,
/// if `starts_early`, without that barrier.
#[test]
fn a_copy_starts_before_others_have_read_its_place() {
    let tensor = Tensor::new(&Vec::from_iter(0..256));
    let input = tensor.input::<u32>();
    let pipeline = |starts_early: bool| {
        let body = || {
            let t = thread_idx_x();
            // SAFETY: four words a thread; broken on purpose if copies start before others have read the place.
            unsafe {
                let start = |step: u32| {
                    words().copy_from(128 * (step % 2) + 4 * t, input, u64::from(4 * t));
                    commit_group();
                };
                start(0);
                start(1);
                for step in 0..4 {
                    wait_for_groups::<1>();
                    sync_threads();
                    assert_eq!(words().load(128 * (step % 2) + 127 - t), 127 - t);
                    if !starts_early {
                        sync_threads();
                    }
                    start(step);
                }
                wait_for_groups::<0>();
            }
        };
        launch(&block_of(32), body).map_err(|fault| *fault.kind)
    };
    assert_eq!(pipeline(false), Ok(()));
    let found = pipeline(true);
    let Err(FaultKind::SharedRace { first, second, .. }) = found else { panic!("{found:?}") };
    assert_eq!((first.kind, second.kind), (AccessKind::Read, AccessKind::Write));
}

/// A copy may read until it is waited for, whatever barriers lie between.
#[test]
fn a_copy_reads_until_its_wait() {
    let body = |words: GlobalMut<u32>, waits_before: bool, is_between_barriers: bool| {
        // SAFETY: elements in bounds; without the wait the write races with the copy on purpose.
        unsafe {
            let thread = thread_idx_x();
            if thread == 0 {
                Shared::<u32, 4>::at(0).copy_from(0, words.read_only(), 0);
                commit_group();
                if waits_before {
                    wait_for_groups::<0>();
                }
            }
            sync_threads();
            if thread == 32 {
                words.store(0, 7);
            }
            if is_between_barriers {
                sync_threads();
            }
            if thread == 0 {
                wait_for_groups::<0>();
            }
        }
    };
    for is_between_barriers in [false, true] {
        assert!(!races(1, 1, |words| body(words, true, is_between_barriers)));
        assert!(races(1, 1, |words| body(words, false, is_between_barriers)));
    }
}

/// A thread copies the first words twice. The first copy, or both, are waited for before the thread itself writes.
#[test]
fn a_thread_writes_to_the_source_of_its_own_copy() {
    let body = |words: GlobalMut<u32>, to: u64, waits_for_all: bool| {
        // SAFETY: elements in bounds; some writes are to a source of a copy in flight on purpose.
        unsafe {
            if thread_idx_x() > 0 {
                return;
            }
            for i in [0, 4] {
                Shared::<u32, 8>::at(0).copy_from(i, words.read_only(), 0);
                commit_group();
            }
            if waits_for_all {
                wait_for_groups::<0>();
            } else {
                wait_for_groups::<1>();
            }
            words.store(to, 7);
            wait_for_groups::<0>();
        }
    };
    assert!(races(1, 1, |words| body(words, 3, false)));
    assert!(!races(1, 1, |words| body(words, 3, true)));
    assert!(!races(1, 1, |words| body(words, 4, false)), "beside the source");
}

/// An atomic that another block reads does not order the end of a copy, even of a block that never waits for it.
#[test]
fn a_copy_that_nobody_waits_for_reads_to_the_end() {
    let body = |words: GlobalMut<u32>, waits: bool| {
        // SAFETY: elements in bounds; without the wait the write races with a copy on purpose.
        unsafe {
            if thread_idx_x() > 0 {
                return;
            }
            Shared::<u32, 4>::at(0).copy_from(0, words.read_only(), 0);
            commit_group();
            if waits {
                wait_for_groups::<0>();
            }
            if DeviceAtomicU32::new(words, 63).add_acq_rel(1) == 1 {
                wait_for_groups::<0>();
                words.store(0, 7);
            }
        }
    };
    assert!(!races(2, 1, |words| body(words, true)));
    assert!(races(2, 1, |words| body(words, false)));
}

/// Words of both operands of a product over 512: eight panels each.
const PANELS: u32 = 2 * 8 * 2048;

/// Four warps start a product, and a fifth writes to its second operand between two barriers with them. The four wait
/// for the product before the first of these barriers, or, if `is_early`, after the second.
fn writes_beside(is_early: bool) -> Result<(), FaultKind> {
    let (started, written) = (NamedBarrier::new(1, 160), NamedBarrier::new(2, 160));
    // SAFETY: the block has the memory.
    let memory = || unsafe { Shared::<u32, { PANELS as usize }>::at(0) };
    let body = || {
        for word in (thread_idx_x()..PANELS).step_by(160) {
            // SAFETY: each word once.
            unsafe { memory().store(word, 0) };
        }
        fence_proxy_async();
        // SAFETY: all threads come together; broken on purpose if the fifth warp is early.
        unsafe {
            sync_threads();
            if warp_id() == 4 {
                started.sync();
                memory().store(8 * 2048 + thread_idx_x() % 32, 7);
                written.arrive();
                return;
            }
            let [left, right] = [0, 8 * 2048].map(|at| Panels::at(memory(), at));
            let product = start_bf16_m64n64k512(left, right);
            if !is_early {
                wait_for_products::<0>();
            }
            started.arrive();
            written.sync();
            let _ = product.wait::<0>();
        }
    };
    let shape = Launch { shared_bytes: 4 * PANELS, ..block_of(160) };
    launch(&shape, body).map_err(|fault| *fault.kind)
}

#[test]
fn an_operand_is_overwritten_between_barriers() {
    assert_eq!(writes_beside(false), Ok(()));
    let found = writes_beside(true);
    let Err(FaultKind::OperandOverwritten { write, .. }) = found else { panic!("{found:?}") };
    assert_eq!((write.kind, write.thread.0 / 32), (AccessKind::Write, 4));
}

/// Copies in flight end with their block, and do not affect the next one.
#[test]
fn what_was_in_flight_in_another_block_is_not() {
    let tensor = Tensor::new(&Vec::from_iter(0..256));
    let input = tensor.input::<u32>();
    // SAFETY: four words a lane, of a block of its own; the copies are never waited for.
    run(32, || unsafe {
        words().copy_from(4 * thread_idx_x(), input, 0);
        commit_group();
    });
    run(32, || {
        let word = 4 * thread_idx_x();
        // SAFETY: as above.
        unsafe {
            words().store(word, 5);
            assert_eq!(words().load(word), 5);
            wait_for_groups::<0>();
            assert_eq!(words().load(word), 5);
        }
    });
}

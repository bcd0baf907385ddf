//! Orders, seeds, faults among many blocks, panics.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use simt::emu::{Fault, FaultKind, Launch, ThreadIndex, launch};
use simt::shared::Shared;
use simt::thread::{block_idx_x, block_idx_y, lane_id, sync_threads, thread_idx_x, warp_id};
use simt::warp;

use crate::device::{Tensor, block_of, fault, fault_kind};

#[test]
fn block_reduction_is_right_under_fifty_seeds() {
    let values = Vec::from_iter((0..8 * 256).map(|i: u32| i.wrapping_mul(0x85EB_CA6B) >> 8));
    let (source, target) = (Tensor::new(&values), Tensor::zeros(8));
    let (input, output) = (source.input::<u32>(), target.output::<u32>());
    let sums = Vec::from_iter(values.chunks(256).map(|block| block.iter().sum::<u32>()));
    for seed in 0..50 {
        let shape = Launch { grid: (8, 1), seed, ..block_of(256) };
        let body = || {
            let row = u64::from(block_idx_x());
            // SAFETY: all threads come to every collective; one word a warp, read after the barrier.
            unsafe {
                let value = input.load(row * 256 + u64::from(thread_idx_x()));
                let partial = Shared::<u32, 8>::at(0);
                let sum = warp::reduce_add_u32(value);
                if lane_id() == 0 {
                    partial.store(warp_id(), sum);
                }
                sync_threads();
                if thread_idx_x() == 0 {
                    output.store(row, (0..8).map(|warp| partial.load(warp)).sum());
                }
            }
        };
        launch(&shape, body).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(target.words(), sums, "seed {seed}");
    }
}

/// The order in which the threads of one block first run.
fn order(seed: u64) -> Vec<u32> {
    let seen = Mutex::new(Vec::new());
    let body = || seen.lock().expect("no panics").push(thread_idx_x());
    launch(&Launch { seed, ..block_of(128) }, body).expect("no rule is broken");
    seen.into_inner().expect("no panics")
}

#[test]
fn order_is_drawn_from_the_seed() {
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    for seed in 0..10 {
        let mut threads = order(seed);
        assert_ne!(threads, Vec::from_iter(0..128));
        threads.sort_unstable();
        assert_eq!(threads, Vec::from_iter(0..128));
    }
}

#[test]
fn order_changes_at_each_stop() {
    let seen = Mutex::new([Vec::new(), Vec::new()]);
    let note = |round: usize| seen.lock().expect("no panics")[round].push(lane_id());
    let body = || {
        note(0);
        // SAFETY: all lanes come.
        unsafe { warp::sync_warp() };
        note(1);
    };
    launch(&block_of(32), body).expect("no rule is broken");
    let [first, second] = seen.into_inner().expect("no panics");
    assert_eq!((first.len(), second.len()), (32, 32));
    assert_ne!(first, second);
}

/// A grid whose blocks from 5 on all break a rule, in many threads each.
fn many_faults(seed: u64) -> Fault {
    let tensor = Tensor::zeros(4);
    let output = tensor.output::<u32>();
    let body = || {
        let block = block_idx_y() * 16 + block_idx_x();
        if block >= 5 {
            // SAFETY: broken on purpose.
            unsafe { output.store(4 + u64::from(thread_idx_x()), 0) };
        }
    };
    let shape = Launch { grid: (16, 4), seed, ..block_of(64) };
    launch(&shape, body).expect_err("blocks break a rule")
}

#[test]
fn fault_is_that_of_the_first_block_whatever_the_threads_do() {
    for seed in 0..5 {
        let first = many_faults(seed);
        assert_eq!(first.block, Some((5, 0)));
        for _ in 0..10 {
            assert_eq!(many_faults(seed), first);
        }
    }
    assert_ne!(many_faults(0), many_faults(1), "the seed chooses the thread that is caught");
}

#[test]
fn panic_becomes_a_fault_with_thread_text_and_place() {
    let line = line!() + 3;
    let kind = fault_kind(64, || {
        if thread_idx_x() == 41 {
            panic!("row {} of 3", 4);
        }
    });
    let location = Some(format!("{}:{line}:13", file!()));
    let (message, thread) = ("row 4 of 3".to_owned(), ThreadIndex(41));
    assert_eq!(kind, FaultKind::Panic { message, thread, location });
}

#[test]
fn panic_after_a_collective_names_the_right_thread() {
    let kind = fault_kind(64, || {
        // SAFETY: all threads come.
        unsafe { sync_threads() };
        assert!(thread_idx_x() != 50, "fifty");
    });
    let FaultKind::Panic { message, thread, .. } = kind else { panic!("{kind}") };
    assert_eq!((message.as_str(), thread), ("fifty", ThreadIndex(50)));
}

#[test]
fn panics_outside_kernels_stay_panics() {
    // The emulator's hook must pass them to the previous hook.
    launch(&block_of(32), || {}).expect("no rule is broken");
    let payload = std::panic::catch_unwind(|| panic!("outside")).expect_err("a panic");
    assert_eq!(payload.downcast_ref(), Some(&"outside"));
}

#[test]
fn fault_unwinds_the_threads_that_wait() {
    struct Guard<'a>(&'a AtomicU32);
    impl Drop for Guard<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let alive = AtomicU32::new(0);
    let kind = fault_kind(64, || {
        alive.fetch_add(1, Ordering::Relaxed);
        let _guard = Guard(&alive);
        if thread_idx_x() != 63 {
            // SAFETY: broken on purpose: thread 63 does not come.
            unsafe { sync_threads() };
        }
    });
    assert!(matches!(kind, FaultKind::Divergence { .. }), "{kind}");
    assert_eq!(alive.into_inner(), 0);
}

#[test]
fn launches_go_on_after_a_fault() {
    let barrier = || {
        // SAFETY: all threads come.
        unsafe { sync_threads() };
    };
    for _ in 0..5 {
        let half = || {
            if warp_id() == 0 {
                barrier();
            }
        };
        launch(&block_of(64), half).expect_err("half a block");
        launch(&block_of(96), barrier).expect("a whole block");
    }
}

#[test]
fn threads_keep_their_own_locals() {
    // Values held across collectives live on each fiber's own stack.
    let tensor = Tensor::zeros(64);
    let output = tensor.output::<u32>();
    let body = || {
        let history = RefCell::new(Vec::new());
        for round in 0..10 {
            // SAFETY: all lanes come.
            history.borrow_mut().push(unsafe { warp::shuffle_xor_u32(thread_idx_x(), round) });
        }
        let sum = history.borrow().iter().sum();
        // SAFETY: one element per thread.
        unsafe { output.store(u64::from(thread_idx_x()), sum) };
    };
    launch(&block_of(64), body).expect("no rule is broken");
    let expected = |thread: u32| (0..10).map(|round| thread ^ round).sum::<u32>();
    assert_eq!(tensor.words(), Vec::from_iter((0..64).map(expected)));
}

#[test]
fn shapes_that_no_device_takes() {
    let shapes = [
        Launch { block: 0, ..block_of(32) },
        Launch { block: 48, ..block_of(32) },
        Launch { block: 1056, ..block_of(32) },
        Launch { grid: (0, 1), ..block_of(32) },
        Launch { grid: (1, 0), ..block_of(32) },
        Launch { grid: (1, 65536), ..block_of(32) },
        Launch { grid: (1 << 31, 1), ..block_of(32) },
    ];
    for shape in shapes {
        let fault = launch(&shape, || panic!("must not run")).expect_err("an invalid shape");
        let (grid, block) = (shape.grid, shape.block);
        assert_eq!(*fault.kind, FaultKind::InvalidLaunch { grid, block });
    }
    launch(&block_of(1024), || {}).expect("the largest block");
}

#[test]
fn kernel_that_launches_a_kernel() {
    for grid in [(1, 1), (9, 1)] {
        let inner = Launch { grid, ..block_of(32) };
        let text = fault(32, || _ = launch(&inner, || {})).to_string();
        assert!(text.contains("a kernel body cannot launch a kernel"), "{text}");
    }
}

#[test]
#[should_panic(expected = "a device function was called outside a launch")]
fn device_function_outside_a_launch() {
    let _ = thread_idx_x();
}

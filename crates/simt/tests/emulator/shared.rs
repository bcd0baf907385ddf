//! Shared memory: unwritten words, bounds, races, and the barriers that prevent races.

use simt::atomic::{BlockAtomicU32, fence_block};
use simt::emu::{AccessKind, FaultKind, ThreadIndex};
use simt::shared::Shared;
use simt::thread::{lane_id, sync_threads, thread_idx_x, warp_id};
use simt::warp::sync_warp;

use crate::device::{Tensor, assert_at, fault, fault_kind, run};

/// The first `N` words of the block's shared memory.
fn words<const N: usize>() -> Shared<u32, N> {
    // SAFETY: every block here has 1 KiB, and N is at most 256.
    unsafe { Shared::at(0) }
}

#[test]
fn words_and_vectors_go_there_and_back() {
    let tensor = Tensor::zeros(64);
    let output = tensor.output::<u32>();
    run(64, || {
        let t = thread_idx_x();
        // SAFETY: one word per thread, a barrier before reading others'; vectors 16-byte aligned.
        unsafe {
            let floats = Shared::<f32, 64>::at(256);
            words::<64>().store(t, t + 1);
            floats.store(t, t as f32 * 0.5);
            sync_threads();
            let vector = words::<64>().load_u32x4(t / 4 * 4);
            assert_eq!(vector[(t % 4) as usize], t + 1);
            assert_eq!(floats.load(63 - t), (63 - t) as f32 * 0.5);
            sync_threads();
            if t.is_multiple_of(4) {
                words::<64>().store_u32x4(t, vector.map(|word| word * 2));
            }
            sync_threads();
            if t.is_multiple_of(2) {
                let pair = words::<64>().load_u32x2(t);
                assert_eq!(pair, [2 * (t + 1), 2 * (t + 2)]);
                words::<64>().store_u32x2(t, pair.map(|word| word + 1));
                words::<64>().store_u32x2_where(false, 99, pair);
                words::<64>().store_u32x2_where(t == 62, t, [0, 1]);
            }
            sync_threads();
            output.store(u64::from(t), words::<64>().load(63 - t));
        }
    });
    assert_eq!(
        tensor.words(),
        Vec::from_iter([1, 0].into_iter().chain((2..64).map(|t| (64 - t) * 2 + 1)))
    );
}

#[test]
fn read_of_an_unwritten_word() {
    let line = line!() + 8;
    let kind = fault_kind(32, || {
        // SAFETY: broken on purpose: only words below 31 are written.
        unsafe {
            if lane_id() != 31 {
                words::<32>().store(lane_id(), 1);
            }
            sync_warp();
            let _ = words::<32>().load(lane_id());
        }
    });
    let FaultKind::PoisonedShared { offset, thread, location } = kind else { panic!("{kind}") };
    assert_eq!((offset, thread), (31 * 4, ThreadIndex(31)));
    assert_at(location, file!(), line);
}

#[test]
fn each_block_starts_unwritten() {
    // A block writes, the next one on the same OS thread reads.
    // SAFETY: one word a lane.
    run(32, || unsafe { words::<32>().store(lane_id(), 1) });
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { words::<32>().load(lane_id()) });
    assert!(matches!(kind, FaultKind::PoisonedShared { .. }), "{kind}");
}

#[test]
fn race_between_warps() {
    let line = line!() + 4;
    let kind = fault_kind(64, || {
        if warp_id() == 0 {
            // SAFETY: broken on purpose, with the load below: no barrier between.
            unsafe { words::<32>().store(lane_id(), 1) };
        }
        // SAFETY: all lanes come; it orders a warp, not a block. A fence orders no one.
        unsafe { sync_warp() };
        fence_block();
        if warp_id() == 1 {
            // SAFETY: as above.
            unsafe { words::<32>().store(lane_id(), 2) };
        }
    });
    let FaultKind::SharedRace { first, second, .. } = kind else { panic!("{kind}") };
    assert_eq!((first.kind, second.kind), (AccessKind::Write, AccessKind::Write));
    let (zero, one) = if first.thread.0 < 32 { (first, second) } else { (second, first) };
    assert_eq!(zero.thread.0 + 32, one.thread.0);
    assert_at(zero.location, file!(), line);
    assert_at(one.location, file!(), line + 7);
}

#[test]
fn barrier_heals_a_race_between_warps() {
    run(64, || {
        if warp_id() == 0 {
            // SAFETY: read by warp 1 after the barrier.
            unsafe { words::<32>().store(lane_id(), 1) };
        }
        // SAFETY: all threads come.
        unsafe { sync_threads() };
        if warp_id() == 1 {
            // SAFETY: written by warp 0 before the barrier.
            assert_eq!(unsafe { words::<32>().load(lane_id()) }, 1);
        }
    });
}

/// Each lane writes its word, calls `between`, and reads its neighbour's word.
fn exchange_with_neighbour(between: impl Fn() + Sync) -> impl Fn() + Sync {
    move || {
        // SAFETY: one word a lane; whether the reads are ordered is the tests' question.
        unsafe { words::<32>().store(lane_id(), lane_id()) };
        between();
        // SAFETY: as above.
        let got = unsafe { words::<32>().load(lane_id() ^ 1) };
        assert_eq!(got, lane_id() ^ 1);
    }
}

#[test]
fn race_inside_a_warp() {
    let together = || {
        // SAFETY: all lanes come. A shuffle holds lanes together but does not order memory.
        let _ = unsafe { simt::warp::shuffle_xor_u32(0, 1) };
    };
    let kind = fault_kind(32, exchange_with_neighbour(together));
    let FaultKind::SharedRace { first, second, .. } = kind else { panic!("{kind}") };
    assert_eq!((first.kind, second.kind), (AccessKind::Write, AccessKind::Read));
    assert_eq!(first.thread.0, second.thread.0 ^ 1);
}

#[test]
fn sync_warp_heals_a_race_inside_a_warp() {
    // SAFETY: all lanes come.
    run(32, exchange_with_neighbour(|| unsafe { sync_warp() }));
}

#[test]
fn write_after_read_is_a_race() {
    let text = fault(64, || {
        let t = thread_idx_x();
        // SAFETY: broken on purpose: threads 1..32 and 40 read word 0, then 33 writes it.
        unsafe {
            if t == 0 {
                words::<1>().store(0, 1);
            }
            sync_threads();
            match t {
                1..=31 | 40 => _ = words::<1>().load(0),
                33 => words::<1>().store(0, 2),
                _ => {}
            }
        }
    })
    .to_string();
    assert!(text.contains("race on shared memory at byte 0: thread"), "{text}");
    assert!(text.contains("thread 33 (warp 1, lane 1) writes at "), "{text}");
    assert!(text.contains(", then, with no barrier between, thread"), "{text}");
}

#[test]
fn race_with_a_reader_of_the_writers_own_warp() {
    // Both readers are of the writer's warp, one of them the writer itself.
    let kind = fault_kind(32, || {
        // SAFETY: broken on purpose: lane 5 writes what lane 9 reads.
        unsafe {
            if lane_id() == 0 {
                words::<1>().store(0, 1);
            }
            sync_warp();
            match lane_id() {
                9 => _ = words::<1>().load(0),
                5 => words::<1>().store(0, words::<1>().load(0) + 1),
                _ => {}
            }
        }
    });
    let FaultKind::SharedRace { first, second, .. } = kind else { panic!("{kind}") };
    let threads = [first.thread.0, second.thread.0];
    assert!(threads == [9, 5] || threads == [5, 9], "{threads:?}");
}

#[test]
fn out_of_bounds_of_an_array_and_of_the_arena() {
    // SAFETY: broken on purpose, here and below.
    let kind = fault_kind(32, || unsafe { words::<8>().store(8, 1) });
    let FaultKind::SharedOutOfBounds { offset, limit, .. } = kind else { panic!("{kind}") };
    assert_eq!((offset, limit), (32, 32));
    // SAFETY: as above.
    let kind = fault_kind(32, || _ = unsafe { Shared::<u32, 8>::at(1024 - 28) });
    let FaultKind::SharedOutOfBounds { offset, bytes, limit, .. } = kind else { panic!("{kind}") };
    assert_eq!((offset, bytes, limit), (996, 32, 1024));
    // SAFETY: as above.
    let kind = fault_kind(32, || _ = unsafe { words::<8>().load_u32x4(8) });
    assert!(matches!(kind, FaultKind::SharedOutOfBounds { .. }), "{kind}");
}

#[test]
fn misaligned_shared_vectors_and_arrays() {
    // SAFETY: broken on purpose, here and below.
    let kind = fault_kind(32, || unsafe { words::<16>().store_u32x4(2, [0; 4]) });
    assert!(matches!(kind, FaultKind::Misaligned { address: 8, align: 16, .. }), "{kind}");
    // SAFETY: as above.
    let kind = fault_kind(32, || _ = unsafe { words::<16>().load_u32x2(1) });
    assert!(matches!(kind, FaultKind::Misaligned { address: 4, align: 8, .. }), "{kind}");
    // SAFETY: as above.
    let kind = fault_kind(32, || _ = unsafe { Shared::<f32, 4>::at(2) });
    assert!(matches!(kind, FaultKind::Misaligned { address: 2, align: 4, .. }), "{kind}");
}

#[test]
fn block_atomics_do_not_race_with_each_other() {
    let tensor = Tensor::zeros(4);
    let output = tensor.output::<u32>();
    run(128, || {
        let t = thread_idx_x();
        // SAFETY: words written before the first barrier, read after the second.
        unsafe {
            if t < 4 {
                words::<4>().store(t, 0);
            }
            sync_threads();
            let [sum, most, swapped, set] =
                [0, 1, 2, 3].map(|i| BlockAtomicU32::new(words::<4>(), i));
            sum.add(t);
            most.max(t);
            if swapped.exchange(1) == 0 {
                assert_eq!(set.compare_exchange(0, 7), 0);
                assert_eq!(set.compare_exchange(0, 8), 7);
            }
            sync_threads();
            if t < 4 {
                output.store(u64::from(t), words::<4>().load(t));
            }
        }
    });
    assert_eq!(tensor.words(), [127 * 128 / 2, 127, 1, 7]);
}

#[test]
fn block_atomic_races_with_a_plain_access() {
    let kind = fault_kind(64, || {
        // SAFETY: broken on purpose: a plain load beside atomics.
        unsafe {
            let word = BlockAtomicU32::new(words::<1>(), 0);
            if thread_idx_x() == 63 {
                word.store(0);
            }
            sync_threads();
            if thread_idx_x() == 3 {
                let _ = words::<1>().load(0);
            } else {
                word.add(1);
            }
        }
    });
    let FaultKind::SharedRace { first, second, .. } = kind else { panic!("{kind}") };
    let kinds = [first.kind, second.kind];
    assert!(kinds.contains(&AccessKind::Atomic) && kinds.contains(&AccessKind::Read), "{kinds:?}");
}

#[test]
fn block_atomic_on_an_unwritten_word() {
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { BlockAtomicU32::new(words::<1>(), 0) }.add(1));
    assert!(matches!(kind, FaultKind::PoisonedShared { offset: 0, .. }), "{kind}");
}

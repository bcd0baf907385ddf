//! Races on global memory: between the threads of a block, of a cluster, and of all blocks.

use simt::atomic::{DeviceAtomicU32, fence_block, fence_device, fence_system};
use simt::cluster::{
    block_rank, cluster_arrive, cluster_arrive_release, cluster_wait, sync_cluster,
};
use simt::copy;
use simt::emu::{AccessKind, FaultKind, Launch, launch, launch_clusters};
use simt::mem::GlobalMut;
use simt::shared::Shared;
use simt::thread::{NamedBarrier, block_idx_x, sync_threads, thread_idx_x};
use simt::warp::sync_warp;

use crate::device::Tensor;

/// Two warps a block.
fn shape(blocks: u32, seed: u64) -> Launch {
    Launch { kernel: "race", grid: (blocks, 1), block: 64, shared_bytes: 256, seed }
}

/// Whether `body` races, with 64 words of memory that are 0 at first. Panics unless all seeds agree.
pub fn races(blocks: u32, cluster: u32, body: impl Fn(GlobalMut<u32>) + Sync) -> bool {
    let race = |seed| {
        let tensor = Tensor::zeros(64);
        let words = tensor.output::<u32>();
        match launch_clusters(&shape(blocks, seed), cluster, || body(words)) {
            Ok(()) => false,
            Err(fault) => {
                assert!(matches!(*fault.kind, FaultKind::GlobalRace { .. }), "{fault}");
                true
            }
        }
    };
    let all: Vec<bool> = (0..20).map(race).collect();
    assert!(all.iter().all(|&race| race == all[0]), "{all:?}");
    all[0]
}

#[test]
fn threads_of_a_block() {
    // SAFETY: elements in bounds; some accesses race on purpose.
    let write_and_read = |words: GlobalMut<u32>, order: &dyn Fn()| unsafe {
        let thread = thread_idx_x();
        words.store(u64::from(thread), thread);
        order();
        _ = words.load(u64::from(thread ^ 32));
    };
    // SAFETY: as above.
    let neighbours = |words: GlobalMut<u32>, order: &dyn Fn()| unsafe {
        let thread = thread_idx_x();
        words.store(u64::from(thread), thread);
        order();
        _ = words.load(u64::from(thread ^ 1));
    };
    // SAFETY: all threads call it.
    let block = || unsafe { sync_threads() };
    // SAFETY: all threads call it.
    let named = || unsafe { NamedBarrier::new(1, 64).sync() };
    // SAFETY: all lanes call it.
    let warp = || unsafe { sync_warp() };
    assert!(!races(1, 1, |words| write_and_read(words, &block)));
    assert!(!races(1, 1, |words| write_and_read(words, &named)));
    assert!(races(1, 1, |words| write_and_read(words, &warp)));
    assert!(races(1, 1, |words| write_and_read(words, &fence_device)));
    assert!(!races(1, 1, |words| neighbours(words, &warp)));
    assert!(races(1, 1, |words| neighbours(words, &|| ())));
}

/// A word holds several elements, and a vector several words: accesses race only if their bytes overlap.
#[test]
fn elements_next_to_each_other_do_not_race() {
    let tensor = Tensor::zeros(64);
    let (bytes, words) = (tensor.output::<u8>(), tensor.output::<u32>());
    // SAFETY: elements in bounds, each by one thread.
    let each = || unsafe { bytes.store(u64::from(64 * block_idx_x() + thread_idx_x()), 1) };
    launch(&shape(4, 0), each).expect("a byte a thread");
    // SAFETY: in bounds; the first byte of a vector has two writers.
    let overlapping = || unsafe {
        match block_idx_x() {
            0 if thread_idx_x() == 0 => bytes.store(16, 1),
            1 if thread_idx_x() == 0 => words.store_u32x4(4, [1; 4]),
            _ => {}
        }
    };
    let fault = launch(&shape(2, 0), overlapping).expect_err("a race");
    let FaultKind::GlobalRace { argument, offset, first, second } = &*fault.kind else {
        panic!("{fault}")
    };
    assert_eq!((*argument, *offset), ("output", 16));
    assert_ne!(first.block, second.block);
    for access in [first, second] {
        assert_eq!((access.access.thread.0, access.access.kind), (0, AccessKind::Write));
        assert_eq!(access.access.location.file(), file!());
    }
    assert!(fault.to_string().contains("nothing that orders them"), "{fault}");
}

/// Each block writes a word and arrives at a counter; the last block reads all words.
#[test]
fn blocks_that_arrive_at_a_counter() {
    const COUNTER: u64 = 63;
    let last_reads = |words: GlobalMut<u32>, arrive: &(dyn Fn(DeviceAtomicU32) -> u32 + Sync)| {
        // SAFETY: elements in bounds; some accesses race on purpose.
        unsafe {
            let last = Shared::<u32, 1>::at(0);
            if thread_idx_x() == 40 {
                words.store(u64::from(block_idx_x()), 1);
            }
            sync_threads();
            if thread_idx_x() == 0 {
                last.store(0, arrive(DeviceAtomicU32::new(words, COUNTER)));
            }
            sync_threads();
            if last.load(0) == 7 && thread_idx_x() < 8 {
                assert_eq!(words.load(u64::from(thread_idx_x())), 1);
            }
        }
    };
    let of = |arrive: &(dyn Fn(DeviceAtomicU32) -> u32 + Sync)| {
        races(8, 1, |words| last_reads(words, arrive))
    };
    assert!(!of(&|counter| counter.add_acq_rel(1)));
    assert!(of(&|counter| counter.add(1)));
    let fenced = |before: fn(), behind: fn()| {
        of(&|counter| {
            before();
            let old = counter.add(1);
            behind();
            old
        })
    };
    assert!(!fenced(fence_device, fence_device) && !fenced(fence_system, fence_device));
    assert!(fenced(fence_device, || ()) && fenced(|| (), fence_device));
    assert!(fenced(fence_block, fence_device) && fenced(fence_device, fence_block));
}

/// An arrival releases only what its own thread knows: a barrier must lie between the writes of other threads of its
/// block and the arrival.
#[test]
fn a_counter_orders_what_its_thread_knows() {
    let arrive = |words: GlobalMut<u32>, is_ordered: bool| {
        // SAFETY: elements in bounds; without the barrier accesses race on purpose.
        unsafe {
            let thread = thread_idx_x();
            if thread == 40 {
                words.store(u64::from(block_idx_x()), 1);
            }
            if is_ordered {
                sync_threads();
            }
            if thread == 0 && DeviceAtomicU32::new(words, 63).add_acq_rel(1) == 3 {
                (0..4).for_each(|block| _ = words.load(block));
            }
        }
    };
    assert!(!races(4, 1, |words| arrive(words, true)));
    assert!(races(4, 1, |words| arrive(words, false)));
}

/// A block also releases what it has acquired: the last block at one counter arrives at another.
#[test]
fn order_passes_from_block_to_block() {
    let chain = |words: GlobalMut<u32>| {
        // SAFETY: elements in bounds; words are read by a thread that knows that all have been written.
        unsafe {
            if thread_idx_x() > 0 {
                return;
            }
            let counter = |at| DeviceAtomicU32::new(words, at);
            words.store(u64::from(block_idx_x()), 1);
            if counter(60).add_acq_rel(1) == 7 {
                counter(61).add_acq_rel(1);
            }
            if counter(61).add_acq_rel(0) == 1 {
                assert_eq!((0..8).map(|block| words.load(block)).sum::<u32>(), 8);
            }
        }
    };
    assert!(!races(8, 1, chain));
}

/// Blocks of a cluster exchange words of global memory.
#[test]
fn blocks_of_a_cluster() {
    let exchange = |words: GlobalMut<u32>, order: &dyn Fn()| {
        // SAFETY: elements in bounds; some accesses race on purpose.
        unsafe {
            let at = |rank: u32| u64::from(32 * rank + thread_idx_x() / 2);
            if thread_idx_x().is_multiple_of(2) {
                words.store(at(block_rank()), 1);
            }
            order();
            assert_eq!(words.load(at(1 - block_rank())), 1);
        }
    };
    // SAFETY: all threads of the cluster call these.
    unsafe {
        let released = || {
            cluster_arrive_release();
            cluster_wait();
        };
        let relaxed = || {
            cluster_arrive();
            cluster_wait();
        };
        assert!(!races(2, 2, |words| exchange(words, &|| sync_cluster())));
        assert!(!races(2, 2, |words| exchange(words, &released)));
        assert!(races(2, 2, |words| exchange(words, &relaxed)));
    }
}

/// A barrier of one cluster does not order another cluster.
#[test]
fn blocks_of_two_clusters() {
    let body = |words: GlobalMut<u32>| {
        // SAFETY: elements in bounds; the two clusters race on purpose.
        unsafe {
            if thread_idx_x() == 0 {
                words.store(u64::from(block_rank()), block_idx_x());
            }
            sync_cluster();
        }
    };
    assert!(!races(2, 2, body));
    assert!(races(4, 2, body));
}

#[test]
fn atomics_and_plain_accesses() {
    // SAFETY: elements in bounds; some accesses race on purpose.
    unsafe {
        let counted = |words| _ = DeviceAtomicU32::new(words, 0).add(1);
        assert!(!races(4, 1, counted));
        assert!(races(4, 1, |words| {
            counted(words);
            if block_idx_x() == 0 && thread_idx_x() == 0 {
                _ = words.load(0);
            }
        }));
        assert!(!races(4, 1, |words| _ = words.load(0)), "reads do not race");
    }
}

/// Loads through a read-only view, and copies to shared memory, are reads too.
#[test]
fn read_only_views_of_memory_that_is_written() {
    let body = |words: GlobalMut<u32>, is_copy: bool| {
        // SAFETY: elements in bounds; the first block's reads race with the second's writes on purpose.
        unsafe {
            let thread = thread_idx_x();
            if block_idx_x() == 1 && thread < 4 {
                words.store(u64::from(thread), 1);
            } else if block_idx_x() == 0 && thread == 0 {
                let view = words.read_only();
                if is_copy {
                    Shared::<u32, 4>::at(0).copy_from(0, view, 0);
                    copy::commit_group();
                    copy::wait_for_groups::<0>();
                } else {
                    _ = view.load_u32x4(0);
                }
            }
        }
    };
    assert!(races(2, 1, |words| body(words, false)));
    assert!(races(2, 1, |words| body(words, true)));
}

/// A relaxed arrival at the cluster barrier orders nothing, not even within its own block. A releasing arrival releases
/// what any lane of its warp knows.
#[test]
fn arrivals_release_what_they_say() {
    let within = |words: GlobalMut<u32>, arrive: unsafe fn()| {
        // SAFETY: elements in bounds; a relaxed arrival leaves a race on purpose.
        unsafe {
            if thread_idx_x() == 0 {
                words.store(0, 1);
            }
            arrive();
            cluster_wait();
            if thread_idx_x() == 32 {
                _ = words.load(0);
            }
        }
    };
    assert!(!races(1, 1, |words| within(words, cluster_arrive_release)));
    assert!(races(1, 1, |words| within(words, cluster_arrive)));
    let passed_on = |words: GlobalMut<u32>| {
        let (rank, thread) = (block_rank(), thread_idx_x());
        // SAFETY: elements in bounds; all threads come to the barrier.
        unsafe {
            let counter = DeviceAtomicU32::new(words, 63);
            // The thread that arrives second knows what the first one wrote.
            let seen = match (rank, thread) {
                (0, 0) => {
                    words.store(0, 1);
                    counter.add_acq_rel(1)
                }
                (1, 5) => counter.add_acq_rel(1),
                _ => 2,
            };
            if (rank, thread) == (1, 5) {
                words.store(1, seen);
            }
            if rank == 0 {
                cluster_arrive();
            } else {
                cluster_arrive_release();
            }
            cluster_wait();
            if rank == 2 && thread == 7 && words.load(1) == 1 {
                assert_eq!(words.load(0), 1);
            }
        }
    };
    assert!(!races(4, 4, passed_on));
}

/// Whether an atomic reads a release depends on the order in which the blocks run: some seeds give one order, some the
/// other.
#[test]
fn blocks_of_a_cluster_run_in_any_order() {
    let race = |seed| {
        let tensor = Tensor::zeros(64);
        let words = tensor.output::<u32>();
        // SAFETY: elements in bounds; the read races unless the other block has arrived before.
        let body = || unsafe {
            if thread_idx_x() == 0 {
                let counter = DeviceAtomicU32::new(words, 63);
                if block_rank() == 0 {
                    words.store(0, 1);
                }
                counter.add_acq_rel(1);
                if block_rank() == 1 {
                    _ = words.load(0);
                }
            }
        };
        launch_clusters(&shape(2, seed), 2, body).is_err()
    };
    let races = (0..20).filter(|&seed| race(seed)).count();
    assert!(0 < races && races < 20, "{races} of 20");
}

/// Many accesses to some bytes of a granule do not displace the records of its other bytes.
#[test]
fn a_crowd_hides_nothing_beside_it() {
    let crowd = |words: GlobalMut<u32>| {
        // SAFETY: elements in bounds; the last read races on purpose.
        unsafe {
            let thread = thread_idx_x();
            if block_rank() == 0 && thread == 0 {
                DeviceAtomicU32::new(words, 0).add(1);
                DeviceAtomicU32::new(words, 1).add(1);
            } else if block_rank() > 0 {
                DeviceAtomicU32::new(words, 0).add(1);
                _ = words.load(2);
            }
            if block_rank() == 3 {
                sync_threads();
                if thread == 0 {
                    _ = words.load(1);
                }
            }
        }
    };
    assert!(races(4, 4, crowd));
}

/// `ld.global.nc` is for memory that is not written during the launch: a barrier between write and load does not help.
#[test]
fn constant_loads_of_memory_that_is_written() {
    let after = |words: GlobalMut<u32>, load: fn(GlobalMut<u32>)| {
        // SAFETY: elements in bounds; some loads are wrong on purpose.
        unsafe {
            if thread_idx_x() == 0 {
                words.store(0, 1);
            }
            sync_threads();
            if thread_idx_x() == 32 {
                load(words);
            }
        }
    };
    let before = |words: GlobalMut<u32>, load: fn(GlobalMut<u32>)| {
        // SAFETY: as above.
        unsafe {
            if thread_idx_x() == 32 {
                load(words);
            }
            sync_threads();
            if thread_idx_x() == 0 {
                words.store(0, 1);
            }
        }
    };
    // SAFETY: in bounds.
    let constant = |words: GlobalMut<u32>| unsafe { _ = words.read_only().load_u32x4(0) };
    // SAFETY: in bounds.
    let in_order = |words: GlobalMut<u32>| unsafe { _ = words.read_only().load_u32x4_volatile(0) };
    assert!(races(1, 1, |words| after(words, constant)));
    assert!(races(1, 1, |words| before(words, constant)));
    assert!(!races(1, 1, |words| after(words, in_order)));
    assert!(!races(1, 1, |words| before(words, in_order)));
}

/// A compare-and-exchange that fails writes nothing, and releases nothing.
#[test]
fn a_failed_exchange_releases_nothing() {
    let alone = |words: GlobalMut<u32>, expected: u32| {
        // SAFETY: elements in bounds; a failed exchange leaves a race on purpose.
        unsafe {
            if thread_idx_x() > 0 {
                return;
            }
            let word = DeviceAtomicU32::new(words, 62);
            words.store(u64::from(block_rank()), 1);
            fence_device();
            _ = word.compare_exchange(expected, 0);
            fence_device();
            // True in the block that runs second. Only the exchange can order the other's write before this read.
            if DeviceAtomicU32::new(words, 61).load() == 1 {
                _ = words.load(u64::from(1 - block_rank()));
            }
            DeviceAtomicU32::new(words, 61).store(1);
        }
    };
    assert!(!races(2, 2, |words| alone(words, 0)), "the words are 0");
    assert!(races(2, 2, |words| alone(words, 5)));
}

#[test]
fn memory_may_allow_races() {
    let tensor = Tensor::zeros(64);
    let memory = tensor.memory().clone().allowing_races();
    let words = GlobalMut::<u32>::bind(&memory, tensor.address(), "output").expect("it is live");
    // SAFETY: in bounds; all threads race on purpose.
    let body = || unsafe {
        words.store(0, 7);
        _ = DeviceAtomicU32::new(words, 0).add(0);
    };
    launch(&shape(4, 0), body).expect("races are no faults there");
    assert_eq!(tensor.words()[0], 7);
}

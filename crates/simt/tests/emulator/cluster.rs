//! Clusters: blocks that wait for each other and read each other's shared memory.

use simt::cluster::{
    block_rank, cluster_arrive, cluster_arrive_release, cluster_wait, sync_cluster,
};
use simt::emu::{FaultKind, Launch, launch_clusters};
use simt::shared::Shared;
use simt::thread::{block_idx_x, sync_threads, thread_idx_x};
use simt::warp::{ballot, sync_warp};

use crate::device::Tensor;

fn shape(blocks: u32) -> Launch {
    Launch { kernel: "cluster", grid: (blocks, 1), block: 64, shared_bytes: 256, seed: 3 }
}

fn fault(size: u32, body: impl Fn() + Sync) -> FaultKind {
    *launch_clusters(&shape(8), size, body).expect_err("a breach").kind
}

#[test]
fn blocks_read_what_the_others_wrote() {
    const BLOCKS: u32 = 24;
    let output = Tensor::zeros((BLOCKS * 64) as usize);
    let sums = output.output::<u32>();
    let body = || {
        // SAFETY: a word a thread, written before the barrier; another follows the reads.
        unsafe {
            let words = Shared::<u32, 64>::at(0);
            let thread = thread_idx_x();
            words.store(thread, 1000 * block_idx_x() + thread);
            sync_cluster();
            let other = |rank| words.load_from(rank, 63 - thread);
            let sum: u32 = (0..8).map(|rank| (1 + rank) * other(rank)).sum();
            let four = words.load_u32x4_from(3, thread / 4 * 4);
            assert_eq!(four, [0, 1, 2, 3].map(|i| words.load_from(3, thread / 4 * 4 + i)));
            cluster_arrive();
            sums.store(u64::from(64 * block_idx_x() + thread), sum + block_rank());
            cluster_wait();
        }
    };
    launch_clusters(&shape(BLOCKS), 8, body).unwrap();
    for (at, word) in (0..).zip(output.words()) {
        let (block, thread) = (at / 64, at % 64);
        let first = block / 8 * 8;
        let other = |rank| (1 + rank) * (1000 * (first + rank) + 63 - thread);
        assert_eq!(word, (0..8).map(other).sum::<u32>() + block % 8, "{at}");
    }
}

/// An access of a lane between the arrival and the wait is not ordered before what other lanes of its warp do after the
/// wait, even if an earlier access of the same lane is.
#[test]
fn a_read_behind_the_arrival_is_not_ordered_by_the_wait() {
    let kind = fault(1, || {
        let (words, lane) = (words(), thread_idx_x() % 32);
        // SAFETY: broken on purpose: the last store and the second load by lane 0.
        unsafe {
            let read = |reads: bool| {
                if reads {
                    let _ = words.load(0);
                }
                // The votes make the lanes run one after another, and order no memory.
                let _ = ballot(reads);
            };
            let is_first = thread_idx_x() < 32;
            if thread_idx_x() == 0 {
                words.store(0, 1);
            }
            sync_warp();
            read(is_first && lane == 0);
            read(is_first && lane == 1);
            cluster_arrive_release();
            read(is_first && lane == 0);
            read(is_first && lane == 2);
            cluster_wait();
            if thread_idx_x() == 2 {
                words.store(0, 2);
            }
        }
    });
    assert!(matches!(kind, FaultKind::SharedRace { .. }), "{kind}");
}

fn words() -> Shared<u32, 64> {
    // SAFETY: every block here has as much.
    unsafe { Shared::at(0) }
}

#[test]
fn blocks_write_into_each_other() {
    let output = Tensor::zeros(8 * 64);
    let found = output.output::<u32>();
    let body = || {
        // SAFETY: word `8 r + i` of each block is written by thread `i` of eight of block `r`, before the barrier.
        unsafe {
            let words = Shared::<u32, 64>::at(0);
            let (thread, rank) = (thread_idx_x(), block_rank());
            sync_cluster();
            words.store_to(thread / 8, 8 * rank + thread % 8, 100 * rank + thread);
            cluster_arrive_release();
            cluster_wait();
            found.store(u64::from(64 * rank + thread), words.load(thread));
        }
    };
    launch_clusters(&shape(8), 8, body).unwrap();
    for (at, word) in (0..).zip(output.words()) {
        let (block, from, i) = (at / 64, at / 8 % 8, at % 8);
        assert_eq!(word, 100 * from + 8 * block + i, "{at}");
    }
}

/// Writes to another block's shared memory that are faults: without a barrier before the read, by two threads, too
/// late, or too early.
#[test]
fn a_write_into_another_block_is_checked() {
    // SAFETY: a word a thread.
    let words = || unsafe { Shared::<u32, 64>::at(0) };
    // SAFETY: wrong on purpose: nothing orders the read after the write.
    let unordered = || unsafe {
        words().store(thread_idx_x(), 1);
        sync_cluster();
        words().store_to(1 - block_rank(), thread_idx_x(), 2);
        sync_threads();
        _ = words().load(thread_idx_x());
        sync_cluster();
    };
    assert!(matches!(fault(2, unordered), FaultKind::SharedRace { .. }));
    // SAFETY: wrong on purpose: both blocks write the second's word.
    let twice = || unsafe {
        sync_cluster();
        words().store_to(1, thread_idx_x(), block_rank());
        sync_cluster();
    };
    assert!(matches!(fault(2, twice), FaultKind::SharedRace { .. }));
    // SAFETY: wrong on purpose: no barrier follows.
    let leaves = || unsafe {
        sync_cluster();
        words().store_to(1 - block_rank(), thread_idx_x(), 2);
    };
    assert!(matches!(fault(2, leaves), FaultKind::PeerMayReturn { .. }));
    // SAFETY: wrong on purpose: a write between the arrival and the wait.
    let late = || unsafe {
        sync_cluster();
        cluster_arrive();
        words().store_to(1 - block_rank(), thread_idx_x(), 2);
        cluster_wait();
    };
    assert!(matches!(fault(2, late), FaultKind::Panic { .. }));
    // SAFETY: wrong on purpose: the arrival releases nothing, so that the other block may not see the word.
    let unreleased = || unsafe {
        sync_cluster();
        words().store_to(1 - block_rank(), thread_idx_x(), 2);
        cluster_arrive();
        cluster_wait();
        _ = words().load(thread_idx_x());
    };
    let FaultKind::Panic { message, .. } = fault(2, unreleased) else { panic!("no fault") };
    assert!(message.contains("releases nothing"), "{message}");
    // SAFETY: wrong on purpose: the other block may not have started.
    let early = || unsafe {
        words().store_to(1 - block_rank(), thread_idx_x(), 2);
        sync_cluster();
    };
    let FaultKind::Panic { message, .. } = fault(2, early) else { panic!("no fault") };
    assert!(message.contains("before a barrier of the cluster"), "{message}");
}

#[test]
fn a_read_before_the_barrier_is_a_fault() {
    // SAFETY: wrong on purpose: nothing orders the reads after the writes.
    let unordered = || unsafe {
        let words = Shared::<u32, 64>::at(0);
        words.store(thread_idx_x(), 1);
        _ = words.load_from(1 - block_rank(), thread_idx_x());
        sync_cluster();
    };
    assert!(matches!(fault(2, unordered), FaultKind::PoisonedShared { .. }));
    // SAFETY: wrong on purpose: the write after the barrier races with the other block's read.
    let overwritten = || unsafe {
        let words = Shared::<u32, 64>::at(0);
        words.store(thread_idx_x(), 1);
        sync_cluster();
        _ = words.load_from(1 - block_rank(), thread_idx_x());
        words.store(thread_idx_x(), 2);
        sync_cluster();
    };
    assert!(matches!(fault(2, overwritten), FaultKind::SharedRace { .. }));
}

/// A block's own barrier does not order other blocks. A cluster barrier does not order accesses after the arrival.
#[test]
fn only_a_barrier_of_the_cluster_orders_blocks() {
    // SAFETY: a word a thread.
    let mine = || unsafe { Shared::<u32, 64>::at(0) };
    // SAFETY: the rank of the other of two blocks.
    let read = || unsafe {
        _ = mine().load_from(1 - block_rank(), thread_idx_x());
    };
    // SAFETY: the thread's own word.
    let write = || unsafe { mine().store(thread_idx_x(), 1) };
    // SAFETY: wrong on purpose: the reader has passed no barrier of the writer.
    let unordered = || unsafe {
        write();
        sync_threads();
        if block_rank() == 1 {
            read();
        }
        sync_cluster();
    };
    // SAFETY: wrong on purpose: the writer has passed no barrier of the reader.
    let overwritten = || unsafe {
        write();
        sync_cluster();
        read();
        sync_threads();
        write();
        sync_cluster();
    };
    // SAFETY: wrong on purpose: others read what was written after the arrival.
    let late = || unsafe {
        cluster_arrive();
        write();
        cluster_wait();
        read();
        sync_cluster();
    };
    // SAFETY: wrong on purpose: the arrival releases nothing.
    let unreleased = || unsafe {
        write();
        cluster_arrive();
        cluster_wait();
        read();
        sync_cluster();
    };
    let bodies: [&(dyn Fn() + Sync); 4] = [&unordered, &overwritten, &late, &unreleased];
    for body in bodies {
        let kind = fault(2, body);
        assert!(matches!(kind, FaultKind::SharedRace { .. }), "{kind}");
        assert!(kind.to_string().contains(" of the cluster "), "{kind}");
    }
    // SAFETY: a word is written before an arrival that releases, or after the barrier that follows its reads.
    let ordered = || unsafe {
        write();
        cluster_arrive_release();
        cluster_wait();
        read();
        cluster_arrive();
        cluster_wait();
        write();
    };
    launch_clusters(&shape(8), 2, ordered).unwrap();
}

#[test]
fn a_read_of_a_block_that_may_have_returned() {
    // SAFETY: wrong on purpose, for another's rank: no barrier follows the read.
    let reads = |rank: fn() -> u32| unsafe {
        let words = Shared::<u32, 64>::at(0);
        words.store(thread_idx_x(), 1);
        sync_cluster();
        _ = words.load_from(rank(), thread_idx_x());
    };
    let kind = fault(2, || reads(|| 1 - block_rank()));
    assert!(matches!(kind, FaultKind::PeerMayReturn { rank: 1, .. }), "{kind}");
    // SAFETY: wrong on purpose, of four words at once.
    let kind = fault(2, || unsafe {
        let words = Shared::<u32, 64>::at(0);
        words.store(thread_idx_x(), 1);
        sync_cluster();
        _ = words.load_u32x4_from(1 - block_rank(), 0);
    });
    let FaultKind::PeerMayReturn { location, .. } = kind else { panic!("{kind}") };
    assert!(location.file().ends_with("emulator/cluster.rs"), "{location}");
    launch_clusters(&shape(8), 2, || reads(block_rank)).unwrap();
}

#[test]
fn blocks_that_part_are_a_fault() {
    // SAFETY: wrong on purpose: one block of four does not arrive.
    let leaves = || unsafe {
        if block_rank() != 2 {
            sync_cluster();
        }
    };
    let FaultKind::Divergence { groups } = fault(4, leaves) else { panic!("no divergence") };
    assert_eq!(groups.len(), 2);
    // SAFETY: wrong on purpose: half of a block waits for its own threads.
    let halves = || unsafe {
        if thread_idx_x() < 32 {
            sync_cluster();
        } else {
            sync_threads();
        }
    };
    assert!(matches!(fault(4, halves), FaultKind::Divergence { .. }));
}

#[test]
fn what_follows_leaving_is_checked() {
    // SAFETY: wrong on purpose: a read between the arrival and the wait.
    let reads = || unsafe {
        let words = Shared::<u32, 64>::at(0);
        words.store(thread_idx_x(), 1);
        sync_cluster();
        cluster_arrive();
        _ = words.load_from(1 - block_rank(), thread_idx_x());
        cluster_wait();
    };
    assert!(matches!(fault(2, reads), FaultKind::Panic { .. }));
    // SAFETY: wrong on purpose: no thread has arrived.
    let stays = || unsafe { cluster_wait() };
    assert!(matches!(fault(2, stays), FaultKind::Panic { .. }));
    // SAFETY: wrong on purpose: the barrier was arrived at before.
    let barriers: [unsafe fn(); 2] = [sync_cluster, cluster_arrive];
    for barrier in barriers {
        // SAFETY: wrong on purpose.
        let again = || unsafe {
            cluster_arrive();
            barrier();
        };
        assert!(matches!(fault(2, again), FaultKind::Panic { .. }));
    }
    // SAFETY: wrong on purpose: one block returns while the others may still read its memory.
    let returns = || unsafe {
        cluster_arrive();
        if block_rank() != 1 {
            cluster_wait();
        }
    };
    assert!(matches!(fault(4, returns), FaultKind::Divergence { .. }));
}

#[test]
fn a_grid_that_is_no_whole_number_of_clusters_is_refused() {
    for (blocks, size) in [(12, 8), (8, 0), (16, 16)] {
        let fault = launch_clusters(&shape(blocks), size, || ()).expect_err("not launched");
        assert!(matches!(*fault.kind, FaultKind::InvalidLaunch { .. }), "{fault}");
    }
}

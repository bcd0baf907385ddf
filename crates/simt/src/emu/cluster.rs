//! [`crate::cluster`] on the CPU.

use std::panic::Location;

use super::block::{current, wait, with_peer};
use super::collective::{Operation, RELEASES};
use super::fault::{AccessKind, FaultKind, Site, ThreadIndex};
use super::shared::{read, write};
use super::shared_memory::SharedMemory;
use crate::limits::MAX_BLOCK_THREADS;

pub fn block_rank() -> u32 {
    current(|block| block.rank.get())
}

#[track_caller]
pub unsafe fn sync_cluster() {
    assert!(!has_left(), "sync_cluster after cluster_arrive, which only cluster_wait ends");
    meet();
}

/// Waits for all threads of the cluster.
#[track_caller]
fn meet() {
    wait(Operation::SyncCluster, 0, 0);
    current(|block| {
        block.thread().wrote_peer.set(false);
        block.thread().met.set(true);
    });
}

/// Whether the running thread has arrived at the cluster's barrier and not yet waited.
fn has_left() -> bool {
    current(|block| block.thread().left.get())
}

/// Waits only for the lanes of its warp, and marks the thread as arrived: until `cluster_wait`, an access to another
/// block's shared memory is a fault. An earlier write to another block's shared memory is a fault too, if nothing has
/// released it since.
#[track_caller]
pub unsafe fn cluster_arrive() {
    let wrote = current(|block| block.thread().wrote_peer.replace(false));
    assert!(
        !wrote,
        "cluster_arrive, which releases nothing, after a write to another block's shared memory"
    );
    arrive(0);
}

/// Arrives at the cluster barrier; `releases` is [`RELEASES`] or 0.
#[track_caller]
fn arrive(releases: u32) {
    assert!(!has_left(), "cluster_arrive twice, without cluster_wait between");
    wait(Operation::ClusterArrive, 0, releases);
    current(|block| block.thread().left.set(true));
}

/// As [`cluster_arrive`], but the arrival releases all earlier accesses.
#[track_caller]
pub unsafe fn cluster_arrive_release() {
    current(|block| block.thread().wrote_peer.set(false));
    arrive(RELEASES);
}

#[track_caller]
pub unsafe fn cluster_wait() {
    let left = current(|block| block.thread().left.replace(false));
    assert!(left, "cluster_wait without cluster_arrive");
    meet();
}

/// The word at `address` of the block `rank`.
///
/// Recorded in that block's memory as an access by a thread of its pseudo-warp of other blocks, which only cluster
/// barriers order.
#[track_caller]
pub unsafe fn load(address: u32, rank: u32) -> u32 {
    let [word] = read_at(address, rank, Location::caller());
    word
}

/// The four words of the block `rank` from `address` on; see [`load`].
#[track_caller]
pub unsafe fn load_x4(address: u32, rank: u32) -> [u32; 4] {
    read_at(address, rank, Location::caller())
}

fn read_at<const N: usize>(address: u32, rank: u32, location: Site) -> [u32; N] {
    if rank == block_rank() {
        return read(address, AccessKind::Read, location);
    }
    let mut words = [0; N];
    access(rank, location, |memory, thread| {
        memory.read((address, &mut words), AccessKind::Read, thread, location)
    });
    words
}

/// Writes the word at `address` of the block `rank`, which must have started. Recorded as for [`load`].
#[track_caller]
pub unsafe fn store(address: u32, rank: u32, word: u32) {
    let location = Location::caller();
    if rank == block_rank() {
        return write(address, [word], AccessKind::Write, location);
    }
    let met = current(|block| block.thread().met.get());
    assert!(met, "a write to another block's shared memory before a barrier of the cluster");
    current(|block| block.thread().wrote_peer.set(true));
    access(rank, location, |memory, thread| {
        memory.write((address, &[word]), AccessKind::Write, thread, location)
    });
}

/// Accesses the shared memory of another block of the cluster, as a thread of that block's pseudo-warp.
fn access<T>(
    rank: u32,
    location: Site,
    access: impl FnOnce(&mut SharedMemory, ThreadIndex) -> Result<T, FaultKind>,
) -> T {
    assert!(!has_left(), "an access to another block's shared memory after cluster_arrive");
    let done = with_peer(rank, |block, peer| {
        let running = block.running.get();
        let thread = ThreadIndex(MAX_BLOCK_THREADS * (1 + block.rank.get()) + running.0);
        block.reads_peer.set(Some((rank, running, location)));
        access(&mut peer.shared_memory.borrow_mut(), thread)
    });
    match done {
        Some(Ok(result)) => result,
        Some(Err(fault)) => current(|block| block.fail(fault)),
        None => panic!("block {rank} is not in the cluster"),
    }
}

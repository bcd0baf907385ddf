//! [`crate::thread`] on the CPU.

use super::block::{current, wait};
use super::collective::Operation;

pub fn thread_idx_x() -> u32 {
    current(|block| block.running.get().0)
}

pub fn block_idx_x() -> u32 {
    current(|block| block.index.get().0)
}

pub fn block_idx_y() -> u32 {
    current(|block| block.index.get().1)
}

pub fn block_dim_x() -> u32 {
    current(|block| block.launch.get().block)
}

pub fn grid_dim_x() -> u32 {
    current(|block| block.launch.get().grid.0)
}

pub fn grid_dim_y() -> u32 {
    current(|block| block.launch.get().grid.1)
}

#[track_caller]
pub unsafe fn sync_threads() {
    wait(Operation::SyncThreads, 0, 0);
}

#[track_caller]
pub unsafe fn barrier_sync(barrier: u32, threads: u32) {
    wait(Operation::BarrierSync, barrier, threads);
}

#[track_caller]
pub unsafe fn barrier_arrive(barrier: u32, threads: u32) {
    wait(Operation::BarrierArrive, barrier, threads);
}

/// The number of a product that the running thread starts.
pub fn start_product() -> u32 {
    current(|block| {
        let products = &block.threads[block.running.get().0 as usize].products;
        products.replace(products.get() + 1)
    })
}

/// Checks that product `number` has ended, if at most the last `pending` of those that the running thread started have not.
#[track_caller]
pub fn check_product(number: u32, pending: u32) {
    let started = current(|block| block.threads[block.running.get().0 as usize].products.get());
    assert!(
        number == u32::MAX || number + pending < started,
        "the product may be in flight: {} were started after it, the wait leaves {pending}",
        started - number - 1
    );
}

pub fn hold_u32(value: u32) -> u32 {
    value
}

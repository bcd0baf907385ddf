//! [`crate::thread`] on the CPU.

use std::panic::Location;

use super::block::{current, wait};
use super::collective::Operation;
use super::fault::FaultKind;
use super::time::warp_of;
use crate::warpgroup::layout::Operand;

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

/// A proxy fence of the running thread.
pub fn fence_proxy_async() {
    current(|block| block.shared_memory.borrow_mut().clocks.fence_proxy(block.running.get()));
}

/// Starts a product of the running thread, and returns its number. The words of shared memory that the thread reads
/// from here to [`end_operands`] are operands of the product. Checks the alignment of the `operands`. Those and `adds`
/// have to be the same in all threads of the warpgroup, which is checked when the block returns.
#[track_caller]
pub fn start_product<const N: usize>(operands: [Operand; N], adds: bool) -> u32 {
    let location = Location::caller();
    current(|block| {
        let misaligned = operands.into_iter().find(|of| !of.address.is_multiple_of(of.align));
        if let Some(Operand { address, align, .. }) = misaligned {
            let (memory, address) = ("an operand of a product", u64::from(address));
            let thread = block.running.get();
            block.fail(FaultKind::Misaligned { memory, address, align, thread, location });
        }
        let (thread, running) = (block.thread(), block.running.get());
        let memory = block.shared_memory.borrow();
        let product = memory.start(running, location);
        let number = thread.products.borrow_mut().start(product, (operands, adds));
        block.operands.borrow_mut()[warp_of(running)].start(number, product, memory.bytes());
        thread.multiplies.set(Some(number));
        number
    })
}

/// The operands of the product that was started last have been read once, and recorded. They count as being read until
/// the product is waited for, as a tensor core may read them until then.
pub fn end_operands() {
    current(|block| block.thread().multiplies.set(None));
}

/// Waits for all products of the running thread but the last `pending`. Reads of a product's operands end when the last
/// lane of the warp has waited for it. Checks that product `number` is among those waited for, unless `number` is
/// `u32::MAX`, which stands for no product.
#[track_caller]
pub fn check_product(number: u32, pending: u32) {
    let location = Location::caller();
    let read = current(|block| {
        let mut products = block.thread().products.borrow_mut();
        let started = products.started();
        assert!(
            number == u32::MAX || number + pending < started,
            "the product may be in flight: {} were started after it, the wait leaves {pending}",
            started - number - 1
        );
        let mut waited = products.wait_for_all_but(pending as usize, location);
        let (running, mut operands) = (block.running.get(), block.operands.borrow_mut());
        waited.try_for_each(|number| {
            let Some(ended) = operands[warp_of(running)].wait(number) else { return Ok(()) };
            block.shared_memory.borrow_mut().end_operands(&ended, running)
        })
    });
    read.unwrap_or_else(|fault| current(|block| block.fail(fault)));
}

pub fn opt_barrier_u32(value: u32) -> u32 {
    value
}

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

pub fn hold_u32(value: u32) -> u32 {
    value
}

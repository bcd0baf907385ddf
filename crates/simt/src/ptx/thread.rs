//! [`crate::thread`] on the device.

use core::arch::{asm, nvptx};

use super::intrinsics::barrier_cta_sync_aligned_all;

macro_rules! special_registers {
    ($($name:ident: $read:ident;)*) => { $(
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reading a special register has no precondition.
            unsafe { nvptx::$read() }
        }
    )* };
}

special_registers! {
    thread_idx_x: _thread_idx_x;
    block_idx_x: _block_idx_x;
    block_idx_y: _block_idx_y;
    block_dim_x: _block_dim_x;
    grid_dim_x: _grid_dim_x;
    grid_dim_y: _grid_dim_y;
}

#[inline(always)]
pub unsafe fn sync_threads() {
    // SAFETY: barrier 0 exists in every kernel; the caller brings all threads of the block.
    unsafe { barrier_cta_sync_aligned_all(0) }
}

#[inline(always)]
pub fn hold_u32(value: u32) -> u32 {
    let mut held = value;
    // SAFETY: no instruction.
    unsafe { asm!("// {0}", inout(reg32) held, options(nomem, nostack)) }
    held
}

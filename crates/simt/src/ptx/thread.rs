//! [`crate::thread`] on the device.

use core::arch::{asm, nvptx};

#[cfg(not(target_feature = "sm_90a"))]
use crate::warpgroup::layout::Operand;

use super::intrinsics::{
    barrier_cta_arrive_aligned_count, barrier_cta_sync_aligned_all, barrier_cta_sync_aligned_count,
};

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
pub unsafe fn barrier_sync(barrier: u32, threads: u32) {
    // SAFETY: barriers 0 to 15 exist; the caller brings the warp, and others bring the rest of the threads.
    unsafe { barrier_cta_sync_aligned_count(barrier.cast_signed(), threads.cast_signed()) }
}

#[inline(always)]
pub unsafe fn barrier_arrive(barrier: u32, threads: u32) {
    // SAFETY: as in `barrier_sync`.
    unsafe { barrier_cta_arrive_aligned_count(barrier.cast_signed(), threads.cast_signed()) }
}

/// Does nothing: except on `sm_90a`, products run when they are started, and read through the generic proxy.
#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub const fn fence_proxy_async() {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub const fn start_product<const N: usize>(_operands: [Operand; N], _adds: bool) -> u32 {
    0
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub const fn end_operands() {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub const fn check_product(_number: u32, _pending: u32) {}

#[inline(always)]
pub fn opt_barrier_u32(value: u32) -> u32 {
    let mut same = value;
    // SAFETY: no instruction.
    unsafe { asm!("// {0}", inout(reg32) same, options(nomem, nostack)) }
    same
}

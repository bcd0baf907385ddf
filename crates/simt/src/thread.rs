//! Thread and block indices, dimensions (PTX ISA 10, special registers), and the block barrier.

use crate::imp;
use crate::limits::WARP_SIZE;

/// Index of the calling thread in its block, `0..block_dim_x()`.
#[inline(always)]
#[must_use]
pub fn thread_idx_x() -> u32 {
    imp::thread::thread_idx_x()
}

/// Column of the calling thread's block in the grid, `0..grid_dim_x()`.
#[inline(always)]
#[must_use]
pub fn block_idx_x() -> u32 {
    imp::thread::block_idx_x()
}

/// Row of the calling thread's block in the grid, `0..grid_dim_y()`.
#[inline(always)]
#[must_use]
pub fn block_idx_y() -> u32 {
    imp::thread::block_idx_y()
}

/// Threads in a block: a multiple of 32, at most 1024.
#[inline(always)]
#[must_use]
pub fn block_dim_x() -> u32 {
    imp::thread::block_dim_x()
}

/// Columns of the grid, in blocks.
#[inline(always)]
#[must_use]
pub fn grid_dim_x() -> u32 {
    imp::thread::grid_dim_x()
}

/// Rows of the grid, in blocks.
#[inline(always)]
#[must_use]
pub fn grid_dim_y() -> u32 {
    imp::thread::grid_dim_y()
}

/// Index of the calling thread in its warp, `0..32`.
#[inline(always)]
#[must_use]
pub fn lane_id() -> u32 {
    // Blocks are one-dimensional, so the hardware fills warps in this order.
    thread_idx_x() % WARP_SIZE
}

/// Index of the calling thread's warp in its block.
#[inline(always)]
#[must_use]
pub fn warp_id() -> u32 {
    thread_idx_x() / WARP_SIZE
}

/// Waits for all threads of the block; what any thread wrote before is visible to all after
/// (`barrier.cta.sync.aligned`, PTX ISA 9.7.13 `barrier`).
///
/// # Safety
/// - Every thread of the block makes this call, the lanes of a warp from the same place in the source (`.aligned`);
///   different warps may call it from different places. None has returned from the kernel.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_threads() {
    // SAFETY: the caller's duty is this callee's: all threads of the block arrive together.
    unsafe { imp::thread::sync_threads() }
}

/// A barrier for some of the block's warps: one of 1 to 15, and the number of threads that complete it, those that wait
/// ([`Self::sync`]) and those that do not ([`Self::arrive`]) together. Once complete it starts anew
/// (PTX ISA 9.7.13 `barrier`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedBarrier {
    number: u32,
    threads: u32,
}

impl NamedBarrier {
    /// Barrier `number`, 1 to 15, of `threads` threads, whole warps.
    #[inline(always)]
    #[must_use]
    pub const fn new(number: u32, threads: u32) -> Self {
        Self { number, threads }
    }

    /// Waits until the barrier is complete; what its threads wrote before they arrived is visible after
    /// (`barrier.cta.sync.aligned`).
    ///
    /// # Safety
    /// - All lanes of the warp make this call together; number and threads are in range, and all calls for a number
    ///   name the same threads.
    /// - No warp arrives twice before the barrier is complete: barriers lead from all arrivals of a completion to each of
    ///   the next. Nobody returns before it is complete.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn sync(self) {
        // SAFETY: the caller's duty is this callee's.
        unsafe { imp::thread::barrier_sync(self.number, self.threads) }
    }

    /// Arrives without waiting (`barrier.cta.arrive.aligned`). The lanes of the warp see nothing of each other by it: for
    /// that they need [`crate::warp::sync_warp`].
    ///
    /// # Safety
    /// - As [`Self::sync`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's duty is this callee's.
        unsafe { imp::thread::barrier_arrive(self.number, self.threads) }
    }
}

/// An optimisation barrier: `value` is computed here. Without it the compiler may sink the computation to
/// its first use and keep all of its operands in registers until then. No instruction.
#[inline(always)]
#[must_use]
pub fn hold_u32(value: u32) -> u32 {
    imp::thread::hold_u32(value)
}

/// [`hold_u32`] of the bits of an `f32`.
#[inline(always)]
#[must_use]
pub fn hold_f32(value: f32) -> f32 {
    f32::from_bits(hold_u32(value.to_bits()))
}

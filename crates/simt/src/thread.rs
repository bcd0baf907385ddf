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

/// Waits for all threads of the block. Writes of any thread before the barrier are visible to all threads after it
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

/// A named barrier for some of the block's warps. It is complete when as many threads as it was made for have arrived,
/// either by [`Self::sync`], which waits, or by [`Self::arrive`], which does not. Then it is reset for its next use
/// (PTX ISA 9.7.13 `barrier`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedBarrier {
    number: u32,
    threads: u32,
}

impl NamedBarrier {
    /// Barrier `number`, 1 to 15, which `threads` threads complete: a multiple of 32.
    #[inline(always)]
    #[must_use]
    pub const fn new(number: u32, threads: u32) -> Self {
        Self { number, threads }
    }

    /// Arrives, and waits until the barrier is complete. Writes that its threads made before they arrived are visible
    /// afterwards (`barrier.cta.sync.aligned`).
    ///
    /// # Safety
    /// - All lanes of the warp make this call together; number and threads are in range, and all calls for a number
    ///   name the same threads.
    /// - No warp arrives twice before the barrier is complete: by barriers, all arrivals of a completion happen before
    ///   each arrival of the next completion. No thread returns before the barrier is complete (*unchecked*).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn sync(self) {
        // SAFETY: the caller's duty is this callee's.
        unsafe { imp::thread::barrier_sync(self.number, self.threads) }
    }

    /// Arrives without waiting (`barrier.cta.arrive.aligned`). It does not make the writes of the warp's lanes visible
    /// to each other; [`crate::warp::sync_warp`] does.
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
/// its first use and keep all of its operands in registers until then. Emits no instruction.
#[inline(always)]
#[must_use]
pub fn opt_barrier_u32(value: u32) -> u32 {
    imp::thread::opt_barrier_u32(value)
}

/// [`opt_barrier_u32`] of the bits of an `f32`.
#[inline(always)]
#[must_use]
pub fn opt_barrier_f32(value: f32) -> f32 {
    f32::from_bits(opt_barrier_u32(value.to_bits()))
}

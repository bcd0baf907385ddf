//! Thread block clusters: consecutive blocks of a row of the grid that run at the same time, synchronise
//! and read each other's shared memory (PTX ISA 5.1 and 9.7.9, sm_90). The number of blocks of a cluster
//! is fixed per kernel, in the PTX and in the launch.

use crate::imp;
use crate::shared::{Shared, Word};

/// Rank of the calling thread's block in its cluster (`%cluster_ctarank`).
#[inline(always)]
#[must_use]
pub fn block_rank() -> u32 {
    imp::cluster::block_rank()
}

/// Waits for all threads of the cluster. Writes of any thread before the barrier are visible to all threads after it
/// (`barrier.cluster.arrive`, `.wait`, aligned, PTX ISA 9.7.13).
///
/// # Safety
/// - Every thread of every block of the cluster makes this call, the lanes of a warp from the same place in the source
///   (`.aligned`); none has returned from the kernel.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_cluster() {
    // SAFETY: the caller's duty is this callee's: all threads of the cluster arrive together.
    unsafe { imp::cluster::sync_cluster() }
}

/// Arrives at the cluster's barrier without waiting, and without making this thread's writes visible
/// (`barrier.cluster.arrive.relaxed`, aligned).
///
/// # Safety
/// - Until [`cluster_wait`] this thread accesses no other block's shared memory.
/// - It has used every value that it read there, since the arrival does not order loads in flight: *unchecked*.
/// - Every thread of every block of the cluster makes this call or [`cluster_arrive_release`], the lanes of a warp from
///   the same place in the source (`.aligned`), and its next barrier of the cluster is [`cluster_wait`].
#[inline(always)]
#[track_caller]
pub unsafe fn cluster_arrive() {
    // SAFETY: the caller's duty is this callee's.
    unsafe { imp::cluster::cluster_arrive() }
}

/// Arrives at the cluster's barrier without waiting. This thread's earlier writes are visible to all threads of the
/// cluster after [`cluster_wait`]. Until then this thread accesses no other block's shared memory
/// (`barrier.cluster.arrive.release`, aligned).
///
/// # Safety
/// - As [`cluster_arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn cluster_arrive_release() {
    // SAFETY: the caller's duty is this callee's.
    unsafe { imp::cluster::cluster_arrive_release() }
}

/// Waits until every thread of the cluster has called [`cluster_arrive`] or [`cluster_arrive_release`]. A block must
/// not return earlier, because others may still read its shared memory (`barrier.cluster.wait`, aligned).
///
/// # Safety
/// - Every thread of every block of the cluster makes this call, the lanes of a warp from the same place in the source
///   (`.aligned`), after [`cluster_arrive`] or [`cluster_arrive_release`].
#[inline(always)]
#[track_caller]
pub unsafe fn cluster_wait() {
    // SAFETY: the caller's duty is this callee's.
    unsafe { imp::cluster::cluster_wait() }
}

impl<T: Word, const N: usize> Shared<T, N> {
    /// Element `i` of the same array in the block `rank` of the cluster (`mapa`,
    /// `ld.shared::cluster.b32`).
    ///
    /// # Safety
    /// - `i < N`, `rank` is a block of the cluster, the element has been written, and no thread writes
    ///   it without [`sync_cluster`] between.
    /// - That block has not returned: a [`sync_cluster`], or [`cluster_arrive`] and [`cluster_wait`],
    ///   follow in every thread.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_from(self, rank: u32, i: u32) -> T {
        // SAFETY: inside the array, written, ordered and alive by the caller's promise.
        T::from_word(unsafe { imp::cluster::load(self.address::<1>(i), rank) })
    }

    /// Writes element `i` of the same array in the block `rank` of the cluster (`mapa`, `st.shared::cluster.b32`).
    ///
    /// # Safety
    /// - `i < N`, `rank` is a block of the cluster, and no other thread accesses the element without [`sync_cluster`]
    ///   between.
    /// - That block has started: this thread has passed a barrier of the cluster. That block has not returned: as for
    ///   [`Self::load_from`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_to(self, rank: u32, i: u32, value: T) {
        // SAFETY: inside the array, ordered and alive by the caller's promise.
        unsafe { imp::cluster::store(self.address::<1>(i), rank, value.to_word()) }
    }

    /// The bits of elements `i..i + 4` of the same array in the block `rank` of the cluster (`mapa`,
    /// `ld.shared::cluster.v4.b32`).
    ///
    /// # Safety
    /// - As [`Self::load_from`] for each of the four, and the address of element `i` is a multiple of 16 bytes.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4_from(self, rank: u32, i: u32) -> [u32; 4] {
        // SAFETY: inside the array, written, aligned, ordered and alive by the caller's promise.
        unsafe { imp::cluster::load_x4(self.address::<4>(i), rank) }
    }
}

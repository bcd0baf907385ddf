//! [`crate::cluster`] on the device.

use core::arch::asm;

use super::intrinsics;

#[inline(always)]
pub fn block_rank() -> u32 {
    // SAFETY: reading a special register has no precondition.
    unsafe { intrinsics::cluster_ctarank() }.cast_unsigned()
}

#[inline(always)]
pub unsafe fn sync_cluster() {
    // SAFETY: the caller brings all threads of the cluster.
    unsafe {
        intrinsics::barrier_cluster_arrive_aligned();
        intrinsics::barrier_cluster_wait_aligned();
    }
}

#[inline(always)]
pub unsafe fn cluster_arrive() {
    // SAFETY: the caller brings all threads of the cluster, and the wait follows.
    unsafe { intrinsics::barrier_cluster_arrive_relaxed_aligned() }
}

#[inline(always)]
pub unsafe fn cluster_arrive_release() {
    // SAFETY: the caller brings all threads of the cluster, and the wait follows.
    unsafe { intrinsics::barrier_cluster_arrive_aligned() }
}

#[inline(always)]
pub unsafe fn cluster_wait() {
    // SAFETY: the caller brings all threads of the cluster, which have arrived.
    unsafe { intrinsics::barrier_cluster_wait_aligned() }
}

#[inline(always)]
pub unsafe fn load(address: u32, rank: u32) -> u32 {
    let word: u32;
    // SAFETY: inside the other block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .b32 there; mapa.shared::cluster.u32 there, {address}, {rank};",
            "ld.shared::cluster.b32 {word}, [there]; }}",
            word = out(reg32) word,
            address = in(reg32) address,
            rank = in(reg32) rank,
            options(readonly, nostack),
        );
    }
    word
}

#[inline(always)]
pub unsafe fn load_x4(address: u32, rank: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: inside the other block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .b32 there; mapa.shared::cluster.u32 there, {address}, {rank};",
            "ld.shared::cluster.v4.b32 {{{a}, {b}, {c}, {d}}}, [there]; }}",
            a = out(reg32) a,
            b = out(reg32) b,
            c = out(reg32) c,
            d = out(reg32) d,
            address = in(reg32) address,
            rank = in(reg32) rank,
            options(readonly, nostack),
        );
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store(address: u32, rank: u32, word: u32) {
    // SAFETY: inside the other block's shared memory, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .b32 there; mapa.shared::cluster.u32 there, {address}, {rank};",
            "st.shared::cluster.b32 [there], {word}; }}",
            word = in(reg32) word,
            address = in(reg32) address,
            rank = in(reg32) rank,
            options(nostack),
        );
    }
}

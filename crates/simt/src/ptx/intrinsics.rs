//! The LLVM intrinsics in use, by their LLVM 22 names. An unknown name compiles to an undefined
//! symbol, which `ptxas` and the PTX lint refuse.

unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    pub fn barrier_cta_sync_aligned_all(barrier: i32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    pub fn barrier_cta_sync_aligned_count(barrier: i32, threads: i32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    pub fn barrier_cta_arrive_aligned_count(barrier: i32, threads: i32);
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    pub fn bar_warp_sync(members: i32);

    #[link_name = "llvm.nvvm.barrier.cluster.arrive.aligned"]
    pub fn barrier_cluster_arrive_aligned();
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.relaxed.aligned"]
    pub fn barrier_cluster_arrive_relaxed_aligned();
    #[link_name = "llvm.nvvm.barrier.cluster.wait.aligned"]
    pub fn barrier_cluster_wait_aligned();
    #[link_name = "llvm.nvvm.read.ptx.sreg.cluster.ctarank"]
    pub fn cluster_ctarank() -> i32;

    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    pub fn shfl_sync_bfly(members: i32, value: i32, lane_mask: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    pub fn shfl_sync_idx(members: i32, value: i32, source_lane: i32, clamp: i32) -> i32;

    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    pub fn vote_ballot_sync(members: i32, predicate: bool) -> i32;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    pub fn vote_all_sync(members: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    pub fn vote_any_sync(members: i32, predicate: bool) -> bool;

    #[link_name = "llvm.nvvm.redux.sync.add"]
    pub fn redux_sync_add(value: i32, members: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    pub fn redux_sync_umax(value: i32, members: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    pub fn redux_sync_umin(value: i32, members: i32) -> i32;

    #[link_name = "llvm.nvvm.prmt"]
    pub fn prmt(a: i32, b: i32, selectors: i32) -> i32;

    #[link_name = "llvm.nvvm.fmax.f"]
    pub fn fmax(a: f32, b: f32) -> f32;
    #[link_name = "llvm.nvvm.fmax.nan.f"]
    pub fn fmax_nan(a: f32, b: f32) -> f32;
    #[link_name = "llvm.nvvm.fmin.f"]
    pub fn fmin(a: f32, b: f32) -> f32;
}

/// A shuffled value, and whether its source lane exists.
#[repr(C)]
pub struct Found(pub i32, pub bool);

/// Four floats, as LLVM returns them from an intrinsic.
#[repr(C)]
pub struct F32x4(pub f32, pub f32, pub f32, pub f32);

/// Four integers, as LLVM returns them from an intrinsic.
#[repr(C)]
pub struct I32x4(pub i32, pub i32, pub i32, pub i32);

// An intrinsic that returns a struct has LLVM's own signature, not one of the C ABI.
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.shfl.sync.up.i32p"]
    pub fn shfl_sync_up_found(members: i32, value: i32, delta: i32, clamp: i32) -> Found;
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
    pub fn mma_m16n8k16_bf16(
        a0: i32,
        a1: i32,
        a2: i32,
        a3: i32,
        b0: i32,
        b1: i32,
        c0: f32,
        c1: f32,
        c2: f32,
        c3: f32,
    ) -> F32x4;
    #[link_name = "llvm.nvvm.mma.m16n8k32.row.col.s8"]
    pub fn mma_m16n8k32_s8(
        a0: i32,
        a1: i32,
        a2: i32,
        a3: i32,
        b0: i32,
        b1: i32,
        c0: i32,
        c1: i32,
        c2: i32,
        c3: i32,
    ) -> I32x4;
}

//! The CUDA thread model: one API, two backends.
//!
//! For `nvptx64`, a kernel body written against this crate compiles to PTX, mostly one instruction per call (second
//! table). For the CPU it compiles to ordinary Rust, which the emulator ([`emu`]) runs with one fiber per CUDA thread.
//! The emulator checks every access and every collective. Indices and barriers have the names of `cuda_std`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`thread`] | indices, dimensions, the block barrier |
//! | [`cluster`] | thread block clusters: barrier, distributed shared memory |
//! | [`warp`] | shuffles, votes, reductions of a full warp |
//! | [`mma`] | matrix products of a full warp on the tensor cores |
//! | [`warpgroup`] | matrix products of four warps: B in shared memory, A in shared memory or in registers |
//! | [`mem`] | global memory: [`mem::Global`], [`mem::GlobalMut`] |
//! | [`shared`] | the block's shared memory: [`shared::Shared`] |
//! | [`copy`] | asynchronous copies from global to shared memory |
//! | [`grid`] | programmatic dependent launch |
//! | [`kernel`] | description of a kernel, on which its launch and its PTX must agree |
//! | [`atomic`] | atomics with the scope in the type's name, fences |
//! | [`math`] | float operations: bit-equal on both backends, or marked as approximate |
//! | `convert` | hardware number conversions (device only) |
//! | [`emu`] | the emulator: launches, device memory, faults (host only) |
//!
//! Blocks are one-dimensional, a multiple of 32 threads and at most 1024; grids are `(x, y)`.
//!
//! An operation whose preconditions the hardware does not check is `unsafe`. The emulator checks the
//! conditions under each `# Safety`, except those marked *unchecked*, and reports a violation as a `Fault`
//! with the source line.
//!
//! # Functions, PTX, and what the emulator detects
//!
//! | function | PTX | the emulator detects |
//! |---|---|---|
//! | [`thread::thread_idx_x`], [`thread::block_idx_x`], .. | `%tid.x`, `%ctaid.x`, .. | call outside a launch |
//! | [`thread::sync_threads`] | `barrier.cta.sync.aligned` | a thread that waits elsewhere or has returned |
//! | [`thread::NamedBarrier::sync`], [`arrive`](thread::NamedBarrier::arrive) | `barrier.cta.sync`, `.arrive` `.aligned` with a number of threads | a wait that never ends; a warp that may arrive twice before the barrier is complete; arrivals left over when the block returns; calls with different numbers of threads. For races it orders only accesses before an arrival with accesses after a wait |
//! | [`thread::opt_barrier_u32`] | none: an optimisation barrier, which keeps a computation where it stands | nothing |
//! | [`warp::shuffle_xor_u32`], `idx`, `up_found` | `shfl.sync` | divergence: not all 32 lanes at the same call |
//! | [`warp::ballot`], [`warp::all`], [`warp::any`] | `vote.sync` | divergence |
//! | [`warp::reduce_add_u32`], `max`, `min` | `redux.sync` | divergence |
//! | [`warp::reduce_add_f32`], [`warp::reduce_max_f32`] | five `shfl.sync.bfly` | divergence |
//! | [`warp::sync_warp`] | `bar.warp.sync` | divergence |
//! | [`cluster::sync_cluster`] | `barrier.cluster.arrive`, `.wait` | a block whose threads are elsewhere |
//! | [`cluster::cluster_arrive`], [`cluster_arrive_release`](cluster::cluster_arrive_release), [`cluster::cluster_wait`] | the two halves of that barrier | wait without arrive; between the two, another cluster barrier or an access to another block's memory; an arrival without release after a write to another block's memory, or where others access what was written before it |
//! | [`shared::Shared::load_from`], `load_u32x4_from`, `store_to` | `mapa`, `ld`, `st` `.shared::cluster` | bounds, unwritten words, races (only barriers of the cluster order blocks), ranks outside the cluster, a block that may have returned |
//! | [`mem::Global::load`] | `ld.global` | bounds, alignment; races, in a view by [`mem::GlobalMut::read_only`] |
//! | [`mem::Global::load_u32x2`], [`load_u32x4`](mem::Global::load_u32x4) | `ld.global.nc.v2`, `.v4` | bounds, alignment; any write by the launch, in a view by [`mem::GlobalMut::read_only`] |
//! | [`mem::Global::load_u32_volatile`], [`load_u32x4_volatile`](mem::Global::load_u32x4_volatile) | `ld.global` in volatile asm | bounds, alignment; races, in a view by [`mem::GlobalMut::read_only`] |
//! | [`mem::Global::prefetch_l2`] | `cp.async.bulk.prefetch.L2` | bounds, alignment |
//! | [`mem::GlobalMut::load`], [`store`](mem::GlobalMut::store), and their vectors | `ld.global`, `st.global` | bounds, alignment, races with other threads of the launch, by the happens-before order of this run |
//! | [`shared::Shared::load`], `store`, and their vectors | `ld.shared`, `st.shared` | bounds, alignment, unwritten words, races |
//! | [`shared::Shared::copy_from`] | `cp.async.cg` | bounds, alignment; races on the source from the copy's start to its wait, in a view by [`mem::GlobalMut::read_only`] |
//! | [`copy::commit_group`], [`copy::wait_for_groups`] | `cp.async.commit_group`, `.wait_group` | races of the copied words, and any access to them from the copy's start to its wait |
//! | [`atomic::DeviceAtomicU32`] | `atom`, `ld`, `st` `.relaxed.gpu.global`, `atom.acq_rel.gpu.global` | bounds, alignment, races with plain accesses |
//! | [`atomic::BlockAtomicU32`] | `atom`, `ld`, `st` `.relaxed.cta.shared` | bounds, unwritten words, races with plain accesses |
//! | [`atomic::fence_device`], `block`, `system` | `fence.acq_rel` | a missing device fence around a device atomic, as a race on global memory. Not modelled, so that correct code which relies on it is reported as a race: order by fences and atomics of block scope, and by a relaxed atomic store that follows a releasing atomic |
//! | [`mma::bf16_m16n8k16`], [`mma::s8_m16n8k32`] | `mma.sync.aligned` | divergence |
//! | [`warpgroup::bf16_m64n64k128`] and the other products | `wgmma` on sm_90a, else `mma` | divergence of a warp; bounds, unwritten words and races of operands in shared memory; a missing [`warpgroup::fence_proxy_async`]; when the block returns, a warp that left out a product of its warpgroup |
//! | [`warpgroup::start_bf16_m64n64k512`], `start_bf16_m64n256k32`, `wait`, [`warpgroup::wait_for_products`] | the same, and `wgmma.wait_group` | writes to operands between the start and the wait, also of products whose sum is added to while in flight; a wait that leaves the product in flight; a product that is never waited for |
//! | [`warpgroup::fence_proxy_async`] | `fence.proxy.async.shared::cta` on sm_90a | its absence, at the product that reads the store |
//! | [`warpgroup::setmaxnreg_inc`], [`warpgroup::setmaxnreg_dec`] | `setmaxnreg` on sm_90a | nothing |
//! | [`grid::wait_for_dependencies`], [`grid::launch_dependents`] | `griddepcontrol` | nothing: launches do not overlap |
//! | [`grid::peek`] | `ld.relaxed.gpu.global` | a result that depends on a value which was not compared after the wait: about half of the blocks get wrong values |
//! | [`math`] | one instruction each | nothing; bit-equal except in [`math::approx`] |
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(
        stdarch_nvptx,
        asm_experimental_arch,
        link_llvm_intrinsics,
        abi_unadjusted,
        core_float_math
    ),
    expect(
        internal_features,
        reason = "collectives must be LLVM intrinsics: inline asm is not convergent"
    )
)]

pub mod atomic;
pub mod cluster;
#[cfg(target_arch = "nvptx64")]
pub mod convert;
pub mod copy;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emu;
pub mod grid;
pub mod kernel;
mod limits;
pub mod math;
pub mod mem;
pub mod mma;
#[cfg(target_arch = "nvptx64")]
mod ptx;
pub mod shared;
pub mod thread;
pub mod warp;
pub mod warpgroup;

#[cfg(not(target_arch = "nvptx64"))]
use emu as imp;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

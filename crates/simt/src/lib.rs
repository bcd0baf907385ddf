//! The CUDA thread model: one API, two backends.
//!
//! A kernel body written against this crate compiles for `nvptx64` into PTX, one instruction a
//! call, and for the CPU into ordinary Rust that the [`emu`] backend runs with one fiber per CUDA
//! thread, checking every access and every collective. Names of indices and barriers are
//! `cuda_std`'s.
//!
//! | module | what it holds |
//! |---|---|
//! | [`thread`] | indices, dimensions, the block barrier |
//! | [`cluster`] | blocks that run together: barrier, shared memory of each other |
//! | [`warp`] | shuffles, votes, reductions of a full warp |
//! | [`mma`] | matrix products of a full warp on the tensor cores |
//! | [`warpgroup`] | matrix products of four warps, one side in shared memory |
//! | [`mem`] | global memory: [`mem::Global`], [`mem::GlobalMut`] |
//! | [`shared`] | the block's shared memory: [`shared::Shared`] |
//! | [`copy`] | copies from global to shared memory that nobody waits for at once |
//! | [`grid`] | launches that overlap in a stream |
//! | [`kernel`] | what a launch and the PTX of a kernel must agree on |
//! | [`atomic`] | atomics with the scope in the type's name, fences |
//! | [`math`] | float operations that are bit-equal on both backends, and those that are not |
//! | `convert` | hardware number conversions (device only) |
//! | [`emu`] | the emulator: launches, device memory, faults (host only) |
//!
//! Blocks are one-dimensional, a multiple of 32 threads and at most 1024; grids are `(x, y)`.
//!
//! Every operation that the hardware checks nothing of is `unsafe`. The emulator checks the duties
//! named under each `# Safety`, except those marked *unchecked*, and reports a breach as a
//! `Fault` with the source line.
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

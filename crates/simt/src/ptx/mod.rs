//! The device backend: one instruction a call.
//!
//! Collectives are LLVM intrinsics (`intrinsics`): LLVM knows those as convergent and moves none
//! into or across a branch. Inline asm is not convergent, so it holds no collective but the products of
//! [`warpgroup`], for which LLVM has no intrinsic: they are to stand in straight code.

pub mod atomic;
pub mod cluster;
pub mod convert;
pub mod copy;
pub mod grid;
mod intrinsics;
pub mod math;
pub mod mem;
pub mod mma;
pub mod shared;
pub mod thread;
pub mod warp;
#[cfg(target_feature = "sm_90a")]
pub mod warpgroup;

//! The device backend: mostly one instruction per call.
//!
//! Collectives are LLVM intrinsics (`intrinsics`), which are `convergent`: LLVM moves them neither into nor
//! across a branch. Rust's inline asm is not convergent, so no collective uses it, except the products of
//! [`warpgroup`], which have no intrinsic: call those in straight-line code only.

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

//! The device backend: one instruction a call.
//!
//! Collectives are LLVM intrinsics (`intrinsics`): LLVM knows those as convergent and moves none
//! into or across a branch. Inline asm is not convergent, so it holds no collective.

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

#[inline(always)]
pub fn hold(value: u32) -> u32 {
    let mut held = value;
    // SAFETY: no instruction.
    unsafe { core::arch::asm!("// {0}", inout(reg32) held, options(nomem, nostack)) }
    held
}

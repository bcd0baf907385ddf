//! [`crate::copy`] on the device. The asm may touch memory, as far as LLVM knows: nothing moves across.

use core::arch::asm;

use super::mem::Pointer;
use crate::mem::Element;

#[inline(always)]
pub unsafe fn start<T: Element>(to: u32, source: Pointer<T>, at: u64) {
    // SAFETY: inside both, aligned and ordered by the caller's promise.
    unsafe {
        asm!(
            "cp.async.cg.shared.global [{to}], [{from}], 16;",
            to = in(reg32) to,
            from = in(reg64) source.global_address(at),
            options(nostack),
        );
    }
}

#[inline(always)]
pub fn close_group() {
    // SAFETY: no operand and no precondition.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

#[inline(always)]
pub fn wait_for_groups<const PENDING: usize>() {
    // SAFETY: no precondition.
    unsafe { asm!("cp.async.wait_group {pending};", pending = const PENDING, options(nostack)) }
}

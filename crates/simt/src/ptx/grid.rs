//! [`crate::grid`] on the device. The asm is not `nomem`: LLVM moves no memory access across it.

use core::arch::asm;

use super::mem::{Access, Pointer};

#[inline(always)]
pub fn wait_for_dependencies() {
    // SAFETY: no operand and no precondition; without a dependency it does nothing.
    unsafe { asm!("griddepcontrol.wait;", options(nostack)) }
}

#[inline(always)]
pub fn launch_dependents() {
    // SAFETY: as above.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) }
}

#[inline(always)]
pub unsafe fn peek<T: Access>(memory: Pointer<T>, i: u64) -> u32 {
    let word: u32;
    // SAFETY: in bounds and aligned by the caller's promise. Not `readonly`: other threads may write.
    unsafe {
        asm!(
            "ld.relaxed.gpu.global.b32 {word}, [{address}];",
            word = out(reg32) word,
            address = in(reg64) memory.global_address(i),
            options(nostack),
        );
    }
    word
}

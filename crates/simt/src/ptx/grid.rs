//! [`crate::grid`] on the device. The asm may touch memory, as far as LLVM knows: nothing moves across.

use core::arch::asm;

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

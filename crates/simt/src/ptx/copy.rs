//! [`crate::copy`] on the device. The asm is not `nomem`: LLVM moves no memory access across it.

use core::arch::asm;

use super::mem::{Access, Pointer};

/// Starts a copy of `WORDS` words, 2 or 4. Only copies of 16 bytes may bypass the L1 cache (`.cg`).
#[inline(always)]
pub unsafe fn start_if<T: Access, const WORDS: usize>(
    is_wanted: bool,
    to: u32,
    source: Pointer<T>,
    at: u64,
) {
    const { assert!(WORDS == 2 || WORDS == 4) };
    let is_wanted = u32::from(is_wanted);
    // SAFETY: if a copy is wanted, inside both, aligned and ordered by the caller's promise.
    unsafe {
        // `skip`: if no copy is wanted, element `at` need not exist.
        let from = source.skip(at).global_address(0);
        if WORDS == 4 {
            asm!(
                "{{ .reg .pred wanted; setp.ne.b32 wanted, {is_wanted}, 0;",
                "@wanted cp.async.cg.shared.global [{to}], [{from}], 16; }}",
                is_wanted = in(reg32) is_wanted,
                to = in(reg32) to,
                from = in(reg64) from,
                options(nostack),
            );
        } else {
            asm!(
                "{{ .reg .pred wanted; setp.ne.b32 wanted, {is_wanted}, 0;",
                "@wanted cp.async.ca.shared.global [{to}], [{from}], 8; }}",
                is_wanted = in(reg32) is_wanted,
                to = in(reg32) to,
                from = in(reg64) from,
                options(nostack),
            );
        }
    }
}

#[inline(always)]
pub fn commit_group() {
    // SAFETY: no operand and no precondition.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

#[inline(always)]
pub fn wait_for_groups<const PENDING: usize>() {
    // SAFETY: no precondition.
    unsafe { asm!("cp.async.wait_group {pending};", pending = const PENDING, options(nostack)) }
}

//! Programmatic dependent launch: a launch may start while the one before it in the stream still runs
//! (PTX ISA 9.7.13 `griddepcontrol`, sm_90). The emulator runs one launch at a time.

use crate::imp;
use crate::mem::{Element, Global};

/// Waits until all launches that this one depends on have ended and their writes are visible
/// (`griddepcontrol.wait`).
#[inline(always)]
pub fn wait_for_dependencies() {
    imp::grid::wait_for_dependencies();
}

/// Signals that, as far as this block is concerned, the launches that depend on this one may start
/// (`griddepcontrol.launch_dependents`). Their [`wait_for_dependencies`] still waits for the end of this
/// launch.
#[inline(always)]
pub fn launch_dependents() {
    imp::grid::launch_dependents();
}

/// A speculative read of element `i`, allowed before [`wait_for_dependencies`]. The value may be stale: compare it
/// with [`Global::load`] after the wait, or use it only for hints whose bounds you check. The speculative read is not
/// cached in L1, so that the later load reads memory again (`ld.relaxed.gpu.global.b32`). To test that no result
/// depends on it, the emulator gives about half of the blocks wrong speculative values.
///
/// # Safety
/// - Element `i` has 4 bytes, lies in the allocation and is aligned.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn peek<T: Element>(memory: Global<T>, i: u64) -> u32 {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: in bounds and aligned by the caller's promise.
    unsafe { imp::grid::peek(memory.0, i) }
}

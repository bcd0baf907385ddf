//! Programmatic dependent launch: a launch may start while the one before it in the stream still runs
//! (PTX ISA 9.7.13 `griddepcontrol`, sm_90). The emulator runs one launch at a time. Also waiting between
//! blocks of one launch.

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

/// A speculative read of element `i`, allowed before [`wait_for_dependencies`]: the value may be stale and
/// must be compared with [`Global::load`] after the wait. It is not cached in L1, so that load reads
/// memory again (`ld.relaxed.gpu.global.b32`). To test revalidation, the emulator gives about half of the
/// blocks a wrong speculative value.
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

/// Calls `poll` until it returns a value: for data that earlier blocks of the grid publish through
/// [`crate::atomic::DeviceAtomicU32`].
///
/// It terminates because the hardware starts blocks in the order of their index, x first. CUDA does not
/// guarantee this order, but every device has it and CUB's decoupled look-back scan relies on it. A block
/// must not wait for a later block. The emulator runs the blocks that wait for each other in order; a
/// wait that could never end panics.
#[inline(always)]
#[track_caller]
pub fn wait_for_earlier_blocks<T>(poll: impl Fn() -> Option<T>) -> T {
    imp::grid::wait_for_earlier_blocks(poll)
}

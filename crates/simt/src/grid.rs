//! Launches that overlap the one before them in their stream (PTX ISA 9.7.13 `griddepcontrol`, sm_90).
//! On the emulator a launch starts when the one before it has ended. And blocks that wait for others of
//! their launch.

use crate::imp;
use crate::mem::{Element, Global};

/// Waits until the launches this one depends on have ended and what they wrote is seen
/// (`griddepcontrol.wait`).
#[inline(always)]
pub fn wait_for_dependencies() {
    imp::grid::wait_for_dependencies();
}

/// Says that, for this block, the launches that depend on this one may start
/// (`griddepcontrol.launch_dependents`). They wait by [`wait_for_dependencies`] until it has ended.
#[inline(always)]
pub fn launch_dependents() {
    imp::grid::launch_dependents();
}

/// Element `i` as it may have been at any time before [`wait_for_dependencies`] returns: a guess, to be
/// checked against [`Global::load`] after it. Leaves nothing in a cache that such a load would find
/// (`ld.relaxed.gpu.global.b32`). The emulator gives about half of the blocks what other launches might
/// have left there.
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

/// What `poll` gives, as soon as it gives something: it looks for what earlier blocks of the grid leave by
/// [`crate::atomic::DeviceAtomicU32`].
///
/// Ends because blocks are started in the order of their number, x first: CUDA does not promise it, but
/// every device does it and CUB's scans rely on it. A block must not wait for a later one. On the emulator
/// the blocks that a block waits for are before it in the same group of the kernel table's `in_order`,
/// and one that would wait forever panics.
#[inline(always)]
#[track_caller]
pub fn wait_for_earlier_blocks<T>(poll: impl Fn() -> Option<T>) -> T {
    imp::grid::wait_for_earlier_blocks(poll)
}

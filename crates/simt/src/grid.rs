//! Launches that overlap the one before them in their stream (PTX ISA 9.7.13 `griddepcontrol`, sm_90).
//! On the emulator a launch starts when the one before it has ended.

use crate::imp;

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

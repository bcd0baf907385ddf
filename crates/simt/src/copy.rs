//! Asynchronous copies from global to shared memory (PTX ISA 9.7.9.25.3, `cp.async`, sm_80).
//!
//! A thread starts copies, commits them in groups, and waits for all of its groups but the last few. After
//! the wait the thread itself may read the data. Other threads may read it after a barrier that follows the wait.

use crate::imp;
use crate::mem::{Element, Global};
use crate::shared::Shared;

impl<const N: usize> Shared<u32, N> {
    /// Starts a copy of the 16 bytes at element `at` of `source` to words `i..i + 4`
    /// (`cp.async.cg.shared.global`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation of `source`; both addresses are multiples of 16 bytes;
    ///   `i + 4 <= N`.
    /// - No thread accesses the words until this thread has waited for the copy's group; other threads
    ///   also need a barrier after that wait.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_from<T: Element>(self, i: u32, source: Global<T>, at: u64) {
        // SAFETY: inside both, aligned and ordered by the caller's promise.
        unsafe { self.copy_from_if(true, i, source, at) }
    }

    /// [`Self::copy_from`] under a predicate instead of a branch.
    ///
    /// # Safety
    /// - As [`Self::copy_from`] if `is_wanted`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_from_if<T: Element>(
        self,
        is_wanted: bool,
        i: u32,
        source: Global<T>,
        at: u64,
    ) {
        // SAFETY: inside both, aligned and ordered by the caller's promise.
        unsafe { imp::copy::start_if::<_, 4>(is_wanted, self.address::<4>(i), source.0, at) }
    }

    /// [`Self::copy_from_if`] of 8 bytes, to words `i` and `i + 1` (`cp.async.ca.shared.global`).
    ///
    /// # Safety
    /// - As [`Self::copy_from_if`], with 8 bytes for 16 and `i + 2 <= N`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn copy_8_from_if<T: Element>(
        self,
        is_wanted: bool,
        i: u32,
        source: Global<T>,
        at: u64,
    ) {
        // SAFETY: inside both, aligned and ordered by the caller's promise.
        unsafe { imp::copy::start_if::<_, 2>(is_wanted, self.address::<2>(i), source.0, at) }
    }
}

/// Commits the copies that this thread has started since the last group; the group may be empty
/// (`cp.async.commit_group`).
#[inline(always)]
pub fn commit_group() {
    imp::copy::commit_group();
}

/// Waits for all of this thread's groups but the last `PENDING` (`cp.async.wait_group`).
#[inline(always)]
#[track_caller]
pub fn wait_for_groups<const PENDING: usize>() {
    imp::copy::wait_for_groups::<PENDING>();
}

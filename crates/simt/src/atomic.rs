//! Atomics, with the scope in the type's name, and the fences that order them (PTX ISA 9.7.13, `atom` and `fence`). All
//! atomics are relaxed except [`DeviceAtomicU32::add_acq_rel`].
//!
//! `core::sync::atomic` is no substitute on the device: its read-modify-writes lose their ordering
//! and its loads and stores are system-scoped.
//!
//! Do not spin on a value that another thread writes: the emulator runs a thread until its next
//! collective, and CUDA guarantees no progress between blocks.

use crate::imp;
use crate::mem::GlobalMut;
use crate::shared::Shared;

/// A word of global memory, atomic among all threads of the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAtomicU32 {
    word: imp::atomic::GlobalWord,
}

impl DeviceAtomicU32 {
    /// Element `index` of `memory` as an atomic.
    ///
    /// # Safety
    /// - Element `index` lies in the allocation and is aligned to 4 bytes.
    /// - The result is used during this launch only.
    /// - While the launch runs, all threads access it by this type only, or synchronization orders the plain accesses.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn new(memory: GlobalMut<u32>, index: u64) -> Self {
        // SAFETY: in bounds and aligned by the caller's promise.
        Self { word: unsafe { imp::atomic::global_word(memory.0, index) } }
    }

    /// Adds modulo 2^32; returns the old value (`atom.relaxed.gpu.global.add.u32`).
    #[inline(always)]
    #[expect(clippy::should_implement_trait, reason = "the name of the operation, as in atom.add")]
    pub fn add(self, value: u32) -> u32 {
        imp::atomic::global_add(self.word, value)
    }

    /// Adds modulo 2^32, with acquire-release order at device scope; returns the old value
    /// (`atom.acq_rel.gpu.global.add.u32`). Orders as [`Self::add`] between two [`fence_device`] does, in less time.
    #[inline(always)]
    pub fn add_acq_rel(self, value: u32) -> u32 {
        imp::atomic::global_add_acq_rel(self.word, value)
    }

    /// Stores the larger of the old value and `value`; returns the old value (`atom.relaxed.gpu.global.max.u32`).
    #[inline(always)]
    pub fn max(self, value: u32) -> u32 {
        imp::atomic::global_max(self.word, value)
    }

    /// Stores `value`; returns the old value (`atom.relaxed.gpu.global.exch.b32`).
    #[inline(always)]
    pub fn exchange(self, value: u32) -> u32 {
        imp::atomic::global_exchange(self.word, value)
    }

    /// Stores `new` if the old value is `expected`; returns the old value, which equals `expected` exactly if `new` was
    /// stored (`atom.relaxed.gpu.global.cas.b32`).
    #[inline(always)]
    pub fn compare_exchange(self, expected: u32, new: u32) -> u32 {
        imp::atomic::global_compare_exchange(self.word, expected, new)
    }

    /// The value (`ld.relaxed.gpu.global.u32`).
    #[inline(always)]
    #[must_use]
    pub fn load(self) -> u32 {
        imp::atomic::global_load(self.word)
    }

    /// Sets the value (`st.relaxed.gpu.global.u32`).
    #[inline(always)]
    pub fn store(self, value: u32) {
        imp::atomic::global_store(self.word, value);
    }
}

/// A word of shared memory, atomic among the threads of a block.
///
/// Its operations do not race with each other, but they race with plain accesses.
#[derive(Clone, Copy, Debug)]
pub struct BlockAtomicU32 {
    address: u32,
}

impl BlockAtomicU32 {
    /// Element `index` of `array` as an atomic.
    ///
    /// # Safety
    /// - `index < N`.
    /// - The element is written (by [`Self::store`] or a plain store and a barrier) before it is
    ///   read or modified.
    /// - No thread makes a plain access to it without a barrier between.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn new<const N: usize>(array: Shared<u32, N>, index: u32) -> Self {
        Self { address: array.address::<1>(index) }
    }

    /// Adds modulo 2^32; returns the old value (`atom.relaxed.cta.shared.add.u32`).
    #[inline(always)]
    #[track_caller]
    #[expect(clippy::should_implement_trait, reason = "the name of the operation, as in atom.add")]
    pub fn add(self, value: u32) -> u32 {
        imp::atomic::shared_add(self.address, value)
    }

    /// Stores the larger of the old value and `value`; returns the old value (`atom.relaxed.cta.shared.max.u32`).
    #[inline(always)]
    #[track_caller]
    pub fn max(self, value: u32) -> u32 {
        imp::atomic::shared_max(self.address, value)
    }

    /// Stores `value`; returns the old value (`atom.relaxed.cta.shared.exch.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn exchange(self, value: u32) -> u32 {
        imp::atomic::shared_exchange(self.address, value)
    }

    /// Stores `new` if the old value is `expected`; returns the old value, which equals `expected` exactly if `new` was
    /// stored (`atom.relaxed.cta.shared.cas.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn compare_exchange(self, expected: u32, new: u32) -> u32 {
        imp::atomic::shared_compare_exchange(self.address, expected, new)
    }

    /// The value (`ld.relaxed.cta.shared.u32`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load(self) -> u32 {
        imp::atomic::shared_load(self.address)
    }

    /// Sets the value (`st.relaxed.cta.shared.u32`).
    #[inline(always)]
    #[track_caller]
    pub fn store(self, value: u32) {
        imp::atomic::shared_store(self.address, value);
    }
}

/// Orders this thread's accesses before the fence and after it, as seen by the block
/// (`fence.acq_rel.cta`).
#[inline(always)]
pub fn fence_block() {
    imp::atomic::fence_block();
}

/// Orders this thread's accesses before the fence and after it, as seen by the device
/// (`fence.acq_rel.gpu`).
#[inline(always)]
pub fn fence_device() {
    imp::atomic::fence_device();
}

/// Orders this thread's accesses before the fence and after it, as seen by host and device
/// (`fence.acq_rel.sys`).
#[inline(always)]
pub fn fence_system() {
    imp::atomic::fence_system();
}

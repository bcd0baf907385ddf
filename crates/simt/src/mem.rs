//! Global memory: typed views of a kernel's pointer arguments.
//!
//! On the device a view is the bare pointer, so that loads and stores stay in the global address
//! space. On the CPU a view also has the bounds of the allocation it was bound to, and every access
//! is checked against them.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu::{Fault, Memory};
use crate::imp;

/// Element types of global memory: `u8`, `u16`, `u32`, `i32`, `f32`. Sealed.
pub trait Element: Copy + imp::mem::Access {}

impl Element for u8 {}
impl Element for u16 {}
impl Element for u32 {}
impl Element for i32 {}
impl Element for f32 {}

/// A pointer to elements that are not written while the kernel may read them: until the launch ends, and from
/// [`crate::grid::wait_for_dependencies`] on in a kernel that calls it, since the previous launch may write until then.
/// The emulator detects such writes only in views by [`GlobalMut::read_only`].
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Global<T: Element>(pub(crate) imp::mem::Pointer<T>);

/// A pointer to elements that the launch may write.
///
/// Plain accesses of different threads of a launch to one element, at least one of them a store, need
/// synchronization between them: a barrier, or, between blocks, an acquire-release atomic or fences around a relaxed
/// one. Accesses without synchronization must be atomic ([`crate::atomic::DeviceAtomicU32`]). The emulator reports
/// races.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct GlobalMut<T: Element>(pub(crate) imp::mem::Pointer<T>);

impl<T: Element> Global<T> {
    /// A view of `pointer`, a `const` pointer parameter of the kernel.
    ///
    /// # Safety
    /// - `pointer` points to global memory that is valid for reads for the whole launch, and that is not written during
    ///   the launch.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    #[must_use]
    pub unsafe fn from_ptr(pointer: *const T) -> Self {
        Self(imp::mem::Pointer::new(pointer.cast_mut()))
    }

    /// A view of the live allocation of `memory` that `address` lies in, starting at `address`.
    /// `argument` names it in faults.
    ///
    /// # Errors
    /// `UnboundPointer` when no live allocation contains `address`.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn bind(memory: &Memory, address: u64, argument: &'static str) -> Result<Self, Fault> {
        imp::mem::Pointer::bind(memory, address, argument, false).map(Self)
    }

    /// The same memory as elements of `U`; index 0 keeps its address.
    #[inline(always)]
    #[must_use]
    pub fn cast<U: Element>(self) -> Global<U> {
        Global(self.0.cast())
    }

    /// Element `i` (`ld.global`).
    ///
    /// # Safety
    /// - Element `i` lies in the allocation and is aligned.
    /// - It is not written during the launch: *unchecked*.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load(self, i: u64) -> T {
        // SAFETY: in bounds, aligned and unwritten by the caller's promise.
        unsafe { imp::mem::load_constant(self.0, i) }
    }

    /// The 8 bytes at element `i` (`ld.global.nc.v2.u32`).
    ///
    /// # Safety
    /// - The 8 bytes lie in the allocation, and their address is a multiple of 8.
    /// - They are not written during the launch: *unchecked*.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x2(self, i: u64) -> [u32; 2] {
        // SAFETY: in bounds, aligned and unwritten by the caller's promise.
        unsafe { imp::mem::load_constant_x2(self.0, i) }
    }

    /// The 16 bytes at element `i` (`ld.global.nc.v4.u32`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation, and their address is a multiple of 16.
    /// - They are not written during the launch: *unchecked*.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4(self, i: u64) -> [u32; 4] {
        // SAFETY: in bounds, aligned and unwritten by the caller's promise.
        unsafe { imp::mem::load_constant_x4(self.0, i) }
    }

    /// The 16 bytes at element `i`, for memory that only copies write, and no launch: the load may precede
    /// [`crate::grid::wait_for_dependencies`] (`ld.global.nc.L1::no_allocate.v4.u32`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation, and their address is a multiple of 16.
    /// - No launch that precedes this one in the stream or may overlap with it writes them: *unchecked*.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4_early(self, i: u64) -> [u32; 4] {
        // SAFETY: in bounds, aligned and unwritten by the caller's promise.
        unsafe { imp::mem::load_early_x4(self.0, i) }
    }

    /// Computes the address of element `i` here, ahead of a load that follows a wait or a barrier.
    /// Accesses no memory.
    ///
    /// # Safety
    /// - Element `i` lies in the allocation.
    #[inline(always)]
    pub unsafe fn precompute_address(self, i: u64) {
        // SAFETY: in bounds by the caller's promise.
        unsafe { imp::mem::precompute_address(self.0, i) }
    }

    /// Prefetches the `bytes` bytes at element `i` into the L2 cache; a hint only
    /// (`cp.async.bulk.prefetch.L2.global`, PTX ISA 9.7.9.25.4, sm_90).
    ///
    /// # Safety
    /// - The bytes lie in the allocation; their address and number are multiples of 16.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn prefetch_l2(self, i: u64, bytes: u32) {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::prefetch_l2(self.0, i, bytes) }
    }

    /// [`Self::load`] of 4 bytes that LLVM does not move. PTX lets `ptxas` move it; none was seen to move one below a
    /// barrier, a store or another such load. Use it for several loads that should be in flight together, for speed
    /// alone (`ld.global.b32`).
    ///
    /// # Safety
    /// - Element `i` has 4 bytes, lies in the allocation and is aligned.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32_volatile(self, i: u64) -> u32 {
        const { assert!(size_of::<T>() == 4) };
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::load_volatile(self.0, i) }
    }

    /// [`Self::load_u32x4`] that LLVM does not move; see [`Self::load_u32_volatile`]
    /// (`ld.global.v4.u32`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation, and their address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4_volatile(self, i: u64) -> [u32; 4] {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::load_x4(self.0, i) }
    }
}

/// Several views, for elements of which only one thread knows the view. That thread passes an element's place (64 bits)
/// to other threads, for instance through shared memory. On the device a place is an address, so that the other threads
/// do not have to select a pointer.
#[derive(Clone, Copy, Debug)]
pub struct Views<T: Element, const N: usize>(pub [Global<T>; N]);

impl<T: Element, const N: usize> Views<T, N> {
    /// The place of element `i` of view `which`, which is below `N`: low word, high word.
    #[inline(always)]
    #[must_use]
    pub fn place(self, which: u32, i: u64) -> [u32; 2] {
        let place = imp::mem::place(self.0.map(|view| view.0), which, i);
        [place as u32, (place >> 32) as u32]
    }

    /// The view that starts at a place.
    ///
    /// # Safety
    /// The place was returned by [`Self::place`] for the same views.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(self, [low, high]: [u32; 2]) -> Global<T> {
        let place = u64::from(high) << 32 | u64::from(low);
        Global(imp::mem::at_place(self.0.map(|view| view.0), place))
    }
}

impl<T: Element> GlobalMut<T> {
    /// A view of `pointer`, a `mut` pointer parameter of the kernel.
    ///
    /// # Safety
    /// - `pointer` points to global memory that is valid for reads and writes for the whole launch.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    #[must_use]
    pub unsafe fn from_ptr(pointer: *mut T) -> Self {
        Self(imp::mem::Pointer::new(pointer))
    }

    /// A view of the live allocation of `memory` that `address` lies in, starting at `address`.
    /// `argument` names it in faults.
    ///
    /// # Errors
    /// `UnboundPointer` when no live allocation contains `address`.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn bind(memory: &Memory, address: u64, argument: &'static str) -> Result<Self, Fault> {
        imp::mem::Pointer::bind(memory, address, argument, true).map(Self)
    }

    /// The same memory as elements of `U`; index 0 keeps its address.
    #[inline(always)]
    #[must_use]
    pub fn cast<U: Element>(self) -> GlobalMut<U> {
        GlobalMut(self.0.cast())
    }

    /// The same view, with its address behind an optimisation barrier ([`crate::thread::opt_barrier_u32`]): it stays in
    /// registers, and the compiler does not compute it again. Emits no instruction.
    #[inline(always)]
    #[must_use]
    pub fn opt_barrier(self) -> Self {
        Self(self.0.opt_barrier())
    }

    /// The same memory, from element `i` on.
    #[inline(always)]
    #[must_use]
    pub fn skip(self, i: u64) -> Self {
        Self(self.0.skip(i))
    }

    /// The same memory, for reads only.
    ///
    /// # Safety
    /// - No element that is read through the result as a vector (`ld.global.nc`) is written during the launch, and no
    ///   other element is written without synchronization between the write and the read.
    #[inline(always)]
    #[must_use]
    pub unsafe fn read_only(self) -> Global<T> {
        Global(self.0)
    }

    /// Element `i` (`ld.global`).
    ///
    /// # Safety
    /// - Element `i` lies in the allocation and is aligned.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load(self, i: u64) -> T {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::load(self.0, i) }
    }

    /// The 8 bytes at element `i` (`ld.global.v2.u32`).
    ///
    /// # Safety
    /// - The 8 bytes lie in the allocation, and their address is a multiple of 8.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x2(self, i: u64) -> [u32; 2] {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::load_x2(self.0, i) }
    }

    /// The 16 bytes at element `i` (`ld.global.v4.u32`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation, and their address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4(self, i: u64) -> [u32; 4] {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::load_x4(self.0, i) }
    }

    /// Sets element `i` (`st.global`).
    ///
    /// # Safety
    /// - Element `i` lies in the allocation and is aligned.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, i: u64, value: T) {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::store(self.0, i, value) }
    }

    /// Sets the 8 bytes at element `i` (`st.global.v2.u32`).
    ///
    /// # Safety
    /// - The 8 bytes lie in the allocation, and their address is a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_u32x2(self, i: u64, value: [u32; 2]) {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::store_x2(self.0, i, value) }
    }

    /// Sets the 16 bytes at element `i` (`st.global.v4.u32`).
    ///
    /// # Safety
    /// - The 16 bytes lie in the allocation, and their address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_u32x4(self, i: u64, value: [u32; 4]) {
        // SAFETY: in bounds and aligned by the caller's promise.
        unsafe { imp::mem::store_x4(self.0, i, value) }
    }
}

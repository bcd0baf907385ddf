//! Shared memory: one dynamic allocation per block, sized by the launch, divided into [`Shared`] arrays. It starts at
//! a multiple of 1,024 bytes.
//!
//! Accesses are 32-bit words. A block starts with unwritten memory: reading a word before writing it
//! is a fault on the emulator and gives undefined data on the device. If two threads access a word, and at least
//! one of them writes, a barrier must lie between the accesses: [`crate::thread::sync_threads`],
//! [`crate::thread::NamedBarrier`], within a warp [`crate::warp::sync_warp`], and between the blocks of a cluster
//! [`crate::cluster::sync_cluster`] or its two halves. The emulator accepts nothing else as ordering, not even a fence.

use core::marker::PhantomData;

use crate::imp;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for f32 {}
}

/// Element types of shared memory, one 32-bit word each: `u32`, `f32`. Sealed.
pub trait Word: Copy + sealed::Sealed {
    /// The word's bits.
    fn to_word(self) -> u32;
    /// The value with these bits.
    fn from_word(word: u32) -> Self;
}

impl Word for u32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        word
    }
}

impl Word for f32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        f32::from_bits(word)
    }
}

/// `N` words of the block's shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T: Word, const N: usize> {
    /// Address of the first word in the backend's shared window.
    base: u32,
    element: PhantomData<T>,
}

impl<T: Word, const N: usize> Shared<T, N> {
    /// Bytes that the array occupies.
    pub const BYTES: u32 = 4 * N as u32;

    /// The array that starts `byte_offset` bytes into the block's shared memory.
    ///
    /// # Safety
    /// - `byte_offset` is a multiple of 4, and `byte_offset + Self::BYTES` is no more than the
    ///   launch's shared bytes.
    /// - Barriers separate the uses of arrays that overlap.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn at(byte_offset: u32) -> Self {
        // SAFETY: aligned and inside the block's shared memory by the caller's promise.
        let base = unsafe { imp::shared::array(byte_offset, Self::BYTES) };
        Self { base, element: PhantomData }
    }

    /// Element `i` (`ld.shared.b32`).
    ///
    /// # Safety
    /// - `i < N`, the element has been written, and no other thread writes it without a barrier
    ///   between.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load(self, i: u32) -> T {
        // SAFETY: inside the array, written and ordered by the caller's promise.
        T::from_word(unsafe { imp::shared::load(self.address::<1>(i)) })
    }

    /// Sets element `i` (`st.shared.b32`).
    ///
    /// # Safety
    /// - `i < N`, and no other thread touches the element without a barrier between.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, i: u32, value: T) {
        // SAFETY: inside the array and ordered by the caller's promise.
        unsafe { imp::shared::store(self.address::<1>(i), value.to_word()) }
    }

    /// The bits of elements `i` and `i + 1` (`ld.shared.v2.b32`).
    ///
    /// # Safety
    /// - As [`Self::load`] for both, and the address of element `i` is a multiple of 8 bytes.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x2(self, i: u32) -> [u32; 2] {
        // SAFETY: inside the array, aligned, written and ordered by the caller's promise.
        unsafe { imp::shared::load_x2(self.address::<2>(i)) }
    }

    /// Sets the bits of elements `i` and `i + 1` (`st.shared.v2.b32`).
    ///
    /// # Safety
    /// - As [`Self::store`] for both, and the address of element `i` is a multiple of 8 bytes.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_u32x2(self, i: u32, value: [u32; 2]) {
        // SAFETY: inside the array, aligned and ordered by the caller's promise.
        unsafe { imp::shared::store_x2(self.address::<2>(i), value) }
    }

    /// [`Self::store_u32x2`] under a predicate instead of a branch (`@p st.shared.v2.b32`).
    ///
    /// # Safety
    /// - As [`Self::store_u32x2`], if `there`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_u32x2_where(self, there: bool, i: u32, value: [u32; 2]) {
        // SAFETY: inside the array, aligned and ordered by the caller's promise.
        unsafe { imp::shared::store_x2_where(there, || self.address::<2>(i), value) }
    }

    /// The bits of elements `i..i + 4` (`ld.shared.v4.b32`).
    ///
    /// # Safety
    /// - As [`Self::load`] for each of the four, and the address of element `i` is a multiple
    ///   of 16 bytes.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn load_u32x4(self, i: u32) -> [u32; 4] {
        // SAFETY: inside the array, aligned, written and ordered by the caller's promise.
        unsafe { imp::shared::load_x4(self.address::<4>(i)) }
    }

    /// Sets the bits of elements `i..i + 4` (`st.shared.v4.b32`).
    ///
    /// # Safety
    /// - As [`Self::store`] for each of the four, and the address of element `i` is a multiple
    ///   of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_u32x4(self, i: u32, value: [u32; 4]) {
        // SAFETY: inside the array, aligned and ordered by the caller's promise.
        unsafe { imp::shared::store_x4(self.address::<4>(i), value) }
    }

    /// Address of element `i`, for one access of `WORDS` words.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn address<const WORDS: u32>(self, i: u32) -> u32 {
        imp::shared::element::<WORDS>(self.base, Self::BYTES / 4, i)
    }
}

//! [`crate::mem`] on the CPU: pointers with bounds checks.

use std::marker::PhantomData;
use std::panic::Location;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use super::block::current;
use super::fault::{AccessKind, Fault, FaultKind, Site};
use super::global_memory::Place;
use super::memory::{Extent, Memory};

/// An element type, as the emulator reads and writes it.
///
/// Memory that a launch may write is accessed by relaxed atomics, which are plain moves on the CPU: a race
/// on global memory gives a wrong result, not undefined behaviour in the host process.
pub trait Access: Copy {
    /// Reads an element.
    ///
    /// # Safety
    /// - `pointer` is aligned and valid for reads and writes; all accesses are atomic.
    unsafe fn load(pointer: *mut Self) -> Self;
    /// Writes an element.
    ///
    /// # Safety
    /// - `pointer` is aligned and valid for reads and writes; all accesses are atomic.
    unsafe fn store(pointer: *mut Self, value: Self);
}

macro_rules! access_by {
    ($($element:ty as $atomic:ty: $to:expr, $from:expr;)*) => { $(
        impl Access for $element {
            #[inline(always)]
            unsafe fn load(pointer: *mut Self) -> Self {
                // SAFETY: aligned, valid and accessed atomically by the caller's promise.
                let bits = unsafe { <$atomic>::from_ptr(pointer.cast()) }.load(Ordering::Relaxed);
                $from(bits)
            }
            #[inline(always)]
            unsafe fn store(pointer: *mut Self, value: Self) {
                let bits = $to(value);
                // SAFETY: aligned, valid and accessed atomically by the caller's promise.
                unsafe { <$atomic>::from_ptr(pointer.cast()) }.store(bits, Ordering::Relaxed);
            }
        }
    )* };
}

access_by! {
    u8 as AtomicU8: u8::from, u8::from;
    u16 as AtomicU16: u16::from, u16::from;
    u32 as AtomicU32: u32::from, u32::from;
    i32 as AtomicU32: i32::cast_unsigned, u32::cast_signed;
    f32 as AtomicU32: f32::to_bits, f32::from_bits;
}

/// A pointer argument, bound to an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Pointer<T> {
    allocation: Extent,
    /// Bytes from the start of the allocation to where the argument points.
    offset: u64,
    argument: &'static str,
    /// Whether accesses are checked for races: the launch may write there, and the memory does not allow races.
    is_written: bool,
    element: PhantomData<*mut T>,
}

// SAFETY: a pointer is an address and its bounds; what it points to is device memory, which all
// threads of a launch may access under the duties of `crate::mem`.
unsafe impl<T> Send for Pointer<T> {}
// SAFETY: as for `Send`; it has no interior of its own.
unsafe impl<T> Sync for Pointer<T> {}

/// Records an access of the running thread, and fails the thread if it races.
fn record(place: Place, kind: AccessKind, location: Site) {
    current(|block| {
        let done = block.observe(|thread, memory| memory.access(thread, place, kind, location));
        done.unwrap_or_else(|fault| block.fail(fault));
    });
}

impl<T: Access> Pointer<T> {
    pub fn bind(
        memory: &Memory,
        address: u64,
        argument: &'static str,
        is_written: bool,
    ) -> Result<Self, Fault> {
        let allocation = memory.find(address).ok_or(Fault {
            kernel: None,
            block: None,
            kind: Box::new(FaultKind::UnboundPointer { argument, address }),
        })?;
        let offset = address - allocation.address;
        let is_written = is_written && !memory.allows_races();
        Ok(Self { allocation, offset, argument, is_written, element: PhantomData })
    }

    /// The same pointer to elements of `U`.
    #[inline(always)]
    pub fn cast<U>(self) -> Pointer<U> {
        let Self { allocation, offset, argument, is_written, .. } = self;
        Pointer { allocation, offset, argument, is_written, element: PhantomData }
    }

    #[inline(always)]
    pub fn opt_barrier(self) -> Self {
        self
    }

    /// The pointer to element `i`.
    #[inline(always)]
    pub fn skip(self, i: u64) -> Self {
        let offset = i.saturating_mul(size_of::<T>() as u64).saturating_add(self.offset);
        Self { offset, ..self }
    }

    /// The pointer to the `bytes` bytes at element `i`; checks that they are in bounds and aligned to `bytes`.
    #[inline(always)]
    #[track_caller]
    pub fn at<U>(self, i: u64, bytes: u32) -> *mut U {
        let offset = i.checked_mul(size_of::<T>() as u64).and_then(|i| i.checked_add(self.offset));
        let end = offset.and_then(|offset| offset.checked_add(u64::from(bytes)));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= self.allocation.bytes => {
                let address = self.allocation.address + offset;
                if !address.is_multiple_of(u64::from(bytes)) {
                    self.misaligned(address, bytes, Location::caller());
                }
                with_exposed_provenance_mut(address as usize)
            }
            _ => self.out_of_bounds(i, bytes, Location::caller()),
        }
    }

    /// The place of the `bytes` bytes at element `i`, which are in bounds; `None` if they are not checked for races.
    #[inline(always)]
    pub fn watched(self, i: u64, bytes: u32) -> Option<Place> {
        if !self.is_written {
            return None;
        }
        let offset = self.offset + i * size_of::<T>() as u64;
        let (address, argument) = (self.allocation.address + offset, self.argument);
        Some(Place { address, bytes, argument, offset })
    }

    /// As [`Self::at`], for an access of the running thread: also records it and checks it for races.
    #[inline(always)]
    #[track_caller]
    pub fn access<U>(self, i: u64, bytes: u32, kind: AccessKind) -> *mut U {
        let pointer = self.at(i, bytes);
        if let Some(place) = self.watched(i, bytes) {
            record(place, kind, Location::caller());
        }
        pointer
    }

    #[cold]
    fn out_of_bounds(self, index: u64, bytes: u32, location: Site) -> ! {
        current(|block| {
            block.fail(FaultKind::OutOfBounds {
                argument: self.argument,
                label: self.allocation.label,
                index,
                offset: u128::from(self.offset) + u128::from(index) * size_of::<T>() as u128,
                bytes,
                allocation_bytes: self.allocation.bytes,
                thread: block.running.get(),
                location,
            })
        })
    }

    #[cold]
    fn misaligned(self, address: u64, align: u32, location: Site) -> ! {
        current(|block| {
            let (memory, thread) = (self.argument, block.running.get());
            block.fail(FaultKind::Misaligned { memory, address, align, thread, location })
        })
    }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_constant<T: Access>(pointer: Pointer<T>, i: u64) -> T {
    let element: *mut T = pointer.access(i, size_of::<T>() as u32, AccessKind::Read);
    // SAFETY: in bounds of a live allocation and aligned. Atomically, since a caller that breaks its promise must not reach
    // undefined behaviour: others may write.
    unsafe { T::load(element) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_constant_x2<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 2] {
    // SAFETY: as in `load_constant`.
    unsafe { load_words(pointer.access(i, 8, AccessKind::ReadConstant)) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_constant_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    // SAFETY: as in `load_constant`.
    unsafe { load_words(pointer.access(i, 16, AccessKind::ReadConstant)) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_early_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    // SAFETY: by this function's own contract.
    unsafe { load_constant_x4(pointer, i) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load<T: Access>(pointer: Pointer<T>, i: u64) -> T {
    let element: *mut T = pointer.access(i, size_of::<T>() as u32, AccessKind::Read);
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { T::load(element) }
}

/// Only checks that the first and the last 16 bytes are in bounds and aligned.
#[track_caller]
pub unsafe fn prefetch_l2<T: Access>(pointer: Pointer<T>, i: u64, bytes: u32) {
    let _: *mut u32 = pointer.at(i, 16);
    let _: *mut u32 = pointer.at(i + u64::from(bytes - 16) / size_of::<T>() as u64, 16);
}

#[inline(always)]
pub unsafe fn precompute_address<T: Access>(_pointer: Pointer<T>, _i: u64) {}

#[inline(always)]
#[track_caller]
pub unsafe fn load_volatile<T: Access>(pointer: Pointer<T>, i: u64) -> u32 {
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { u32::load(pointer.access(i, 4, AccessKind::Read)) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_x2<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 2] {
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { load_words(pointer.access(i, 8, AccessKind::Read)) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn load_x4<T: Access>(pointer: Pointer<T>, i: u64) -> [u32; 4] {
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { load_words(pointer.access(i, 16, AccessKind::Read)) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn store<T: Access>(pointer: Pointer<T>, i: u64, value: T) {
    let element: *mut T = pointer.access(i, size_of::<T>() as u32, AccessKind::Write);
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { T::store(element, value) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn store_x2<T: Access>(pointer: Pointer<T>, i: u64, value: [u32; 2]) {
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { store_words(pointer.access(i, 8, AccessKind::Write), value) }
}

#[inline(always)]
#[track_caller]
pub unsafe fn store_x4<T: Access>(pointer: Pointer<T>, i: u64, value: [u32; 4]) {
    // SAFETY: in bounds of a live allocation and aligned; views that write access it atomically.
    unsafe { store_words(pointer.access(i, 16, AccessKind::Write), value) }
}

/// # Safety
/// - `N` words at `first` are aligned and valid for reads and writes; all accesses are atomic.
pub unsafe fn load_words<const N: usize>(first: *mut u32) -> [u32; N] {
    // SAFETY: word `i < N`, by the caller's promise.
    std::array::from_fn(|i| unsafe { u32::load(first.add(i)) })
}

/// # Safety
/// - `N` words at `first` are aligned and valid for reads and writes; all accesses are atomic.
unsafe fn store_words<const N: usize>(first: *mut u32, value: [u32; N]) {
    for (i, value) in value.into_iter().enumerate() {
        // SAFETY: word `i < N`, by the caller's promise.
        unsafe { u32::store(first.add(i), value) }
    }
}

/// Low bits of a place, which hold the index of the element. The bits above hold the index of the view.
const ELEMENT_BITS: u32 = 56;

/// The place of element `i` of view `which`: both indices in one number.
pub fn place<T: Access, const N: usize>(_views: [Pointer<T>; N], which: u32, i: u64) -> u64 {
    assert!(i >> ELEMENT_BITS == 0, "no allocation has element {i}");
    u64::from(which) << ELEMENT_BITS | i
}

/// The view that starts at a place.
pub fn at_place<T: Access, const N: usize>(views: [Pointer<T>; N], place: u64) -> Pointer<T> {
    let which = usize::try_from(place >> ELEMENT_BITS).expect("eight bits");
    views[which].skip(place & ((1 << ELEMENT_BITS) - 1))
}

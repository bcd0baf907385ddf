//! Typed buffers and pointers over a device's raw memory.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::{Device, RawMemory, RawPinned};

/// An address on a device, typed by what it points to. Not dereferenceable on the host.
///
/// `#[repr(transparent)]` over the 64-bit address: it is what a kernel's `.param .u64` receives.
#[repr(transparent)]
pub struct DevicePtr<T> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

impl<T> DevicePtr<T> {
    /// The pointer to `address`, for memory an embedder owns.
    #[must_use]
    pub const fn from_address(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// The address.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.address
    }

    /// The pointer `count` elements further on.
    #[must_use]
    pub const fn offset(self, count: u64) -> Self {
        Self::from_address(self.address + count * size_of::<T>() as u64)
    }
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> PartialEq for DevicePtr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl<T> Eq for DevicePtr<T> {}

impl<T> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}

/// Device memory of `len` elements of `T`. Cloning shares it; the last clone frees it.
pub struct Buffer<D: Device, T> {
    memory: Arc<D::Memory>,
    /// First element of `memory` that belongs to it.
    start: u64,
    len: u64,
    element: PhantomData<fn() -> T>,
}

impl<D: Device, T> Clone for Buffer<D, T> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), ..*self }
    }
}

impl<D: Device, T: Pod> Buffer<D, T> {
    /// All of `memory` as elements of `T`.
    pub(super) fn new(memory: D::Memory) -> Self {
        let len = memory.bytes() / size_of::<T>() as u64;
        Self { memory: Arc::new(memory), start: 0, len, element: PhantomData }
    }

    /// `len` of its elements from `start` on, sharing the memory; `None` if it has not that many.
    #[must_use]
    pub fn slice(&self, start: u64, len: u64) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| Self { start: self.start + start, len, ..self.clone() })
    }

    /// The same bytes as elements of `U`; a last part of one is left out.
    #[must_use]
    pub fn cast<U: Pod>(&self) -> Buffer<D, U> {
        let size = size_of::<U>() as u64;
        let start = self.start * size_of::<T>() as u64;
        debug_assert!(start.is_multiple_of(size), "a slice that starts inside an element");
        let memory = Arc::clone(&self.memory);
        Buffer { memory, start: start / size, len: self.bytes() / size, element: PhantomData }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len * size_of::<T>() as u64
    }

    /// Pointer to the first element, for launches.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr<T> {
        DevicePtr::from_address(self.memory.address()).offset(self.start)
    }

    /// The memory itself, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Arc<D::Memory> {
        Arc::clone(&self.memory)
    }
}

/// Pinned host memory of `T`, the source of copies that do not wait.
pub struct Pinned<D: Device, T> {
    memory: D::PinnedMemory,
    len: usize,
    element: PhantomData<T>,
}

impl<D: Device, T: Pod> Pinned<D, T> {
    /// The first `len` elements of `memory`.
    pub(super) fn new(memory: D::PinnedMemory, len: usize) -> Self {
        Self { memory, len, element: PhantomData }
    }

    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        &bytemuck::cast_slice(self.memory.bytes())[..self.len]
    }

    /// The elements, to write.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(self.memory.bytes_mut())[..self.len]
    }
}

//! Typed device memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::Pod;

use crate::backend::{Backend, RawMemory};
use crate::checks::{check_device, check_element};
use crate::device::Device;
use crate::error::DeviceError;
use crate::identity::DeviceId;
use crate::owned::Owned;
use crate::pointer::{DevicePtr, DevicePtrMut};
use crate::span::Span;

/// One allocation of a device, for a graph to keep alive. Dropping the last clone frees it.
pub struct Memory<B: Backend> {
    shared: Arc<Allocation<B>>,
}

struct Allocation<B: Backend> {
    raw: Owned<B::Memory>,
    device: Device<B>,
}

impl<B: Backend> Clone for Memory<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Backend> fmt::Debug for Memory<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("span", &self.span()).finish_non_exhaustive()
    }
}

impl<B: Backend> Memory<B> {
    pub(crate) fn new(raw: B::Memory, device: &Device<B>) -> Self {
        let raw = device.own(raw);
        Self { shared: Arc::new(Allocation { raw, device: device.clone() }) }
    }

    /// Its whole range.
    #[must_use]
    pub fn span(&self) -> Span {
        let raw = &*self.shared.raw;
        Span { address: raw.address(), bytes: raw.bytes(), device: self.shared.device.id() }
    }
}

/// Device memory of `len` elements of `T` that is only read: downloaded, sliced, and passed to `const`
/// arguments of kernels. Cloning shares it; the last clone frees it.
///
/// Made by [`Buffer::view`]. Its elements may change, through the buffer that it is a view of.
pub struct View<B: Backend, T> {
    memory: Memory<B>,
    /// Offset of its first byte in `memory`.
    offset: u64,
    len: u64,
    element: PhantomData<fn() -> T>,
}

impl<B: Backend, T> fmt::Debug for View<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("address", &(self.memory.span().address + self.offset))
            .field("elements", &self.len)
            .finish_non_exhaustive()
    }
}

impl<B: Backend, T> Clone for View<B, T> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), ..*self }
    }
}

impl<B: Backend, T: Pod> View<B, T> {
    /// `len` of its elements from `start` on, sharing the memory; `None` if not all of them exist.
    #[must_use]
    pub fn slice(&self, start: u64, len: u64) -> Option<Self> {
        let end = start.checked_add(len)?;
        let offset = || self.offset + start * size_of::<T>() as u64;
        (end <= self.len).then(|| Self { offset: offset(), len, ..self.clone() })
    }

    /// The same bytes as elements of `U`.
    ///
    /// # Errors
    /// [`DeviceError::Cast`] unless they are a whole number of elements, the first of them aligned;
    /// [`DeviceError::Element`].
    pub fn cast<U: Pod>(&self) -> Result<View<B, U>, DeviceError> {
        check_element::<U>()?;
        let (size, align) = (size_of::<U>() as u64, align_of::<U>() as u64);
        let (bytes, offset) = (self.bytes(), self.offset);
        // The memory itself is aligned to more than any element.
        if !bytes.is_multiple_of(size) || !offset.is_multiple_of(align) {
            return Err(DeviceError::Cast { offset, bytes, size, align });
        }
        let memory = self.memory.clone();
        Ok(View { memory, offset, len: bytes / size, element: PhantomData })
    }

    /// Number of elements.
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

    /// Pointer to the elements, for `const` arguments of launches.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr<T> {
        DevicePtr::new(self.span())
    }

    /// Its range of the device's memory.
    #[must_use]
    pub fn span(&self) -> Span {
        let memory = self.memory.span();
        Span { address: memory.address + self.offset, bytes: self.bytes(), ..memory }
    }

    /// The memory itself, for a graph to keep alive.
    #[must_use]
    pub fn memory(&self) -> Memory<B> {
        self.memory.clone()
    }

    /// The same elements, writable: for tests that corrupt memory and check that this is detected.
    ///
    /// # Safety
    /// The owner of the memory allows writes at these places at this time. Nothing may rest on what it
    /// holds that a kernel does not check, and no queued work may touch it while it is written.
    #[must_use]
    pub unsafe fn writable(&self) -> Buffer<B, T> {
        Buffer(self.clone())
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> &Device<B> {
        &self.memory.shared.device
    }

    /// The range of `len` elements from `at` on, if this is a buffer of device `used`.
    pub(crate) fn range(
        &self,
        what: &'static str,
        used: DeviceId,
        at: u64,
        len: u64,
    ) -> Result<Span, DeviceError> {
        let span = self.span();
        check_device("buffer", span.device, used)?;
        let found = self.len.saturating_sub(at);
        if at > self.len || found < len {
            return Err(DeviceError::Length { what, found, needed: len });
        }
        let size = size_of::<T>() as u64;
        Ok(Span { address: span.address + at * size, bytes: len * size, ..span })
    }
}

/// Device memory of `len` elements of `T` that may be written. It is a [`View`] too. Cloning shares it; the
/// last clone frees it.
pub struct Buffer<B: Backend, T>(View<B, T>);

impl<B: Backend, T> fmt::Debug for Buffer<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffer").field(&self.0).finish()
    }
}

impl<B: Backend, T> Clone for Buffer<B, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend, T> Deref for Buffer<B, T> {
    type Target = View<B, T>;

    fn deref(&self) -> &View<B, T> {
        &self.0
    }
}

impl<B: Backend, T> From<Buffer<B, T>> for View<B, T> {
    fn from(buffer: Buffer<B, T>) -> Self {
        buffer.0
    }
}

impl<B: Backend, T: Pod> Buffer<B, T> {
    /// All of `memory`, which has `len` elements.
    pub(crate) fn new(memory: Memory<B>, len: u64) -> Self {
        Self(View { memory, offset: 0, len, element: PhantomData })
    }

    /// The same elements, to read only.
    #[must_use]
    pub fn view(&self) -> View<B, T> {
        self.0.clone()
    }

    /// As [`View::slice`].
    #[must_use]
    pub fn slice(&self, start: u64, len: u64) -> Option<Self> {
        self.0.slice(start, len).map(Self)
    }

    /// As [`View::cast`].
    ///
    /// # Errors
    /// As [`View::cast`].
    pub fn cast<U: Pod>(&self) -> Result<Buffer<B, U>, DeviceError> {
        self.0.cast().map(Buffer)
    }

    /// As [`View::memory`].
    #[must_use]
    pub fn memory(&self) -> Memory<B> {
        self.0.memory()
    }

    /// Tells the device that ranges of the bytes of its allocation are buffers of their own.
    pub(crate) fn divide(&self, parts: &[Range<u64>]) {
        let Allocation { raw, device } = &*self.0.memory.shared;
        device.backend().divide(raw, parts);
    }

    /// Pointer to the elements, for `mut` arguments of launches.
    #[must_use]
    pub fn ptr_mut(&self) -> DevicePtrMut<T> {
        DevicePtrMut::new(self.span())
    }
}

impl<B: Backend> Device<B> {
    /// Zeroed device memory of `len` elements. `label` names it in errors.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Element`] for a type that no buffer can hold;
    /// [`DeviceError::ForbiddenInCapture`] while capturing; [`DeviceError::Cuda`].
    pub fn allocate<T: Pod>(
        &self,
        label: &'static str,
        len: u64,
    ) -> Result<Buffer<B, T>, DeviceError> {
        check_element::<T>()?;
        let memory = self.captures().outside("allocating device memory", || {
            match len.checked_mul(size_of::<T>() as u64) {
                Some(bytes) => self.backend().allocate(label, bytes),
                None => {
                    let (requested, free) = (u64::MAX, self.free_memory()?);
                    Err(DeviceError::OutOfMemory { label, requested, free })
                }
            }
        })?;
        Ok(Buffer::new(Memory::new(memory, self), len))
    }
}

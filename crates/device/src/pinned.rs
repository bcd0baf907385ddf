//! Page-locked host memory.

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::backend::{Backend, RawPinned};
use crate::checks::check_element;
use crate::device::Device;
use crate::error::DeviceError;
use crate::owned::Owned;

/// Pinned host memory of `T`: copies from it need not wait.
pub struct Pinned<B: Backend, T> {
    memory: Owned<B::PinnedMemory>,
    device: Device<B>,
    len: usize,
    element: PhantomData<T>,
}

impl<B: Backend, T: Pod> Pinned<B, T> {
    /// The first `len` elements of `memory`.
    pub(crate) fn new(memory: Owned<B::PinnedMemory>, len: usize, device: &Device<B>) -> Self {
        Self { memory, len, device: device.clone(), element: PhantomData }
    }

    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        bytemuck::cast_slice(&self.memory.bytes()[..self.len * size_of::<T>()])
    }

    /// The elements, to write.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.memory.bytes_mut()[..self.len * size_of::<T>()])
    }

    /// The device that it was allocated for.
    #[must_use]
    pub fn device(&self) -> &Device<B> {
        &self.device
    }
}

impl<B: Backend> Device<B> {
    /// Zeroed pinned host memory of `len` elements.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_pinned<T: Pod>(&self, len: usize) -> Result<Pinned<B, T>, DeviceError> {
        check_element::<T>()?;
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let memory = self
            .captures()
            .outside("allocating pinned memory", || self.backend().allocate_pinned(bytes))?;
        Ok(Pinned::new(self.own(memory), len, self))
    }
}

//! Page-locked host memory.

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::capture::Owned;
use crate::{Backend, Device, RawPinned};

/// Pinned host memory of `T`, the source of copies that do not wait.
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

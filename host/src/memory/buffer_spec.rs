//! Buffers of a fixed size. Capacity planning and allocation use the same list, so that they agree.

use bytemuck::Pod;

use crate::device::{Backend, Buffer, Device, DeviceError, Memory};

/// Size and label of a buffer that will be allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferSpec<T> {
    /// Names the buffer in errors.
    pub label: &'static str,
    len: u64,
    element: std::marker::PhantomData<T>,
}

impl<T> BufferSpec<T> {
    /// `len` elements; `label` names the buffer in errors.
    pub const fn new(label: &'static str, len: u64) -> Self {
        Self { label, len, element: std::marker::PhantomData }
    }

    /// Elements of the buffer.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of the buffer.
    pub const fn bytes(&self) -> u64 {
        self.len * size_of::<T>() as u64
    }
}

/// Allocates buffers and keeps a list of their memory, for graphs to retain.
pub(crate) struct Allocator<'d, B: Backend> {
    device: &'d Device<B>,
    memory: Vec<Memory<B>>,
}

impl<'d, B: Backend> Allocator<'d, B> {
    /// Nothing allocated yet.
    pub fn new(device: &'d Device<B>) -> Self {
        Self { device, memory: Vec::new() }
    }

    /// Allocates a buffer, filled with zero.
    pub fn allocate<T: Pod>(&mut self, spec: BufferSpec<T>) -> Result<Buffer<B, T>, DeviceError> {
        let buffer = self.device.allocate(spec.label, spec.len)?;
        self.memory.push(buffer.memory());
        Ok(buffer)
    }

    /// Adds the memory of `owner`, which was allocated elsewhere, to the list.
    pub fn keep<T>(&mut self, owner: T, memory: impl Fn(&T) -> Memory<B>) -> T {
        self.memory.push(memory(&owner));
        owner
    }

    /// The memory of all that was allocated.
    pub fn memory(self) -> Vec<Memory<B>> {
        self.memory
    }
}

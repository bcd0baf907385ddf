//! A device buffer that the host rewrites again and again without waiting for the device.

use bytemuck::Pod;

use super::{Buffer, Device, DeviceError, Pinned};

/// Device memory of `T` at one address for life, and two pinned arrays to write it from, in turn:
/// the device may still be copying the last one while the host fills the next.
pub struct Staged<D: Device, T> {
    target: Buffer<D, T>,
    sources: [Source<D, T>; 2],
    next: usize,
}

/// A pinned array and the event after which it may be written again.
struct Source<D: Device, T> {
    array: Pinned<D, T>,
    copied: D::Event,
}

impl<D: Device, T: Pod> Staged<D, T> {
    /// Zeroed memory of `len` elements.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn new(device: &D, label: &'static str, len: usize) -> Result<Self, DeviceError> {
        let source = || {
            Ok::<_, DeviceError>(Source {
                array: device.allocate_pinned(len)?,
                copied: device.event()?,
            })
        };
        let target = device.allocate(label, len as u64)?;
        Ok(Self { target, sources: [source()?, source()?], next: 0 })
    }

    /// The device memory.
    #[must_use]
    pub fn buffer(&self) -> &Buffer<D, T> {
        &self.target
    }

    /// Lets `write` fill the whole array, then queues one copy of it to the device. If `write`
    /// refuses, nothing is queued and the device keeps what it has.
    ///
    /// # Errors
    /// What `write` returned; [`DeviceError`] of the copy.
    pub fn update<R, E: From<DeviceError>>(
        &mut self,
        device: &D,
        stream: &D::Stream,
        write: impl FnOnce(&mut [T]) -> Result<R, E>,
    ) -> Result<R, E> {
        let source = &mut self.sources[self.next];
        device.wait(&source.copied)?;
        let result = write(source.array.as_mut_slice())?;
        let len = source.array.as_slice().len();
        // SAFETY: the array is private to this source, and is not written again before `copied`,
        // recorded right behind the copy, has passed.
        unsafe { device.copy_from_pinned(stream, &source.array, &self.target, len)? };
        device.record(&source.copied, stream)?;
        self.next = 1 - self.next;
        Ok(result)
    }
}

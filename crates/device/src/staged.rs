//! A device buffer that the host rewrites repeatedly without waiting for the device.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::DeviceError;
use crate::pinned::Pinned;
use crate::stream::{Event, Stream};

/// Device memory of `T` at a fixed address, and pinned arrays from which it is written, in turn: the device may still be
/// copying the last ones while the host fills the next.
pub struct Staged<B: Backend, T> {
    target: Buffer<B, T>,
    sources: Vec<Source<B, T>>,
    next: usize,
}

/// A pinned array, and the copy that must be done before it is written again.
struct Source<B: Backend, T> {
    array: Pinned<B, T>,
    /// Recorded after the last copy, if that succeeded.
    copied: Event<B>,
    /// The stream of a copy that may be in flight without `copied` recorded after it.
    unrecorded: Option<Stream<B>>,
}

impl<B: Backend, T: Pod> Source<B, T> {
    fn new(device: &Device<B>, len: usize) -> Result<Self, DeviceError> {
        let (array, copied) = (device.allocate_pinned(len)?, device.event()?);
        Ok(Self { array, copied, unrecorded: None })
    }

    /// Waits until the device has read the array.
    fn wait(&mut self) -> Result<(), DeviceError> {
        if let Some(stream) = &self.unrecorded {
            stream.synchronize()?;
            self.unrecorded = None;
        }
        self.copied.wait()
    }

    /// Queues a copy of the first `len` elements.
    fn copy_to(
        &mut self,
        target: &Buffer<B, T>,
        len: usize,
        stream: &Stream<B>,
    ) -> Result<(), DeviceError> {
        self.unrecorded = Some(stream.clone());
        // SAFETY: the array is private to this source, and is not written again before `wait`; dropping it
        // waits for the copy.
        let copied = unsafe { stream.copy_from_pinned(&self.array, target, len) };
        if copied.as_ref().is_err_and(|error| !error.may_have_queued()) {
            // There is no copy to wait for, and the stream may even be another device's.
            self.unrecorded = None;
        }
        copied?;
        stream.record(&self.copied)?;
        self.unrecorded = None;
        Ok(())
    }
}

impl<B: Backend, T: Pod> Staged<B, T> {
    /// Zeroed memory of `len` elements, with `arrays` pinned arrays of as many, at least one: an update waits for the copy
    /// of the one that is `arrays` before it.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn new(
        device: &Device<B>,
        label: &'static str,
        len: usize,
        arrays: usize,
    ) -> Result<Self, DeviceError> {
        let target = device.allocate(label, len as u64)?;
        let sources = (0..arrays.max(1)).map(|_| Source::new(device, len));
        Ok(Self { target, sources: sources.collect::<Result<_, _>>()?, next: 0 })
    }

    /// The device memory.
    #[must_use]
    pub fn buffer(&self) -> &Buffer<B, T> {
        &self.target
    }

    /// Calls `write` with an array of all elements, whose contents are arbitrary. `write` fills its beginning and
    /// returns the number of elements to copy. Queues one copy of these to the device, whose other elements stay as
    /// they were. If `write` fails, nothing is queued.
    ///
    /// # Errors
    /// The error of `write`; [`DeviceError::Length`] if it returns a larger number than there are elements;
    /// [`DeviceError`] of the copy, which may have been queued nevertheless ([`DeviceError::may_have_queued`]).
    pub fn update<R, E: From<DeviceError>>(
        &mut self,
        stream: &Stream<B>,
        write: impl FnOnce(&mut [T]) -> Result<(usize, R), E>,
    ) -> Result<R, E> {
        let source = &mut self.sources[self.next];
        source.wait()?;
        let (len, result) = write(source.array.as_mut_slice())?;
        source.copy_to(&self.target, len, stream)?;
        self.next = (self.next + 1) % self.sources.len();
        Ok(result)
    }
}

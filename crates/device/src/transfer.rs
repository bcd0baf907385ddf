//! Copies and fills.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{Buffer, View};
use crate::checks::check_device;
use crate::error::DeviceError;
use crate::pinned::Pinned;
use crate::stream::Stream;

/// Bytes that are copied to or from borrowed host memory at a time.
const PART: usize = 4 << 20;

impl<B: Backend> Stream<B> {
    /// Queues a copy between two buffers of equal length.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if the lengths differ; [`DeviceError::Aliased`] if they overlap;
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::NotRetained`] in a capture; [`DeviceError::Cuda`].
    pub fn copy<T: Pod>(&self, from: &View<B, T>, to: &Buffer<B, T>) -> Result<(), DeviceError> {
        let used = self.device().id();
        let target = to.range("copy", used, 0, from.len())?;
        let source = from.range("copy", used, 0, to.len())?;
        if source.overlaps(&target) {
            return Err(DeviceError::Aliased { kernel: "copy", argument: "to", other: "from" });
        }
        let named = [("from", &source), ("to", &target)];
        let captures = self.device().captures();
        if source.bytes == 0 {
            return captures.check_retained(self.id(), "copy", named);
        }
        captures.queue(self.id(), "copy", named, || {
            // SAFETY: two ranges of live buffers of this device, which do not overlap; freeing one waits for
            // the copy, and a graph keeps both.
            unsafe { self.backend().copy(self.raw(), source.address, target.address, source.bytes) }
        })
    }

    /// Queues filling all of `to` with one byte.
    ///
    /// # Errors
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::NotRetained`] in a capture; [`DeviceError::Cuda`].
    pub fn fill<T: Pod>(&self, to: &Buffer<B, T>, byte: u8) -> Result<(), DeviceError> {
        let target = to.range("fill", self.device().id(), 0, to.len())?;
        let captures = self.device().captures();
        if target.bytes == 0 {
            return captures.check_retained(self.id(), "fill", [("to", &target)]);
        }
        captures.queue(self.id(), "fill", [("to", &target)], || {
            // SAFETY: all of a live buffer of this device; freeing it waits, and a graph keeps it.
            unsafe { self.backend().fill(self.raw(), target.address, byte, target.bytes) }
        })
    }

    /// Allocates a buffer that holds `values`, and waits for all work of the stream. An error of the allocation names the buffer
    /// `label`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::ForbiddenInCapture`] while capturing; [`DeviceError::Cuda`];
    /// [`DeviceError::KernelFault`].
    pub fn upload_new<T: Pod>(
        &self,
        label: &'static str,
        values: &[T],
    ) -> Result<Buffer<B, T>, DeviceError> {
        self.refuse_recording("copying from host memory")?;
        let buffer = self.device().allocate(label, values.len() as u64)?;
        self.upload(values, &buffer, 0)?;
        Ok(buffer)
    }

    /// Copies `values` to elements `at..` of `to` and waits for all work of the stream.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if they do not fit; [`DeviceError::ForeignDevice`];
    /// [`DeviceError::ForbiddenInCapture`] while capturing; [`DeviceError::Cuda`];
    /// [`DeviceError::KernelFault`].
    pub fn upload<T: Pod>(
        &self,
        values: &[T],
        to: &Buffer<B, T>,
        at: u64,
    ) -> Result<(), DeviceError> {
        let target = to.range("upload", self.device().id(), at, values.len() as u64)?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.in_parts(
            "copying from host memory",
            bytes.len(),
            |staging, offset, len| {
                staging.extend_from_slice(&bytes[offset..offset + len]);
                let to = target.address + offset as u64;
                // SAFETY: `in_parts` keeps `staging` as it is until the copy is done; the range is in a live
                // buffer of this device.
                unsafe { self.backend().upload(self.raw(), staging.as_ptr(), to, len) }
            },
            |_, _| (),
        )
    }

    /// Copies elements `at..at + values.len()` of `from` to `values`, once all work of the stream is done. On
    /// an error some of them may have been copied.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if they do not exist; otherwise as [`Self::upload`].
    pub fn download<T: Pod>(
        &self,
        from: &View<B, T>,
        at: u64,
        values: &mut [T],
    ) -> Result<(), DeviceError> {
        let source = from.range("download", self.device().id(), at, values.len() as u64)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        self.in_parts(
            "copying to host memory",
            bytes.len(),
            |staging, offset, len| {
                staging.resize(len, 0);
                let from = source.address + offset as u64;
                // SAFETY: `in_parts` keeps `staging` from everyone until the copy is done; the range is in a
                // live buffer of this device.
                unsafe { self.backend().download(self.raw(), from, staging.as_mut_ptr(), len) }
            },
            |staging, offset| bytes[offset..offset + staging.len()].copy_from_slice(staging),
        )
    }

    /// Copies `bytes` bytes in parts through staging memory. `queue` queues the copy of a part, given its offset and
    /// length; `done` gets the part after the copy was waited for.
    ///
    /// A copy that outlives the call must not reach borrowed host memory. After a failed wait the copy may still be in
    /// flight: the staging memory is then leaked.
    fn in_parts(
        &self,
        operation: &'static str,
        bytes: usize,
        queue: impl Fn(&mut Vec<u8>, usize, usize) -> Result<(), DeviceError>,
        mut done: impl FnMut(&[u8], usize),
    ) -> Result<(), DeviceError> {
        self.outside(operation, || {
            let mut staging = Vec::with_capacity(bytes.min(PART));
            for offset in (0..bytes).step_by(PART) {
                staging.clear();
                let queued = queue(&mut staging, offset, PART.min(bytes - offset));
                let waited = self.backend().synchronize(self.raw());
                if waited.is_err() {
                    std::mem::forget(std::mem::take(&mut staging));
                }
                // A fault of a kernel is an error of both, and only that of the wait is about kernels on every device.
                waited.and(queued)?;
                done(&staging, offset);
            }
            if bytes == 0 { self.backend().synchronize(self.raw()) } else { Ok(()) }
        })
    }

    /// Queues a copy of the first `len` elements of `from` to `to`.
    ///
    /// # Safety
    /// `from` is neither written nor dropped until the copy is done, or the stream was waited for; after an
    /// error too.
    ///
    /// # Errors
    /// [`DeviceError::Length`] if either is shorter; [`DeviceError::ForeignDevice`];
    /// [`DeviceError::ForbiddenInCapture`] while capturing; [`DeviceError::Cuda`], and then the copy may have
    /// been queued all the same.
    pub unsafe fn copy_from_pinned<T: Pod>(
        &self,
        from: &Pinned<B, T>,
        to: &Buffer<B, T>,
        len: usize,
    ) -> Result<(), DeviceError> {
        const WHAT: &str = "copy from pinned memory";
        check_device("pinned memory", from.device().id(), self.device().id())?;
        let from = from.as_slice();
        let (found, needed) = (from.len() as u64, len as u64);
        if found < needed {
            return Err(DeviceError::Length { what: WHAT, found, needed });
        }
        let target = to.range(WHAT, self.device().id(), 0, needed)?;
        let bytes = len * size_of::<T>();
        self.outside("copying from host memory", || {
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: both ranges exist by the checks above; that `from` stays as it is until the copy is
            // done is the caller's promise.
            unsafe {
                self.backend().upload(self.raw(), from.as_ptr().cast(), target.address, bytes)
            }
        })
    }
}

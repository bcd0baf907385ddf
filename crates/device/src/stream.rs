//! Streams and events.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, Priority};
use crate::checks::{check_device, check_grid, check_pointers};
use crate::device::Device;
use crate::error::DeviceError;
use crate::operation::Operation;
use crate::owned::Owned;
use crate::span::Span;
use simt::kernel::KernelInfo;

/// An in-order queue of work of one device, which it keeps alive. Cloning gives another handle of the same
/// stream.
pub struct Stream<B: Backend> {
    shared: Arc<Shared<B>>,
}

struct Shared<B: Backend> {
    // Dropped before the device.
    raw: Owned<B::Stream>,
    device: Device<B>,
}

impl<B: Backend> Clone for Stream<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Backend> fmt::Debug for Stream<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.id())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Stream<B> {
    pub(crate) fn new(raw: Owned<B::Stream>, device: &Device<B>) -> Self {
        Self { shared: Arc::new(Shared { raw, device: device.clone() }) }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device<B> {
        &self.shared.device
    }

    /// A number that no other stream of its device has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.backend().stream_id(self.raw())
    }

    /// Whether [`Self::capture`] is capturing it: then work that is queued into it is recorded and does not run.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.device().captures().is_capturing(self.id())
    }

    /// Whether work that is queued into it now is recorded and does not run: [`Self::capture`] is capturing it, or the
    /// program that owns it is.
    ///
    /// # Errors
    /// [`DeviceError::ForbiddenInCapture`] of the legacy default stream while another stream is captured;
    /// [`DeviceError::Cuda`]; [`DeviceError::KernelFault`].
    pub fn is_recorded(&self) -> Result<bool, DeviceError> {
        Ok(self.is_capturing() || self.backend().is_recorded(self.raw())?)
    }

    /// To be called before queueing work that must run, not only be recorded: until the result is dropped, no capture of
    /// the stream begins. `operation` names the work in the error.
    ///
    /// # Errors
    /// [`DeviceError::ForbiddenInCapture`] while it is being captured, also by the program that owns it;
    /// [`DeviceError::Cuda`]; [`DeviceError::KernelFault`].
    pub fn running(&self, operation: &'static str) -> Result<Running<'_, B>, DeviceError> {
        let id = self.id();
        self.refuse_recording(operation)?;
        if !self.device().captures().start_running(id) {
            return Err(DeviceError::ForbiddenInCapture { operation });
        }
        Ok(Running { stream: self, id })
    }

    /// Refuses work that has to run while the program that owns the stream captures it: it would be recorded, and a wait
    /// would end that capture. A capture by [`Self::capture`] is refused by `Captures`, which also fails that capture.
    pub(crate) fn refuse_recording(&self, operation: &'static str) -> Result<(), DeviceError> {
        if !self.is_capturing() && self.backend().is_recorded(self.raw())? {
            return Err(DeviceError::ForbiddenInCapture { operation });
        }
        Ok(())
    }

    /// Calls `forbidden`, which works on this stream and may not be captured, unless a capture forbids it.
    pub(crate) fn outside<R>(
        &self,
        operation: &'static str,
        forbidden: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        self.refuse_recording(operation)?;
        self.device().captures().outside(operation, forbidden)
    }

    /// Queues one launch of the kernel of `operation` for `variant`, over the grid that the operation
    /// states.
    ///
    /// Until the kernel is done, work of other streams, and copies, must not touch memory that the kernel writes, nor
    /// write memory that it reads: otherwise the results are wrong.
    ///
    /// # Safety
    /// The pointers are good for what the kernel reads and writes with these scalars, whatever that memory holds, and
    /// whoever writes it meanwhile: the kernel checks each index that it reads. `O::kernel` indexes the list that the
    /// device was opened with, and `O::info`, the extents and the arguments are those of that kernel.
    ///
    /// # Errors
    /// As [`Self::check`]; [`DeviceError::Cuda`]; [`DeviceError::KernelFault`] of an earlier launch;
    /// [`DeviceError::Fault`] on the emulator.
    pub unsafe fn launch<O: Operation>(
        &self,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        let (kernel, pointers) = (O::info(variant), operation.pointers());
        let pointers = pointers.as_ref();
        self.check_call(variant, operation, pointers)?;
        let captures = self.device().captures();
        captures.queue(self.id(), kernel.name, named(kernel, pointers), || {
            // SAFETY: checked above, and for the rest the caller's promise.
            unsafe { self.backend().launch(self.raw(), variant, operation) }
        })?;
        self.wait_if_asked()
    }

    /// Waits for what was queued just now, if the device was opened so, and no capture forbids it.
    pub(crate) fn wait_if_asked(&self) -> Result<(), DeviceError> {
        if !self.backend().waits_for_launches() {
            return Ok(());
        }
        match self.is_recorded() {
            // A wait would end the capture. The launch is queued, so that this is no error of it.
            Ok(true) | Err(DeviceError::ForbiddenInCapture { .. }) => Ok(()),
            Err(other) => Err(other),
            Ok(false) => {
                let captures = self.device().captures();
                let wait = || self.backend().synchronize(self.raw());
                captures.try_outside(wait).unwrap_or(Ok(()))
            }
        }
    }

    /// Makes the checks of [`Self::launch`] and queues nothing: for operations of several launches, of which all or
    /// none are to be queued.
    ///
    /// # Errors
    /// [`DeviceError::BadGrid`]; [`DeviceError::ForeignDevice`]; [`DeviceError::Misaligned`];
    /// [`DeviceError::TooShort`]; [`DeviceError::Aliased`]; [`DeviceError::NotRetained`] in a capture.
    pub fn check<O: Operation>(
        &self,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        let (kernel, pointers) = (O::info(variant), operation.pointers());
        let pointers = pointers.as_ref();
        self.check_call(variant, operation, pointers)?;
        self.device().captures().check_retained(self.id(), kernel.name, named(kernel, pointers))
    }

    /// The checks of [`Self::check`] except that for captures.
    fn check_call<O: Operation>(
        &self,
        variant: O::Variant,
        operation: &O,
        pointers: &[Span],
    ) -> Result<(), DeviceError> {
        let (kernel, extents) = (O::info(variant), operation.extents(variant));
        check_grid(kernel.name, operation.grid(variant))?;
        check_pointers(kernel, pointers, extents.as_ref(), self.device().id())
    }

    /// Waits until all its work is done. Faults of its kernels are returned here.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`]; [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.outside("waiting for a stream", || self.backend().synchronize(self.raw()))
    }

    /// Records `event` at the present end of the stream.
    ///
    /// # Errors
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::ForbiddenInCapture`] while capturing;
    /// [`DeviceError::Cuda`]; [`DeviceError::KernelFault`].
    pub fn record(&self, event: &Event<B>) -> Result<(), DeviceError> {
        let raw = event.raw_for(self.device())?;
        // Streams that wait for the event would be captured too.
        self.outside("recording an event", || self.backend().record(raw, self.raw()))
    }

    /// Makes work that is queued from now on wait, on the device, until `event` has passed; it does not wait if `event`
    /// was never recorded. The host does not wait.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub fn wait_for(&self, event: &Event<B>) -> Result<(), DeviceError> {
        let raw = event.raw_for(self.device())?;
        self.outside("waiting for an event", || self.backend().wait_in_stream(self.raw(), raw))
    }

    pub(crate) fn raw(&self) -> &B::Stream {
        &self.shared.raw
    }

    pub(crate) fn backend(&self) -> &B {
        self.device().backend()
    }
}

/// Work that is being queued into a stream and has to run; see [`Stream::running`].
#[must_use = "a capture may begin as soon as it is dropped"]
pub struct Running<'s, B: Backend> {
    stream: &'s Stream<B>,
    id: u64,
}

impl<B: Backend> Drop for Running<'_, B> {
    fn drop(&mut self) {
        self.stream.device().captures().end_running(self.id);
    }
}

impl<B: Backend> fmt::Debug for Running<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// The memory of a launch's arguments, with their names.
fn named<'s>(
    kernel: &'static KernelInfo,
    pointers: &'s [Span],
) -> impl Iterator<Item = (&'static str, &'s Span)> {
    kernel.pointers.iter().map(|info| info.name).zip(pointers)
}

/// A point in a stream.
pub struct Event<B: Backend> {
    // Dropped before the device.
    raw: Owned<B::Event>,
    device: Device<B>,
}

impl<B: Backend> fmt::Debug for Event<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<B: Backend> Event<B> {
    pub(crate) fn new(raw: Owned<B::Event>, device: &Device<B>) -> Self {
        Self { raw, device: device.clone() }
    }

    /// Waits until it has passed; at once if it was never recorded.
    ///
    /// # Errors
    /// [`DeviceError::KernelFault`]; [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    pub fn wait(&self) -> Result<(), DeviceError> {
        let captures = self.device.captures();
        captures.outside("waiting for an event", || self.device.backend().wait(&self.raw))
    }

    /// Whether it has passed; true if it was never recorded. The host does not wait.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn has_passed(&self) -> Result<bool, DeviceError> {
        let captures = self.device.captures();
        captures.outside("asking for an event", || self.device.backend().has_passed(&self.raw))
    }

    /// Milliseconds from `earlier` to this event; waits for this one.
    ///
    /// # Errors
    /// [`DeviceError::NotRecorded`]; as [`Self::wait`]; [`DeviceError::ForeignDevice`].
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, DeviceError> {
        let (backend, from) = (self.device.backend(), earlier.raw_for(&self.device)?);
        self.device.captures().outside("waiting for an event", || {
            backend.wait(&self.raw)?;
            backend.elapsed_ms(from, &self.raw)
        })
    }

    fn raw_for(&self, device: &Device<B>) -> Result<&B::Event, DeviceError> {
        check_device("event", self.device.id(), device.id())?;
        Ok(&self.raw)
    }
}

impl<B: Backend> Device<B> {
    /// A new stream of the highest priority, for steps.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    pub fn stream(&self) -> Result<Stream<B>, DeviceError> {
        self.stream_with(Priority::Highest)
    }

    /// A new stream of the lowest priority, for copies beside steps: its kernels get only multiprocessors that no block
    /// of a stream of higher priority waits for.
    ///
    /// # Errors
    /// As [`Self::stream`].
    pub fn background_stream(&self) -> Result<Stream<B>, DeviceError> {
        self.stream_with(Priority::Lowest)
    }

    fn stream_with(&self, priority: Priority) -> Result<Stream<B>, DeviceError> {
        let create = || self.backend().stream(priority);
        let raw = self.captures().outside("creating a stream", create)?;
        Ok(Stream::new(self.own(raw), self))
    }

    /// A new event.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    pub fn event(&self) -> Result<Event<B>, DeviceError> {
        let raw = self.captures().outside("creating an event", || self.backend().event())?;
        Ok(Event::new(self.own(raw), self))
    }
}

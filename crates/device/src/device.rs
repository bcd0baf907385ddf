//! A device: what it allocates, and what all that belongs to it shares.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;

use crate::buffer::Memory;
use crate::capture::{Captures, Owned, domain};
use crate::{Backend, Buffer, DeviceError, Event, Pinned, Stream};

/// What a device is, for people and reports.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Compute capability as in `sm_90`; `None` for the emulated device.
    pub sm: Option<u32>,
    /// Memory of the device, in bytes.
    pub total_memory: u64,
}

/// Which [`Device`] something belongs to. No two devices of a process have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// A device that runs kernels. Cloning gives another handle of the same device.
pub struct Device<B: Backend> {
    pub(crate) shared: Arc<Shared<B>>,
}

pub(crate) struct Shared<B: Backend> {
    pub backend: Owned<B>,
    pub id: DeviceId,
    pub captures: Arc<Captures>,
}

impl<B: Backend> Clone for Device<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Backend> fmt::Debug for Device<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id(), self.info().name)
    }
}

impl<B: Backend> Device<B> {
    /// A device over the raw calls of `backend`.
    pub fn from_backend(backend: B) -> Self {
        let captures = backend.capture_domain().map_or_else(Arc::default, domain);
        let backend = Owned::new(backend, &captures);
        Self { shared: Arc::new(Shared { backend, id: DeviceId::new(), captures }) }
    }

    /// The raw calls beneath.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// What tells this device from every other.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.shared.id
    }

    /// What this device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.backend().info()
    }

    /// Bytes that an allocation could take now.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver cannot tell.
    pub fn free_memory(&self) -> Result<u64, DeviceError> {
        self.backend().free_memory()
    }

    /// Zeroed device memory of `len` elements. `label` names it in errors.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Element`] for a type that no buffer holds;
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

    /// A new stream.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; [`DeviceError::ForbiddenInCapture`] while capturing.
    pub fn stream(&self) -> Result<Stream<B>, DeviceError> {
        let raw = self.captures().outside("creating a stream", || self.backend().stream())?;
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

    pub(crate) fn captures(&self) -> &Captures {
        &self.shared.captures
    }

    /// What gives `raw` back when it is dropped, or after the capture that is active then.
    pub(crate) fn own<T: Send + 'static>(&self, raw: T) -> Owned<T> {
        Owned::new(raw, &self.shared.captures)
    }
}

/// Refuses a type of elements that no memory holds: of no bytes, or aligned more than pinned memory is.
pub(crate) fn check_element<T: Pod>() -> Result<(), DeviceError> {
    let (bytes, align) = (size_of::<T>(), align_of::<T>());
    if bytes == 0 || align > align_of::<u128>() {
        return Err(DeviceError::Element { bytes, align });
    }
    Ok(())
}

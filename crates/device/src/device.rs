//! [`Device`]: the state that all objects of a device share.

use std::fmt;
use std::sync::Arc;

use crate::backend::Backend;
use crate::capture::{Captures, domain};
use crate::error::DeviceError;
use crate::identity::{DeviceId, DeviceInfo};
use crate::owned::Owned;

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

    /// The backend with the raw calls.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// The identity of this device, unique in the process.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.shared.id
    }

    /// Name, compute capability and memory size.
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

    pub(crate) fn captures(&self) -> &Arc<Captures> {
        &self.shared.captures
    }

    /// Wraps `raw`, which is released when the wrapper is dropped, or after a capture that is active then.
    pub(crate) fn own<T: Send + 'static>(&self, raw: T) -> Owned<T> {
        Owned::new(raw, &self.shared.captures)
    }
}

//! Of which memory regions are made.

use std::fmt;
use std::sync::Arc;

use dsv4_kv::device::{Backend, Device, DeviceError, Stream};

use super::TransportError;
use super::memory_kind::MemoryKind;
use super::on_device::{DeviceBytes, OnDevice, SharedDigester};
use super::region::Region;

/// Of which memory payloads are made: the host's, or a device's. Payloads of the cache's own device are packed and unpacked
/// by its kernels, and their digests are computed there: no byte of them goes through host memory.
#[derive(Clone, Debug, Default)]
pub struct Storage {
    device: Option<Arc<dyn Allocate>>,
    /// Where the device has no room, memory of the host is taken.
    or_host: bool,
}

impl Storage {
    /// Memory of the host.
    #[must_use]
    pub fn host() -> Self {
        Self::default()
    }

    /// Memory of `device`. `ordinal` is the driver's number of the GPU, by which peers tell GPUs of a host apart; it means
    /// nothing for an emulated device.
    ///
    /// # Errors
    /// [`TransportError::Device`].
    pub fn device<B: Backend>(device: &Device<B>, ordinal: u32) -> Result<Self, TransportError> {
        let kind = match device.info().sm {
            Some(_) => MemoryKind::Cuda { ordinal },
            None => MemoryKind::Emulated,
        };
        // Of its own, so that nothing else is waited for; steps come before digests.
        let stream = device.background_stream()?;
        let digester = SharedDigester::default();
        Ok(Self { device: Some(Arc::new(OfDevice { stream, kind, digester })), or_host: false })
    }

    /// The same, but memory of the host for what the device has no room for.
    #[must_use]
    pub fn or_host(self) -> Self {
        Self { or_host: true, ..self }
    }

    /// Which kind of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.device.as_ref().map_or(MemoryKind::Host, |device| device.kind())
    }

    /// Zeroed memory of `len` bytes, at least one.
    ///
    /// # Errors
    /// [`TransportError::Memory`], [`TransportError::Device`].
    pub fn region(&self, len: usize) -> Result<Region, TransportError> {
        let Some(device) = &self.device else { return Region::new(len) };
        match device.allocate(len.max(1)) {
            Ok(memory) => Ok(Region::on_device(memory)),
            Err(DeviceError::OutOfMemory { .. }) if self.or_host => Region::new(len),
            Err(error) => Err(error.into()),
        }
    }
}

/// A device that memory is taken from.
trait Allocate: Send + Sync + fmt::Debug {
    fn kind(&self) -> MemoryKind;

    fn allocate(&self, len: usize) -> Result<Box<dyn OnDevice>, DeviceError>;
}

struct OfDevice<B: Backend> {
    stream: Stream<B>,
    kind: MemoryKind,
    digester: SharedDigester<B>,
}

impl<B: Backend> Allocate for OfDevice<B> {
    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn allocate(&self, len: usize) -> Result<Box<dyn OnDevice>, DeviceError> {
        let Self { stream, kind, digester } = self;
        let buffer = stream.device().allocate("payloads that move", len as u64)?;
        Ok(Box::new(DeviceBytes::new(stream.clone(), buffer, *kind, Arc::clone(digester))))
    }
}

impl<B: Backend> fmt::Debug for OfDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfDevice").field("kind", &self.kind).finish_non_exhaustive()
    }
}

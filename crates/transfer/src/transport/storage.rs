//! The memory from which regions are allocated.

use std::fmt;
use std::sync::Arc;

use dsv4_kv::device::{Backend, Device, DeviceError, Stream};

use super::TransportError;
use super::memory_kind::MemoryKind;
use super::on_device::{DeviceBytes, OnDevice, SharedDigester};
use super::region::Region;

/// The memory from which payloads are allocated: host memory, or memory of a device. Kernels of the cache's own device
/// pack, unpack and hash payloads there, so that none of their bytes passes through host memory. Sections that do not
/// begin and end at multiples of 8 bytes, as rows with `f32` scales can have, are copied to the host to be hashed.
#[derive(Clone, Debug, Default)]
pub struct Storage {
    device: Option<Arc<dyn Allocate>>,
    /// Whether host memory is used when the device is out of memory.
    or_host: bool,
}

impl Storage {
    /// Memory of the host.
    #[must_use]
    pub fn host() -> Self {
        Self::default()
    }

    /// Memory of `device`. `ordinal` is the driver's number of the GPU, by which peers distinguish the GPUs of a host;
    /// it is ignored for an emulated device.
    ///
    /// # Errors
    /// [`TransportError::Device`].
    pub fn device<B: Backend>(device: &Device<B>, ordinal: u32) -> Result<Self, TransportError> {
        let kind = match device.info().sm {
            Some(_) => MemoryKind::Cuda { ordinal },
            None => MemoryKind::Emulated,
        };
        // A stream of its own, so that a copy waits for no other work. It has low priority, so that steps run before
        // digests.
        let stream = device.background_stream()?;
        let digester = SharedDigester::default();
        Ok(Self { device: Some(Arc::new(OfDevice { stream, kind, digester })), or_host: false })
    }

    /// As `self`, but with host memory when the device is out of memory.
    #[must_use]
    pub fn or_host(self) -> Self {
        Self { or_host: true, ..self }
    }

    /// The kind of memory. After `or_host`, single regions may still be in host memory.
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

/// A device that allocates payloads. Hides the backend's type.
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

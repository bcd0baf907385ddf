//! Within a process: for tests, and for caches of several devices of one host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Descriptor, InFlight, NotPosted, Polled, Region, Registered, Transport, TransportError,
};

/// The memory that the loopbacks of a process share.
#[derive(Clone, Debug, Default)]
pub struct Fabric(Arc<Mutex<HashMap<u64, Region>>>);

impl Fabric {
    fn regions(&self) -> MutexGuard<'_, HashMap<u64, Region>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes registered memory as hardware does: without asking who has its token. `false` if there is none of that
    /// number.
    pub fn write(&self, id: u64, at: usize, bytes: &[u8]) -> bool {
        let mut regions = self.regions();
        let room = regions
            .get_mut(&id)
            .and_then(|region| region.bytes_mut().get_mut(at..)?.get_mut(..bytes.len()));
        room.is_some_and(|room| {
            room.copy_from_slice(bytes);
            true
        })
    }

    /// The bytes of the memory that a descriptor names.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`].
    pub fn read(&self, from: &Descriptor) -> Result<Vec<u8>, TransportError> {
        let id = from.0.as_array::<8>().map(|&id| u64::from_le_bytes(id));
        let regions = self.regions();
        let region = id.and_then(|id| regions.get(&id));
        let gone = || TransportError::Descriptor { why: "the memory was given up".to_owned() };
        region.map(|region| region.bytes().to_vec()).ok_or_else(gone)
    }
}

/// A transport whose peers are in this process. A read is done when it is posted.
#[derive(Debug)]
pub struct Loopback {
    fabric: Fabric,
    own: Vec<u64>,
}

impl Loopback {
    /// A peer of all others of this fabric.
    #[must_use]
    pub fn new(fabric: &Fabric) -> Self {
        Self { fabric: fabric.clone(), own: Vec::new() }
    }
}

impl Transport for Loopback {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        let memory = Registered::new(region.bytes().len());
        self.fabric.regions().insert(memory.id(), region);
        self.own.push(memory.id());
        Ok(memory)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        self.own.retain(|&id| id != memory.id());
        let removed = self.fabric.regions().remove(&memory.id());
        removed.ok_or(TransportError::Unknown { id: memory.id() })
    }

    fn with_bytes<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TransportError> {
        let mut regions = self.fabric.regions();
        let region = regions.get_mut(&memory.id());
        let region = region.ok_or(TransportError::Unknown { id: memory.id() })?;
        Ok(work(region.bytes_mut()))
    }

    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        Ok(Descriptor(memory.id().to_le_bytes().to_vec()))
    }

    fn post(&mut self, into: Registered, from: &Descriptor) -> Result<InFlight, NotPosted> {
        let needed = into.len();
        let read = self.fabric.read(from).and_then(|bytes| {
            let found = bytes.len();
            let part = bytes.get(..needed).ok_or(TransportError::TooShort { needed, found })?;
            let written = self.fabric.write(into.id(), 0, part);
            if written { Ok(()) } else { Err(TransportError::Unknown { id: into.id() }) }
        });
        match read {
            Ok(()) => Ok(into.in_flight()),
            Err(error) => Err(NotPosted(into, error)),
        }
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        Polled::Done(read.ended())
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        let mut regions = self.fabric.regions();
        self.own.drain(..).for_each(|id| drop(regions.remove(&id)));
        Ok(())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // Nothing is under way between calls.
        let _ = self.fence();
    }
}

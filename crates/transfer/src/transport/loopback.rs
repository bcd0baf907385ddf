//! A transport within a process: for tests, and for caches on several devices of one host.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Descriptor, Held, InFlight, NotPosted, Polled, Region, RegionMut, Registered, Transport,
    TransportError,
};

/// The memory that several loopbacks share.
#[derive(Clone, Debug, Default)]
pub struct Fabric(Arc<Mutex<HashMap<u64, Held>>>);

impl Fabric {
    fn regions(&self) -> MutexGuard<'_, HashMap<u64, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes registered memory as hardware does, regardless of its tokens. `false` if no memory has this id, or if the
    /// range lies outside of it.
    pub fn write(&self, id: u64, at: usize, bytes: &[u8]) -> bool {
        let mut regions = self.regions();
        let held = regions.get_mut(&id);
        held.is_some_and(|held| held.region_mut().write(at, bytes).is_ok())
    }

    /// Bytes of the memory that a descriptor names.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`], [`TransportError::TooShort`], [`TransportError::Outside`] for a range that ends
    /// before it begins, [`TransportError::Device`].
    pub fn read(&self, from: &Descriptor, bytes: Range<usize>) -> Result<Vec<u8>, TransportError> {
        let id = from.0.as_array::<8>().map(|&id| u64::from_le_bytes(id));
        let regions = self.regions();
        let held = id.and_then(|id| regions.get(&id));
        let gone = || TransportError::Descriptor { why: "the memory was given up".to_owned() };
        let memory = held.ok_or_else(gone)?.region();
        let (needed, found) = (bytes.end, memory.len());
        if bytes.start > needed {
            return Err(TransportError::Outside { bytes, len: found });
        }
        if needed > found {
            return Err(TransportError::TooShort { needed, found });
        }
        let mut part = vec![0; bytes.len()];
        memory.read(bytes.start, &mut part)?;
        Ok(part)
    }
}

/// A transport whose peers are in this process. A read is complete when `post` returns.
#[derive(Debug)]
pub struct Loopback {
    fabric: Fabric,
    own: Vec<u64>,
}

impl Loopback {
    /// A new peer in this fabric.
    #[must_use]
    pub fn new(fabric: &Fabric) -> Self {
        Self { fabric: fabric.clone(), own: Vec::new() }
    }

    /// Refuses memory of other peers in the fabric.
    fn check_own(&self, id: u64) -> Result<(), TransportError> {
        if self.own.contains(&id) { Ok(()) } else { Err(TransportError::Unknown { id }) }
    }
}

impl Transport for Loopback {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        let (held, memory) = Held::new(region);
        self.fabric.regions().insert(memory.id(), held);
        self.own.push(memory.id());
        Ok(memory)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        self.check_own(memory.id())?;
        self.own.retain(|&id| id != memory.id());
        let removed = self.fabric.regions().remove(&memory.id());
        removed.map(Held::into_region).ok_or(TransportError::Unknown { id: memory.id() })
    }

    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError> {
        self.check_own(memory.id())?;
        let mut regions = self.fabric.regions();
        let held = regions.get_mut(&memory.id());
        let held = held.ok_or(TransportError::Unknown { id: memory.id() })?;
        Ok(work(held.region_mut()))
    }

    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        self.check_own(memory.id())?;
        Ok(Descriptor(memory.id().to_le_bytes().to_vec()))
    }

    /// Only checks the range: peers always see the current bytes.
    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError> {
        self.check_own(memory.id())?;
        let len = memory.len();
        let is_its = bytes.start <= bytes.end && bytes.end <= len;
        if is_its { Ok(()) } else { Err(TransportError::Outside { bytes, len }) }
    }

    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted> {
        if let Err(error) = self.check_own(into.id()) {
            return Err(NotPosted(into, error));
        }
        let read = self.fabric.read(from, bytes.clone()).and_then(|found| {
            let written = self.fabric.write(into.id(), bytes.start, &found);
            let len = into.len();
            if written { Ok(()) } else { Err(TransportError::Outside { bytes, len }) }
        });
        match read {
            Ok(()) => Ok(into.in_flight()),
            Err(error) => Err(NotPosted(into, error)),
        }
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        let id = read.id();
        match self.fabric.regions().get(&id) {
            Some(held) => held.done(read),
            None => Polled::Failed(read, TransportError::Unknown { id }),
        }
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        let mut regions = self.fabric.regions();
        self.own.drain(..).for_each(|id| drop(regions.remove(&id)));
        Ok(())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // No read is under way between calls, so the memory can be freed.
        let _ = self.fence();
    }
}

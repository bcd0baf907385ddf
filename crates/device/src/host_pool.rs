//! Pinned host memory in units of one size, and copies between it and a device that do not wait.

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::Backend;
use crate::buffer::{Buffer, View};
use crate::checks::check_device;
use crate::device::Device;
use crate::error::DeviceError;
use crate::pinned::Pinned;
use crate::stream::{Event, Stream};

/// Pinned host memory in units of one size. Cloning gives another handle of the same pool.
pub struct HostPool<B: Backend> {
    shared: Arc<Shared<B>>,
}

struct Shared<B: Backend> {
    /// The first byte of `memory`.
    first: NonNull<u8>,
    unit_bytes: usize,
    units: u32,
    /// Numbers of the free units.
    free: Mutex<BTreeSet<u32>>,
    memory: Pinned<B, u8>,
}

// SAFETY: the bytes behind `first` are reached through units alone, of which each has one owner and no byte of another.
unsafe impl<B: Backend> Send for Shared<B> {}
// SAFETY: as above.
unsafe impl<B: Backend> Sync for Shared<B> {}

impl<B: Backend> Shared<B> {
    fn free(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // Every change of the set is one call, so that a panic leaves it valid.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self, index: u32) -> NonNull<u8> {
        // SAFETY: `memory` has the bytes of all units, and units are made for numbers below `units`.
        unsafe { self.first.add(index as usize * self.unit_bytes) }
    }
}

impl<B: Backend> Clone for HostPool<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// A unit of a [`HostPool`]. Only its owner can reach its bytes. It goes back to its pool when it is dropped.
pub struct HostUnit<B: Backend> {
    index: u32,
    shared: Arc<Shared<B>>,
}

impl<B: Backend> HostUnit<B> {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes are the unit's, zeroed when they were allocated. Who writes them has the unit by
        // `&mut`, or by value: a copy from the device holds it until it is done.
        unsafe {
            slice::from_raw_parts(self.shared.address(self.index).as_ptr(), self.shared.unit_bytes)
        }
    }

    /// Its bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let Shared { unit_bytes, .. } = *self.shared;
        // SAFETY: as above. A copy to the device holds the unit by an `Arc`, so that nobody has it by `&mut`.
        unsafe { slice::from_raw_parts_mut(self.shared.address(self.index).as_ptr(), unit_bytes) }
    }
}

impl<B: Backend> Drop for HostUnit<B> {
    fn drop(&mut self) {
        self.shared.free().insert(self.index);
    }
}

impl<B: Backend> HostPool<B> {
    /// Pinned memory of `units` units of `unit_bytes` bytes, zero.
    ///
    /// # Errors
    /// As [`Device::allocate_pinned`].
    pub fn new(device: &Device<B>, units: u32, unit_bytes: usize) -> Result<Self, DeviceError> {
        let bytes = unit_bytes.saturating_mul(units as usize);
        let mut memory = device.allocate_pinned::<u8>(bytes)?;
        let first = NonNull::from(memory.as_mut_slice()).cast();
        let free = Mutex::new((0..units).collect());
        Ok(Self { shared: Arc::new(Shared { first, unit_bytes, units, free, memory }) })
    }

    /// Takes `units` units, those with the lowest numbers; `None` if fewer are free.
    #[must_use]
    pub fn take(&self, units: usize) -> Option<Vec<HostUnit<B>>> {
        let mut free = self.shared.free();
        if free.len() < units {
            return None;
        }
        let unit = |index| HostUnit { index, shared: Arc::clone(&self.shared) };
        Some(std::iter::from_fn(|| free.pop_first()).take(units).map(unit).collect())
    }

    /// Number of free units.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.shared.free().len() as u32
    }

    /// Number of units.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.shared.units
    }

    /// Bytes of a unit.
    #[must_use]
    pub fn unit_bytes(&self) -> usize {
        self.shared.unit_bytes
    }
}

/// Copies between a device's memory and units of a [`HostPool`], in one stream. It holds the units until the copies are
/// done: until then no unit can be written, read by others or given back. Dropping it waits for the stream; during a
/// capture the wait is deferred until the capture ends. If the wait fails, or the program that owns the stream captures
/// it, the units never return to their pool.
pub struct HostCopies<B: Backend> {
    stream: Stream<B>,
    ended: Event<B>,
    written: Vec<HostUnit<B>>,
    read: Vec<Arc<HostUnit<B>>>,
    /// Bytes of all copies that were queued.
    bytes: u64,
    /// Whether nothing is in flight.
    is_settled: bool,
}

impl<B: Backend> HostCopies<B> {
    /// Copies in `stream`; none is queued yet.
    ///
    /// # Errors
    /// As [`Device::event`].
    pub fn new(stream: &Stream<B>) -> Result<Self, DeviceError> {
        let (stream, ended) = (stream.clone(), stream.device().event()?);
        let (written, read) = (Vec::new(), Vec::new());
        Ok(Self { stream, ended, written, read, bytes: 0, is_settled: true })
    }

    /// Queues copies of `from` to `units`, in order, cut into parts as long as a unit. The last part may be shorter
    /// than its unit. Units that are adjacent in their pool take one copy.
    ///
    /// # Errors
    /// [`DeviceError::Length`] unless `from` fills all units but the last, and fits into all;
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::ForbiddenInCapture`]; [`DeviceError::Cuda`]. After the last two,
    /// copies may have been queued, and `self` keeps the units; after the others the units are dropped.
    pub fn store(
        &mut self,
        from: &View<B, u8>,
        units: Vec<HostUnit<B>>,
    ) -> Result<(), DeviceError> {
        let (first, runs) = (self.written.len(), runs(from.len(), units.iter())?);
        self.check_units(units.iter())?;
        let source = from.range("copy to host memory", self.stream.device().id(), 0, from.len())?;
        self.written.extend(units);
        let (stream, written) = (&self.stream, &self.written[first..]);
        let mut queued = 0;
        let copies = runs.iter().try_for_each(|run| {
            let (start, to) = (source.address + run.start, written[run.unit].address());
            // SAFETY: the run's units are disjoint memory of one pool, which follows each other, and `self` holds them
            // until the stream was waited for; the source is in a live buffer of this device, whose freeing waits.
            let copy = || unsafe {
                let backend = stream.backend();
                backend.download(stream.raw(), start, to.as_ptr(), run.bytes)
            };
            stream.outside("copying to host memory", || {
                self.is_settled = false;
                copy()
            })?;
            queued += run.bytes as u64;
            Ok(())
        });
        self.bytes += queued;
        copies
    }

    /// Queues copies of `units` to `to`, in order, cut into parts as long as a unit. The last part may be shorter than
    /// its unit. Units that are adjacent in their pool take one copy.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn load(
        &mut self,
        units: impl IntoIterator<Item = Arc<HostUnit<B>>>,
        to: &Buffer<B, u8>,
    ) -> Result<(), DeviceError> {
        let units: Vec<_> = units.into_iter().collect();
        let (first, runs) = (self.read.len(), runs(to.len(), units.iter().map(|unit| &**unit))?);
        self.check_units(units.iter().map(|unit| &**unit))?;
        let target = to.range("copy from host memory", self.stream.device().id(), 0, to.len())?;
        self.read.extend(units);
        let (stream, read) = (&self.stream, &self.read[first..]);
        let mut queued = 0;
        let copies = runs.iter().try_for_each(|run| {
            let (from, start) = (read[run.unit].address(), target.address + run.start);
            // SAFETY: as above; nobody writes a unit that is shared.
            let copy = || unsafe {
                let backend = stream.backend();
                backend.upload(stream.raw(), from.as_ptr().cast_const(), start, run.bytes)
            };
            stream.outside("copying from host memory", || {
                self.is_settled = false;
                copy()
            })?;
            queued += run.bytes as u64;
            Ok(())
        });
        self.bytes += queued;
        copies
    }

    /// Records the end of the work in the stream: of the copies, and of other work that was queued there.
    ///
    /// # Errors
    /// As [`Stream::record`].
    pub fn end(&mut self) -> Result<(), DeviceError> {
        self.stream.record(&self.ended)?;
        self.is_settled = false;
        Ok(())
    }

    /// Bytes of all copies that were queued.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all work before [`Self::end`] is done.
    ///
    /// # Errors
    /// As [`Event::has_passed`].
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        self.ended.has_passed()
    }

    /// Waits for all work of the stream, and returns the units that were written.
    ///
    /// # Errors
    /// [`Unsettled`], which holds the copies with their units, if the wait fails.
    pub fn settle(mut self) -> Result<Vec<HostUnit<B>>, Box<Unsettled<B>>> {
        if let Err(error) = self.stream.synchronize() {
            return Err(Box::new(Unsettled { copies: self, error }));
        }
        self.is_settled = true;
        Ok(std::mem::take(&mut self.written))
    }

    /// Refuses units of other devices.
    fn check_units<'u>(
        &self,
        mut units: impl Iterator<Item = &'u HostUnit<B>>,
    ) -> Result<(), DeviceError> {
        let used = self.stream.device().id();
        units.try_for_each(|unit| {
            check_device("pinned memory", unit.shared.memory.device().id(), used)
        })
    }
}

impl<B: Backend> HostUnit<B> {
    fn address(&self) -> NonNull<u8> {
        self.shared.address(self.index)
    }
}

impl<B: Backend> Drop for HostCopies<B> {
    fn drop(&mut self) {
        if !self.is_settled {
            let (written, read) =
                (std::mem::take(&mut self.written), std::mem::take(&mut self.read));
            InFlight { stream: self.stream.clone(), written, read }.release();
        }
    }
}

/// Units that the device may still write or read, and the stream of the copies.
struct InFlight<B: Backend> {
    stream: Stream<B>,
    written: Vec<HostUnit<B>>,
    read: Vec<Arc<HostUnit<B>>>,
}

impl<B: Backend> InFlight<B> {
    /// Waits for the stream and gives the units back; during a capture, when that has ended.
    fn release(mut self) {
        let device = self.stream.device().clone();
        // A wait would end a capture by the program that owns the stream.
        if self.stream.refuse_recording("waiting for copies").is_err() {
            return self.leak();
        }
        let waited = loop {
            let wait = || self.stream.backend().synchronize(self.stream.raw());
            if let Some(waited) = device.captures().try_outside(wait) {
                break waited;
            }
            match device.captures().defer(self, Self::release) {
                Ok(()) => return,
                // The capture has ended meanwhile.
                Err(same) => self = same,
            }
        };
        if waited.is_err() {
            self.leak();
        }
    }

    /// Gives no unit back: the device may still write or read them.
    fn leak(self) {
        self.written.into_iter().for_each(std::mem::forget);
        self.read.into_iter().for_each(std::mem::forget);
    }
}

/// Copies that could not be waited for: they may still be in flight.
pub struct Unsettled<B: Backend> {
    /// The copies.
    pub copies: HostCopies<B>,
    /// The error of the wait.
    pub error: DeviceError,
}

/// Units that are adjacent in one pool.
struct Run {
    /// Index of the first, among the units that are copied.
    unit: usize,
    /// Offset of the first byte in the range on the device.
    start: u64,
    bytes: usize,
}

/// Divides `bytes` bytes among the units, filling all but the last, and joins adjacent units into runs.
fn runs<'u, B: Backend>(
    bytes: u64,
    units: impl Iterator<Item = &'u HostUnit<B>>,
) -> Result<Vec<Run>, DeviceError> {
    let mut runs: Vec<Run> = Vec::new();
    let (mut start, mut last): (u64, Option<&HostUnit<B>>) = (0, None);
    for (unit, found) in units.enumerate() {
        let size = found.shared.unit_bytes as u64;
        let these = size.min(bytes.saturating_sub(start));
        if these == 0 {
            let what = "bytes for a unit of host memory";
            return Err(DeviceError::Length { what, found: bytes, needed: start + 1 });
        }
        let follows = last.is_some_and(|last| {
            Arc::ptr_eq(&last.shared, &found.shared) && last.index + 1 == found.index
        });
        match runs.last_mut().filter(|_| follows) {
            Some(run) => run.bytes += these as usize,
            None => runs.push(Run { unit, start, bytes: these as usize }),
        }
        (start, last) = (start + these, Some(found));
    }
    if start < bytes {
        let what = "units of host memory, in bytes";
        return Err(DeviceError::Length { what, found: start, needed: bytes });
    }
    Ok(runs)
}

//! What both devices enforce of a capture, and the graph it ends in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Device, DeviceError, RawMemory};
use crate::kernels::Operation;

/// A captured sequence of launches, copies and fills. It owns the memory its launches touch: a
/// replay can never meet a freed buffer.
pub struct Graph<D: Device> {
    pub(super) raw: D::RawGraph,
    /// Held, not read: the memory of every pointer in `raw`.
    _retained: Vec<Arc<D::Memory>>,
}

impl<D: Device> Graph<D> {
    pub(super) fn new(raw: D::RawGraph, retained: Vec<Arc<D::Memory>>) -> Self {
        Self { raw, _retained: retained }
    }
}

/// The one capture a device can have at a time.
#[derive(Default)]
pub(super) struct Captures {
    /// Whether `current` is occupied; read without the lock on every launch.
    active: AtomicBool,
    current: Mutex<Option<Capture>>,
}

struct Capture {
    /// The stream being captured, by the device's own identity of it.
    stream: usize,
    /// Address ranges that launches may point into: first byte, bytes.
    retained: Vec<(u64, u64)>,
    /// The first rule that was broken: the capture cannot end well, even if the caller went on.
    violation: Option<DeviceError>,
}

impl Captures {
    /// Begins a capture of `stream`.
    pub(super) fn begin<M: RawMemory>(
        &self,
        stream: usize,
        retained: &[Arc<M>],
    ) -> Result<(), DeviceError> {
        let mut current = self.lock();
        if current.is_some() {
            return Err(DeviceError::NestedCapture);
        }
        let retained = retained.iter().map(|memory| (memory.address(), memory.bytes())).collect();
        *current = Some(Capture { stream, retained, violation: None });
        self.active.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the capture; the first rule broken in it, if any.
    pub(super) fn end(&self) -> Result<(), DeviceError> {
        self.active.store(false, Ordering::Release);
        match self.lock().take().and_then(|capture| capture.violation) {
            Some(violation) => Err(violation),
            None => Ok(()),
        }
    }

    /// Whether `stream` is being captured.
    pub(super) fn is_capturing(&self, stream: usize) -> bool {
        self.active.load(Ordering::Acquire)
            && self.lock().as_ref().is_some_and(|capture| capture.stream == stream)
    }

    /// Refuses `operation` while anything is being captured.
    pub(super) fn forbid(&self, operation: &'static str) -> Result<(), DeviceError> {
        if !self.active.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(capture) = self.lock().as_mut() {
            capture.note(DeviceError::ForbiddenInCapture { operation });
            return Err(DeviceError::ForbiddenInCapture { operation });
        }
        Ok(())
    }

    /// Checks a launch into `stream`: while it is captured, every pointer must be retained.
    pub(super) fn check_launch<O: Operation>(
        &self,
        stream: usize,
        kernel: &'static str,
        operation: &O,
    ) -> Result<(), DeviceError> {
        if !self.active.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut result = Ok(());
        operation.for_each_pointer(&mut |argument, address| {
            if result.is_ok() {
                result = self.check_pointer(stream, kernel, argument, address);
            }
        });
        result
    }

    /// As [`Self::check_launch`], for one pointer.
    pub(super) fn check_pointer(
        &self,
        stream: usize,
        kernel: &'static str,
        argument: &'static str,
        address: u64,
    ) -> Result<(), DeviceError> {
        let mut current = self.lock();
        let Some(capture) = current.as_mut().filter(|capture| capture.stream == stream) else {
            return Ok(());
        };
        let inside = |&(first, bytes): &(u64, u64)| address >= first && address - first < bytes;
        if capture.retained.iter().any(inside) {
            return Ok(());
        }
        capture.note(DeviceError::NotRetained { kernel, argument, address });
        Err(DeviceError::NotRetained { kernel, argument, address })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Capture>> {
        // The state is a plain value, valid even if a holder of the lock panicked.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Capture {
    fn note(&mut self, violation: DeviceError) {
        self.violation.get_or_insert(violation);
    }
}

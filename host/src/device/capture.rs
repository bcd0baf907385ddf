//! What both devices enforce of a capture, and the graph it ends in.

use std::sync::{Arc, PoisonError};

// Under `--cfg loom` the model checker's own, for the test at the end.
#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

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

    fn lock(&self) -> MutexGuard<'_, Option<Capture>> {
        // The state is a plain value, valid even if a holder of the lock panicked.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Capture {
    fn note(&mut self, violation: DeviceError) {
        self.violation.get_or_insert(violation);
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --release -p dsv4-kv --lib -- loom`: every order in which two
/// threads can meet here.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;

    struct Nothing;

    impl RawMemory for Nothing {
        fn address(&self) -> u64 {
            0
        }

        fn bytes(&self) -> u64 {
            0
        }
    }

    /// Another thread that is refused during a capture makes that capture fail, and one that is not
    /// refused does not.
    #[test]
    fn a_refusal_and_the_end_of_a_capture_agree() {
        loom::model(|| {
            let captures = loom::sync::Arc::new(Captures::default());
            let other = loom::sync::Arc::clone(&captures);
            let other = thread::spawn(move || other.forbid("allocating").is_err());
            captures.begin::<Nothing>(1, &[]).unwrap();
            let failed = captures.end().is_err();
            assert_eq!(other.join().unwrap(), failed);
        });
    }

    /// Of two captures at a time one is refused, and the other ends well.
    #[test]
    fn one_of_two_captures_is_refused() {
        loom::model(|| {
            let captures = loom::sync::Arc::new(Captures::default());
            let other = loom::sync::Arc::clone(&captures);
            let begin = |captures: &Captures| captures.begin::<Nothing>(1, &[]).is_ok();
            let other = thread::spawn(move || begin(&other));
            let here = captures.begin::<Nothing>(2, &[]).is_ok();
            assert!(here != other.join().unwrap());
            assert!(captures.is_capturing(if here { 2 } else { 1 }));
            captures.end().unwrap();
            assert!(!captures.is_capturing(1) && !captures.is_capturing(2));
        });
    }
}

//! The state of stream captures: calls that an active capture forbids, and frees that are deferred until it ends.
//!
//! An active capture forbids allocating, freeing and waiting: on its device in every thread, and in its thread on any
//! device. Other threads may use other devices: a capture is begun in mode `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.

use std::cell::RefCell;
use std::sync::{Arc, PoisonError, Weak};

// Under `--cfg loom` these are the model checker's own types, for the tests at the end.
#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicBool, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicBool, Ordering},
};

use crate::error::DeviceError;
use crate::span::Span;

#[cfg(not(loom))]
thread_local! {
    /// The domain in which this thread captures a stream.
    static CAPTURING: RefCell<Option<Arc<Captures>>> = const { RefCell::new(None) };
}
#[cfg(loom)]
loom::thread_local! {
    static CAPTURING: RefCell<Option<Arc<Captures>>> = RefCell::new(None);
}

/// The state of captures in one domain, whose devices have at most one capture at a time.
pub(crate) struct Captures {
    /// Whether `current` is occupied; read without the lock on every launch.
    active: AtomicBool,
    /// Locked for reading during calls that a capture forbids or records, for writing while a capture begins. So a
    /// capture begins after such calls in flight have ended, and later calls wait until it has begun.
    gate: RwLock<()>,
    current: Mutex<Option<Capture>>,
    /// Streams that no capture may record, once for each [`Self::start_running`]. Locked before `current`.
    running: Mutex<Vec<u64>>,
}

struct Capture {
    /// The stream being captured, by the backend's own identity of it.
    stream: u64,
    /// Ranges that launches may point into.
    retained: Vec<Span>,
    /// Launches, copies and fills that were queued.
    nodes: u64,
    /// The first rule that was broken. The capture then ends with this error, even if the caller ignored it.
    violation: Option<DeviceError>,
    /// Work to do when the capture has ended: frees, and waits.
    deferred: Vec<Deferred>,
}

impl Default for Captures {
    fn default() -> Self {
        // Otherwise the first steps would allocate.
        let running = Mutex::new(Vec::with_capacity(16));
        let (active, gate) = (AtomicBool::new(false), RwLock::new(()));
        Self { active, gate, current: Mutex::new(None), running }
    }
}

/// Work that a capture defers.
type Deferred = Box<dyn FnOnce() + Send>;

impl Captures {
    /// Begins a capture of `stream` in this thread, after all calls in flight that a capture forbids or records.
    ///
    /// # Errors
    /// [`DeviceError::NestedCapture`]; [`DeviceError::StreamInUse`] between [`Self::start_running`] and
    /// [`Self::end_running`] of the stream.
    pub fn begin(self: &Arc<Self>, stream: u64, retained: Vec<Span>) -> Result<(), DeviceError> {
        if self.elsewhere().is_some() {
            return Err(DeviceError::NestedCapture);
        }
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let running = self.lock_running();
        let mut current = self.lock();
        if current.is_some() {
            return Err(DeviceError::NestedCapture);
        }
        if running.contains(&stream) {
            return Err(DeviceError::StreamInUse);
        }
        let deferred = Vec::new();
        *current = Some(Capture { stream, retained, nodes: 0, violation: None, deferred });
        self.active.store(true, Ordering::Release);
        CAPTURING.with(|capturing| capturing.replace(Some(Arc::clone(self))));
        Ok(())
    }

    /// Ends the capture, in the thread that began it, and does the deferred work. Returns the number of nodes that were
    /// queued.
    ///
    /// # Errors
    /// The first rule that was broken during the capture.
    pub fn end(&self) -> Result<u64, DeviceError> {
        CAPTURING.with(RefCell::take);
        self.active.store(false, Ordering::Release);
        let Some(Capture { nodes, violation, deferred, .. }) = self.lock().take() else {
            return Ok(0);
        };
        // Another capture may begin meanwhile; it then defers the remaining work.
        deferred.into_iter().for_each(|deferred| deferred());
        violation.map_or(Ok(nodes), Err)
    }

    /// Calls `queue`, which queues work into `stream`. While the stream is captured, every range must be retained, and
    /// the work counts as a node. No capture begins between the check and the end of `queue`, which must not call
    /// anything here, nor drop an `Owned`.
    pub fn queue<'a>(
        &self,
        stream: u64,
        kernel: &'static str,
        arguments: impl IntoIterator<Item = (&'static str, &'a Span)>,
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let _gate = self.enter();
        self.check_retained(stream, kernel, arguments)?;
        queue()?;
        if self.active.load(Ordering::Acquire)
            && let Some(capture) = self.lock().as_mut()
            && capture.stream == stream
        {
            capture.nodes += 1;
        }
        Ok(())
    }

    /// Calls `replay`, which replays a graph into `stream`, unless the stream is being captured. No capture begins
    /// meanwhile.
    pub fn replay(
        &self,
        stream: u64,
        replay: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let _gate = self.enter();
        if self.is_capturing(stream) {
            return Err(DeviceError::NestedCapture);
        }
        replay()
    }

    /// From now on no capture of `stream` begins, until as many calls of [`Self::end_running`]. False, and without
    /// effect, if the stream is being captured.
    #[must_use]
    pub fn start_running(&self, stream: u64) -> bool {
        let mut running = self.lock_running();
        let runs = !self.is_capturing(stream);
        if runs {
            running.push(stream);
        }
        runs
    }

    /// Ends what a call of [`Self::start_running`] began.
    pub fn end_running(&self, stream: u64) {
        let mut running = self.lock_running();
        if let Some(at) = running.iter().position(|&other| other == stream) {
            running.swap_remove(at);
        }
    }

    /// Whether `stream` is being captured.
    pub fn is_capturing(&self, stream: u64) -> bool {
        self.active.load(Ordering::Acquire)
            && self.lock().as_ref().is_some_and(|capture| capture.stream == stream)
    }

    /// Calls `forbidden`, which does something that a capture forbids. Refuses it while a stream of this domain is
    /// being captured, or while this thread captures one of another domain. No capture of this domain begins until the
    /// call is done. It must not call anything here, nor drop an `Owned`.
    pub fn outside<R>(
        &self,
        operation: &'static str,
        forbidden: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        self.with_forbidding(|captures| {
            if captures.active.load(Ordering::Acquire)
                && let Some(capture) = captures.lock().as_mut()
            {
                capture.note(DeviceError::ForbiddenInCapture { operation });
                return Err(DeviceError::ForbiddenInCapture { operation });
            }
            forbidden()
        })
    }

    /// As [`Self::outside`], but where that refuses, this calls nothing, breaks no rule and returns `None`.
    pub fn try_outside<R>(&self, forbidden: impl FnOnce() -> R) -> Option<R> {
        self.with_forbidding(|captures| (!captures.active.load(Ordering::Acquire)).then(forbidden))
    }

    /// Calls `then` with `value` when the capture ends that is active in this domain, or that this thread has begun in
    /// another.
    ///
    /// # Errors
    /// `value`, if none is active.
    pub fn defer<T: Send + 'static>(&self, value: T, then: fn(T)) -> Result<(), T> {
        self.with_forbidding(|captures| match captures.lock().as_mut() {
            Some(capture) => {
                capture.deferred.push(Box::new(move || then(value)));
                Ok(())
            }
            None => Err(value),
        })
    }

    /// Drops `raw`: now, or when the capture ends that is active in this domain, or that this thread has begun in
    /// another.
    pub fn free<T: Send + 'static>(self: &Arc<Self>, raw: T) {
        self.with_forbidding(|captures| {
            if captures.active.load(Ordering::Acquire)
                && let Some(capture) = captures.lock().as_mut()
            {
                let here = Arc::clone(self);
                capture.deferred.push(Box::new(move || here.free(raw)));
                return;
            }
            drop(raw);
        });
    }

    /// Calls `then` with the domain whose capture, if one is active, forbids calls of this thread: the other domain in
    /// which the thread itself captures, or else this one. In this one no capture begins during the call.
    fn with_forbidding<R>(&self, then: impl FnOnce(&Self) -> R) -> R {
        match self.elsewhere() {
            // Without this domain's gate: a thread that holds it may wait for that capture.
            Some(captures) => then(&captures),
            None => {
                let _gate = self.enter();
                then(self)
            }
        }
    }

    /// The other domain in which this thread captures a stream, if there is one.
    fn elsewhere(&self) -> Option<Arc<Self>> {
        // While a thread ends, its thread-local variables are gone, and it captures nothing.
        let capturing = CAPTURING.try_with(|capturing| capturing.borrow().clone()).ok().flatten();
        capturing.filter(|captures| !std::ptr::eq(Arc::as_ptr(captures), self))
    }

    /// Checks work that is queued into `stream`: while the stream is captured, every range must be retained.
    pub fn check_retained<'a>(
        &self,
        stream: u64,
        kernel: &'static str,
        arguments: impl IntoIterator<Item = (&'static str, &'a Span)>,
    ) -> Result<(), DeviceError> {
        if !self.active.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut current = self.lock();
        let Some(capture) = current.as_mut().filter(|capture| capture.stream == stream) else {
            return Ok(());
        };
        for (argument, &Span { address, bytes, .. }) in arguments {
            let holds = |memory: &Span| {
                address >= memory.address && address - memory.address + bytes <= memory.bytes
            };
            if !capture.retained.iter().any(holds) {
                capture.note(DeviceError::NotRetained { kernel, argument, address });
                return Err(DeviceError::NotRetained { kernel, argument, address });
            }
        }
        Ok(())
    }

    fn enter(&self) -> RwLockReadGuard<'_, ()> {
        // The guarded value is `()`: nothing in it can be broken by a panic.
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_running(&self) -> MutexGuard<'_, Vec<u64>> {
        // A list of numbers is valid even if a holder of the lock panicked.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Refuses an operation that a capture forbids, if this thread captures a stream of any device.
#[cfg(feature = "cuda")]
pub(crate) fn check_thread(operation: &'static str) -> Result<(), DeviceError> {
    let capturing = CAPTURING.with(|capturing| capturing.borrow().clone());
    capturing.map_or(Ok(()), |captures| captures.outside(operation, || Ok(())))
}

/// The state of captures that all devices of one domain share.
pub(crate) fn domain(key: u64) -> Arc<Captures> {
    static DOMAINS: std::sync::Mutex<Vec<(u64, Weak<Captures>)>> =
        std::sync::Mutex::new(Vec::new());
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    domains.retain(|(_, captures)| captures.strong_count() > 0);
    let known = domains.iter().find(|(of, _)| *of == key).and_then(|(_, known)| known.upgrade());
    known.unwrap_or_else(|| {
        let captures = Arc::<Captures>::default();
        domains.push((key, Arc::downgrade(&captures)));
        captures
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// A wait for one device holds up no capture of another: a rank may wait for work that another rank does after its
    /// capture.
    #[test]
    fn a_wait_elsewhere_holds_up_no_capture() {
        let [here, elsewhere] = [(); 2].map(|()| Arc::<Captures>::default());
        let [waits, captured] = [(); 2].map(|()| Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                let wait = || {
                    waits.wait();
                    captured.wait();
                    Ok(())
                };
                elsewhere.outside("waiting for a stream", wait).unwrap();
            });
            waits.wait();
            here.begin(1, Vec::new()).unwrap();
            here.end().unwrap();
            captured.wait();
        });
    }

    /// A thread that captures waits for no gate of another device: the thread that holds it may wait for that capture.
    #[test]
    fn a_capturing_thread_waits_for_no_gate_elsewhere() {
        let [here, elsewhere] = [(); 2].map(|()| Arc::<Captures>::default());
        let gate = elsewhere.gate.write().unwrap();
        here.begin(1, Vec::new()).unwrap();
        elsewhere.free(7);
        assert!(elsewhere.try_outside(|| ()).is_none());
        assert!(elsewhere.outside("waiting for a stream", || Ok(())).is_err());
        drop(gate);
        here.end().unwrap_err();
        elsewhere.outside("waiting for a stream", || Ok(())).unwrap();
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --release -p dsv4-kv-device --lib -- loom`: every interleaving of two threads.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    /// Another thread that is refused during a capture makes that capture fail, and one that is not
    /// refused does not.
    #[test]
    fn a_refusal_and_the_end_of_a_capture_agree() {
        loom::model(|| {
            let captures = Arc::new(Captures::default());
            let other = Arc::clone(&captures);
            let other = thread::spawn(move || other.outside("allocating", || Ok(())).is_err());
            captures.begin(1, Vec::new()).unwrap();
            let failed = captures.end().is_err();
            assert_eq!(other.join().unwrap(), failed);
        });
    }

    /// If two captures are begun at the same time, one is refused, and the other ends well.
    #[test]
    fn one_of_two_captures_is_refused() {
        loom::model(|| {
            let captures = Arc::new(Captures::default());
            let other = Arc::clone(&captures);
            let begin =
                |captures: &Arc<Captures>, stream| captures.begin(stream, Vec::new()).is_ok();
            let other = thread::spawn(move || begin(&other, 1));
            let here = begin(&captures, 2);
            assert!(here != other.join().unwrap());
            assert!(captures.is_capturing(if here { 2 } else { 1 }));
            captures.end().unwrap();
            assert!(!captures.is_capturing(1) && !captures.is_capturing(2));
        });
    }

    /// Recorded work was checked for the capture: no launch with memory that is not retained is recorded, and no
    /// replay.
    #[test]
    fn what_is_recorded_was_checked() {
        loom::model(|| {
            let captures = Arc::new(Captures::default());
            let captured = loom::sync::Arc::new(AtomicBool::new(false));
            let (other, flag) = (captures.clone(), captured.clone());
            let other = thread::spawn(move || {
                let device = crate::identity::DeviceId::new();
                let span = Span { device, address: 64, bytes: 4 };
                let runs = || {
                    assert!(!flag.load(Ordering::Acquire), "it would be recorded");
                    Ok(())
                };
                let _ = other.queue(1, "kernel", [("to", &span)], runs);
                let _ = other.replay(1, runs);
            });
            captures.begin(1, Vec::new()).unwrap();
            captured.store(true, Ordering::Release);
            thread::yield_now();
            captured.store(false, Ordering::Release);
            let _ = captures.end();
            other.join().unwrap();
        });
    }

    /// Work that must run is never recorded: either it is refused, or no capture of its stream begins beside it.
    #[test]
    fn what_must_run_is_not_recorded() {
        loom::model(|| {
            let captures = Arc::new(Captures::default());
            let captured = loom::sync::Arc::new(AtomicBool::new(false));
            let (other, flag) = (captures.clone(), captured.clone());
            let other = thread::spawn(move || {
                if !other.start_running(1) {
                    return;
                }
                let runs = || {
                    assert!(!flag.load(Ordering::Acquire), "it would be recorded");
                    Ok(())
                };
                other.queue(1, "kernel", [], runs).unwrap();
                other.end_running(1);
            });
            match captures.begin(1, Vec::new()) {
                Ok(()) => {
                    captured.store(true, Ordering::Release);
                    thread::yield_now();
                    captured.store(false, Ordering::Release);
                    assert_eq!(captures.end().unwrap(), 0, "nodes");
                }
                Err(error) => assert!(matches!(error, DeviceError::StreamInUse), "{error}"),
            }
            other.join().unwrap();
            captures.begin(1, Vec::new()).unwrap();
            captures.end().unwrap();
        });
    }

    /// Forbidden calls and frees never run between the begin and the end of a capture.
    #[test]
    fn forbidden_calls_and_frees_stay_outside() {
        /// Counts itself when it is dropped, and must not be while anything is captured.
        struct Freed {
            captured: loom::sync::Arc<AtomicBool>,
            count: loom::sync::Arc<AtomicUsize>,
        }

        impl Drop for Freed {
            fn drop(&mut self) {
                assert!(!self.captured.load(Ordering::Acquire));
                self.count.fetch_add(1, Ordering::AcqRel);
            }
        }

        loom::model(|| {
            let captures = Arc::new(Captures::default());
            let captured = loom::sync::Arc::new(AtomicBool::new(false));
            let count = loom::sync::Arc::new(AtomicUsize::new(0));
            let freed = Freed { captured: captured.clone(), count: count.clone() };
            let (other, flag) = (captures.clone(), captured.clone());
            let other = thread::spawn(move || {
                let _ = other.outside("waiting", || {
                    assert!(!flag.load(Ordering::Acquire));
                    Ok(())
                });
                other.free(freed);
            });
            captures.begin(1, Vec::new()).unwrap();
            captured.store(true, Ordering::Release);
            captured.store(false, Ordering::Release);
            let _ = captures.end();
            other.join().unwrap();
            assert_eq!(count.load(Ordering::Acquire), 1);
        });
    }
}

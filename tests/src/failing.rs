//! A device that fails on demand: any call of its backend can be made to fail.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use dsv4_kv::device::{
    Backend, CudaStatus, Device, DeviceError, DeviceInfo, EmuOptions, Emulator, Operation, Priority,
};

use crate::lazy::Lazy;

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call does nothing and returns an error.
    Instead,
    /// The call does its work and returns an error all the same, as a driver does when it reports the error of earlier
    /// work.
    After,
}

/// The numbers of the calls to fail, in turn, each twice. An attempt after a failed one may begin with one more wait,
/// so that the failure hits the call before the intended one. The next attempt begins without that wait, and the
/// failure hits the intended call.
pub fn each_call() -> impl Iterator<Item = u64> {
    (0..).flat_map(|call| [call; 2])
}

/// A backend that counts the calls that can fail, and fails the call chosen by [`Self::fail`].
///
/// Counted are allocations, streams, events, records, waits, queries of events, launches, copies, fills, and the begin,
/// end, instantiation and replay of captures. Other queries are not counted ([`Backend::info`],
/// [`Backend::free_memory`], [`Backend::elapsed_ms`]).
pub struct Failing<B> {
    inner: B,
    /// Calls since the last [`Self::fail`].
    calls: AtomicU64,
    plan: Mutex<Plan>,
    meeting: Mutex<Option<Meeting>>,
    /// The number of a call, and work to run before it.
    before: Mutex<Option<(u64, Other)>>,
    skips_launches: AtomicBool,
    waits_for_launches: AtomicBool,
    is_recorded: AtomicBool,
    /// Streams of the lowest priority that were asked for.
    background_streams: AtomicU64,
    domain: Option<u64>,
}

/// A graph of a [`Failing`] device. Its lock shows whether a thread is replaying it.
pub struct FailingGraph<G> {
    inner: G,
    replayed: Mutex<()>,
}

/// Work that [`Failing::meet`] runs inside a call of [`Backend::stream_id`], and the number of such calls to let pass
/// before.
struct Meeting {
    questions: u64,
    other: Other,
}

/// Work that runs beside a call.
type Other = Box<dyn FnOnce() + Send>;

/// The call to fail next, and the call that failed last.
#[derive(Clone, Copy, Default)]
struct Plan {
    next: Option<(u64, Failure)>,
    failed: Option<&'static str>,
}

impl Failing<Emulator> {
    /// An emulated device that fails on demand.
    #[must_use]
    pub fn emulated(options: EmuOptions) -> Device<Self> {
        Device::from_backend(Self::new(Emulator::new(options)))
    }
}

impl Failing<Lazy<Emulator>> {
    /// An emulated device that defers its work (see [`Lazy`]), and fails on demand.
    #[must_use]
    pub fn late(options: EmuOptions) -> Device<Self> {
        Device::from_backend(Self::new(Lazy::new(Emulator::new(options))))
    }
}

impl<B: Backend> Failing<B> {
    /// A backend that fails only on demand.
    #[must_use]
    pub fn new(inner: B) -> Self {
        let domain = inner.capture_domain();
        Self {
            inner,
            calls: AtomicU64::new(0),
            plan: Mutex::default(),
            meeting: Mutex::default(),
            before: Mutex::default(),
            skips_launches: AtomicBool::new(false),
            waits_for_launches: AtomicBool::new(false),
            is_recorded: AtomicBool::new(false),
            background_streams: AtomicU64::new(0),
            domain,
        }
    }

    /// As [`Self::new`], in a capture [domain](Backend::capture_domain) with others, as two devices on one GPU are.
    #[must_use]
    pub fn in_domain(self, domain: u64) -> Self {
        Self { domain: Some(domain), ..self }
    }

    /// Restarts the count at 0, and makes call `call` fail once.
    pub fn fail(&self, call: u64, how: Failure) {
        self.plan(|plan| *plan = Plan { next: Some((call, how)), failed: None });
        self.calls.store(0, Ordering::Relaxed);
    }

    /// Restarts the count at 0, and makes no call fail.
    pub fn fail_nothing(&self) {
        self.plan(|plan| *plan = Plan::default());
        self.calls.store(0, Ordering::Relaxed);
    }

    /// Restarts the count at 0, and runs `other` once, before call `call`. It may not begin a capture.
    pub fn run_before(&self, call: u64, other: impl FnOnce() + Send + 'static) {
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) = Some((call, Box::new(other)));
        self.calls.store(0, Ordering::Relaxed);
    }

    /// Whether the work of the last [`Self::run_before`] has run. If it has not, it is discarded.
    pub fn has_run(&self) -> bool {
        self.before.lock().unwrap_or_else(PoisonError::into_inner).take().is_none()
    }

    /// Sets whether launches from now on succeed without running their kernels.
    pub fn skip_launches(&self, skip: bool) {
        self.skips_launches.store(skip, Ordering::Relaxed);
    }

    /// Sets whether the device waits after each launch from now on.
    pub fn wait_for_launches(&self, waits: bool) {
        self.waits_for_launches.store(waits, Ordering::Relaxed);
    }

    /// Sets whether all streams count from now on as captured by the program that owns them.
    pub fn record_streams(&self, records: bool) {
        self.is_recorded.store(records, Ordering::Relaxed);
    }

    /// Runs `other` once, inside call `question`, counted from 0 from now on, of [`Backend::stream_id`]. A stream makes
    /// that call before each launch. A capture may still begin there; inside the launch it may not.
    pub fn meet(&self, question: u64, other: impl FnOnce() + Send + 'static) {
        let meeting = Meeting { questions: question, other: Box::new(other) };
        *self.meeting.lock().unwrap_or_else(PoisonError::into_inner) = Some(meeting);
    }

    /// Whether the work of the last [`Self::meet`] has run. If it has not, it is discarded.
    pub fn has_met(&self) -> bool {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner).take().is_none()
    }

    /// Runs the work of the last [`Self::meet`] now, if it has not run yet.
    pub fn end_meeting(&self) {
        let meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Meeting { other, .. }) = meeting {
            other();
        }
    }

    /// Counts a call of [`Backend::stream_id`], and returns the work to run inside it.
    fn asked(&self) -> Option<Meeting> {
        let mut meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Meeting { questions, .. }) = &mut *meeting
            && *questions > 0
        {
            *questions -= 1;
            return None;
        }
        meeting.take()
    }

    /// Calls since the last [`Self::fail`] or [`Self::fail_nothing`].
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Number of streams of the lowest priority that were asked for.
    #[must_use]
    pub fn background_streams(&self) -> u64 {
        self.background_streams.load(Ordering::Relaxed)
    }

    /// The name of the call that failed since then.
    #[must_use]
    pub fn failed(&self) -> Option<&'static str> {
        self.plan(|plan| plan.failed)
    }

    fn plan<R>(&self, change: impl FnOnce(&mut Plan) -> R) -> R {
        change(&mut self.plan.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `call`, unless it is the one to fail.
    fn count<R>(
        &self,
        name: &'static str,
        call: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let other = before.take_if(|(call, _)| *call == number);
        // The work makes calls that are counted too.
        drop(before);
        if let Some((_, other)) = other {
            other();
        }
        let fails = self.plan(|plan| match plan.next {
            Some((at, how)) if at == number => {
                *plan = Plan { next: None, failed: Some(name) };
                Some(how)
            }
            _ => None,
        });
        match fails {
            None => return call(),
            Some(Failure::Instead) => {}
            Some(Failure::After) => drop(call()?),
        }
        let status = CudaStatus { code: 999, text: "failed on demand".into() };
        Err(DeviceError::Cuda { operation: name, status })
    }
}

// SAFETY: all objects are the inner backend's, and all that is done is done by it, or not at all.
unsafe impl<B: Backend> Backend for Failing<B> {
    type Memory = B::Memory;
    type PinnedMemory = B::PinnedMemory;
    type Stream = B::Stream;
    type Event = B::Event;
    type Graph = FailingGraph<B::Graph>;

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capture_domain(&self) -> Option<u64> {
        self.domain
    }

    fn waits_for_launches(&self) -> bool {
        self.waits_for_launches.load(Ordering::Relaxed) || self.inner.waits_for_launches()
    }

    fn is_recorded(&self, stream: &Self::Stream) -> Result<bool, DeviceError> {
        Ok(self.is_recorded.load(Ordering::Relaxed) || self.inner.is_recorded(stream)?)
    }

    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError> {
        self.inner.within(work)
    }

    fn divide(&self, memory: &Self::Memory, parts: &[Range<u64>]) {
        self.inner.divide(memory, parts);
    }

    fn stream_id(&self, stream: &B::Stream) -> u64 {
        if let Some(meeting) = self.asked() {
            (meeting.other)();
        }
        self.inner.stream_id(stream)
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        self.inner.free_memory()
    }

    fn allocate(&self, label: &'static str, bytes: u64) -> Result<B::Memory, DeviceError> {
        self.count("allocate", || self.inner.allocate(label, bytes))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<B::PinnedMemory, DeviceError> {
        self.count("allocate pinned", || self.inner.allocate_pinned(bytes))
    }

    fn stream(&self, priority: Priority) -> Result<B::Stream, DeviceError> {
        let is_lowest = u64::from(priority == Priority::Lowest);
        self.background_streams.fetch_add(is_lowest, Ordering::Relaxed);
        self.count("stream", || self.inner.stream(priority))
    }

    fn event(&self) -> Result<B::Event, DeviceError> {
        self.count("event", || self.inner.event())
    }

    fn record(&self, event: &B::Event, stream: &B::Stream) -> Result<(), DeviceError> {
        self.count("record", || self.inner.record(event, stream))
    }

    fn wait(&self, event: &B::Event) -> Result<(), DeviceError> {
        self.count("wait", || self.inner.wait(event))
    }

    fn has_passed(&self, event: &B::Event) -> Result<bool, DeviceError> {
        self.count("has passed", || self.inner.has_passed(event))
    }

    fn wait_in_stream(&self, stream: &B::Stream, event: &B::Event) -> Result<(), DeviceError> {
        self.count("wait in stream", || self.inner.wait_in_stream(stream, event))
    }

    fn elapsed_ms(&self, from: &B::Event, to: &B::Event) -> Result<f32, DeviceError> {
        self.inner.elapsed_ms(from, to)
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &B::Stream,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        if self.skips_launches.load(Ordering::Relaxed) {
            return self.count("launch", || Ok(()));
        }
        // SAFETY: the caller's promise.
        self.count("launch", || unsafe { self.inner.launch(stream, variant, operation) })
    }

    unsafe fn copy(
        &self,
        stream: &B::Stream,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.count("copy", || unsafe { self.inner.copy(stream, from, to, bytes) })
    }

    unsafe fn fill(
        &self,
        stream: &B::Stream,
        to: u64,
        byte: u8,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.count("fill", || unsafe { self.inner.fill(stream, to, byte, bytes) })
    }

    unsafe fn upload(
        &self,
        stream: &B::Stream,
        from: *const u8,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.count("upload", || unsafe { self.inner.upload(stream, from, to, bytes) })
    }

    unsafe fn download(
        &self,
        stream: &B::Stream,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.count("download", || unsafe { self.inner.download(stream, from, to, bytes) })
    }

    fn synchronize(&self, stream: &B::Stream) -> Result<(), DeviceError> {
        self.count("synchronize", || self.inner.synchronize(stream))
    }

    fn begin_capture(&self, stream: &B::Stream) -> Result<(), DeviceError> {
        let begun = self.count("begin capture", || self.inner.begin_capture(stream));
        if begun.is_err() {
            // A begin that reports an error must leave no capture open.
            drop(self.inner.end_capture(stream));
        }
        begun
    }

    fn end_capture(&self, stream: &B::Stream) -> Result<Self::Graph, DeviceError> {
        // The capture ends even if the call reports an error.
        let ended = self.inner.end_capture(stream);
        let ended = ended.map(|inner| FailingGraph { inner, replayed: Mutex::default() });
        self.count("end capture", || ended)
    }

    fn instantiate(&self, graph: &mut Self::Graph) -> Result<(), DeviceError> {
        self.count("instantiate", || self.inner.instantiate(&mut graph.inner))
    }

    /// # Panics
    /// While another thread replays the same graph, which the trait forbids.
    unsafe fn replay(&self, stream: &B::Stream, graph: &Self::Graph) -> Result<(), DeviceError> {
        let _alone = graph.replayed.try_lock().expect("one thread at a time replays a graph");
        // SAFETY: the caller's promise.
        self.count("replay", || unsafe { self.inner.replay(stream, &graph.inner) })
    }
}

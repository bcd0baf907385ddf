//! A device that defers its work: what is queued runs when the host or another stream waits for it.
//!
//! The emulator runs work at once when it is queued, and so hides a missing wait. This device exposes it. When a stream
//! reaches a wait for an event, it runs the other stream up to that event. With [`Order::OthersFirst`], a wait of the
//! host for one stream first runs all other streams: work that should have waited for that stream runs too early.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dsv4_kv::device::{
    Backend, Device, DeviceError, DeviceInfo, EmuOptions, Emulator, Operation, Priority, RawMemory,
    RawPinned,
};

/// A backend that runs the work of its streams late: when the host waits for the stream, when memory is freed, when an
/// event that was recorded in the stream is waited for, or when the stream begins or ends a capture or replays a graph.
pub struct Lazy<B: Backend> {
    inner: Arc<B>,
    streams: Streams<B>,
    order: Order,
}

/// The streams that run when the host waits for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// That stream, and the streams for whose events it waits.
    Late,
    /// All other streams first, then that stream.
    OthersFirst,
}

/// All streams of a device, in the order in which [`run_all`] last ran them. Each call reverses the order, so that no
/// test can rely on one.
type Streams<B> = Arc<Mutex<Vec<Weak<Queue<B>>>>>;

/// One piece of work.
type Work<B> = Box<dyn FnOnce(&B, &<B as Backend>::Stream) -> Result<(), DeviceError> + Send>;

/// The work that a stream has not run yet.
pub struct Queue<B: Backend> {
    stream: B::Stream,
    backend: Arc<B>,
    pending: Mutex<Pending<B>>,
}

/// Work in order, and the number of its first piece. Pieces are numbered from 0 in the order in which they are queued.
struct Pending<B: Backend> {
    work: VecDeque<Work<B>>,
    first: u64,
}

impl<B: Backend> Pending<B> {
    /// The number of the next piece of work to be queued.
    fn end(&self) -> u64 {
        self.first + self.work.len() as u64
    }
}

/// A stream of a [`Lazy`] device.
pub struct LazyStream<B: Backend>(Arc<Queue<B>>);

/// An event, the stream that it was recorded in last, and how much work was queued there before.
pub struct LazyEvent<B: Backend> {
    inner: B::Event,
    recorded: Mutex<Option<(Arc<Queue<B>>, u64)>>,
}

/// Memory that is freed only after all queued work has run.
pub struct LazyMemory<B: Backend, M> {
    inner: M,
    streams: Streams<B>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Queue<B> {
    /// Runs all work; returns the first error.
    fn run(&self) -> Result<(), DeviceError> {
        self.run_until(u64::MAX)
    }

    /// Runs all work before number `end`; returns the first error.
    fn run_until(&self, end: u64) -> Result<(), DeviceError> {
        let mut done = Ok(());
        while let Some(work) = self.next_before(end) {
            done = done.and(work(&self.backend, &self.stream));
        }
        done
    }

    fn next_before(&self, end: u64) -> Option<Work<B>> {
        let mut pending = lock(&self.pending);
        if pending.first >= end {
            return None;
        }
        let work = pending.work.pop_front()?;
        pending.first += 1;
        Some(work)
    }
}

impl<B: Backend> LazyStream<B> {
    fn queue(
        &self,
        work: impl FnOnce(&B, &B::Stream) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        lock(&self.0.pending).work.push_back(Box::new(work));
        Ok(())
    }
}

impl<B: Backend, M> Drop for LazyMemory<B, M> {
    fn drop(&mut self) {
        run_all(&self.streams, None);
    }
}

/// Runs all streams, except `but`. Errors of the work are dropped, since no caller has waited for it.
fn run_all<B: Backend>(streams: &Streams<B>, but: Option<&Arc<Queue<B>>>) {
    let streams: Vec<_> = {
        let mut streams = lock(streams);
        streams.reverse();
        streams.iter().filter_map(Weak::upgrade).collect()
    };
    let others = streams.iter().filter(|stream| but.is_none_or(|but| !Arc::ptr_eq(but, stream)));
    others.for_each(|stream| drop(stream.run()));
}

impl<B: Backend, M: RawMemory> RawMemory for LazyMemory<B, M> {
    fn address(&self) -> u64 {
        self.inner.address()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
}

impl<B: Backend, M: RawPinned> RawPinned for LazyMemory<B, M> {
    fn bytes(&self) -> &[u8] {
        self.inner.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.inner.bytes_mut()
    }
}

impl Lazy<Emulator> {
    /// An emulated device that defers its work.
    #[must_use]
    pub fn emulated(options: EmuOptions) -> Device<Self> {
        Device::from_backend(Self::new(Emulator::new(options)))
    }
}

impl<B: Backend> Lazy<B> {
    /// A backend that defers the work of `inner`.
    #[must_use]
    pub fn new(inner: B) -> Self {
        Self { inner: Arc::new(inner), streams: Arc::default(), order: Order::Late }
    }

    /// The same backend with another order.
    #[must_use]
    pub fn with_order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    fn memory<M>(&self, inner: M) -> LazyMemory<B, M> {
        LazyMemory { inner, streams: Arc::clone(&self.streams) }
    }
}

/// An address of host memory that queued work captures.
#[derive(Clone, Copy)]
struct Host(*mut u8);

// SAFETY: the caller of `upload` and `download` keeps the memory as it must be until the work is done.
unsafe impl Send for Host {}

impl Host {
    fn address(self) -> *mut u8 {
        self.0
    }
}

// SAFETY: all objects are the inner backend's; work runs in the order of its stream, at the latest when the
// stream is waited for or memory is freed.
unsafe impl<B: Backend> Backend for Lazy<B> {
    type Memory = LazyMemory<B, B::Memory>;
    type PinnedMemory = LazyMemory<B, B::PinnedMemory>;
    type Stream = LazyStream<B>;
    type Event = LazyEvent<B>;
    type Graph = B::Graph;

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capture_domain(&self) -> Option<u64> {
        self.inner.capture_domain()
    }

    fn within(&self, work: &mut dyn FnMut()) -> Result<(), DeviceError> {
        self.inner.within(work)
    }

    fn divide(&self, memory: &Self::Memory, parts: &[Range<u64>]) {
        self.inner.divide(&memory.inner, parts);
    }

    fn stream_id(&self, stream: &LazyStream<B>) -> u64 {
        self.inner.stream_id(&stream.0.stream)
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        self.inner.free_memory()
    }

    fn allocate(&self, label: &'static str, bytes: u64) -> Result<Self::Memory, DeviceError> {
        Ok(self.memory(self.inner.allocate(label, bytes)?))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Self::PinnedMemory, DeviceError> {
        Ok(self.memory(self.inner.allocate_pinned(bytes)?))
    }

    fn stream(&self, priority: Priority) -> Result<LazyStream<B>, DeviceError> {
        let (stream, backend) = (self.inner.stream(priority)?, Arc::clone(&self.inner));
        let pending = Mutex::new(Pending { work: VecDeque::new(), first: 0 });
        let queue = Arc::new(Queue { stream, backend, pending });
        lock(&self.streams).push(Arc::downgrade(&queue));
        Ok(LazyStream(queue))
    }

    fn event(&self) -> Result<LazyEvent<B>, DeviceError> {
        Ok(LazyEvent { inner: self.inner.event()?, recorded: Mutex::default() })
    }

    fn record(&self, event: &LazyEvent<B>, stream: &LazyStream<B>) -> Result<(), DeviceError> {
        let end = lock(&stream.0.pending).end();
        *lock(&event.recorded) = Some((Arc::clone(&stream.0), end));
        self.inner.record(&event.inner, &stream.0.stream)
    }

    fn wait(&self, event: &LazyEvent<B>) -> Result<(), DeviceError> {
        let recorded = lock(&event.recorded).clone();
        recorded.map_or(Ok(()), |(queue, end)| queue.run_until(end))?;
        self.inner.wait(&event.inner)
    }

    fn has_passed(&self, event: &LazyEvent<B>) -> Result<bool, DeviceError> {
        let recorded = lock(&event.recorded);
        Ok(recorded.as_ref().is_none_or(|(queue, end)| lock(&queue.pending).first >= *end))
    }

    fn wait_in_stream(
        &self,
        stream: &LazyStream<B>,
        event: &LazyEvent<B>,
    ) -> Result<(), DeviceError> {
        let Some((queue, end)) = lock(&event.recorded).clone() else { return Ok(()) };
        stream.queue(move |_, _| queue.run_until(end))
    }

    fn elapsed_ms(&self, from: &LazyEvent<B>, to: &LazyEvent<B>) -> Result<f32, DeviceError> {
        self.inner.elapsed_ms(&from.inner, &to.inner)
    }

    unsafe fn launch<O: Operation>(
        &self,
        stream: &LazyStream<B>,
        variant: O::Variant,
        operation: &O,
    ) -> Result<(), DeviceError> {
        let operation = *operation;
        // SAFETY: the caller's promise, which holds until the work is done.
        stream.queue(move |inner, stream| unsafe { inner.launch(stream, variant, &operation) })
    }

    unsafe fn copy(
        &self,
        stream: &LazyStream<B>,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise, which holds until the work is done.
        stream.queue(move |inner, stream| unsafe { inner.copy(stream, from, to, bytes) })
    }

    unsafe fn fill(
        &self,
        stream: &LazyStream<B>,
        to: u64,
        byte: u8,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise, which holds until the work is done.
        stream.queue(move |inner, stream| unsafe { inner.fill(stream, to, byte, bytes) })
    }

    unsafe fn upload(
        &self,
        stream: &LazyStream<B>,
        from: *const u8,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let from = Host(from.cast_mut());
        // SAFETY: the caller's promise, which holds until the work is done.
        stream
            .queue(move |inner, stream| unsafe { inner.upload(stream, from.address(), to, bytes) })
    }

    unsafe fn download(
        &self,
        stream: &LazyStream<B>,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let to = Host(to);
        // SAFETY: the caller's promise, which holds until the work is done.
        stream.queue(move |inner, stream| unsafe {
            inner.download(stream, from, to.address(), bytes)
        })
    }

    fn synchronize(&self, stream: &LazyStream<B>) -> Result<(), DeviceError> {
        if self.order == Order::OthersFirst {
            run_all(&self.streams, Some(&stream.0));
        }
        stream.0.run()?;
        self.inner.synchronize(&stream.0.stream)
    }

    fn begin_capture(&self, stream: &LazyStream<B>) -> Result<(), DeviceError> {
        stream.0.run()?;
        self.inner.begin_capture(&stream.0.stream)
    }

    fn end_capture(&self, stream: &LazyStream<B>) -> Result<B::Graph, DeviceError> {
        let queued = stream.0.run();
        let graph = self.inner.end_capture(&stream.0.stream)?;
        queued.map(|()| graph)
    }

    fn instantiate(&self, graph: &mut B::Graph) -> Result<(), DeviceError> {
        self.inner.instantiate(graph)
    }

    unsafe fn replay(&self, stream: &LazyStream<B>, graph: &B::Graph) -> Result<(), DeviceError> {
        stream.0.run()?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.replay(&stream.0.stream, graph) }
    }
}

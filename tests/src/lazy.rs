//! A device that does nothing before it must: what is queued runs when somebody waits for it.
//!
//! The emulator runs work when it is queued, and so forgives whoever does not wait. This one shows it.

use std::mem::take;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dsv4_kv::device::{
    Backend, Device, DeviceError, DeviceInfo, EmuOptions, Emulator, Operation, RawMemory, RawPinned,
};

/// A backend whose streams run their work when they are waited for, when memory is freed, or when an event
/// that was recorded in them is waited for.
pub struct Lazy<B: Backend> {
    inner: Arc<B>,
    streams: Streams<B>,
}

/// All streams of a device, in the order in which the next free runs them: that of the last one turned around, since nobody
/// may rely on one.
type Streams<B> = Arc<Mutex<Vec<Weak<Queue<B>>>>>;

/// One piece of work.
type Work<B> = Box<dyn FnOnce(&B, &<B as Backend>::Stream) -> Result<(), DeviceError> + Send>;

/// What a stream has still to do.
pub struct Queue<B: Backend> {
    stream: B::Stream,
    backend: Arc<B>,
    work: Mutex<Vec<Work<B>>>,
}

/// A stream of a [`Lazy`] device.
pub struct LazyStream<B: Backend>(Arc<Queue<B>>);

/// An event, and the stream that it was recorded in last.
pub struct LazyEvent<B: Backend> {
    inner: B::Event,
    recorded: Mutex<Option<Arc<Queue<B>>>>,
}

/// Memory that all work is done with before it is freed.
pub struct LazyMemory<B: Backend, M> {
    inner: M,
    streams: Streams<B>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Queue<B> {
    /// Runs everything; the first error.
    fn run(&self) -> Result<(), DeviceError> {
        let work = take(&mut *lock(&self.work));
        work.into_iter().map(|work| work(&self.backend, &self.stream)).fold(Ok(()), Result::and)
    }
}

impl<B: Backend> LazyStream<B> {
    fn queue(
        &self,
        work: impl FnOnce(&B, &B::Stream) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        lock(&self.0.work).push(Box::new(work));
        Ok(())
    }
}

impl<B: Backend, M> Drop for LazyMemory<B, M> {
    fn drop(&mut self) {
        let streams: Vec<_> = {
            let mut streams = lock(&self.streams);
            streams.reverse();
            streams.iter().filter_map(Weak::upgrade).collect()
        };
        // An error of the work has nobody to go to.
        streams.iter().for_each(|stream| drop(stream.run()));
    }
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
    /// An emulated device that does nothing before it must.
    #[must_use]
    pub fn emulated(options: EmuOptions) -> Device<Self> {
        Device::from_backend(Self::new(Emulator::new(options)))
    }
}

impl<B: Backend> Lazy<B> {
    /// `inner`, put off.
    #[must_use]
    pub fn new(inner: B) -> Self {
        Self { inner: Arc::new(inner), streams: Arc::default() }
    }

    fn memory<M>(&self, inner: M) -> LazyMemory<B, M> {
        LazyMemory { inner, streams: Arc::clone(&self.streams) }
    }
}

/// An address of host memory, on its way into work.
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

    fn stream(&self) -> Result<LazyStream<B>, DeviceError> {
        let (stream, backend) = (self.inner.stream()?, Arc::clone(&self.inner));
        let queue = Arc::new(Queue { stream, backend, work: Mutex::default() });
        lock(&self.streams).push(Arc::downgrade(&queue));
        Ok(LazyStream(queue))
    }

    fn event(&self) -> Result<LazyEvent<B>, DeviceError> {
        Ok(LazyEvent { inner: self.inner.event()?, recorded: Mutex::default() })
    }

    fn record(&self, event: &LazyEvent<B>, stream: &LazyStream<B>) -> Result<(), DeviceError> {
        *lock(&event.recorded) = Some(Arc::clone(&stream.0));
        self.inner.record(&event.inner, &stream.0.stream)
    }

    fn wait(&self, event: &LazyEvent<B>) -> Result<(), DeviceError> {
        let recorded = lock(&event.recorded).clone();
        recorded.map_or(Ok(()), |queue| queue.run())?;
        self.inner.wait(&event.inner)
    }

    fn has_passed(&self, event: &LazyEvent<B>) -> Result<bool, DeviceError> {
        let recorded = lock(&event.recorded);
        Ok(recorded.as_ref().is_none_or(|queue| lock(&queue.work).is_empty()))
    }

    fn wait_in_stream(
        &self,
        _stream: &LazyStream<B>,
        event: &LazyEvent<B>,
    ) -> Result<(), DeviceError> {
        self.wait(event)
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

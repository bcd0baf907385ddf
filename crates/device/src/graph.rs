//! Graphs: capture and replay. A graph keeps the memory that it touches alive.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::backend::Backend;
use crate::buffer::Memory;
use crate::checks::check_device;
use crate::device::Device;
use crate::error::DeviceError;
use crate::owned::Owned;
use crate::stream::Stream;

/// A captured sequence of launches, copies and fills. It keeps the memory that they touch alive: a replay
/// can never meet a freed buffer.
pub struct Graph<B: Backend> {
    raw: Owned<B::Graph>,
    nodes: u64,
    device: Device<B>,
    /// Held while the graph is being replayed: a driver allows one thread at a time.
    turn: Mutex<()>,
    /// Held, not read: the memory of every pointer in `raw`.
    _retained: Vec<Memory<B>>,
}

/// Ends the capture if `record` panics.
struct EndOnPanic<'a, B: Backend> {
    stream: &'a Stream<B>,
}

impl<B: Backend> Drop for EndOnPanic<'_, B> {
    fn drop(&mut self) {
        // The graph is dropped while the capture still counts as active here, so that no other capture has begun.
        drop(self.stream.backend().end_capture(self.stream.raw()));
        // The panic goes on: a rule that `record` broke need not be reported.
        let _ = self.stream.device().captures().end();
    }
}

impl<B: Backend> fmt::Debug for Graph<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("nodes", &self.nodes)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Graph<B> {
    /// Number of launches, copies and fills in the graph.
    #[must_use]
    pub fn nodes(&self) -> u64 {
        self.nodes
    }
}

impl<B: Backend> Stream<B> {
    /// Captures what `record` queues into the stream; nothing of it runs. If `record` panics, the capture
    /// ends.
    ///
    /// The graph keeps `retained` alive, and every pointer of every captured launch must lie in it.
    /// `record` may fail with any error type that a [`DeviceError`] converts into.
    ///
    /// # Errors
    /// The error of `record`; [`DeviceError::ForbiddenInCapture`] if it, or another thread, tried to allocate or to
    /// wait, even if that error was ignored; [`DeviceError::NotRetained`];
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::NestedCapture`]; [`DeviceError::StreamInUse`] while another thread
    /// begins or replays a step in the stream, queues a layer's work, or copies a request; [`DeviceError::Cuda`].
    pub fn capture<E: From<DeviceError>>(
        &self,
        retained: Vec<Memory<B>>,
        record: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph<B>, E> {
        let (device, backend) = (self.device(), self.backend());
        let spans: Vec<_> = retained.iter().map(Memory::span).collect();
        spans.iter().try_for_each(|span| check_device("memory", span.device, device.id()))?;
        device.captures().begin(self.id(), spans)?;
        if let Err(error) = backend.begin_capture(self.raw()) {
            // `record` has not run: only other threads can have broken a rule.
            let _ = device.captures().end();
            return Err(error.into());
        }
        let end_on_panic = EndOnPanic { stream: self };
        let recorded = record();
        std::mem::forget(end_on_panic);
        let ended = backend.end_capture(self.raw()).and_then(|mut graph| {
            // While the capture still counts as active, so that no other begins meanwhile.
            if recorded.is_ok() {
                backend.instantiate(&mut graph)?;
            }
            Ok(device.own(graph))
        });
        let kept = device.captures().end();
        recorded?;
        let nodes = kept?;
        let (raw, device) = (ended?, device.clone());
        Ok(Graph { raw, nodes, device, turn: Mutex::new(()), _retained: retained })
    }

    /// Queues everything that `graph` captured. Threads that replay one graph take turns.
    ///
    /// # Errors
    /// [`DeviceError::ForeignDevice`]; [`DeviceError::NestedCapture`] into a stream that is being captured, also by the
    /// program that owns it; as [`Self::launch`].
    pub fn replay(&self, graph: &Graph<B>) -> Result<(), DeviceError> {
        check_device("graph", graph.device.id(), self.device().id())?;
        // The guarded value is `()`: nothing in it can be broken by a panic.
        let _turn = graph.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.backend().is_recorded(self.raw())? {
            return Err(DeviceError::NestedCapture);
        }
        let captures = self.device().captures();
        captures.replay(self.id(), || {
            // SAFETY: it was instantiated when it was captured, this thread has its turn, and what it touches
            // is retained in it, which waits for the launches before it is freed.
            unsafe { self.backend().replay(self.raw(), &graph.raw) }
        })?;
        self.wait_if_asked()
    }
}

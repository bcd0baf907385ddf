//! What updated layers read, as a graph of its own that an open step queues again and again.

use std::fmt;
use std::marker::PhantomData;

use super::layers::Layers;
use super::shape::Recording;
use crate::device::{Backend, DeviceError, Graph, Memory, Stream};
use crate::error::KvError;

/// Attention, lists and gathers of a step as a graph, which only that step queues, as often as it likes: for benchmarks. It holds
/// the step until it is dropped.
pub struct RecordedReads<'s, B: Backend> {
    graph: Graph<B>,
    stream: Stream<B>,
    step: PhantomData<&'s mut ()>,
}

impl<B: Backend> fmt::Debug for RecordedReads<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedReads").field("nodes", &self.nodes()).finish_non_exhaustive()
    }
}

impl<B: Backend> RecordedReads<'_, B> {
    /// Launches of which it consists.
    #[must_use]
    pub fn nodes(&self) -> u64 {
        self.graph.nodes()
    }

    /// Queues it in the stream of its step.
    ///
    /// # Errors
    /// [`KvError::Device`].
    pub fn replay(&self) -> Result<(), KvError> {
        Ok(self.stream.replay(&self.graph)?)
    }
}

/// Layers whose reads are recorded; dropped, they are as before, by a panic too.
struct Recorded<'l, 'a, B: Backend>(&'l mut Layers<'a, B>, Recording);

impl<B: Backend> Drop for Recorded<'_, '_, B> {
    fn drop(&mut self) {
        self.0.recording = self.1;
    }
}

impl<'a, B: Backend> Layers<'a, B> {
    /// Captures what `record` queues of layers that are updated, and launches of the caller's own; nothing of it runs. Updates and
    /// appends are refused in it. The graph keeps the cache's memory and `retained` alive.
    ///
    /// # Errors
    /// What `record` returned; [`KvError::Device`] if it allocated, waited, or touched memory that is not retained.
    pub fn record_reads<E: From<DeviceError>>(
        &mut self,
        mut retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'a, B>) -> Result<(), E>,
    ) -> Result<RecordedReads<'_, B>, E> {
        let all = self.core.memory.memory().iter().chain(self.memory.memory());
        retained.extend(all.cloned());
        let (stream, before) = (self.stream.clone(), self.recording);
        self.recording = Recording::Reads;
        let layers = Recorded(self, before);
        let graph = stream.capture(retained, || record(&mut *layers.0))?;
        Ok(RecordedReads { graph, stream, step: PhantomData })
    }
}

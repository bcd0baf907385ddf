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

impl<B: Backend> Layers<'_, B> {
    /// Captures what `record` queues of layers that are updated, and launches of the caller's own; nothing of it runs. Updates and
    /// appends are refused in it. The graph keeps the cache's memory and `retained` alive.
    ///
    /// # Errors
    /// What `record` returned; [`KvError::Device`] if it allocated, waited, or touched memory that is not retained.
    pub fn record_reads<E: From<DeviceError>>(
        &mut self,
        mut retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'_, B>) -> Result<(), E>,
    ) -> Result<RecordedReads<'_, B>, E> {
        let Self { core, group, shape, plan, bucket, touched, .. } = *self;
        retained.extend(core.memory.memory().iter().chain(self.memory.memory()).cloned());
        let (stream, memory) = (self.stream.clone(), &mut *self.memory);
        let (ids, span) = (self.ids.clone(), self.span.clone());
        // A value of its own, so that what is recorded ends with it.
        let mut layers = Layers {
            recording: Recording::Reads,
            stream: stream.clone(),
            core,
            memory,
            group,
            ids,
            shape,
            plan,
            bucket,
            touched,
            span,
        };
        let graph = stream.capture(retained, || record(&mut layers))?;
        Ok(RecordedReads { graph, stream, step: PhantomData })
    }
}

//! The reads of updated layers as a graph, which an open step can queue repeatedly.

use std::fmt;
use std::marker::PhantomData;

use super::layers::Layers;
use super::shape::Recording;
use crate::device::{Backend, Buffer, DeviceError, Graph, Memory, Stream};
use crate::error::KvError;
use crate::ops::reset_arrivals;

/// Attention, indexer lists and gathers of a step as a graph. Only that step can queue it, any number of times: for
/// benchmarks. It borrows the step until it is dropped.
pub struct RecordedReads<'s, B: Backend> {
    graph: Graph<B>,
    stream: Stream<B>,
    /// The arrival counters of attention.
    arrivals: Vec<Buffer<B, u32>>,
    step: PhantomData<&'s mut ()>,
}

impl<B: Backend> fmt::Debug for RecordedReads<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedReads").field("nodes", &self.nodes()).finish_non_exhaustive()
    }
}

impl<B: Backend> RecordedReads<'_, B> {
    /// Number of launches in the graph.
    #[must_use]
    pub fn nodes(&self) -> u64 {
        self.graph.nodes()
    }

    /// Queues the graph in the stream of its step.
    ///
    /// # Errors
    /// [`KvError::Device`].
    pub fn replay(&self) -> Result<(), KvError> {
        // As in the replay of a step: no capture records the fills.
        let _running = self.stream.running("replaying recorded reads")?;
        let replayed = self.stream.replay(&self.graph);
        Ok(replayed.inspect_err(|error| reset_arrivals(&self.stream, error, &self.arrivals))?)
    }
}

impl<B: Backend> Layers<'_, B> {
    /// Captures the reads of updated layers that `record` queues, and other launches that it queues. Nothing of it
    /// runs. Updates and appends are refused in it. The graph keeps the cache's memory and `retained` alive.
    ///
    /// # Errors
    /// The error of `record`; [`KvError::Device`] if it allocated, waited, or touched memory that is not retained.
    pub fn record_reads<E: From<DeviceError>>(
        &mut self,
        mut retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'_, B>) -> Result<(), E>,
    ) -> Result<RecordedReads<'_, B>, E> {
        let Self { core, group, shape, plan, bucket, touched, .. } = *self;
        retained.extend(core.memory.memory().iter().chain(self.memory.memory()).cloned());
        let (stream, memory) = (self.stream.clone(), &mut *self.memory);
        let (ids, span) = (self.ids.clone(), self.span.clone());
        let arrivals = memory.arrivals().cloned().collect();
        // A separate value, so that `Recording::Reads` ends with it.
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
        Ok(RecordedReads { graph, stream, arrivals, step: PhantomData })
    }
}

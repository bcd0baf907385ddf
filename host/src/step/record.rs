//! How a step is captured as a graph.

use super::begin::Group;
use super::capture::CapturedStep;
use super::layers::Layers;
use super::shape::{BegunStep, Recording, StepShape};
use crate::bucket::Bucket;
use crate::device::{Backend, Memory, Stream};
use crate::error::KvError;
use crate::ledger::{StepPlan, may_save};
use crate::trace::Span;

impl<B: Backend> Group<'_, B> {
    /// Captures a graph for steps of `bucket`: the work of the layers that `record` is given, and other launches that
    /// it queues. Nothing of it runs. The graph keeps the cache's memory and `retained` alive. It may cover only some
    /// of the layers. [`super::Step::replay`] queues it.
    ///
    /// Pass the queries `..`, all queries of the bucket, to every call in `record`: the range is part of the graph. A
    /// graph with a shorter range is valid, but leaves the results of the other queries as they were. `retained` is all
    /// other memory that the graph touches: tensors and, with `select`, the memory of the
    /// [workspace](crate::IndexerWorkspace::memory) and of each [indexer](crate::CsaIndexer::memory).
    ///
    /// # Errors
    /// [`KvError::Bucket`] for a bucket out of the cache's range; the error of `record`;
    /// [`KvError::Device`] if it allocated, waited, or touched memory that is not retained.
    pub fn capture(
        &mut self,
        stream: &Stream<B>,
        bucket: &Bucket,
        mut retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'_, B>) -> Result<(), KvError>,
    ) -> Result<CapturedStep<B>, KvError> {
        let Self { core, memory, group } = self;
        core.check_stream(stream)?;
        bucket.validate(&core.config)?;
        retained.extend(core.memory.memory().iter().chain(memory.memory()).cloned());
        let step_meta = memory.step_meta.buffer().ptr();
        let ring_copies = may_save(*group, &core.config).then_some(0);
        let plan = StepPlan { ring_copies, ..StepPlan::default() };
        memory.lay_out(plan.layout_in(Some(bucket)));
        let shape = StepShape::of_bucket(bucket, &core.config);
        let begun = BegunStep { shape, plan, bucket: Some(*bucket), recording: Recording::Step };
        let mut layers = Layers::new(core, memory, *group, stream, begun, Span::none());
        let graph = stream.capture(retained, || record(&mut layers))?;
        let progress = layers.all_progress().to_vec();
        let rows = layers.memory.rows.clone();
        Ok(CapturedStep { graph, bucket: *bucket, progress, rows, step_meta })
    }
}

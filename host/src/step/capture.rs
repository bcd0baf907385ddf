//! A captured step: one graph for every step of a bucket.

use super::{Group, Layers, StepShape};
use crate::bucket::Bucket;
use crate::device::{Backend, DevicePtr, Graph, Memory, Stream};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::manager::KvCacheManager;

/// The launches of a step as a graph, for every step of a bucket. It owns all memory that it touches.
pub struct CapturedStep<B: Backend> {
    graph: Graph<B>,
    bucket: Bucket,
    /// How far it brings each layer of its group.
    progress: Vec<LayerProgress>,
    /// StepMeta of the group that it was captured over, which no other group has.
    step_meta: DevicePtr<i32>,
}

impl<B: Backend> CapturedStep<B> {
    /// The steps that it serves.
    #[must_use]
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    pub(super) fn graph(&self) -> &Graph<B> {
        &self.graph
    }

    pub(super) fn progress(&self) -> &[LayerProgress] {
        &self.progress
    }

    pub(super) fn step_meta(&self) -> DevicePtr<i32> {
        self.step_meta
    }
}

impl<B: Backend> Group<'_, B> {
    /// Captures what `record` queues, of the layers it is handed and of the caller's own, as a graph
    /// for steps of `bucket`; nothing of it runs. The graph keeps the cache's memory and `retained`
    /// alive. It may cover some of the layers only. [`super::Step::replay`] queues it.
    ///
    /// # Errors
    /// [`KvError::Bucket`] for a bucket out of the cache's range; what `record` returned;
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
        let mut layers = Layers::new(core, memory, *group, stream, StepShape::of_bucket(bucket));
        let mut refused = None;
        let graph = stream.capture(retained, || match record(&mut layers) {
            Ok(()) => Ok(()),
            Err(KvError::Device(error)) => Err(error),
            Err(other) => {
                refused = Some(other);
                Ok(())
            }
        });
        if let Some(error) = refused {
            return Err(error);
        }
        let progress = layers.all_progress().to_vec();
        Ok(CapturedStep { graph: graph?, bucket: *bucket, progress, step_meta })
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// Captures a step of the trunk; see [`Group::capture`].
    ///
    /// # Errors
    /// As [`Group::capture`].
    pub fn capture(
        &mut self,
        stream: &Stream<B>,
        bucket: &Bucket,
        retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'_, B>) -> Result<(), KvError>,
    ) -> Result<CapturedStep<B>, KvError> {
        self.groups().trunk.capture(stream, bucket, retained, record)
    }
}

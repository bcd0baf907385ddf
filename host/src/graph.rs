//! A captured step: one graph for every batch up to a bucket.

use crate::device::{Backend, DevicePtr, Graph, Memory, Stream};
use crate::error::KvError;
use crate::manager::KvCacheManager;

/// A step as a graph, for up to `bucket` tokens. It owns all memory that it touches.
pub struct CapturedStep<B: Backend> {
    graph: Graph<B>,
    bucket: u32,
    /// StepMeta of the cache it was captured over.
    step: DevicePtr<i32>,
}

impl<B: Backend> CapturedStep<B> {
    /// Most tokens of a step that it can replay.
    #[must_use]
    pub fn bucket(&self) -> u32 {
        self.bucket
    }

    /// The graph itself, to be timed or replayed without a step being prepared.
    #[must_use]
    pub fn graph(&self) -> &Graph<B> {
        &self.graph
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// Captures a step for up to `bucket` tokens: what `record` queues of handles from
    /// [`Self::layer_for`] and of the caller's own. The graph keeps the cache's memory and `retained`
    /// alive; tokens past those of a prepared step are padding and touch nothing.
    ///
    /// # Errors
    /// [`KvError::StepTooLong`] if no step can have that many tokens; what `record` returned;
    /// [`KvError::Device`] if it allocated, waited, or touched other memory.
    pub fn capture(
        &self,
        stream: &Stream<B>,
        bucket: u32,
        mut retained: Vec<Memory<B>>,
        record: impl FnOnce(&Self) -> Result<(), KvError>,
    ) -> Result<CapturedStep<B>, KvError> {
        let most = self.config().max_step_tokens;
        if bucket > most {
            return Err(KvError::StepTooLong { tokens: bucket.into(), most });
        }
        retained.extend(self.memory());
        let mut refused = None;
        let graph = stream.capture(retained, || match record(self) {
            Ok(()) => Ok(()),
            Err(KvError::Device(error)) => Err(error),
            Err(other) => {
                refused = Some(other);
                Ok(())
            }
        });
        match refused {
            Some(error) => Err(error),
            None => Ok(CapturedStep { graph: graph?, bucket, step: self.step_address() }),
        }
    }

    /// Queues a captured step, for the requests of the step that was prepared last.
    ///
    /// # Errors
    /// [`KvError::ForeignGraph`] if it was captured over another cache; [`KvError::OverBucket`] if the
    /// prepared step has more tokens than its bucket; [`KvError::Device`].
    pub fn replay(&self, stream: &Stream<B>, step: &CapturedStep<B>) -> Result<(), KvError> {
        if step.step != self.step_address() {
            return Err(KvError::ForeignGraph);
        }
        let (tokens, bucket) = (self.step_tokens(), step.bucket);
        if tokens > bucket {
            return Err(KvError::OverBucket { tokens, bucket });
        }
        Ok(stream.replay(&step.graph)?)
    }
}

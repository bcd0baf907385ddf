//! A captured step: one graph for every step of a bucket.

use super::layers::Layers;
use super::tracker::may_have_run;
use crate::bucket::Bucket;
use crate::device::{Backend, DevicePtr, Graph};
use crate::error::{KvError, RowsMismatch};
use crate::ids::LayerId;
use crate::layer_progress::LayerProgress;
use std::fmt;

/// The launches of a step as a graph, for every step of a bucket. It owns all memory that it touches.
pub struct CapturedStep<B: Backend> {
    pub(super) graph: Graph<B>,
    pub(super) bucket: Bucket,
    /// How far it brings each layer of its group.
    pub(super) progress: Vec<LayerProgress>,
    /// Of each layer the address of the window rows that it updates it with, which it retains.
    pub(super) rows: Vec<Option<u64>>,
    /// StepMeta of the group that it was captured over, which no other group has.
    pub(super) step_meta: DevicePtr<i32>,
}

impl<B: Backend> fmt::Debug for CapturedStep<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedStep")
            .field("bucket", &self.bucket)
            .field("nodes", &self.nodes())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> CapturedStep<B> {
    /// The steps that it serves.
    #[must_use]
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Launches, copies and fills of which it consists.
    #[must_use]
    pub fn nodes(&self) -> u64 {
        self.graph.nodes()
    }
}

impl<B: Backend> Layers<'_, B> {
    /// Refuses a graph that was captured over other memory, or for another bucket.
    fn check_graph(&self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        if self.memory.step_meta.buffer().ptr() != graph.step_meta {
            return Err(KvError::ForeignGraph);
        }
        let (captured, step) = (graph.bucket, self.bucket);
        if step != Some(captured) {
            return Err(KvError::WrongBucket { captured, step });
        }
        Ok(())
    }

    /// Queues a graph, and takes over how far it brings each layer.
    pub(super) fn replay(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.check_graph(graph)?;
        let states = graph.progress.iter().zip(&self.memory.progress);
        for (layer, (&recorded, &progress)) in self.ids.clone().zip(states) {
            let covered = recorded != LayerProgress::NotStarted;
            if covered && progress != LayerProgress::NotStarted {
                return Err(KvError::LayerRepeated { layer: LayerId(layer), progress });
            }
        }
        let replayed = self.stream.replay(&graph.graph).map_err(KvError::from);
        if !may_have_run(&replayed) {
            return replayed;
        }
        // The emulator runs a graph node by node: where one fails, those before it have run.
        self.touched = true;
        let memory = &mut *self.memory;
        let now = memory.progress.iter_mut().zip(&mut memory.rows);
        for ((now, rows), (&recorded, &updated)) in now.zip(graph.progress.iter().zip(&graph.rows))
        {
            if recorded != LayerProgress::NotStarted {
                *now = if replayed.is_ok() { recorded } else { LayerProgress::Failed };
                *rows = updated;
            }
        }
        replayed
    }

    /// Queues a graph again whose layers are all finished, with the same rows.
    pub(super) fn repeat(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.check_graph(graph)?;
        let limit = self.core.config.step_tokens_with_rollback();
        let tokens = graph.bucket().tokens_per_request;
        if tokens > limit {
            return Err(KvError::WindowOverwritten { tokens, limit });
        }
        let states = graph.progress.iter().zip(&self.memory.progress);
        let rows = self.memory.rows.iter().zip(&graph.rows);
        for (layer, ((&recorded, &progress), rows)) in self.ids.clone().zip(states.zip(rows)) {
            let layer = LayerId(layer);
            if recorded == LayerProgress::NotStarted {
                continue;
            }
            if progress != LayerProgress::Finished {
                return Err(KvError::LayerNotUpdated { layer, progress });
            }
            // It would store other rows than the step has.
            if let (&Some(updated), &Some(found)) = rows
                && updated != found
            {
                return Err(KvError::RowsMismatch(RowsMismatch { layer, updated, found }));
            }
        }
        Ok(self.stream.replay(&graph.graph)?)
    }
}

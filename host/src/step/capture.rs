//! A captured step: one graph for every step of a bucket.

use super::layers::Layers;
use super::tracker::may_have_run;
use crate::bucket::Bucket;
use crate::device::{Backend, DevicePtr, Graph};
use crate::error::{KvError, RowsMismatch};
use crate::ids::LayerId;
use crate::layer_progress::LayerProgress;
use crate::ops::reset_arrivals;
use std::fmt;

/// The launches of a step as a graph, which every step of a bucket can replay. It keeps all memory that it touches
/// alive.
pub struct CapturedStep<B: Backend> {
    pub(super) graph: Graph<B>,
    pub(super) bucket: Bucket,
    /// The progress of each layer of the group after a replay.
    pub(super) progress: Vec<LayerProgress>,
    /// For each layer, the address of the window rows with which the graph updates it. The graph retains their memory.
    pub(super) rows: Vec<Option<u64>>,
    /// The StepMeta of the group that the graph was captured over. No other group has the same address.
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
    /// The bucket whose steps it serves.
    #[must_use]
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Number of launches, copies and fills in the graph.
    #[must_use]
    pub fn nodes(&self) -> u64 {
        self.graph.nodes()
    }
}

impl<B: Backend> Layers<'_, B> {
    /// Refuses a graph that was captured over the memory of another group, or for another bucket.
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

    /// Queues a graph, and enters the progress that it brings to each layer.
    pub(super) fn replay(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.check_graph(graph)?;
        let states = graph.progress.iter().zip(&self.memory.progress);
        for (layer, (&recorded, &progress)) in self.ids.clone().zip(states) {
            let covered = recorded != LayerProgress::NotStarted;
            if covered && progress != LayerProgress::NotStarted {
                return Err(KvError::LayerRepeated { layer: LayerId(layer), progress });
            }
        }
        let replayed = self.replay_graph(graph);
        if !may_have_run(&replayed) {
            return replayed;
        }
        // The emulator runs a graph node by node: if a node fails, the nodes before it have run.
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

    /// Queues a graph again. Its layers must be finished, and updated with the same rows.
    pub(super) fn repeat(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.check_graph(graph)?;
        let limit = self.core.config.max_decode_tokens();
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
            // The graph would store other rows than the layer's update did.
            if let (&Some(updated), &Some(found)) = rows
                && updated != found
            {
                return Err(KvError::RowsMismatch(RowsMismatch { layer, updated, found }));
            }
        }
        self.replay_graph(graph)
    }

    /// Queues the graph alone. If it fails, the counters of attention are reset.
    fn replay_graph(&self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        // A capture that begins in between would record the fills, and the counters would stay as they are.
        let _running = self.stream.running("replaying a captured step")?;
        let replayed = self.stream.replay(&graph.graph);
        let counters = self.memory.arrivals();
        Ok(replayed.inspect_err(|error| reset_arrivals(&self.stream, error, counters))?)
    }
}

//! Access for tests that a server must not have: write access to memory that only kernels write,
//! and steps without kernels. Only with the feature `testing`.

use crate::checkpoints::SavedCheckpoint;
use crate::device::{Backend, Buffer, Stream};
use crate::error::KvError;
use crate::ids::{LayerGroup, LayerId, RequestId};
use crate::ledger::Ledger;
use crate::manager::KvCacheManager;
use crate::ops::{AttentionExchange, SplitWorkspace};
use crate::pool_kind::PoolKind;
use crate::step::Layers;

impl<B: Backend> KvCacheManager<B> {
    /// A pool of a layer, writable, so that tests can corrupt it.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`], [`KvError::NoSuchPool`].
    pub fn writable_pool(&self, layer: LayerId, kind: PoolKind) -> Result<Buffer<B, u8>, KvError> {
        self.core().memory.pools.layer(layer)?.get(kind).cloned()
    }

    /// The contents of a checkpoint, writable, so that tests can corrupt them.
    #[must_use]
    pub fn writable_checkpoint(&self, checkpoint: &SavedCheckpoint) -> Buffer<B, u8> {
        self.core().memory.state.checkpoint(checkpoint.id())
    }

    /// Restores a request from the checkpoint of another one. The test must make sure that the blocks of both have the
    /// same contents.
    ///
    /// # Errors
    /// As [`Self::restore_checkpoint`], which refuses this.
    pub fn restore_from_other(
        &mut self,
        stream: &Stream<B>,
        id: RequestId,
        from: &SavedCheckpoint,
    ) -> Result<(), KvError> {
        self.restore_saved(stream, (id, from), Ledger::check_restorable)
    }

    /// StepMeta of a layer group, `[elements of the largest layout]` i32, writable, so that tests can corrupt it.
    ///
    /// # Errors
    /// [`KvError::NoSuchGroup`].
    pub fn writable_step_meta(&mut self, group: LayerGroup) -> Result<Buffer<B, i32>, KvError> {
        Ok(self.group(group)?.memory.step_meta.buffer().clone())
    }
}

impl<B: Backend> Layers<'_, B> {
    /// Marks every layer that was not started as finished, as if its kernels had run.
    pub fn skip_kernels(&mut self) {
        self.mark_finished();
    }
}

impl<B: Backend> SplitWorkspace<B> {
    /// Partial outputs and denominators of splits, to be overwritten between launches.
    #[must_use]
    pub fn partial_outputs(&self) -> [&Buffer<B, f32>; 2] {
        [&self.sums, &self.lse]
    }

    /// Counters of splits, which are 0 between launches.
    #[must_use]
    pub fn counters(&self) -> &Buffer<B, u32> {
        &self.arrivals
    }
}

impl<B: Backend> AttentionExchange<B> {
    /// Partial outputs and denominators of clusters, to be overwritten between launches.
    #[must_use]
    pub fn partial_outputs(&self) -> [&Buffer<B, f32>; 2] {
        [&self.sums, &self.denominators]
    }

    /// Softmax weights of tiles, to be overwritten between launches.
    #[must_use]
    pub fn softmax_weights(&self) -> &Buffer<B, u32> {
        &self.weights
    }

    /// Counters of clusters, which are 0 between launches.
    #[must_use]
    pub fn counters(&self) -> &Buffer<B, u32> {
        &self.arrivals
    }
}

//! The update of an HCA layer.

use kv_layout::geometry::CompressorKind;

use super::layer::{CompressorInputs, Hca, Layer, UpdatedLayer};
use super::shape::StepShape;
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::memory::step_memory::Compressed;
use crate::ops::{self, HcaCompression, HcaDecode, HcaFlush, WorkList, run_capacity};
use crate::pool_kind::PoolKind;
use kernels_gpu::launch::{DecodeHca, FlushHca};

/// Inputs of an HCA layer's update.
pub struct HcaInputs<'i, B: Backend> {
    /// `[tokens, 512]` BF16: the step's window rows, after norm and RoPE, in the order of the step's tokens. They must
    /// not be written before [`UpdatedLayer::append`].
    pub kv: &'i Buffer<B, bf16>,
    /// The compressor of the entries.
    pub main: CompressorInputs<'i, B>,
}

impl<'s, B: Backend> Layer<'s, B, Hca> {
    /// Queues the layer's update: the step's tokens are added to the running sums; entries of the compression
    /// windows that close are normed, rotated, quantised and stored. In a decode step
    /// ([`crate::CacheConfig::max_decode_tokens`]) one launch does that and the append, with the same bytes.
    ///
    /// # Errors
    /// [`KvError::LayerRepeated`]; [`KvError::Device`] if a tensor is too short, if a launch failed, or while a capture
    /// other than the step's own records the stream. If a launch behind the first failed, the layer has failed.
    pub fn update(
        mut self,
        inputs: &HcaInputs<'_, B>,
    ) -> Result<UpdatedLayer<'s, B, Hca>, KvError> {
        self.tracker.check_not_started()?;
        let _launches = self.access.running()?;
        self.access.check_rows(inputs.kv)?;
        inputs.main.check(CompressorKind::Hca, self.access.shape.tokens)?;
        if self.access.shape.is_decode() {
            self.decode(inputs)?;
            self.tracker.reached(LayerProgress::Finished);
        } else {
            self.compress(inputs)?;
            self.flush(inputs)?;
            self.tracker.reached(LayerProgress::Updated);
        }
        Ok(self.updated(inputs.kv))
    }

    /// Queues the update and the append as one launch.
    fn decode(&mut self, inputs: &HcaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let faults = access.fault_word::<DecodeHca>(access.core.config.main_format);
        let tokens = access.step_tokens();
        let step = access.decode_step(&tokens, inputs.kv, faults)?;
        let main = access.decode_compressor(PoolKind::MainState, &inputs.main)?;
        let decode = HcaDecode { step: &step, main: &main };
        // SAFETY: the cache alone writes StepMeta, its tables and work lists, in the order of its steps.
        self.tracker.queued(unsafe { ops::decode_hca(access.stream, &decode) })
    }

    /// Queues the addition of the step's tokens to the running sums. The pooled sums of compression windows that close
    /// go to scratch memory.
    fn compress(&mut self, inputs: &HcaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let scratch = access.compressed();
        let windows = HcaCompression {
            tokens: &access.step_tokens(),
            projections: &inputs.main.projections(),
            ape: inputs.main.ape,
            state: &access.pools.state(PoolKind::MainState, &access.core.config)?,
            runs: &scratch.hca_runs(access.shape),
            pooled: &scratch.hca_pooled,
        };
        // Each launch is tracked by itself: if the second is refused, the first has already overwritten state rows.
        ops::HCA_LAUNCHES.into_iter().try_for_each(|part| {
            self.tracker.queued(ops::compress_hca_part(access.stream, &windows, part))
        })
    }

    /// Queues quantisation and store of the entries that closed.
    fn flush(&mut self, inputs: &HcaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let scratch = access.compressed();
        let to = access.pools.entries(&access.core.config)?;
        let flush = HcaFlush {
            tokens: &access.step_tokens(),
            runs: &scratch.hca_runs(access.shape),
            pooled: &scratch.hca_pooled,
            norm: inputs.main.norm,
            frequencies: &access.core.memory.frequencies,
            table: &access.core.memory.table(),
            state_slots: access.core.config.max_requests,
            to: &to,
            faults: access.fault_word::<FlushHca>(to.format),
        };
        // SAFETY: the cache alone writes StepMeta, its tables and work lists, in the order of its steps.
        self.tracker.queued(unsafe { ops::flush_hca(access.stream, &flush) })
    }
}

impl<B: Backend> Compressed<B> {
    /// The tokens of the step that end an HCA run.
    pub(super) fn hca_runs(&self, shape: StepShape) -> WorkList<'_, B> {
        let capacity = run_capacity(shape.tokens, shape.requests);
        WorkList { records: &self.hca_runs, capacity }
    }
}

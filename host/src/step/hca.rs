//! The update of an HCA layer.

use kv_layout::geometry::{CompressorKind, HCA_RATIO};

use super::layer::{CompressorInputs, CompressorShape, Hca, Layer, UpdatedLayer};
use super::shape::StepShape;
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::ops::{self, Compression, Flush, HcaDecode, WorkList, plan_capacity};
use crate::pool_kind::PoolKind;
use crate::step_memory::Compressed;
use kernels_gpu::launch::{DecodeHca, FlushHca};

/// What an HCA layer's update reads.
pub struct HcaInputs<'i, B: Backend> {
    /// `[tokens, 512]` BF16: the step's window rows, after norm and RoPE, in the order of the step.
    pub kv: &'i Buffer<B, bf16>,
    /// The compressor of the entries.
    pub main: CompressorInputs<'i, B>,
}

impl<'s, B: Backend> Layer<'s, B, Hca> {
    /// Queues the layer's update: entries of the windows that the step closes are pooled, normed,
    /// rotated, quantised and stored; then the step's tokens go to the state ring. Where every request
    /// has one token, one launch does that and the append, with the same bytes.
    ///
    /// # Errors
    /// [`KvError::LayerRepeated`]; [`KvError::Device`] if a tensor is too short, or a launch failed.
    pub fn update(
        mut self,
        inputs: &HcaInputs<'_, B>,
    ) -> Result<UpdatedLayer<'s, B, Hca>, KvError> {
        self.tracker.check_not_started()?;
        self.access.check_rows(inputs.kv)?;
        inputs.main.check(CompressorShape::HCA, self.access.shape.tokens)?;
        if self.access.shape.is_fused() {
            self.decode(inputs)?;
            self.tracker.reached(LayerProgress::Finished);
        } else {
            self.compress(inputs)?;
            self.flush()?;
            let (which, pool) = (CompressorKind::Hca, PoolKind::MainState);
            self.tracker.queued(self.access.write_state(which, pool, &inputs.main))?;
            self.tracker.reached(LayerProgress::Updated);
        }
        Ok(self.updated(inputs.kv))
    }

    /// Everything in one launch.
    fn decode(&mut self, inputs: &HcaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let faults = access.fault_word::<DecodeHca>(access.core.config.main_format);
        let parts = access.decode_parts();
        let step = access.decode_step(&parts, inputs.kv, &faults)?;
        let main = access.decode_compressor(PoolKind::MainState, &inputs.main)?;
        let scratch = &access.compressed().hca_scratch;
        let decode = HcaDecode { step: &step, main: &main, scratch };
        self.tracker.queued(ops::decode_hca(access.stream, &decode))
    }

    /// Entries of the windows that close, into scratch memory.
    fn compress(&self, inputs: &HcaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let (tokens, scratch) = (access.step_tokens(), access.compressed());
        let state = access.pools.state(PoolKind::MainState, &access.core.config)?;
        let windows = Compression {
            tokens: &tokens,
            projections: &inputs.main.projections(),
            weights: &access.weights(&inputs.main),
            state: &state,
            closing: &scratch.hca_closing(access.shape),
            entries: &scratch.entries,
        };
        Ok(ops::compress_hca(access.stream, &scratch.hca_scratch, &windows)?)
    }

    /// Entries into their blocks.
    fn flush(&mut self) -> Result<(), KvError> {
        let access = &self.access;
        let scratch = access.compressed();
        let to = access.pools.entries(&access.core.config)?;
        let flush = Flush {
            tokens: &access.step_tokens(),
            closing: &scratch.hca_closing(access.shape),
            entries: &scratch.entries,
            table: &access.core.memory.table(),
            to: &to,
            faults: &access.fault_word::<FlushHca>(to.format),
        };
        self.tracker.queued(ops::flush_hca(access.stream, &flush))
    }
}

impl<B: Backend> Compressed<B> {
    /// The tokens of the step that close an HCA window.
    pub(super) fn hca_closing(&self, shape: StepShape) -> WorkList<'_, B> {
        let capacity = plan_capacity(shape.tokens, shape.requests, HCA_RATIO);
        WorkList { records: &self.hca_closing, capacity }
    }
}

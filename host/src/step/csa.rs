//! The update of a CSA layer.

use kv_layout::geometry::{CSA_RATIO, CompressorKind, CsaCompressor};

use super::layer::{CompressorInputs, Csa, Layer, UpdatedLayer};
use super::shape::StepShape;
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::memory::step_memory::Compressed;
use crate::ops::{self, Compression, CsaDecode, Flush, KeyFlush, WorkList, window_capacity};
use crate::pool_kind::PoolKind;
use kernels_gpu::launch::{DecodeCsa, FlushCsa};

/// Inputs of a CSA layer's update.
pub struct CsaInputs<'i, B: Backend> {
    /// `[tokens, 512]` BF16: the step's window rows, after norm and RoPE, in the order of the step's tokens. They must
    /// not be written before [`UpdatedLayer::append`].
    pub kv: &'i Buffer<B, bf16>,
    /// The compressor of the entries.
    pub main: CompressorInputs<'i, B>,
    /// The compressor of the indexer keys.
    pub index: CompressorInputs<'i, B>,
}

impl<'s, B: Backend> Layer<'s, B, Csa> {
    /// Queues the layer's update: entries and indexer keys of the compression windows that the step closes are
    /// pooled, normed, rotated, quantised and stored; then the step's tokens go to the state rings.
    /// In a decode step ([`crate::CacheConfig::max_decode_tokens`]) one launch does that and the append, with the same
    /// bytes.
    ///
    /// # Errors
    /// [`KvError::LayerRepeated`]; [`KvError::Device`] if a tensor is too short, if a launch failed, or while a capture
    /// other than the step's own records the stream. If a launch behind the first failed, the layer has failed.
    pub fn update(
        mut self,
        inputs: &CsaInputs<'_, B>,
    ) -> Result<UpdatedLayer<'s, B, Csa>, KvError> {
        let tokens = self.access.shape.tokens;
        self.tracker.check_not_started()?;
        let _launches = self.access.running()?;
        self.access.check_rows(inputs.kv)?;
        inputs.main.check(CompressorKind::CsaMain, tokens)?;
        inputs.index.check(CompressorKind::CsaIndex, tokens)?;
        if self.access.shape.is_decode() {
            self.decode(inputs)?;
            self.tracker.reached(LayerProgress::Finished);
        } else {
            self.compress(inputs)?;
            self.flush()?;
            self.write_states(inputs)?;
            self.tracker.reached(LayerProgress::Updated);
        }
        Ok(self.updated(inputs.kv))
    }

    /// Queues the update and the append as one launch.
    fn decode(&mut self, inputs: &CsaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let keys = access.pools.index_keys(&access.core.config)?;
        let faults = access.fault_word::<DecodeCsa>((access.core.config.main_format, keys.format));
        let tokens = access.step_tokens();
        let step = access.decode_step(&tokens, inputs.kv, faults)?;
        let main = access.decode_compressor(PoolKind::MainState, &inputs.main)?;
        let index = access.decode_compressor(PoolKind::IndexState, &inputs.index)?;
        let (step, main, index, keys) = (&step, &main, &index, &keys);
        let decode = CsaDecode { step, main, index, keys };
        // SAFETY: the cache alone writes StepMeta, its tables and work lists, in the order of its steps.
        self.tracker.queued(unsafe { ops::decode_csa(access.stream, &decode) })
    }

    /// Queues the pooling of entries and indexer keys of the compression windows that close, into scratch memory.
    fn compress(&self, inputs: &CsaInputs<'_, B>) -> Result<(), KvError> {
        let access = &self.access;
        let (tokens, scratch) = (access.step_tokens(), access.compressed());
        let closing = scratch.csa_closing(access.shape);
        for (which, pool, inputs, out) in [
            (CsaCompressor::Main, PoolKind::MainState, &inputs.main, &scratch.entries),
            (CsaCompressor::Index, PoolKind::IndexState, &inputs.index, &scratch.keys),
        ] {
            let state = access.pools.state(pool, &access.core.config)?;
            let windows = Compression {
                tokens: &tokens,
                projections: &inputs.projections(),
                weights: &access.weights(inputs),
                state: &state,
                closing: &closing,
                entries: out,
            };
            // SAFETY: the cache alone writes StepMeta, its pools and work lists, in the order of its steps.
            unsafe { ops::compress(access.stream, which, &windows) }?;
        }
        Ok(())
    }

    /// Queues quantisation and store of the entries and indexer keys that closed.
    fn flush(&mut self) -> Result<(), KvError> {
        let access = &self.access;
        let (config, scratch) = (&access.core.config, access.compressed());
        let (to, keys) = (access.pools.entries(config)?, access.pools.index_keys(config)?);
        let (tokens, closing) = (access.step_tokens(), scratch.csa_closing(access.shape));
        let flush = Flush {
            tokens: &tokens,
            closing: &closing,
            entries: &scratch.entries,
            table: &access.core.memory.table(),
            state_slots: access.core.config.max_requests,
            to: &to,
            faults: access.fault_word::<FlushCsa>((to.format, keys.format)),
        };
        let keys = KeyFlush { keys: &scratch.keys, to: &keys };
        self.tracker.queued(ops::flush_csa(access.stream, &flush, &keys))
    }

    /// Queues the writes of the step's tokens to the state rings of both compressors.
    fn write_states(&mut self, inputs: &CsaInputs<'_, B>) -> Result<(), KvError> {
        for (which, pool, inputs) in [
            (CsaCompressor::Main, PoolKind::MainState, &inputs.main),
            (CsaCompressor::Index, PoolKind::IndexState, &inputs.index),
        ] {
            self.tracker.queued(self.access.write_state(which, pool, inputs))?;
        }
        Ok(())
    }
}

impl<B: Backend> Compressed<B> {
    /// The tokens of the step that close a compression window.
    pub(super) fn csa_closing(&self, shape: StepShape) -> WorkList<'_, B> {
        let capacity = window_capacity(shape.tokens, shape.requests, CSA_RATIO);
        WorkList { records: &self.csa_closing, capacity }
    }
}

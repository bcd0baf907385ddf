//! The compressed entries of a layer: compress and flush, and the gathers.

use std::num::NonZeroU32;
use std::ops::Range;

use kv_layout::geometry::{CSA_RATIO, CsaStream, HCA_RATIO, LayerKind, StateStream};

use super::LayerCacheHandle;
use crate::device::{Backend, Buffer, Stream, View};
use crate::error::KvError;
use crate::kernels::{DecodeCsa, DecodeHca, FlushCsa, FlushHca, GatherAll, GatherKv};
use crate::ops::{
    self, CompressorWeights, DecodeStep, DecodeStream, Entries, GatherQueries, GatheredRows,
    IndexKeys, StateRing, StepProjections, StepTokens,
};
use crate::plan::Section;
use crate::schema::{PoolKind, state_ring_rows};

/// A compressor's weights, and what the model projected for the step's tokens.
///
/// `columns` is 1024 for the main entries of a CSA layer (the half that the next window pools, then
/// its own window's), 256 for its indexer keys, 512 in an HCA layer; `channels` is 512, 128, 512.
pub struct Projected<'a, B: Backend> {
    /// `[tokens, columns]` f32, keys.
    pub kv: &'a Buffer<B, f32>,
    /// `[tokens, columns]` f32, gates, without the position bias.
    pub gate: &'a Buffer<B, f32>,
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'a Buffer<B, f32>,
    /// `[channels]` f32, weights of the RMS norm.
    pub norm: &'a Buffer<B, f32>,
}

impl<B: Backend> Projected<'_, B> {
    fn projections(&self) -> StepProjections<'_, B> {
        StepProjections { kv: self.kv, gate: self.gate }
    }
}

impl<B: Backend> LayerCacheHandle<'_, B> {
    /// Queues a CSA layer's update: entries and indexer keys of the windows that the step closes are
    /// pooled, normed, rotated, quantised and stored; then the step's tokens go to the state rings.
    ///
    /// Runs after [`crate::KvCacheManager::build_plan`] and before the gathers of the same step,
    /// whose queries already see the entries that close in it.
    ///
    /// # Errors
    /// [`KvError::WrongLayerKind`] in another layer; [`KvError::Device`] if a tensor is too short, or
    /// a launch failed.
    pub fn update_csa(
        &self,
        stream: &Stream<B>,
        main: &Projected<'_, B>,
        index: &Projected<'_, B>,
    ) -> Result<(), KvError> {
        self.check_kind(LayerKind::Csa)?;
        if self.tokens == 0 {
            return Ok(());
        }
        let (tokens, plan) = (self.step_tokens(), self.workspace.csa_plan(self.tokens));
        let (entries, keys) = (&self.workspace.entries, &self.workspace.keys);
        let streams = [
            (CsaStream::Main, StateStream::CsaMain, PoolKind::MainState, main, entries),
            (CsaStream::Index, StateStream::CsaIndex, PoolKind::IndexState, index, keys),
        ];
        for (which, _, pool, projected, out) in streams {
            let (state, weights) = (self.state(pool)?, self.weights(projected));
            let projections = projected.projections();
            let compress = ops::compress;
            compress(stream, which, &tokens, &projections, &weights, &state, &plan, out)?;
        }
        let (table, to, codes) = (self.workspace.table(), self.entries()?, self.index_keys()?);
        let faults = self.fault_word::<FlushCsa>((to.format, codes.format));
        let flush = ops::flush_csa;
        flush(stream, &tokens, &plan, (entries, keys), &table, &to, &codes, &faults)?;
        for (_, which, pool, projected, _) in streams {
            self.write_state(stream, which, pool, projected, &tokens)?;
        }
        Ok(())
    }

    /// Queues an HCA layer's update; see [`Self::update_csa`].
    ///
    /// # Errors
    /// As [`Self::update_csa`].
    pub fn update_hca(
        &self,
        stream: &Stream<B>,
        projected: &Projected<'_, B>,
    ) -> Result<(), KvError> {
        self.check_kind(LayerKind::Hca)?;
        if self.tokens == 0 {
            return Ok(());
        }
        let (tokens, plan) = (self.step_tokens(), self.workspace.hca_plan(self.tokens));
        let out = &self.workspace.entries;
        let (state, weights) = (self.state(PoolKind::MainState)?, self.weights(projected));
        let (projections, scratch) = (projected.projections(), &self.workspace.hca_scratch);
        let compress = ops::compress_hca;
        compress(stream, &tokens, &projections, &weights, &state, &plan, scratch, out)?;
        let (table, to) = (self.workspace.table(), self.entries()?);
        let faults = self.fault_word::<FlushHca>(to.format);
        ops::flush_hca(stream, &tokens, &plan, out, &table, &to, &faults)?;
        self.write_state(stream, StateStream::Hca, PoolKind::MainState, projected, &tokens)
    }

    /// Queues everything a CSA layer does for a step of one token a request, in one launch: what
    /// [`Self::append_swa`] and [`Self::update_csa`] do, with the same bytes, and without a work list.
    ///
    /// `window_kv`: `[tokens, 512]` BF16. A request with more than one token in the step is refused
    /// on the device and reported by [`crate::KvCacheManager::check_faults`].
    ///
    /// # Errors
    /// As [`Self::update_csa`].
    pub fn decode_csa(
        &self,
        stream: &Stream<B>,
        window_kv: &Buffer<B, u16>,
        main: &Projected<'_, B>,
        index: &Projected<'_, B>,
    ) -> Result<(), KvError> {
        self.check_kind(LayerKind::Csa)?;
        let keys = self.index_keys()?;
        let faults = self.fault_word::<DecodeCsa>((self.config.main_format, keys.format));
        let (tokens, ring_row) = (self.step_tokens(), self.section(Section::RingRow));
        let step = self.decode_step(&tokens, &ring_row, window_kv, &faults)?;
        let main = self.decode_stream(PoolKind::MainState, main)?;
        let index = self.decode_stream(PoolKind::IndexState, index)?;
        Ok(ops::decode_csa(stream, &step, &main, &index, &keys)?)
    }

    /// Queues everything an HCA layer does for a step of one token a request, in one launch; see
    /// [`Self::decode_csa`].
    ///
    /// # Errors
    /// As [`Self::update_csa`]; [`KvError::Device`] of a length for a bucket of more than `max_requests +
    /// max_step_tokens / 128` tokens: a step of one token a request has `max_requests` at most.
    pub fn decode_hca(
        &self,
        stream: &Stream<B>,
        window_kv: &Buffer<B, u16>,
        main: &Projected<'_, B>,
    ) -> Result<(), KvError> {
        self.check_kind(LayerKind::Hca)?;
        let faults = self.fault_word::<DecodeHca>(self.config.main_format);
        let (tokens, ring_row) = (self.step_tokens(), self.section(Section::RingRow));
        let step = self.decode_step(&tokens, &ring_row, window_kv, &faults)?;
        let main = self.decode_stream(PoolKind::MainState, main)?;
        let scratch = &self.workspace.hca_scratch;
        Ok(ops::decode_hca(stream, &step, &main, scratch)?)
    }

    fn decode_step<'b>(
        &'b self,
        tokens: &'b StepTokens<B>,
        ring_row: &'b View<B, i32>,
        window_kv: &'b Buffer<B, u16>,
        faults: &'b Buffer<B, u32>,
    ) -> Result<DecodeStep<'b, B>, KvError> {
        let (window, table, entries) = (self.swa(), self.workspace.table(), self.entries()?);
        Ok(DecodeStep { tokens, ring_row, window_kv, window, table, entries, faults })
    }

    fn decode_stream<'b>(
        &'b self,
        pool: PoolKind,
        projected: &'b Projected<'_, B>,
    ) -> Result<DecodeStream<'b, B>, KvError> {
        let (projections, weights) = (projected.projections(), self.weights(projected));
        Ok(DecodeStream { projections, weights, state: self.state(pool)? })
    }

    /// Queues the gather of the entries that each query's row of `selected` names (`[queries, rows]`
    /// i32 entry indices, -1 = none) into `tile` (`[queries, rows, 512]` BF16, zero where there is
    /// none).
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::NoSuchPool`] in a layer without entries;
    /// [`KvError::Device`] if a tensor is too short, or the launch failed.
    pub fn gather_kv(
        &self,
        stream: &Stream<B>,
        queries: Range<u32>,
        selected: &Buffer<B, i32>,
        rows: u32,
        tile: &Buffer<B, u16>,
    ) -> Result<(), KvError> {
        let count = self.check_queries(&queries)?;
        let (tokens, entries, table) =
            (self.step_tokens(), self.entries()?, self.workspace.table());
        let queries = gather_queries(&tokens, queries.start, count);
        let faults = self.fault_word::<GatherKv>(entries.format);
        let gather = ops::gather_kv;
        gather(stream, &queries, selected, rows, &table, &entries, tile, &faults)?;
        self.find_poison(stream, &queries, tile, GatheredRows::List(selected, rows))
    }

    /// Queues the gather of all entries that each query sees into `tile` (`[queries, rows, 512]`
    /// BF16) and their number into `lengths` (`[queries]`). Rows past the length keep what they held.
    ///
    /// # Errors
    /// As [`Self::gather_kv`].
    pub fn gather_all(
        &self,
        stream: &Stream<B>,
        queries: Range<u32>,
        rows: u32,
        tile: &Buffer<B, u16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let count = self.check_queries(&queries)?;
        let (tokens, entries, table) =
            (self.step_tokens(), self.entries()?, self.workspace.table());
        let queries = gather_queries(&tokens, queries.start, count);
        let faults = self.fault_word::<GatherAll>(entries.format);
        let gather = ops::gather_all;
        gather(stream, &queries, rows, &table, &entries, tile, lengths, &faults)?;
        self.find_poison(stream, &queries, tile, GatheredRows::All(lengths, rows))
    }

    /// Queues the number of entries that each query sees into `lengths` (`[queries]`); 0 for padding.
    ///
    /// # Errors
    /// As [`Self::gather_kv`].
    pub fn valid_lens(
        &self,
        stream: &Stream<B>,
        queries: Range<u32>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let count = self.check_queries(&queries)?;
        let ratio = self.schema.kind.ratio().and_then(NonZeroU32::new);
        let (layer, pool) = (self.schema.layer.0, PoolKind::EntryData);
        let ratio = ratio.ok_or(KvError::NoSuchPool { layer, pool })?;
        let tokens = self.step_tokens();
        let queries = gather_queries(&tokens, queries.start, count);
        Ok(ops::valid_lens(stream, &queries, ratio, lengths)?)
    }

    /// The layer's compressed entries, for kernels of the embedder.
    ///
    /// # Errors
    /// [`KvError::NoSuchPool`] in a layer without entries.
    pub fn entries(&self) -> Result<Entries<'_, B>, KvError> {
        Ok(Entries {
            data: self.pool(PoolKind::EntryData)?,
            scale: self.pool(PoolKind::EntryScale)?,
            format: self.config.main_format,
            entries_per_block: self.schema.kind.entries_per_block(),
            num_blocks: self.config.num_blocks,
        })
    }

    /// The layer's indexer keys, for kernels of the embedder.
    ///
    /// # Errors
    /// [`KvError::NoSuchPool`] in a layer without an indexer.
    pub fn index_keys(&self) -> Result<IndexKeys<'_, B>, KvError> {
        Ok(IndexKeys {
            code: self.pool(PoolKind::IndexCode)?,
            scale: self.pool(PoolKind::IndexScale)?,
            format: self.config.index_format,
            rotate: true,
        })
    }

    /// The state ring of `pool`, for inspection: rows by `position % ring`.
    ///
    /// # Errors
    /// [`KvError::NoSuchPool`] in a layer without that compressor.
    pub fn state(&self, pool: PoolKind) -> Result<StateRing<B>, KvError> {
        let window = match self.schema.kind {
            LayerKind::Hca => HCA_RATIO,
            LayerKind::Csa | LayerKind::Swa => 2 * CSA_RATIO,
        };
        Ok(StateRing {
            rows: self.pool(pool)?.cast()?,
            ring: state_ring_rows(window, self.config.step_tokens_with_rollback()),
            slots: self.config.max_requests,
        })
    }

    fn write_state(
        &self,
        stream: &Stream<B>,
        which: StateStream,
        pool: PoolKind,
        projected: &Projected<'_, B>,
        tokens: &StepTokens<B>,
    ) -> Result<(), KvError> {
        let (state, projections) = (self.state(pool)?, projected.projections());
        let write = ops::write_state;
        Ok(write(stream, which, tokens, &projections, projected.ape, &state)?)
    }

    fn weights<'b>(&'b self, projected: &'b Projected<'_, B>) -> CompressorWeights<'b, B> {
        let frequencies = &self.workspace.frequencies;
        CompressorWeights { ape: projected.ape, norm: projected.norm, frequencies }
    }

    pub(crate) fn check_kind(&self, needed: LayerKind) -> Result<(), KvError> {
        let (layer, found) = (self.schema.layer.0, self.schema.kind);
        if found == needed { Ok(()) } else { Err(KvError::WrongLayerKind { layer, found, needed }) }
    }
}

fn gather_queries<B: Backend>(
    tokens: &StepTokens<B>,
    first: u32,
    count: u32,
) -> GatherQueries<'_, B> {
    let StepTokens { position, slot, index, .. } = tokens;
    GatherQueries { position, slot, index, first, count }
}

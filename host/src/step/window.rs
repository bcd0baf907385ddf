//! The sliding window: the update of layers with only a window, and the gather of windows in all layers.

use std::ops::{Bound, Range, RangeBounds};

use kernels_gpu::launch::GatherSwa;

use super::layer::{Access, Layer, Swa, UpdatedLayer};
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::ops::{self, GatheredRows, StepQueries, StepTokens};

impl<'s, B: Backend> Layer<'s, B, Swa> {
    /// Takes the step's window rows: `[tokens, 512]` BF16, after norm and RoPE, in the order of the
    /// step's tokens. In a decode step ([`crate::CacheConfig::max_decode_tokens`]) this appends them to the ring;
    /// otherwise [`UpdatedLayer::append`] does. They must not be written before that.
    ///
    /// # Errors
    /// [`KvError::LayerRepeated`]; [`KvError::Device`] if `kv` is too short, if the launch failed, or while a capture
    /// other than the step's own records the stream. The update can then be repeated.
    pub fn update(mut self, kv: &Buffer<B, bf16>) -> Result<UpdatedLayer<'s, B, Swa>, KvError> {
        self.tracker.check_not_started()?;
        let _launches = self.access.running()?;
        self.access.check_rows(kv)?;
        if self.access.shape.is_decode() {
            self.tracker.appended(self.access.append(kv))?;
            self.tracker.reached(LayerProgress::Finished);
        } else {
            self.tracker.reached(LayerProgress::Updated);
        }
        Ok(self.updated(kv))
    }
}

impl<B: Backend, K> UpdatedLayer<'_, B, K> {
    /// Queues the gather of the sliding windows of the step's queries in the range `queries` (`..` = all).
    ///
    /// Keys of the step itself are read from its window rows, and quantised as the cache stores them. `tile`:
    /// `[queries, 128, 512]` BF16; row j is the query's j-th oldest key, and rows past its length are zero. `lengths`:
    /// `[queries]` i32, 1 to 128. Padding has length 0, and its part of the tile is not written. Row 0 of both belongs
    /// to the first query of the range, not of the step.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::WindowOverwritten`] after the append of a chunk of more than
    /// `max_draft` + 1 tokens of a request; [`KvError::Device`] if a tensor is too short, if the launch failed, or
    /// while a capture other than the step's own records the stream.
    pub fn gather_window(
        &self,
        queries: impl RangeBounds<u32>,
        tile: &Buffer<B, bf16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        self.check_window()?;
        let access = &self.access;
        let queries = access.queries(access.range(queries))?;
        let ring = access.window()?;
        let faults = access.fault_word::<GatherSwa>(ring.format);
        let (kv, queries, ring) = (&self.kv, &queries, &ring);
        let gather = ops::WindowGather { kv, queries, ring, tile, lengths, faults };
        let _launches = access.reading()?;
        ops::gather_swa(access.stream, &gather)?;
        access.find_poison(queries, tile, GatheredRows::Window(lengths))?;
        Ok(())
    }
}

impl<B: Backend> Access<'_, B> {
    /// The step's tokens.
    pub fn step_tokens(&self) -> StepTokens<'_, B> {
        self.sections.tokens(self.shape.tokens)
    }

    /// Resolves a range of queries of the step, or of its bucket: `..` is all of them.
    pub fn range(&self, queries: impl RangeBounds<u32>) -> Range<u32> {
        let start = match queries.start_bound() {
            Bound::Included(&first) => first,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match queries.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.shape.tokens,
        };
        start..end
    }

    /// The step's tokens in a range, as queries.
    pub fn queries(&self, queries: Range<u32>) -> Result<StepQueries<'_, B>, KvError> {
        let StepTokens { position, slot, index, count: tokens, .. } = self.step_tokens();
        let Range { start: first, end } = queries;
        if first > end || end > tokens {
            return Err(KvError::NoSuchQueries { first, end, tokens });
        }
        Ok(StepQueries { position, slot, index, first, count: end - first })
    }

    /// In a cache with `CacheConfig::poison`, queues the search of a gathered tile for rows that were never written.
    pub fn find_poison(
        &self,
        queries: &StepQueries<'_, B>,
        tile: &Buffer<B, bf16>,
        rows: GatheredRows<'_, B>,
    ) -> Result<(), KvError> {
        let Some(found) = &self.core.memory.poison else { return Ok(()) };
        let found = &found[self.group.index()];
        let layer = self.pools.schema.layer;
        let search = ops::PoisonSearch { queries, layer, tile, rows, found };
        Ok(ops::find_poison(self.stream, &search)?)
    }
}

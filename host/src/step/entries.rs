//! Parts that CSA and HCA layers share: steps of their updates, and the gathers of entries.

use std::ops::RangeBounds;

use kv_layout::geometry::CsaCompressor;

use super::entry_lists::EntryLists;
use super::layer::{Access, CompressorInputs, Csa, Hca, UpdatedLayer};
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::ops::{
    self, DecodeCompressor, DecodeStep, EntryCounts, EntryGather, GatheredRows, PoolingWeights,
    StateUpdate, StepProjections, StepTokens,
};
use crate::pool_kind::PoolKind;
use crate::step_meta::Section;
use kernels_gpu::launch::{GatherAll, GatherEntries};

impl<B: Backend> CompressorInputs<'_, B> {
    pub(super) fn projections(&self) -> StepProjections<'_, B> {
        StepProjections { kv: self.kv, gate: self.gate }
    }
}

impl<B: Backend> Access<'_, B> {
    pub(super) fn weights<'i>(&'i self, inputs: &CompressorInputs<'i, B>) -> PoolingWeights<'i, B> {
        let frequencies = &self.core.memory.frequencies;
        PoolingWeights { ape: inputs.ape, norm: inputs.norm, frequencies }
    }

    pub(super) fn decode_step<'p>(
        &'p self,
        tokens: &'p StepTokens<'p, B>,
        window_kv: &'p Buffer<B, bf16>,
        faults: &'p Buffer<B, u32>,
    ) -> Result<DecodeStep<'p, B>, KvError> {
        let (ring_row, entries) =
            (self.section(Section::RingRow), self.pools.entries(&self.core.config)?);
        let (window, table) = (self.window()?, self.core.memory.table());
        Ok(DecodeStep { tokens, ring_row, window_kv, window, table, entries, faults })
    }

    pub(super) fn decode_compressor<'i>(
        &'i self,
        pool: PoolKind,
        inputs: &'i CompressorInputs<'_, B>,
    ) -> Result<DecodeCompressor<'i, B>, KvError> {
        let (projections, weights) = (inputs.projections(), self.weights(inputs));
        Ok(DecodeCompressor {
            projections,
            weights,
            state: self.pools.state(pool, &self.core.config)?,
        })
    }

    pub(super) fn write_state(
        &self,
        which: CsaCompressor,
        pool: PoolKind,
        inputs: &CompressorInputs<'_, B>,
    ) -> Result<(), KvError> {
        let state = self.pools.state(pool, &self.core.config)?;
        let update = StateUpdate {
            tokens: &self.step_tokens(),
            projections: &inputs.projections(),
            ape: inputs.ape,
            state: &state,
        };
        let checkpoints = self.checkpoint_rows();
        Ok(ops::write_state_saving(self.stream, which, &update, checkpoints.as_ref())?)
    }
}

mod sealed {
    /// Layers that store compressed entries.
    pub trait HasEntries {}
    impl HasEntries for super::Csa {}
    impl HasEntries for super::Hca {}
}

impl<B: Backend, K: sealed::HasEntries> UpdatedLayer<'_, B, K> {
    /// Queues the gather of the entries in each query's list into `tile` (`[queries, k, 512]` BF16, a row of zeros for
    /// -1). Row 0 of the tile belongs to the first query of the range, not of the step. An entry that the query does
    /// not see also gives a row of zeros, and is reported by [`crate::KvCacheManager::check_faults`]. With an empty
    /// range, or lists of no elements, nothing is queued.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::ListsMismatch`] if a query has no list; [`KvError::Device`] if a tensor
    /// is too short, if an output would replace rows of the layer's `kv`, if the launch failed, or while a capture
    /// other than the step's own records the stream.
    pub fn gather_entries(
        &self,
        queries: impl RangeBounds<u32>,
        lists: &EntryLists<'_, B>,
        tile: &Buffer<B, bf16>,
    ) -> Result<(), KvError> {
        let (access, rows) = (&self.access, lists.k);
        let queries = access.range(queries);
        let of_step = access.queries(queries.clone())?;
        if queries.is_empty() || rows == 0 {
            return Ok(());
        }
        let selected = &lists.of(queries)?;
        let entries = access.pools.entries(&access.core.config)?;
        let (table, faults) =
            (access.core.memory.table(), access.fault_word::<GatherEntries>(entries.format));
        let (queries, table, entries) = (&of_step, &table, &entries);
        let gather = EntryGather { queries, table, entries, rows, tile, faults };
        self.check_outputs("gather_entries", [("tile", tile.span())])?;
        let _launches = access.reading()?;
        ops::gather_entries(access.stream, &gather, selected)?;
        access.find_poison(queries, tile, GatheredRows::List(selected, rows))?;
        Ok(())
    }

    /// Queues the gather of all entries that each query sees into `tile` (`[queries, rows, 512]` BF16), and of their
    /// number into `lengths` (`[queries]` i32). Row 0 of both belongs to the first query of the range, not of the step.
    /// Rows of the tile past a query's length are not written. A query that sees more than `rows` entries gets the
    /// first `rows`, and is reported by [`crate::KvCacheManager::check_faults`].
    ///
    /// `rows` may be 0 in a step whose contexts are too short for an entry: then only `lengths` is written.
    ///
    /// # Errors
    /// As [`Self::gather_entries`]; [`KvError::Device`] if `rows` is 0 in a step or graph whose queries may see
    /// entries.
    pub fn gather_all(
        &self,
        queries: impl RangeBounds<u32>,
        rows: u32,
        tile: &Buffer<B, bf16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let access = &self.access;
        if rows == 0 && access.shape.context < access.pools.ratio()?.get() {
            return self.entry_counts(queries, lengths);
        }
        let queries = access.queries(access.range(queries))?;
        let entries = access.pools.entries(&access.core.config)?;
        let (table, faults) =
            (access.core.memory.table(), access.fault_word::<GatherAll>(entries.format));
        let (queries, table, entries) = (&queries, &table, &entries);
        let gather = EntryGather { queries, table, entries, rows, tile, faults };
        self.check_outputs("gather_all", [("tile", tile.span()), ("lengths", lengths.span())])?;
        let _launches = access.reading()?;
        ops::gather_all(access.stream, &gather, lengths)?;
        access.find_poison(queries, tile, GatheredRows::All(lengths, rows))?;
        Ok(())
    }

    /// Queues the count of the entries that each query sees into `lengths` (`[queries]` i32; 0 for padding). Row 0
    /// belongs to the first query of the range, not of the step.
    ///
    /// # Errors
    /// As [`Self::gather_entries`].
    pub fn entry_counts(
        &self,
        queries: impl RangeBounds<u32>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let access = &self.access;
        let queries = access.queries(access.range(queries))?;
        self.check_outputs("count_entries", [("lengths", lengths.span())])?;
        let counts = EntryCounts { queries: &queries, ratio: access.pools.ratio()?, lengths };
        let _launches = access.reading()?;
        ops::count_entries(access.stream, &counts)?;
        Ok(())
    }
}

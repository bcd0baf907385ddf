//! `LayerCacheHandle`: one layer's cache for one step. It borrows, launches, and allocates nothing.

mod compressed;
mod swa;

pub use compressed::Projected;

use std::ops::Range;

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Operation, Stream, View};
use crate::error::KvError;
use crate::manager::LayerPools;
use crate::ops::{self, GatherQueries, GatheredRows, StepTokens};
use crate::plan::{Section, StepLayout};
use crate::schema::{LayerCacheSchema, PoolKind};
use crate::workspace::Workspace;

/// The cache of one layer, seen from the step that was prepared last.
pub struct LayerCacheHandle<'a, B: Backend> {
    pub(crate) config: &'a CacheConfig,
    pub(crate) schema: &'a LayerCacheSchema,
    pub(crate) pools: &'a LayerPools<B>,
    pub(crate) step: &'a View<B, i32>,
    pub(crate) layout: StepLayout,
    pub(crate) workspace: &'a Workspace<B>,
    pub(crate) tokens: u32,
}

impl<B: Backend> LayerCacheHandle<'_, B> {
    /// Tokens that launches of this handle cover.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The layer's pools.
    #[must_use]
    pub fn schema(&self) -> &LayerCacheSchema {
        self.schema
    }

    /// The step's tokens, for kernels of the embedder.
    #[must_use]
    pub fn step_tokens(&self) -> StepTokens<B> {
        StepTokens {
            position: self.section(Section::Position),
            slot: self.section(Section::Slot),
            index: self.section(Section::Index),
            remaining: self.section(Section::Remaining),
            count: self.tokens,
        }
    }

    /// The pool of a kind that this layer has.
    fn pool(&self, kind: PoolKind) -> Result<&Buffer<B, u8>, KvError> {
        let layer = self.schema.layer.0;
        self.pools.get(kind).ok_or(KvError::NoSuchPool { layer, pool: kind })
    }

    /// Checks that `queries` are of the step; their number.
    pub(crate) fn check_queries(&self, queries: &Range<u32>) -> Result<u32, KvError> {
        let Range { start: first, end } = *queries;
        if first > end || end > self.tokens {
            return Err(KvError::NoSuchQueries { first, end, tokens: self.tokens });
        }
        Ok(end - first)
    }

    /// One array of the step's StepMeta, `[capacity]`, for kernels of the embedder.
    ///
    /// # Panics
    /// Never: the array has all its sections.
    #[must_use]
    pub fn section(&self, section: Section) -> View<B, i32> {
        let range = self.layout.range(section);
        self.step
            .slice(range.start as u64, range.len() as u64)
            .expect("the array has all its sections")
    }

    /// In a poisoned cache, queues the search of a gathered tile for rows that nobody wrote.
    fn find_poison(
        &self,
        stream: &Stream<B>,
        queries: &GatherQueries<'_, B>,
        tile: &Buffer<B, u16>,
        rows: GatheredRows<'_, B>,
    ) -> Result<(), KvError> {
        let Some(found) = &self.workspace.poison else { return Ok(()) };
        let layer = self.schema.layer;
        Ok(ops::find_poison(stream, queries, layer, tile, rows, found)?)
    }

    pub(crate) fn fault_word<O: Operation>(&self, variant: O::Variant) -> Buffer<B, u32> {
        let word = O::kernel(variant) as u64;
        self.workspace.faults.slice(word, 1).expect("there is a word per kernel")
    }
}

//! `LayerCacheHandle`: one layer's cache for one step. It borrows, launches, and allocates nothing.

use std::ops::Range;

use kv_layout::geometry::swa_ring_rows;

use crate::config::CacheConfig;
use crate::device::ops::{self, GatherQueries, SwaRing};
use crate::device::{Buffer, Device};
use crate::error::KvError;
use crate::kernels::{AppendSwa, GatherSwa, Operation};
use crate::manager::LayerPools;
use crate::plan::{Section, StepLayout};
use crate::schema::{LayerCacheSchema, PoolKind};

/// The cache of one layer, seen from the step that was prepared last.
pub struct LayerCacheHandle<'a, D: Device> {
    pub(crate) device: &'a D,
    pub(crate) config: &'a CacheConfig,
    pub(crate) schema: &'a LayerCacheSchema,
    pub(crate) pools: &'a LayerPools<D>,
    pub(crate) step: &'a Buffer<D, i32>,
    pub(crate) layout: StepLayout,
    pub(crate) faults: &'a Buffer<D, u32>,
    pub(crate) tokens: u32,
}

impl<D: Device> LayerCacheHandle<'_, D> {
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

    /// The sliding-window ring planes, for kernels of the embedder.
    #[must_use]
    pub fn swa(&self) -> SwaRing<'_, D> {
        SwaRing {
            data: self.pool(PoolKind::SwaData),
            scale: self.pool(PoolKind::SwaScale),
            format: self.config.main_format,
            ring: swa_ring_rows(self.config.step_tokens_with_rollback()),
            slots: self.config.max_requests,
        }
    }

    /// Queues the quantise-and-scatter of the step's KV rows into the sliding-window ring.
    ///
    /// `kv`: `[tokens, 512]` BF16, after norm and RoPE, in the order of the step. Of a chunk longer
    /// than the ring only the last `ring` tokens are written. Run it after [`Self::gather_swa`]
    /// unless every chunk has at most `max_draft + 1` tokens.
    ///
    /// # Errors
    /// [`KvError::Device`] if `kv` is too short, or the launch failed.
    pub fn append_swa(&self, stream: &D::Stream, kv: &Buffer<D, u16>) -> Result<(), KvError> {
        let (ring, row) = (self.swa(), self.section(Section::RingRow));
        let faults = self.fault_word::<AppendSwa>(ring.format);
        Ok(ops::append_swa(self.device, stream, kv, &row, &ring, &faults, self.tokens)?)
    }

    /// Queues the gather of the sliding window of queries `first..end` of the step.
    ///
    /// `kv` is what [`Self::append_swa`] takes: keys of the step itself are read from it, through
    /// the quantisation that the cache applies. `tile`: `[queries, 128, 512]` BF16, row j of a
    /// query its j-th oldest key, rows past its length zero. `lengths`: `[queries]`, 1 to 128, and
    /// 0 for padding, whose tile stays untouched.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::Device`] if a tensor is too short, or the launch failed.
    pub fn gather_swa(
        &self,
        stream: &D::Stream,
        kv: &Buffer<D, u16>,
        queries: Range<u32>,
        tile: &Buffer<D, u16>,
        lengths: &Buffer<D, i32>,
    ) -> Result<(), KvError> {
        let Range { start: first, end } = queries;
        if first > end || end > self.tokens {
            return Err(KvError::NoSuchQueries { first, end, tokens: self.tokens });
        }
        let ring = self.swa();
        let queries = GatherQueries {
            position: &self.section(Section::Position),
            slot: &self.section(Section::Slot),
            index: &self.section(Section::Index),
            first,
            count: end - first,
        };
        let faults = self.fault_word::<GatherSwa>(ring.format);
        let gather = ops::gather_swa;
        Ok(gather(self.device, stream, kv, &queries, &ring, tile, lengths, &faults)?)
    }

    fn pool(&self, kind: PoolKind) -> &Buffer<D, u8> {
        self.pools.get(kind).expect("every layer has a sliding-window ring")
    }

    /// One array of the step's StepMeta, `[capacity]`, for kernels of the embedder.
    ///
    /// # Panics
    /// Never: the array has all its sections.
    #[must_use]
    pub fn section(&self, section: Section) -> Buffer<D, i32> {
        let (start, len) = (self.layout.offset(section) as u64, u64::from(self.layout.capacity()));
        self.step.slice(start, len).expect("the array has all its sections")
    }

    fn fault_word<O: Operation>(&self, variant: O::Variant) -> Buffer<D, u32> {
        let word = O::kernel(variant) as u64;
        self.faults.slice(word, 1).expect("there is a word per kernel")
    }
}

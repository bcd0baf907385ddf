//! The sliding window of a layer.

use std::ops::Range;

use kv_layout::geometry::swa_ring_rows;

use super::LayerCacheHandle;
use crate::device::{Backend, Buffer, Stream};
use crate::error::KvError;
use crate::kernels::{AppendSwa, GatherSwa};
use crate::ops::{self, GatherQueries, GatheredRows, SwaRing};
use crate::plan::Section;
use crate::schema::PoolKind;

const EVERY_LAYER: &str = "every layer has a sliding-window ring";

impl<B: Backend> LayerCacheHandle<'_, B> {
    /// The sliding-window ring planes, for kernels of the embedder.
    ///
    /// # Panics
    /// Never: every layer has them.
    #[must_use]
    pub fn swa(&self) -> SwaRing<'_, B> {
        SwaRing {
            data: self.pools.get(PoolKind::SwaData).expect(EVERY_LAYER),
            scale: self.pools.get(PoolKind::SwaScale).expect(EVERY_LAYER),
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
    pub fn append_swa(&self, stream: &Stream<B>, kv: &Buffer<B, u16>) -> Result<(), KvError> {
        let (ring, row) = (self.swa(), self.section(Section::RingRow));
        let faults = self.fault_word::<AppendSwa>(ring.format);
        Ok(ops::append_swa(stream, kv, &row, &ring, &faults, self.tokens)?)
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
        stream: &Stream<B>,
        kv: &Buffer<B, u16>,
        queries: Range<u32>,
        tile: &Buffer<B, u16>,
        lengths: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let count = self.check_queries(&queries)?;
        let ring = self.swa();
        let queries = GatherQueries {
            position: &self.section(Section::Position),
            slot: &self.section(Section::Slot),
            index: &self.section(Section::Index),
            first: queries.start,
            count,
        };
        let faults = self.fault_word::<GatherSwa>(ring.format);
        let gather = ops::gather_swa;
        gather(stream, kv, &queries, &ring, tile, lengths, &faults)?;
        self.find_poison(stream, &queries, tile, GatheredRows::Window(lengths))
    }
}

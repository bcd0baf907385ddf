//! Attention in place: a layer's queries attend to the rows of the cache as they are stored, without a gather.

use std::ops::{Range, RangeBounds};
use std::sync::PoisonError;

use kernels_gpu::launch::{AppendSwa, Attend};
use kv_layout::attention::{AttendForm, AttendKernel, AttendedKeys};
use kv_layout::geometry::LayerKind;

use super::entry_lists::EntryLists;
use super::layer::{Access, Csa, Hca, Swa, UpdatedLayer};
use crate::device::{Backend, Buffer, bf16};
use crate::error::KvError;
use crate::layer_progress::LayerProgress;
use crate::ops::{
    self, Attended, AttendedEntries, Attention, OwnRows, QueryForm, SwaRing, WindowAppend,
};

/// Inputs and outputs of attention for a range of a step's queries.
///
/// Row 0 of `query`, `out` and `lse` belongs to the first query of that range, not to the first of the step. For
/// `attend(n - 1..n, ..)` over tensors of the whole step, pass [`Buffer::slice`]s of them.
///
/// ```
/// use dsv4_kv::device::{EmuDevice, EmuOptions, bf16};
/// use dsv4_kv::kv_layout::config::ModelConfig;
/// use dsv4_kv::kv_layout::geometry::LayerKind;
/// use dsv4_kv::step::{AttentionTensors, QueryForm};
/// use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, LayerId, StepRequest};
///
/// # let tiny = ModelConfig::preset("tiny").expect("a preset");
/// # let model = ModelConfig { layers: vec![LayerKind::Swa], mtp_layers: 0, ..tiny };
/// # let device = EmuDevice::new(EmuOptions::default());
/// # let stream = device.stream()?;
/// # let smallest = CacheConfig::new(model);
/// # let config = CacheConfig { num_blocks: 16, max_context: 512, max_step_tokens: 64, ..smallest };
/// # let mut cache = KvCacheManager::new(device.clone(), config)?;
/// // Three tokens, four heads: rows of ones, scores that are equal, and a sink that weighs as much as a key.
/// let (kv, out) = (device.allocate("rows", 3 * 512)?, device.allocate("results", 3 * 4 * 512)?);
/// let (query, sinks) = (device.allocate("queries", 3 * 4 * 512)?, device.allocate("sinks", 4)?);
/// stream.upload(&vec![bf16::ONE; 3 * 512], &kv, 0)?;
///
/// let id = cache.admit()?;
/// let requests = [StepRequest { id, start: 0, tokens: 3 }];
/// let mut step = cache.begin_step(&stream, Launches::Eager, &requests)?;
/// let layer = step.swa(LayerId(0))?.update(&kv)?;
/// let form = QueryForm::Rotated;
/// let tensors = AttentionTensors { heads: 4, query: &query, form, sinks: &sinks, out: &out, lse: None };
/// layer.attend(0..3, &tensors)?;
/// layer.append()?;
/// step.commit(&[Accepted::count(id, 3)])?;
///
/// // The third token sees three keys, and the sink has a quarter of the weight: the result is 0.75.
/// let mut results = vec![bf16::ZERO; 3 * 4 * 512];
/// stream.download(&out, 0, &mut results)?;
/// assert_eq!(results[2 * 4 * 512].to_f32(), 0.75);
/// # Ok::<(), dsv4_kv::KvError>(())
/// ```
pub struct AttentionTensors<'i, B: Backend> {
    /// Heads of a query, 1 to 128.
    pub heads: u32,
    /// `[queries, heads, 512]` BF16.
    pub query: &'i Buffer<B, bf16>,
    /// How `query` was processed before.
    pub form: QueryForm,
    /// `[heads]` f32: a logit per head that takes part in the softmax and has no value.
    pub sinks: &'i Buffer<B, f32>,
    /// `[queries, heads, 512]` BF16: the weighted sums of the keys, after inverse RoPE. Rows of padding are not
    /// written. Must not overlap the layer's `kv`.
    pub out: &'i Buffer<B, bf16>,
    /// `[queries, heads]` f32, optional: the natural logarithm of the softmax's denominator, including the sink.
    pub lse: Option<&'i Buffer<B, f32>>,
}

impl<B: Backend> UpdatedLayer<'_, B, Swa> {
    /// Queues attention of the step's queries in the range `queries` (`..` = all) to their sliding windows.
    ///
    /// All rows are read in place. The bits of a query's result depend on its request alone, and in layers with entries
    /// also on [`crate::CacheConfig::attention_cluster`]. In a decode step ([`crate::CacheConfig::max_decode_tokens`])
    /// the rows of the step itself are already in the ring. For longer chunks, the layer's first call queues a launch
    /// that quantises them into memory of the step, as `append` will.
    ///
    /// In a cache with `CacheConfig::poison`, a row that was never written makes the result NaN. An empty range queues
    /// nothing, whatever `heads` is.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::WindowOverwritten`] after the append of a chunk of more than
    /// `max_draft` + 1 tokens of a request; [`KvError::Device`] for a number of heads out of range, if a tensor is too
    /// short, if results would replace rows of the layer's `kv`, if a launch failed, or while a capture other than the
    /// step's own records the stream.
    pub fn attend(
        &self,
        queries: impl RangeBounds<u32>,
        tensors: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        self.attend_to(self.access.range(queries), None, tensors)
    }
}

impl<B: Backend> UpdatedLayer<'_, B, Csa> {
    /// Queues attention of the step's queries in the range `queries` to their sliding windows and to the entries in
    /// each query's list: one softmax over both.
    ///
    /// Only the first `min(k, entries that the query sees)` elements of a list are read. Lists from `select` fit:
    /// entries first, then -1. A -1 among the elements that are read is a key without weight. The number of elements
    /// that are read decides how keys are divided among thread blocks. So another `k` can change the last bits of the
    /// result of a list that is padded with -1: choose `k` independently of the batch.
    ///
    /// Otherwise as [`UpdatedLayer::attend`] of a layer with only a window.
    ///
    /// # Errors
    /// As in a layer with only a window; [`KvError::ListsMismatch`] if a query has no list; [`KvError::Device`] for `k`
    /// out of range.
    pub fn attend(
        &self,
        queries: impl RangeBounds<u32>,
        lists: &EntryLists<'_, B>,
        tensors: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        let queries = self.access.range(queries);
        self.access.queries(queries.clone())?;
        if queries.is_empty() {
            return Ok(());
        }
        let selected = lists.of(queries.clone())?;
        self.attend_to(queries, Some((Attended::List(&selected), lists.k)), tensors)
    }
}

impl<B: Backend> UpdatedLayer<'_, B, Hca> {
    /// Queues attention of the step's queries in the range `queries` to their sliding windows and to all entries that
    /// each query sees: one softmax over both.
    ///
    /// Otherwise as [`UpdatedLayer::attend`] of a layer with only a window.
    ///
    /// # Errors
    /// As in a layer with only a window.
    pub fn attend(
        &self,
        queries: impl RangeBounds<u32>,
        tensors: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        let queries = self.access.range(queries);
        self.attend_to(queries, Some((Attended::All, self.access.most_entries()?)), tensors)
    }
}

impl<B: Backend, K> UpdatedLayer<'_, B, K> {
    /// Queues attention to windows and, if `which` is given, to entries, at most its number per query. The layer's
    /// first call in a step with long chunks also queues the quantisation of the step's own rows.
    fn attend_to(
        &self,
        queries: Range<u32>,
        which: Option<(Attended<'_, B>, u32)>,
        tensors: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        self.check_window()?;
        let access = &self.access;
        let queries = access.queries(queries)?;
        if queries.count == 0 {
            return Ok(());
        }
        let ring = access.window()?;
        let is_in_ring = *self.tracker.progress == LayerProgress::Finished;
        let own =
            OwnRows { data: &access.own.data, scale: &access.own.scale, rows: access.shape.tokens };
        let keys = which.as_ref().map_or(AttendedKeys::Window, |(which, _)| which.keys());
        let (entries, table);
        let attended = match which {
            None => None,
            Some((which, rows)) => {
                let config = &access.core.config;
                (entries, table) = (access.pools.entries(config)?, access.core.memory.table());
                let (entries, table) = (&entries, &table);
                let splits = access.compressed().splits.as_ref();
                Some(AttendedEntries { entries, table, which, rows, splits })
            }
        };
        let attention = Attention {
            queries: &queries,
            query: tensors.query,
            form: tensors.form,
            heads: tensors.heads,
            cluster: access.core.config.attention_cluster,
            multiprocessors: ops::MULTIPROCESSORS,
            exchange: Some(access.exchange),
            sinks: tensors.sinks,
            frequencies: access.frequencies(),
            ring: &ring,
            own: (!is_in_ring).then_some(own),
            entries: attended,
            out: tensors.out,
            lse: tensors.lse,
            // All forms of the kernel count refused rows in the fault word of `Whole`.
            faults: access.fault_word::<Attend>(AttendKernel {
                format: ring.format,
                form: AttendForm::Whole(keys),
            }),
        };
        // Checked before any launch is queued: a refused call queues nothing.
        let out = tensors.out.span();
        let lse = tensors.lse.map_or(out, |lse| lse.span());
        self.check_outputs("attend", [("out", out), ("lse", lse)])?;
        let _launches = access.reading()?;
        if !is_in_ring {
            self.quantise_once(&attention)?;
        }
        // SAFETY: the cache alone writes StepMeta, by copies in the order of its steps, and hands out views of it. The
        // launch is of the step, and runs in its order.
        unsafe { ops::attend(access.stream, &attention) }?;
        Ok(())
    }

    /// Queues the quantisation of the step's own rows, unless an earlier call has. For attention that would be refused
    /// it queues nothing.
    fn quantise_once(&self, attention: &Attention<'_, B>) -> Result<(), KvError> {
        let mut has_own_rows = self.has_own_rows.lock().unwrap_or_else(PoisonError::into_inner);
        if !*has_own_rows {
            let _launches = self.access.reading()?;
            ops::check_attend(self.access.stream, attention)?;
            self.access.quantise_rows(&self.kv)?;
            *has_own_rows = true;
        }
        Ok(())
    }

    /// Refuses to read windows whose rows the append of a long chunk has replaced, or may have.
    pub(super) fn check_window(&self) -> Result<(), KvError> {
        let shape = &self.access.shape;
        let is_kept = *self.tracker.progress == LayerProgress::Updated;
        if !is_kept && !shape.is_decode() {
            let (tokens, limit) = (shape.tokens_per_request, shape.max_decode_tokens);
            return Err(KvError::WindowOverwritten { tokens, limit });
        }
        Ok(())
    }
}

impl<B: Backend> Access<'_, B> {
    /// The layer's rotary frequencies.
    fn frequencies(&self) -> &Buffer<B, f32> {
        match self.pools.schema.kind {
            LayerKind::Swa => &self.core.memory.window_frequencies,
            LayerKind::Csa | LayerKind::Hca => &self.core.memory.frequencies,
        }
    }

    /// Most entries that a query of the step may see, but at least 1, the least that a launch takes.
    fn most_entries(&self) -> Result<u32, KvError> {
        Ok((self.shape.context / self.pools.ratio()?).max(1))
    }

    /// Queues the quantisation of the step's window rows into the step's own planes.
    fn quantise_rows(&self, kv: &Buffer<B, bf16>) -> Result<(), KvError> {
        let (own, tokens) = (self.own, self.shape.tokens);
        let format = self.core.config.main_format;
        let ring = SwaRing { data: &own.data, scale: &own.scale, format, ring: tokens, slots: 1 };
        let faults = self.fault_word::<AppendSwa>(format);
        let append = WindowAppend { kv, row: &own.place, ring: &ring, faults, tokens };
        Ok(ops::append_swa(self.stream, &append)?)
    }
}

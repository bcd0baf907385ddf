//! Attention of a layer's queries over the rows of the cache where they lie.

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

/// The tensors of attention of some queries of a step: what it reads of the model, and where its results go.
///
/// Row 0 of `query`, `out` and `lse` belongs to the first query of the range that is attended, not to the step's first: for
/// `attend(n - 1..n, ..)` over tensors of the whole step, give [`Buffer::slice`]s of them.
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
/// // The third token has three keys: three quarters of their value.
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
    /// What has been done to `query`.
    pub form: QueryForm,
    /// `[heads]` f32: a score that takes its share of the softmax and gives no value.
    pub sinks: &'i Buffer<B, f32>,
    /// `[queries, heads, 512]` BF16: the weighted sums of the keys, with inverse RoPE. Padding stays untouched. Not in the memory of the
    /// layer's `kv`.
    pub out: &'i Buffer<B, bf16>,
    /// `[queries, heads]` f32, if it is wanted: the natural logarithm of the softmax's denominator, the sink included.
    pub lse: Option<&'i Buffer<B, f32>>,
}

impl<B: Backend> UpdatedLayer<'_, B, Swa> {
    /// Queues attention of the step's queries in the range `queries`, `..` for all, to their sliding windows.
    ///
    /// All rows are read where they lie, as the cache stores them, and a query's bits depend on its request alone, and on
    /// [`crate::CacheConfig::attention_split`] in layers with entries. Rows
    /// of the step itself lie in the ring where no request has more than `max_draft` + 1 tokens. For longer chunks
    /// the layer's first call queues a launch that quantises them into memory of the step, as `append` will.
    ///
    /// In a poisoned cache a row that nobody wrote gives NaN. No queries are nothing, whatever `heads` are.
    ///
    /// # Errors
    /// [`KvError::NoSuchQueries`]; [`KvError::WindowOverwritten`] after the append of a chunk of more than
    /// `max_draft` + 1 tokens of a request; [`KvError::Device`] for a number of heads out of range, if a tensor is too short, if results would replace
    /// rows of the layer's `kv`, if a launch failed, or while another capture than the step's own records the stream.
    pub fn attend(
        &self,
        queries: impl RangeBounds<u32>,
        tensors: &AttentionTensors<'_, B>,
    ) -> Result<(), KvError> {
        self.attend_to(self.access.range(queries), None, tensors)
    }
}

impl<B: Backend> UpdatedLayer<'_, B, Csa> {
    /// Queues attention of the step's queries in the range `queries` to their sliding windows and to the entries that each
    /// query's list names: one softmax over both.
    ///
    /// Of each list the first `min(k, entries that the query sees)` elements are read; later ones are ignored. Lists of
    /// `select` fit: entries first, then -1. A -1 among the elements that are read is a key without weight. The number of
    /// elements that are read decides how keys are divided among blocks, so a list that is padded with -1 can have other
    /// last bits with another `k`: choose `k` independently of the batch.
    ///
    /// Otherwise as in a layer with a window alone ([`UpdatedLayer::attend`]).
    ///
    /// # Errors
    /// As there; [`KvError::ListsMismatch`] if a query has no list; [`KvError::Device`] for `k` out of range.
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
    /// Queues attention of the step's queries in the range `queries` to their sliding windows and to all entries that each query
    /// sees: one softmax over both.
    ///
    /// Otherwise as in a layer with a window alone ([`UpdatedLayer::attend`]).
    ///
    /// # Errors
    /// As there.
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
    /// Queues attention to windows and, if there are some, to entries, at most so many of a query; before the layer's
    /// first of a long chunk also the quantisation of the step's own rows.
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
                let parts = access.compressed().parts.as_ref();
                Some(AttendedEntries { entries, table, which, rows, parts })
            }
        };
        let attention = Attention {
            queries: &queries,
            query: tensors.query,
            form: tensors.form,
            heads: tensors.heads,
            split: access.core.config.attention_split,
            multiprocessors: ops::MULTIPROCESSORS,
            exchange: Some(access.exchange),
            sinks: tensors.sinks,
            frequencies: access.frequencies(),
            ring: &ring,
            own: (!is_in_ring).then_some(own),
            entries: attended,
            out: tensors.out,
            lse: tensors.lse,
            // All forms count in the word of `Whole`.
            faults: access.fault_word::<Attend>(AttendKernel {
                format: ring.format,
                form: AttendForm::Whole(keys),
            }),
        };
        // The call is checked before any launch is queued: a refused one queues nothing.
        let out = tensors.out.span();
        let lse = tensors.lse.map_or(out, |lse| lse.span());
        self.check_outputs("attend", [("out", out), ("lse", lse)])?;
        let launches = access.reading()?;
        if !is_in_ring {
            self.quantise_once(&attention)?;
        }
        // SAFETY: the cache alone writes StepMeta, by copies in the order of its steps, and hands out views of it. The launch is of
        // the step, and runs in its order.
        unsafe { ops::attend(access.stream, &attention) }?;
        launches.end()
    }

    /// Queues the quantisation of the step's own rows, unless a call before has. Attention that would be refused queues nothing.
    fn quantise_once(&self, attention: &Attention<'_, B>) -> Result<(), KvError> {
        let mut has_own_rows = self.has_own_rows.lock().unwrap_or_else(PoisonError::into_inner);
        if !*has_own_rows {
            let launches = self.access.reading()?;
            ops::check_attend(self.access.stream, attention)?;
            self.access.quantise_rows(&self.kv)?;
            launches.end()?;
            *has_own_rows = true;
        }
        Ok(())
    }

    /// Refuses to read windows whose rows the append of a long chunk has replaced.
    pub(super) fn check_window(&self) -> Result<(), KvError> {
        let shape = &self.access.shape;
        if *self.tracker.progress == LayerProgress::Finished && !shape.is_fused() {
            let (tokens, limit) = (shape.tokens_per_request, shape.rollback);
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

    /// Entries that a query of the step may see; 1 where that is none, since a launch takes at least one.
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

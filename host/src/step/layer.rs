//! One layer of a step: [`Layer`] before its update, [`UpdatedLayer`] after it.
//!
//! The types enforce the order within a layer: update, then reads, then append. Entries are pooled before the
//! step's tokens enter the state ring, since a chunk overwrites rows that its own first tokens need;
//! a layer is updated before its entries are read, since a token that closes a window sees its entry;
//! and windows are gathered or attended to before a long chunk's rows enter the window ring.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Mutex;

use kernels_gpu::launch::AppendSwa;
use kv_layout::geometry::{CompressorKind, HEAD_DIM};

use super::shape::{Recording, StepShape};
use super::tracker::{Tracker, may_have_run};
use crate::device::Operation;
use crate::device::shape::check_length;
use crate::device::{Backend, Buffer, DeviceError, Running, Span, Stream, View, bf16};
use crate::error::{KvError, RowsMismatch};
use crate::ids::LayerGroup;
use crate::layer_progress::LayerProgress;
use crate::manager::core::Core;
use crate::memory::pools::LayerPools;
use crate::memory::step_memory::{Compressed, OwnPlanes, Sections};
use crate::ops::{self, AttentionExchange};
use crate::schema::LayerCacheSchema;
use crate::step_meta::Section;

/// A layer with a sliding window alone.
#[derive(Clone, Copy, Debug)]
pub struct Swa;
/// A CSA layer: a window, an entry for every 4 tokens, and an indexer that picks among them.
#[derive(Clone, Copy, Debug)]
pub struct Csa;
/// An HCA layer: a window, and an entry for every 128 tokens, all of which are read.
#[derive(Clone, Copy, Debug)]
pub struct Hca;

/// What a layer's launches use: its pools, StepMeta, scratch, and the stream.
pub(crate) struct Access<'s, B: Backend> {
    pub core: &'s Core<B>,
    pub group: LayerGroup,
    pub pools: &'s LayerPools<B>,
    pub sections: &'s Sections<B>,
    pub own: &'s OwnPlanes<B>,
    pub exchange: &'s AttentionExchange<B>,
    pub compressed: Option<&'s Compressed<B>>,
    pub stream: &'s Stream<B>,
    pub shape: StepShape,
    /// Which capture records the launches, if any.
    pub recording: Recording,
}

/// A layer of a step that is not updated yet.
pub struct Layer<'s, B: Backend, K> {
    pub(super) access: Access<'s, B>,
    pub(super) tracker: Tracker<'s>,
    kind: PhantomData<K>,
}

impl<B: Backend, K> fmt::Debug for Layer<'_, B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("layer", &self.tracker.layer)
            .field("progress", &self.tracker.progress)
            .finish_non_exhaustive()
    }
}

/// A layer whose update is queued: its rows can be attended to or gathered. Then the step's rows are to be appended to
/// its window, unless the update has done that.
pub struct UpdatedLayer<'s, B: Backend, K> {
    pub(crate) access: Access<'s, B>,
    pub(super) tracker: Tracker<'s>,
    /// `[tokens, 512]` BF16: the step's window rows, which are read until they are appended.
    pub(super) kv: Buffer<B, bf16>,
    /// Whether the step's own planes hold these rows; in a captured step, whether they will when its graph is replayed.
    pub(super) has_own_rows: Mutex<bool>,
    kind: PhantomData<K>,
}

impl<B: Backend, K> fmt::Debug for UpdatedLayer<'_, B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpdatedLayer")
            .field("layer", &self.tracker.layer)
            .field("progress", &self.tracker.progress)
            .finish_non_exhaustive()
    }
}

/// A compressor's weights, and the model's projections of the step's tokens.
///
/// `columns` is 1024 for the main entries of a CSA layer (512 that the next window pools, then 512 that the token's own
/// window pools), 256 for its indexer keys (in the same two halves), 512 in an HCA layer; `channels` is 512, 128, 512.
pub struct CompressorInputs<'i, B: Backend> {
    /// `[tokens, columns]` f32, keys.
    pub kv: &'i Buffer<B, f32>,
    /// `[tokens, columns]` f32, gates, without the position bias.
    pub gate: &'i Buffer<B, f32>,
    /// `[ratio, columns]` f32, the position bias.
    pub ape: &'i Buffer<B, f32>,
    /// `[channels]` f32, weights of the RMS norm.
    pub norm: &'i Buffer<B, f32>,
}

impl<B: Backend> Clone for CompressorInputs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for CompressorInputs<'_, B> {}

impl<'s, B: Backend, K> Layer<'s, B, K> {
    pub(super) fn new(access: Access<'s, B>, tracker: Tracker<'s>) -> Self {
        Self { access, tracker, kind: PhantomData }
    }

    /// The layer's pools and their sizes.
    #[must_use]
    pub fn schema(&self) -> &LayerCacheSchema {
        &self.access.pools.schema
    }

    /// Continues with a layer that this step has already updated, by a captured graph or through a handle that was
    /// dropped. `kv` is the tensor of that update, which must not have been written since.
    ///
    /// # Errors
    /// [`KvError::LayerNotUpdated`]; [`KvError::RowsMismatch`] if the update had another tensor; [`KvError::Device`] if
    /// `kv` is too short.
    pub fn already_updated(self, kv: &Buffer<B, bf16>) -> Result<UpdatedLayer<'s, B, K>, KvError> {
        let (layer, progress) = (self.tracker.layer, *self.tracker.progress);
        match progress {
            LayerProgress::Updated | LayerProgress::HalfAppended | LayerProgress::Finished => {
                self.access.check_rows(kv)?;
                let found = kv.span().address();
                match *self.tracker.rows {
                    Some(updated) if updated != found => {
                        Err(KvError::RowsMismatch(RowsMismatch { layer, updated, found }))
                    }
                    _ => Ok(self.updated(kv)),
                }
            }
            _ => Err(KvError::LayerNotUpdated { layer, progress }),
        }
    }

    pub(super) fn updated(self, kv: &Buffer<B, bf16>) -> UpdatedLayer<'s, B, K> {
        let Self { access, tracker, kind } = self;
        tracker.rows.get_or_insert(kv.span().address());
        UpdatedLayer { access, tracker, kv: kv.clone(), has_own_rows: Mutex::new(false), kind }
    }
}

impl<B: Backend, K> UpdatedLayer<'_, B, K> {
    /// The layer's pools and their sizes.
    #[must_use]
    pub fn schema(&self) -> &LayerCacheSchema {
        &self.access.pools.schema
    }

    /// Tokens that launches cover: the step's, or those of its bucket.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.access.shape.tokens
    }

    /// The stream of the step.
    #[must_use]
    pub fn stream(&self) -> &Stream<B> {
        self.access.stream
    }

    /// Refuses outputs of `kernel` that overlap the step's `kv`: the append, or [`Self::gather_window`], may still read
    /// it.
    pub(crate) fn check_outputs<const N: usize>(
        &self,
        kernel: &'static str,
        outputs: [(&'static str, Span); N],
    ) -> Result<(), KvError> {
        let kept = self.kv.span();
        let mut others = outputs.iter().filter(|(_, span)| span.overlaps(&kept));
        others.next().map_or(Ok(()), |&(argument, _)| {
            Err(DeviceError::Aliased { kernel, argument, other: "kv" }.into())
        })
    }

    /// Queues the quantisation of the step's rows into the sliding-window ring, unless the update has done that, and
    /// finishes the layer. If a chunk is longer than the ring, only its last rows are written.
    ///
    /// # Errors
    /// [`KvError::Device`] if the launch failed, or while a capture other than the step's own records the stream. The
    /// append can then be repeated: continue with [`Layer::already_updated`]. Until then windows are refused if the
    /// launch may have run.
    pub fn append(mut self) -> Result<(), KvError> {
        if *self.tracker.progress == LayerProgress::Finished {
            return Ok(());
        }
        let _launches = self.access.running()?;
        let launch = self.access.append(&self.kv);
        if may_have_run(&launch) {
            self.tracker.reached(LayerProgress::HalfAppended);
        }
        self.tracker.appended(launch)?;
        self.tracker.reached(LayerProgress::Finished);
        Ok(())
    }
}

impl<'s, B: Backend> Access<'s, B> {
    /// One array of StepMeta.
    pub fn section(&self, which: Section) -> &View<B, i32> {
        self.sections.get(which)
    }

    /// The word in which a kernel counts the rows that it refuses.
    pub fn fault_word<O: Operation>(&self, variant: O::Variant) -> &Buffer<B, u32> {
        self.core.memory.faults[self.group.index()].word(O::kernel(variant))
    }

    /// Queues the quantisation of the step's window rows into the ring, and into the checkpoints that keep them.
    pub fn append(&self, kv: &Buffer<B, bf16>) -> Result<(), KvError> {
        let (ring, row) = (self.window()?, self.section(Section::RingRow));
        let (faults, tokens) = (self.fault_word::<AppendSwa>(ring.format), self.shape.tokens);
        let append = ops::WindowAppend { kv, row, ring: &ring, faults, tokens };
        let checkpoints = self.checkpoint_rows();
        Ok(ops::append_swa_saving(self.stream, &append, checkpoints.as_ref())?)
    }

    /// The sliding-window ring.
    pub fn window(&self) -> Result<ops::SwaRing<'_, B>, KvError> {
        self.pools.window(&self.core.config)
    }

    /// The rows of checkpoints that the layer's launches write; `None` in a step that cannot save.
    pub fn checkpoint_rows(&self) -> Option<ops::CheckpointRows<'_, B>> {
        let row = self.section(Section::CheckpointRow);
        (!row.is_empty()).then(|| self.core.memory.state.rows(self.pools.schema.layer, row))
    }

    /// Refuses launches while a capture other than the step's own records the stream: it would only record them. The
    /// step would count them as run, and a graph of them could be replayed beside steps whose memory they use. No such
    /// capture begins until the result is dropped, behind the last launch.
    pub fn running(&self) -> Result<Option<Running<'s, B>>, KvError> {
        let operation = "queueing work of a step's layer in a capture that is not the step's own";
        Ok(match self.recording {
            Recording::Step => None,
            Recording::Nothing | Recording::Reads => Some(self.stream.running(operation)?),
        })
    }

    /// As [`Self::running`], for launches that only read: [`Layers::record_reads`](super::Layers::record_reads) may
    /// record them too.
    pub fn reading(&self) -> Result<Option<Running<'s, B>>, KvError> {
        if self.recording == Recording::Reads { Ok(None) } else { self.running() }
    }

    /// Refuses window rows that do not cover the step.
    pub fn check_rows(&self, kv: &Buffer<B, bf16>) -> Result<(), KvError> {
        check("window rows", kv.len(), self.shape.tokens, HEAD_DIM)
    }

    /// Work lists and scratch, which every group with compressed layers has.
    pub fn compressed(&self) -> &Compressed<B> {
        self.compressed.expect("draft layers have no compressor: `CacheConfig::validate`")
    }
}

impl<B: Backend> CompressorInputs<'_, B> {
    /// Refuses tensors that do not cover the step, before anything is queued.
    pub(super) fn check(&self, compressor: CompressorKind, tokens: u32) -> Result<(), KvError> {
        let (ratio, columns) = (compressor.ratio(), compressor.columns());
        check("key projections", self.kv.len(), tokens, columns)?;
        check("gate projections", self.gate.len(), tokens, columns)?;
        check("position bias", self.ape.len(), ratio, columns)?;
        check("norm weights", self.norm.len(), 1, compressor.channels())
    }
}

fn check(what: &'static str, found: u64, rows: u32, columns: u32) -> Result<(), KvError> {
    Ok(check_length(what, found, u64::from(rows) * u64::from(columns))?)
}

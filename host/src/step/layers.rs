//! The layers of a step, or of a step that is being captured.

use kv_layout::geometry::LayerKind;
use std::fmt;
use std::ops::Range;

use super::layer::{Csa, Hca, Layer, Swa};
use super::shape::{BegunStep, Recording, StepShape};
use super::tracker::Tracker;
use crate::bucket::Bucket;
use crate::device::{Backend, Stream, View};
use crate::error::KvError;
use crate::ids::{LayerGroup, LayerId};
use crate::layer_progress::LayerProgress;
use crate::ledger::{StepPlan, Written};
use crate::manager::core::Core;
use crate::memory::step_memory::StepMemory;
use crate::step_meta::Section;
use crate::trace::Span;

/// The layers of one group in one step. Each is updated once, in any order. All work is queued in the stream that the
/// step was begun with.
pub struct Layers<'a, B: Backend> {
    pub(super) core: &'a Core<B>,
    pub(super) memory: &'a mut StepMemory<B>,
    pub(super) group: LayerGroup,
    pub(super) ids: Range<u32>,
    pub(super) stream: Stream<B>,
    pub(super) shape: StepShape,
    pub(super) plan: StepPlan,
    pub(super) bucket: Option<Bucket>,
    pub(super) recording: Recording,
    /// Whether a kernel of a layer was queued.
    pub(super) touched: bool,
    /// The span of the step; none in a capture.
    pub(super) span: Span,
}

impl<B: Backend> fmt::Debug for Layers<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layers")
            .field("group", &self.group)
            .field("plan", &self.plan)
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

impl<'a, B: Backend> Layers<'a, B> {
    /// The layers of a step that has begun, none of them started.
    pub(super) fn new(
        core: &'a Core<B>,
        memory: &'a mut StepMemory<B>,
        group: LayerGroup,
        stream: &Stream<B>,
        begun: BegunStep,
        span: Span,
    ) -> Self {
        memory.progress.fill(LayerProgress::NotStarted);
        memory.rows.fill(None);
        let BegunStep { shape, plan, bucket, recording } = begun;
        let (ids, stream) = (core.config.group_layers(group), stream.clone());
        let touched = false;
        Self { core, memory, group, ids, stream, shape, plan, bucket, recording, touched, span }
    }

    /// The span of the step, which the embedder can enter while the model runs; [`crate::trace`] lists its fields.
    #[cfg(feature = "tracing")]
    #[must_use]
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Tokens that launches cover: the step's, or those of its bucket.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.shape.tokens
    }

    /// The layer group.
    #[must_use]
    pub fn group(&self) -> LayerGroup {
        self.group
    }

    /// The layers of the group, in order, with their kinds.
    pub fn layer_kinds(&self) -> impl ExactSizeIterator<Item = (LayerId, LayerKind)> + use<'a, B> {
        let kinds = &self.core.config.model.layers;
        self.ids.clone().map(|layer| (LayerId(layer), kinds[layer as usize]))
    }

    /// The stream of the step.
    #[must_use]
    pub fn stream(&self) -> &Stream<B> {
        &self.stream
    }

    /// One section of the step's StepMeta, i32, for kernels of the embedder. Sections of tokens are `[tokens]`, padded
    /// to a multiple of four, at the same address in every step of a bucket. Those of the block table are
    /// `[new blocks]`, padded in the same way, and [`Section::Copies`] is `[copies, 4]`; these three are empty in a
    /// capture. [`Section::CheckpointRow`] is empty in a step that cannot save.
    #[must_use]
    pub fn section(&self, section: Section) -> View<B, i32> {
        self.memory.sections.get(section).clone()
    }

    /// The progress of a layer in the step.
    ///
    /// # Errors
    /// [`KvError::WrongLayerGroup`].
    pub fn progress(&self, layer: LayerId) -> Result<LayerProgress, KvError> {
        self.index(layer).map(|index| self.memory.progress[index])
    }

    /// A layer with only a sliding window, to be updated.
    ///
    /// # Errors
    /// [`KvError::WrongLayerGroup`], [`KvError::WrongLayerKind`].
    pub fn swa(&mut self, layer: LayerId) -> Result<Layer<'_, B, Swa>, KvError> {
        self.layer(layer, LayerKind::Swa)
    }

    /// A CSA layer, to be updated.
    ///
    /// # Errors
    /// As [`Self::swa`].
    pub fn csa(&mut self, layer: LayerId) -> Result<Layer<'_, B, Csa>, KvError> {
        self.layer(layer, LayerKind::Csa)
    }

    /// An HCA layer, to be updated.
    ///
    /// # Errors
    /// As [`Self::swa`].
    pub fn hca(&mut self, layer: LayerId) -> Result<Layer<'_, B, Hca>, KvError> {
        self.layer(layer, LayerKind::Hca)
    }

    fn layer<K>(&mut self, layer: LayerId, needed: LayerKind) -> Result<Layer<'_, B, K>, KvError> {
        let index = self.index(layer)?;
        let found = self.core.config.model.layers[layer.0 as usize];
        if found != needed {
            return Err(KvError::WrongLayerKind { layer, found, needed });
        }
        let StepMemory { sections, own, exchange, compressed, progress, rows, .. } =
            &mut *self.memory;
        let (progress, rows) = (&mut progress[index], &mut rows[index]);
        Ok(Layer::new(
            super::layer::Access {
                core: self.core,
                group: self.group,
                pools: self.core.memory.pools.layer(layer)?,
                sections,
                own,
                exchange,
                compressed: compressed.as_ref(),
                stream: &self.stream,
                shape: self.shape,
                recording: self.recording,
            },
            Tracker { layer, progress, rows, touched: &mut self.touched },
        ))
    }

    /// A layer's index in the group.
    fn index(&self, layer: LayerId) -> Result<usize, KvError> {
        let Range { start: first, end } = self.ids;
        let group = self.group;
        if self.ids.contains(&layer.0) {
            Ok((layer.0 - first) as usize)
        } else {
            Err(KvError::WrongLayerGroup { layer, group, first, end })
        }
    }

    /// Waits for the step's stream and reports rows that kernels refused since the last check. A step with
    /// refusals should be dropped, not committed.
    ///
    /// # Errors
    /// As [`crate::KvCacheManager::check_faults`].
    pub fn check_faults(&self) -> Result<(), KvError> {
        self.core.check_faults(&self.stream, &[self.group])
    }

    /// Waits for the step's stream and reports reads of rows that were never written, by steps of its layer group.
    ///
    /// # Errors
    /// As [`crate::KvCacheManager::check_poison`].
    pub fn check_poison(&self) -> Result<(), KvError> {
        self.core.check_poison(&self.stream, &[self.group])
    }

    pub(super) fn core(&self) -> &Core<B> {
        self.core
    }

    pub(super) fn touched(&self) -> bool {
        self.touched
    }

    /// Refuses a step with a layer that is not finished.
    pub(super) fn check_finished(&self) -> Result<(), KvError> {
        let mut layers = self.ids.clone().zip(&self.memory.progress);
        match layers.find(|&(_, &progress)| progress != LayerProgress::Finished) {
            Some((layer, &progress)) => {
                Err(KvError::LayerUnfinished { layer: LayerId(layer), progress })
            }
            None => Ok(()),
        }
    }

    /// The progress of each layer of the group.
    pub(super) fn all_progress(&self) -> &[LayerProgress] {
        &self.memory.progress
    }

    /// Marks every layer that was not started as finished.
    #[cfg(feature = "testing")]
    pub(crate) fn mark_finished(&mut self) {
        let layers = self.memory.progress.iter_mut();
        layers
            .filter(|progress| **progress == LayerProgress::NotStarted)
            .for_each(|progress| *progress = LayerProgress::Finished);
        self.touched = true;
    }

    /// Rejects the step of these layers.
    pub(super) fn reject(&mut self, written: Written) {
        let to_poison = &mut self.memory.to_poison;
        let returned = |block| to_poison.add_block(block);
        self.core.lock_ledger().reject_step_with(self.group, written, returned);
    }
}

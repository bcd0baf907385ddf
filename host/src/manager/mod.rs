//! `KvCacheManager`: the ledger and the device memory it describes.

pub(crate) mod copy_kind;
pub(crate) mod core;
pub mod host_tier;
mod queued_copies;
mod request_copies;
pub mod reuse;
mod state_copies;
pub mod suspended;

use std::fmt;
use std::ops::Deref;

use crate::bucket::Bucket;
use crate::config::CacheConfig;
use crate::device::{Backend, Device, Memory, Stream, View};
use crate::error::KvError;
use crate::ids::{BlockId, CacheId, LayerGroup, LayerId, RequestId};
use crate::ledger::{Ledger, StepRequest};
use crate::manager::copy_kind::CopyKind;
use crate::manager::core::Core;
use crate::memory::step_memory::StepMemory;
use crate::ops::JobWords;
use crate::pool_kind::PoolKind;
use crate::schema::Schema;
use crate::step::{CapturedStep, Group, Launches, Layers, Step};
use crate::tier::Tier;
use crate::trace;

/// The KV cache of one model on one device.
///
/// Between steps: [`Self::admit`], [`Self::release`]. A step: [`Self::begin_step`], whose [`Step`]
/// borrows the cache until it is committed or dropped.
pub struct KvCacheManager<B: Backend> {
    core: Core<B>,
    trunk: StepMemory<B>,
    /// Step memory of the draft (MTP) layers, if the model has any.
    draft: Option<StepMemory<B>>,
    /// The host tier; `None` without one.
    tier: Option<Box<Tier<B>>>,
    /// Copies that [`Self::save_wanted`] queues. Scratch, so that it allocates nothing.
    save_jobs: Vec<(CopyKind, JobWords)>,
}

impl<B: Backend> fmt::Debug for KvCacheManager<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCacheManager")
            .field("id", &self.id())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

/// The layer groups of a cache, each of which may have a step open at the same time.
pub struct Groups<'a, B: Backend> {
    /// The layers of the model.
    pub trunk: Group<'a, B>,
    /// The draft (MTP) layers, if the model has any.
    pub draft: Option<Group<'a, B>>,
}

impl<'a, B: Backend> IntoIterator for Groups<'a, B> {
    type Item = Group<'a, B>;
    type IntoIter =
        std::iter::Chain<std::iter::Once<Group<'a, B>>, std::option::IntoIter<Group<'a, B>>>;

    /// The trunk, then the draft layers.
    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.trunk).chain(self.draft)
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// Allocates all device memory that the cache will ever need.
    ///
    /// # Errors
    /// [`KvError::Model`], [`KvError::Config`] or [`KvError::DraftLayerKind`] if a setting is out of range;
    /// [`KvError::Device`] with the buffer that did not fit.
    pub fn new(device: Device<B>, config: CacheConfig) -> Result<Self, KvError> {
        let mut core = Core::new(device, config)?;
        let tier = Tier::new(&core.device, &core.config, &core.schema)?;
        if tier.is_some() {
            core.ledger_mut().offer_checkpoints();
        }
        let has_drafts = !core.config.group_layers(LayerGroup::Draft).is_empty();
        let steps = |group| StepMemory::new(&core.device, group, &core.config);
        Ok(Self {
            save_jobs: Vec::with_capacity(core.config.num_checkpoints as usize),
            tier,
            trunk: steps(LayerGroup::Trunk)?,
            draft: if has_drafts { Some(steps(LayerGroup::Draft)?) } else { None },
            core,
        })
    }

    /// Admits a request with no tokens.
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, KvError> {
        let _admission = trace::admission(None).entered();
        self.ledger_mut().admit().inspect_err(trace::refused)
    }

    /// Ends a request and frees what it held. Kernels of its last step may still run: later steps run
    /// after them.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.reject_leaked_steps();
        self.ledger_mut().release(id)?;
        self.poison_slot(id.slot());
        Ok(())
    }

    /// Memory for the copies of saves, empty; [`Self::return_job_buffer`] takes it back.
    pub(crate) fn take_job_buffer(&mut self) -> Vec<(CopyKind, JobWords)> {
        let mut jobs = std::mem::take(&mut self.save_jobs);
        jobs.clear();
        jobs
    }

    /// Takes back the memory that [`Self::take_job_buffer`] handed out.
    pub(crate) fn return_job_buffer(&mut self, jobs: Vec<(CopyKind, JobWords)>) {
        self.save_jobs = jobs;
    }

    /// Both layer groups, to run a draft step while a trunk step is open.
    pub fn groups(&mut self) -> Groups<'_, B> {
        let Self { core, trunk, draft, .. } = self;
        core.unlock();
        let core = &*core;
        let group = |memory, group| Group { core, memory, group };
        Groups {
            trunk: group(trunk, LayerGroup::Trunk),
            draft: draft.as_mut().map(|memory| group(memory, LayerGroup::Draft)),
        }
    }

    /// One layer group.
    ///
    /// # Errors
    /// [`KvError::NoSuchGroup`] for the draft layers of a model that has none.
    pub fn group(&mut self, group: LayerGroup) -> Result<Group<'_, B>, KvError> {
        let Groups { trunk, draft } = self.groups();
        match group {
            LayerGroup::Trunk => Ok(trunk),
            LayerGroup::Draft => draft.ok_or(KvError::NoSuchGroup { group }),
        }
    }

    /// Begins a step of the trunk; see [`Group::begin_step`].
    ///
    /// # Errors
    /// As [`Group::begin_step`].
    pub fn begin_step(
        &mut self,
        stream: &Stream<B>,
        launches: Launches<'_>,
        requests: &[StepRequest],
    ) -> Result<Step<'_, B>, KvError> {
        self.groups().trunk.into_step(stream, launches, requests)
    }

    /// Captures a step of the trunk; see [`Group::capture`].
    ///
    /// ```
    /// use dsv4_kv::device::{EmuDevice, EmuOptions, bf16};
    /// use dsv4_kv::kv_layout::config::ModelConfig;
    /// use dsv4_kv::kv_layout::geometry::LayerKind;
    /// use dsv4_kv::{Accepted, Bucket, CacheConfig, KvCacheManager, Launches, LayerId, StepRequest};
    ///
    /// # let tiny = ModelConfig::preset("tiny").expect("a preset");
    /// # let model = ModelConfig { layers: vec![LayerKind::Swa], mtp_layers: 0, ..tiny };
    /// # let device = EmuDevice::new(EmuOptions::default());
    /// # let stream = device.stream()?;
    /// # let smallest = CacheConfig::new(model);
    /// # let config = CacheConfig { num_blocks: 16, max_context: 512, max_step_tokens: 64, max_requests: 2, ..smallest };
    /// # let mut cache = KvCacheManager::new(device.clone(), config)?;
    /// // A graph for decode steps of up to two requests: one token of each, in tensors whose addresses stay.
    /// let bucket = Bucket::decode(cache.config(), 2);
    /// let kv = device.allocate::<bf16>("rows", 2 * 512)?;
    /// let graph = cache.capture(&stream, &bucket, vec![kv.memory()], |layers| {
    ///     layers.swa(LayerId(0))?.update(&kv)?.append()
    /// })?;
    ///
    /// let id = cache.admit()?;
    /// for position in 0..3 {
    ///     stream.upload(&[bf16::ONE; 512], &kv, 0)?;
    ///     let requests = [StepRequest { id, start: position, tokens: 1 }];
    ///     let mut step = cache.begin_step(&stream, Launches::Bucket(&bucket), &requests)?;
    ///     step.replay(&graph)?;
    ///     step.commit(&[Accepted::count(id, 1)])?;
    /// }
    /// # Ok::<(), dsv4_kv::KvError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Group::capture`].
    pub fn capture(
        &mut self,
        stream: &Stream<B>,
        bucket: &Bucket,
        retained: Vec<Memory<B>>,
        record: impl FnOnce(&mut Layers<'_, B>) -> Result<(), KvError>,
    ) -> Result<CapturedStep<B>, KvError> {
        self.groups().trunk.capture(stream, bucket, retained, record)
    }

    /// Moves a request's draft layers back to `committed` tokens; see [`Ledger::rewind_draft`].
    ///
    /// # Errors
    /// As [`Ledger::rewind_draft`].
    pub fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.reject_leaked_steps();
        self.ledger_mut().rewind_draft(id, committed)
    }

    /// Waits for `stream` and reports rows that kernels refused since the last check: their indices are out of range, and the kernels
    /// skipped and counted them. A kernel that crashes is [`DeviceError::KernelFault`](crate::device::DeviceError::KernelFault) of the next wait.
    ///
    /// # Errors
    /// [`KvError::KernelRefused`] with every kernel that refused rows, and whether it writes the cache
    /// ([`Refusal::writes`](crate::error::Refusal::writes)); [`KvError::Device`].
    pub fn check_faults(&self, stream: &Stream<B>) -> Result<(), KvError> {
        self.core.check_faults(stream, &LayerGroup::ALL)
    }

    /// Waits for `stream` and reports rows and keys that were gathered or scored since the last check although no
    /// kernel had written them. A row whose inputs were NaN counts too. While kernels run in another stream, a row can
    /// be counted before its record is written; then check each layer group by [`Layers::check_poison`] of its own
    /// step. Without [`CacheConfig::poison`] there is nothing to report.
    ///
    /// # Errors
    /// [`KvError::PoisonRead`]; [`KvError::Device`].
    pub fn check_poison(&self, stream: &Stream<B>) -> Result<(), KvError> {
        self.core.check_poison(stream, &LayerGroup::ALL)
    }

    /// The pools of a layer, read-only, for inspection.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`].
    pub fn pools(
        &self,
        layer: LayerId,
    ) -> Result<impl Iterator<Item = (PoolKind, View<B, u8>)>, KvError> {
        Ok(self.core.memory.pools.layer(layer)?.views())
    }

    /// One pool of a layer, read-only, for inspection.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`]; [`KvError::NoSuchPool`] if layers of its kind have none.
    pub fn pool(&self, layer: LayerId, kind: PoolKind) -> Result<View<B, u8>, KvError> {
        Ok(self.core.memory.pools.layer(layer)?.get(kind)?.view())
    }

    /// The block table on the device, read-only: `[max_requests, max_blocks]` block of each logical
    /// block, -1 = none. Elements past a request's blocks may be stale.
    #[must_use]
    pub fn device_block_table(&self) -> View<B, i32> {
        self.core.memory.table().table.view()
    }

    /// All device memory of the cache, for graphs of the embedder's own kernels that read it. Work of a step's layers is refused in
    /// them: [`Self::capture`] captures steps, and [`Layers::record_reads`](crate::Layers::record_reads) what an open step reads.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        let steps = std::iter::once(&self.trunk).chain(&self.draft);
        let shared = self.core.memory.memory().iter();
        shared.chain(steps.flat_map(StepMemory::memory)).cloned().collect()
    }

    /// Bytes on the device, per kind of pool, over all layers.
    #[must_use]
    pub fn pool_bytes(&self) -> Vec<(PoolKind, u64)> {
        let mut totals: Vec<(PoolKind, u64)> = Vec::new();
        for (pool, buffer) in self.core.memory.pools.all() {
            match totals.iter_mut().find(|(found, _)| *found == pool.kind) {
                Some((_, bytes)) => *bytes += buffer.bytes(),
                None => totals.push((pool.kind, buffer.bytes())),
            }
        }
        totals
    }

    /// Blocks of a request, in the order of its tokens.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub fn block_table(&self, id: RequestId) -> Result<Vec<BlockId>, KvError> {
        Ok(self.core.read_ledger().block_table(id)?.collect())
    }

    /// The device.
    pub fn device(&self) -> &Device<B> {
        &self.core.device
    }

    /// The id of the cache.
    pub fn id(&self) -> CacheId {
        self.core().id
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.core.config
    }

    /// The pools of every layer.
    pub fn schema(&self) -> &Schema {
        &self.core.schema
    }

    /// The ledger, read-only. Methods that change it belong to the cache, because they change device memory with it; they
    /// do not compile while the returned guard is held. A guard that is leaked (`std::mem::forget`) holds up none of them.
    pub fn ledger(&self) -> impl Deref<Target = Ledger> + '_ {
        self.core.read_ledger()
    }

    /// Rejects steps that were leaked: since the cache is borrowed mutably, no live step borrows it.
    pub(crate) fn reject_leaked_steps(&mut self) {
        let (core, trunk, draft) = self.parts();
        let ledger = core.ledger_mut();
        for (group, memory) in LayerGroup::ALL.into_iter().zip(std::iter::once(trunk).chain(draft))
        {
            memory.reject_leaked_step(ledger, group);
        }
    }

    /// Makes `stream` wait for the steps of both groups, and queues the poisoning of freed slots and blocks.
    pub(crate) fn follow_steps(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        Ok(self.queue_copies(stream, &[], None)?)
    }

    /// The ledger, for the methods that change it.
    pub(crate) fn ledger_mut(&mut self) -> &mut Ledger {
        self.core.ledger_mut()
    }

    /// The core that all steps share, and the step memory of each group.
    pub(crate) fn parts(
        &mut self,
    ) -> (&mut Core<B>, &mut StepMemory<B>, Option<&mut StepMemory<B>>) {
        (&mut self.core, &mut self.trunk, self.draft.as_mut())
    }

    /// The core that all steps share, and the host tier.
    pub(crate) fn tier_parts(&mut self) -> Option<(&mut Core<B>, &mut Tier<B>)> {
        Some((&mut self.core, self.tier.as_deref_mut()?))
    }

    pub(crate) fn tier(&self) -> Option<&Tier<B>> {
        self.tier.as_deref()
    }

    pub(crate) fn core(&self) -> &Core<B> {
        &self.core
    }
}

//! How a step begins: everything is checked and queued before the ledger changes.

use kernels_gpu::fault_injection;

use super::layers::Layers;
use super::open_step::Step;
use super::shape::{BegunStep, Recording, StepShape};
use crate::bucket::Bucket;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::ledger::{Ledger, StepPlan, StepRequest};
use crate::manager::core::Core;
use crate::memory::step_memory::StepMemory;
use crate::ops::{self, CopyDirection, StateCopies, TableUpdate, WorkLists};
use crate::step_meta::Section;
use crate::trace;

/// How the kernels of a step are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launches<'b> {
    /// One by one, for exactly the step's tokens.
    Eager,
    /// For all tokens of a bucket; those that the step does not have are padding. The kernels are launched one by one,
    /// or by a graph that was captured for the bucket.
    Bucket(&'b Bucket),
}

/// One layer group of a cache, ready for a step. It borrows the memory that all steps of the group use, so that two
/// steps of a group are never open at once.
pub struct Group<'a, B: Backend> {
    pub(crate) core: &'a Core<B>,
    pub(crate) memory: &'a mut StepMemory<B>,
    pub(crate) group: LayerGroup,
}

impl<'a, B: Backend> Group<'a, B> {
    /// Begins a step: takes the blocks that it needs, sends its StepMeta, enters new blocks into the
    /// device's block table and builds the work lists. All work of the device is queued in `stream`.
    ///
    /// All or nothing: on any error, of the device too, no block is taken and no request changes. After an error of the
    /// device, prefixes without a reference may have been evicted, and checkpoints of outputs given up
    /// ([`CacheConfig::keep_outputs`](crate::CacheConfig::keep_outputs)): their bytes are computed again when they are
    /// needed. A leaked step of the group (`std::mem::forget`) is rejected first. If the group's last step ran in another
    /// stream, `stream` waits for it on the device.
    ///
    /// # Errors
    /// As [`Ledger::begin_step`]; [`KvError::Bucket`] for a bucket out of the cache's range, and the
    /// refusals of a step that exceeds its bucket; [`KvError::Device`].
    pub fn begin_step(
        &mut self,
        stream: &Stream<B>,
        launches: Launches<'_>,
        requests: &[StepRequest],
    ) -> Result<Step<'_, B>, KvError> {
        let Self { core, memory, group } = self;
        Group { core, memory, group: *group }.into_step(stream, launches, requests)
    }

    /// As [`Self::begin_step`], but consumes the group: the step can live as long as the borrow of the cache.
    ///
    /// # Errors
    /// As [`Self::begin_step`].
    pub fn into_step(
        self,
        stream: &Stream<B>,
        launches: Launches<'_>,
        requests: &[StepRequest],
    ) -> Result<Step<'a, B>, KvError> {
        let Self { core, memory, group } = self;
        let span = trace::step(group, requests, core.config.max_decode_tokens());
        let begun = span.in_scope(|| begin(core, memory, group, stream, launches, requests));
        match begun {
            Ok(begun) => {
                trace::begun(&span, begun.plan);
                Ok(Step::new(Layers::new(core, memory, group, stream, begun, span)))
            }
            Err(error) => {
                span.in_scope(|| trace::refused(&error));
                Err(error)
            }
        }
    }
}

/// Checks the step, queues the work that precedes its layers, and enters the step in the ledger.
#[inline]
fn begin<B: Backend>(
    core: &Core<B>,
    memory: &mut StepMemory<B>,
    group: LayerGroup,
    stream: &Stream<B>,
    launches: Launches<'_>,
    requests: &[StepRequest],
) -> Result<BegunStep, KvError> {
    core.check_stream(stream)?;
    let _running = stream.running("beginning a step")?;
    let bucket = match launches {
        Launches::Eager => None,
        Launches::Bucket(bucket) => Some(*bucket),
    };
    bucket.map_or(Ok(()), |bucket| bucket.validate(&core.config))?;
    let mut ledger = core.lock_ledger();
    memory.reject_leaked_step(&mut ledger, group);
    let plan = stage(core, memory, group, stream, bucket.as_ref(), requests, &mut ledger)?;
    let config = &core.config;
    let shape = match &bucket {
        None => StepShape::of_plan(plan, config),
        Some(bucket) => StepShape::of_bucket(bucket, config),
    };
    memory.build_work_lists(stream, shape)?;
    memory.update_block_table(stream, core, plan)?;
    // Nothing can fail from here on.
    ledger.enter_step(group, requests);
    memory.to_poison.clear();
    Ok(BegunStep { shape, plan, bucket, recording: Recording::Nothing })
}

/// Checks the step, and queues three things: the copy of StepMeta, the poisoning of freed slots and blocks, and the
/// copies from rings to checkpoints.
fn stage<B: Backend>(
    core: &Core<B>,
    memory: &mut StepMemory<B>,
    group: LayerGroup,
    stream: &Stream<B>,
    bucket: Option<&Bucket>,
    requests: &[StepRequest],
    ledger: &mut Ledger,
) -> Result<StepPlan, KvError> {
    memory.follow(stream)?;
    let write = |array: &mut [i32]| {
        let plan = ledger.stage_step(group, bucket, requests, array)?;
        let layout = plan.layout_in(bucket);
        Ok::<_, KvError>((layout.elements(), (plan, layout)))
    };
    let (plan, layout) = memory.step_meta.update(stream, write)?;
    memory.lay_out(layout);
    if group == LayerGroup::Trunk {
        // Draft layers have no blocks.
        ledger.take_to_poison().for_each(|block| memory.to_poison.add_block(block));
    }
    let layers = core.config.group_layers(group);
    memory.to_poison.poison(stream, core.memory.pools.of_layers(layers))?;
    memory.save_from_rings(stream, core, plan)?;
    Ok(plan)
}

impl<B: Backend> StepMemory<B> {
    fn build_work_lists(&self, stream: &Stream<B>, shape: StepShape) -> Result<(), KvError> {
        let Some(compressed) = self.compressed.as_ref().filter(|_| !shape.is_decode()) else {
            return Ok(());
        };
        let lists = WorkLists {
            tokens: &self.sections.tokens(shape.tokens),
            csa: &compressed.csa_closing(shape),
            hca: &compressed.hca_runs(shape),
        };
        Ok(ops::list_closing_tokens(stream, &lists)?)
    }

    /// Queues copies of the ring rows that a checkpoint keeps and that the step overwrites.
    fn save_from_rings(
        &self,
        stream: &Stream<B>,
        core: &Core<B>,
        plan: StepPlan,
    ) -> Result<(), KvError> {
        let state = &core.memory.state;
        let copies = StateCopies {
            arena: &state.arena(),
            pieces: state.trunk_pieces(),
            jobs: self.sections.get(Section::Copies),
            count: plan.ring_copies.unwrap_or(0),
            direction: CopyDirection::Pack,
            faults: core.memory.copy_faults(),
        };
        Ok(ops::copy_state(stream, &copies)?)
    }

    fn update_block_table(
        &self,
        stream: &Stream<B>,
        core: &Core<B>,
        plan: StepPlan,
    ) -> Result<(), KvError> {
        let entered = fault_injection::entered_blocks(plan.new_blocks);
        let update = TableUpdate {
            index: self.sections.get(Section::TableIndex),
            block: self.sections.get(Section::TableBlock),
            table: &core.memory.table(),
            count: entered,
        };
        Ok(ops::update_table(stream, &update)?)
    }
}

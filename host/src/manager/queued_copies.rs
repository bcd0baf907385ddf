//! Copies that are queued between steps: of slots, checkpoints, blocks, and rows of the block table. Their descriptors use
//! the memory of the trunk's StepMeta, which is unused between steps.

use crate::device::{Backend, Stream, View};
use crate::error::KvError;
use crate::ids::{BlockId, LayerGroup, SlotId};
use crate::manager::KvCacheManager;
use crate::manager::copy_kind::CopyKind;
use crate::manager::core::Core;
use crate::memory::step_memory::StepMemory;
use crate::ops::{self, CopyDirection, JOB, JobWords, StateCopies, TableUpdate};

/// Copies that could not be queued.
#[derive(Debug)]
pub(crate) struct CopiesFailed {
    /// Why.
    pub error: KvError,
    /// Whether some of the copies may have been queued before the error.
    pub began: bool,
}

impl From<KvError> for CopiesFailed {
    fn from(error: KvError) -> Self {
        Self { error, began: false }
    }
}

impl From<CopiesFailed> for KvError {
    fn from(failed: CopiesFailed) -> Self {
        failed.error
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// As [`Self::follow_steps`], then queues copies (consecutive ones of one kind in one launch), then the first blocks of a
    /// slot's row of the device's block table.
    pub(crate) fn queue_copies(
        &mut self,
        stream: &Stream<B>,
        jobs: &[(CopyKind, JobWords)],
        table: Option<(SlotId, &[BlockId])>,
    ) -> Result<(), CopiesFailed> {
        let (core, trunk, mut draft) = self.parts();
        core.check_stream(stream)?;
        let _running = stream.running("copying between steps").map_err(KvError::from)?;
        core.ledger_mut().take_to_poison().for_each(|block| trunk.to_poison.add_block(block));
        let groups = std::iter::once(&mut *trunk).chain(draft.as_deref_mut());
        for (group, memory) in LayerGroup::ALL.into_iter().zip(groups) {
            memory.follow(stream)?;
            let layers = core.config.group_layers(group);
            memory.to_poison.poison(stream, core.memory.pools.of_layers(layers))?;
        }
        let (slot, blocks) = table.unwrap_or((SlotId(0), &[]));
        let first = slot.0 * core.config.max_blocks_per_request();
        trunk.queue_copies(stream, core, jobs, (first, blocks))?;
        std::iter::once(trunk).chain(draft).for_each(|memory| memory.to_poison.clear());
        Ok(())
    }
}

impl<B: Backend> StepMemory<B> {
    /// Sends jobs and blocks in one copy to the device if StepMeta has room for all, else in several. One copy holds
    /// the blocks of one million tokens if steps may have more than 2,700 tokens.
    fn queue_copies(
        &mut self,
        stream: &Stream<B>,
        core: &Core<B>,
        mut jobs: &[(CopyKind, JobWords)],
        (mut first, mut blocks): (u32, &[BlockId]),
    ) -> Result<(), CopiesFailed> {
        let mut began = false;
        let room = self.step_meta.buffer().len() as usize;
        while !jobs.is_empty() || !blocks.is_empty() {
            let (these, later) = jobs.split_at(jobs.len().min(room / JOB).min(MAX_JOBS));
            let left = room - JOB * these.len();
            let (entered, others) = blocks.split_at(blocks.len().min(left / 2));
            let write = |array: &mut [i32]| {
                let (copies, table) = array.split_at_mut(JOB * these.len());
                let words = copies.as_chunks_mut().0.iter_mut();
                words.zip(these).for_each(|(words, &(_, job))| *words = job);
                let (index, block) = table.split_at_mut(entered.len());
                index.iter_mut().zip(first..).for_each(|(word, at)| *word = at as i32);
                block.iter_mut().zip(entered).for_each(|(word, block)| *word = block.0 as i32);
                Ok::<_, KvError>((JOB * these.len() + 2 * entered.len(), ()))
            };
            let sent = self.step_meta.update(stream, write);
            sent.map_err(|error| CopiesFailed { error, began })?;
            began |= !these.is_empty();
            let queued = self.queue(stream, core, these, entered.len());
            queued.map_err(|error| CopiesFailed { error, began })?;
            (jobs, blocks, first) = (later, others, first + entered.len() as u32);
        }
        Ok(())
    }

    /// Queues the launches that use the words in StepMeta: the jobs, then the updates of the block
    /// table that follow them.
    fn queue(
        &self,
        stream: &Stream<B>,
        core: &Core<B>,
        jobs: &[(CopyKind, JobWords)],
        updates: usize,
    ) -> Result<(), KvError> {
        let part = |start: usize, len: usize| {
            let part = self.step_meta.buffer().view().slice(start as u64, len as u64);
            part.expect("StepMeta has what was sent")
        };
        let mut sent = 0;
        for run in jobs.chunk_by(|(a, _), (b, _)| a == b) {
            copy(stream, core, run[0].0, &part(sent, JOB * run.len()))?;
            sent += JOB * run.len();
        }
        let update = TableUpdate {
            index: &part(sent, updates),
            block: &part(sent + updates, updates),
            table: &core.memory.table(),
            count: updates as u32,
        };
        Ok(ops::update_table(stream, &update)?)
    }
}

/// Most jobs of a launch: the job is the grid's y index, which is at most this.
const MAX_JOBS: usize = (1 << 16) - 1;

/// Queues the launch of jobs of one kind.
fn copy<B: Backend>(
    stream: &Stream<B>,
    core: &Core<B>,
    kind: CopyKind,
    jobs: &View<B, i32>,
) -> Result<(), KvError> {
    let state = &core.memory.state;
    let (pieces, direction) = match kind {
        CopyKind::Save => (state.checkpoint_pieces(), CopyDirection::Pack),
        CopyKind::Restore => (state.checkpoint_pieces(), CopyDirection::Unpack),
        CopyKind::RestoreTrunk => (state.trunk_pieces(), CopyDirection::Unpack),
        CopyKind::Slots => (state.slot_pieces(), CopyDirection::Copy),
        CopyKind::Blocks => (state.block_pieces(), CopyDirection::Copy),
    };
    let of_blocks = kind == CopyKind::Blocks;
    let arena = if of_blocks { state.block_arena() } else { state.arena() };
    let (count, faults) = (jobs.len() as u32 / JOB as u32, core.memory.copy_faults());
    let copies = StateCopies { arena: &arena, pieces, jobs, count, direction, faults };
    Ok(ops::copy_state(stream, &copies)?)
}

//! Between steps: requests are saved to checkpoints, and go on from them.

use crate::checkpoints::{SavedCheckpoint, SavedPlace};
use crate::core::Core;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId, SlotId};
use crate::manager::KvCacheManager;
use crate::ops::{self, CheckpointCopy, CopyDirection, CopyPieces, JobWords, StateCopies};
use crate::step_memory::StepMemory;

/// Of which layers a checkpoint is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copied {
    All,
    Trunk,
}

impl<B: Backend> KvCacheManager<B> {
    /// Saves requests, each at a position: the state that a request which has the blocks before it needs to go on there,
    /// in one launch for all of them. The position is a multiple of 128 that the request has committed, and has passed
    /// by no more than `max_draft` + 1 tokens: after each step of a decode that passes one there is time until the next
    /// step. Queued in `stream`, behind the steps before.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NotSavable`],
    /// [`KvError::OutOfCheckpoints`], [`KvError::Device`]. Nothing is taken then.
    pub fn save_checkpoints(
        &mut self,
        stream: &Stream<B>,
        saves: &[(RequestId, u32)],
    ) -> Result<Vec<SavedCheckpoint>, KvError> {
        self.reject_leaked_steps();
        let saved = self.core().ledger().take_checkpoints(saves)?;
        let job = |(&(id, boundary), saved): (&(RequestId, u32), &SavedCheckpoint)| {
            let (slot, checkpoint) = (id.slot(), saved.id());
            CheckpointCopy { slot, checkpoint, boundary, end: boundary }.words()
        };
        let jobs: Vec<_> = saves.iter().zip(&saved).map(job).collect();
        match self.copy_state(stream, CopyDirection::Save, Copied::All, &jobs) {
            Ok(()) => Ok(saved),
            Err(error) => {
                let mut ledger = self.core().ledger();
                saved.into_iter().rev().for_each(|saved| ledger.discard_checkpoint(saved));
                Err(error)
            }
        }
    }

    /// Lets a request go on from a checkpoint: its slot becomes what that of the saved request was, in one launch. It must
    /// hold the blocks of as many tokens, in which their entries are. Queued in `stream`, behind the steps before.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NotRestorable`], [`KvError::Device`].
    /// The request has the tokens that it had then; if the launch failed, it may have lost rows that they need.
    pub fn restore_checkpoint(
        &mut self,
        stream: &Stream<B>,
        id: RequestId,
        from: &SavedCheckpoint,
    ) -> Result<(), KvError> {
        self.restore_place(stream, id, from.place())
    }

    /// As [`Self::restore_checkpoint`], from a checkpoint that somebody keeps.
    pub(crate) fn restore_place(
        &mut self,
        stream: &Stream<B>,
        id: RequestId,
        from: SavedPlace,
    ) -> Result<(), KvError> {
        self.reject_leaked_steps();
        let SavedPlace { checkpoint, boundary, has_draft } = from;
        self.core().ledger().check_restore(id, boundary)?;
        let slot = id.slot();
        let job = CheckpointCopy { slot, checkpoint, boundary, end: boundary }.words();
        let layers = if has_draft { Copied::All } else { Copied::Trunk };
        self.copy_state(stream, CopyDirection::Restore, layers, &[job])?;
        if !has_draft {
            self.clear_draft_windows(stream, slot)?;
        }
        self.core().ledger().enter_restored(id, boundary)
    }

    /// Queues zero for the windows of a slot's draft layers.
    fn clear_draft_windows(&self, stream: &Stream<B>, slot: SlotId) -> Result<(), KvError> {
        let core = self.core();
        let layers = core.config.group_layers(LayerGroup::Draft);
        for (pool, buffer) in core.memory.pools.of_layers(layers) {
            let bytes = pool.unit_bytes();
            let unit = buffer.slice(u64::from(slot.0) * bytes, bytes);
            stream.fill(&unit.expect("the pool has every slot"), 0)?;
        }
        Ok(())
    }

    /// Saves the requests that passed a position at which they were to be saved
    /// ([`want_checkpoint`](crate::Ledger::want_checkpoint)) in a step that could not do it, a decode step for instance:
    /// to be called after its commit, before the next step. One launch for all of them, none if there are none. A
    /// request that no checkpoint is free for is not saved. [`take_saved`](crate::Ledger::take_saved) hands out what was.
    ///
    /// # Errors
    /// [`KvError::Device`]; nothing was saved then.
    pub fn save_wanted(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let due = self.core().ledger().take_due();
        if due.is_empty() {
            return Ok(());
        }
        let saved = self.save_checkpoints(stream, &due)?;
        let ids = due.into_iter().map(|(id, _)| id);
        self.core().ledger().add_saved(ids.zip(saved));
        Ok(())
    }

    /// Gives a checkpoint up.
    pub fn discard_checkpoint(&mut self, checkpoint: SavedCheckpoint) {
        self.core().ledger().discard_checkpoint(checkpoint);
    }

    /// Rejects steps that were leaked: none borrows the cache any more.
    pub(crate) fn reject_leaked_steps(&mut self) {
        let (core, trunk, draft) = self.parts();
        let mut ledger = core.ledger();
        for (group, memory) in LayerGroup::ALL.into_iter().zip(std::iter::once(trunk).chain(draft))
        {
            memory.reject_leaked_step(&mut ledger, group);
        }
    }

    /// Queues copies of one direction, behind the steps of both groups and behind the poisoning of what was freed: as
    /// many in a launch as the trunk's StepMeta, which lends its memory between steps, has room for.
    fn copy_state(
        &mut self,
        stream: &Stream<B>,
        direction: CopyDirection,
        layers: Copied,
        jobs: &[JobWords],
    ) -> Result<(), KvError> {
        let (core, trunk, draft) = self.parts();
        core.check_stream(stream)?;
        for (group, memory) in
            LayerGroup::ALL.into_iter().zip(std::iter::once(&mut *trunk).chain(draft))
        {
            memory.follow(stream)?;
            let layers = core.config.group_layers(group);
            memory.freed.poison(stream, core.memory.pools.of_layers(layers))?;
            memory.freed.clear();
        }
        trunk.copy_state(stream, core, direction, layers, jobs)
    }
}

impl<B: Backend> StepMemory<B> {
    fn copy_state(
        &mut self,
        stream: &Stream<B>,
        core: &Core<B>,
        direction: CopyDirection,
        layers: Copied,
        jobs: &[JobWords],
    ) -> Result<(), KvError> {
        let state = &core.memory.state;
        let words = size_of::<JobWords>() / size_of::<i32>();
        let room = self.step_meta.buffer().len() as usize / words;
        for jobs in jobs.chunks(room) {
            let write = |array: &mut [i32]| {
                let jobs = jobs.as_flattened();
                array[..jobs.len()].copy_from_slice(jobs);
                Ok::<_, KvError>((jobs.len(), ()))
            };
            self.step_meta.update(stream, write)?;
            let pieces: CopyPieces<'_, B> = match (direction, layers) {
                (CopyDirection::Slot, _) => state.slot_pieces(),
                (_, Copied::All) => state.checkpoint_pieces(),
                (_, Copied::Trunk) => state.trunk_pieces(),
            };
            let copies = StateCopies {
                arena: &state.arena(),
                pieces,
                jobs: self.step_meta.buffer(),
                count: jobs.len() as u32,
                direction,
                faults: core.memory.copy_faults(),
            };
            ops::copy_state(stream, &copies)?;
        }
        Ok(())
    }
}

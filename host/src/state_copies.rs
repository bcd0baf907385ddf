//! Between steps: requests are saved to checkpoints, and go on from them.

use crate::checkpoints::SavedCheckpoint;
use crate::core::Core;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId};
use crate::manager::KvCacheManager;
use crate::ops::{self, CheckpointCopy, CopyDirection, CopyPieces, JobWords, StateCopies};
use crate::state_memory;
use crate::step_memory::StepMemory;

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
        match self.copy_state(stream, CopyDirection::Save, &jobs) {
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
        self.reject_leaked_steps();
        self.core().ledger().check_restore(id, from)?;
        let (slot, checkpoint, boundary) = (id.slot(), from.id(), from.boundary());
        let job = CheckpointCopy { slot, checkpoint, boundary, end: boundary }.words();
        self.copy_state(stream, CopyDirection::Restore, &[job])?;
        self.core().ledger().enter_restored(id, from)
    }

    /// Gives a checkpoint up.
    pub fn discard_checkpoint(&mut self, checkpoint: SavedCheckpoint) {
        self.core().ledger().discard_checkpoint(checkpoint);
    }

    /// Rejects steps that were leaked: none borrows the cache any more.
    fn reject_leaked_steps(&mut self) {
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
        trunk.copy_state(stream, core, direction, jobs)
    }
}

impl<B: Backend> StepMemory<B> {
    fn copy_state(
        &mut self,
        stream: &Stream<B>,
        core: &Core<B>,
        direction: CopyDirection,
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
            let pieces: CopyPieces<'_, B> = match direction {
                CopyDirection::Slot => state.slot_pieces(),
                CopyDirection::Save | CopyDirection::Restore => state.checkpoint_pieces(),
            };
            let copies = StateCopies {
                arena: &state.arena(),
                pieces,
                jobs: self.step_meta.buffer(),
                count: jobs.len() as u32,
                direction,
                faults: &core.memory.fault_words[state_memory::fault_word()],
            };
            ops::copy_state(stream, &copies)?;
        }
        Ok(())
    }
}

//! Between steps: saving requests to checkpoints, and restoring them.

use crate::checkpoints::{ForeignCheckpoint, SavedCheckpoint, SavedPlace};
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{BlockId, LayerGroup, RequestId, SlotId};
use crate::ledger::Ledger;
use crate::manager::KvCacheManager;
use crate::manager::copy_kind::CopyKind;
use crate::manager::queued_copies::CopiesFailed;
use crate::ops::{CheckpointCopy, CopyArena, CopyPieces, JobWords};

impl<B: Backend> KvCacheManager<B> {
    /// Saves requests, each at a position, in one launch for all of them: the state that a request with the blocks
    /// before this position needs to continue there. The position is a multiple of 128 that the request has committed,
    /// and has passed by no more than `max_draft` + 1 tokens. A position that a decode step passes can be saved until
    /// the next step. Queued in `stream`, after the earlier steps.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NotSavable`],
    /// [`KvError::OutOfCheckpoints`], [`KvError::Device`]. Nothing is taken then; to make room, prefixes without a
    /// reference may have been evicted, and checkpoints of outputs given up.
    pub fn save_checkpoints(
        &mut self,
        stream: &Stream<B>,
        saves: &[(RequestId, u32)],
    ) -> Result<Vec<SavedCheckpoint>, KvError> {
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        let saved = self.ledger_mut().take_checkpoints(saves)?;
        let job = |(&(id, _), saved): (&(RequestId, u32), _)| save_job(id, saved);
        let jobs: Vec<_> = saves.iter().zip(&saved).map(job).collect();
        match self.queue_copies(stream, &jobs, None) {
            Ok(()) => Ok(saved),
            Err(error) => {
                self.ledger_mut().undo_saves(saved);
                Err(error.into())
            }
        }
    }

    /// Restores a request from a checkpoint of itself: one launch copies the saved state to its slot. The final tokens of
    /// the request must be in exactly the blocks of the checkpoint's tokens, as after a step that was rejected and had overwritten rows
    /// ([`KvError::Overwritten`]). Positions of earlier [`Self::want_checkpoint`] calls are forgotten, but for the
    /// checkpoint's own, if a step has passed it and it is not saved yet. Queued in `stream`, after the earlier steps.
    /// Other requests with the same tokens continue from checkpoints by [`Self::admit_with`].
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`],
    /// [`KvError::ForeignCheckpoint`], [`KvError::OtherRequest`], [`KvError::NotRestorable`]: nothing has changed then.
    /// [`KvError::Device`]: if the device failed during the copy or after it, the contents of the slot are unknown, and
    /// later steps refuse the request ([`KvError::Overwritten`]) until it is restored or released; else nothing has
    /// changed.
    pub fn restore_checkpoint(
        &mut self,
        stream: &Stream<B>,
        id: RequestId,
        from: &SavedCheckpoint,
    ) -> Result<(), KvError> {
        self.restore_saved(stream, (id, from), Ledger::check_restore)
    }

    /// As [`Self::restore_checkpoint`], for a request that `check` accepts for the checkpoint.
    pub(crate) fn restore_saved(
        &mut self,
        stream: &Stream<B>,
        (id, from): (RequestId, &SavedCheckpoint),
        check: fn(&Ledger, RequestId, &SavedCheckpoint) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.reject_leaked_steps();
        check(&self.core().read_ledger(), id, from)?;
        self.restore_place(stream, id, from.place(), &[])?;
        self.ledger_mut().plan_checkpoints(id)
    }

    /// As [`Self::restore_checkpoint`], for a request that takes part in no step and has the blocks of the checkpoint's
    /// tokens already. `blocks` are entered in the request's row of the device's block table, from its first element on.
    pub(crate) fn restore_place(
        &mut self,
        stream: &Stream<B>,
        id: RequestId,
        from: SavedPlace,
        blocks: &[BlockId],
    ) -> Result<(), KvError> {
        self.core().check_stream(stream)?;
        // No capture begins between the copy and the fills.
        let _running = stream.running("restoring a checkpoint")?;
        let SavedPlace { checkpoint, boundary, has_draft } = from;
        let slot = id.slot();
        let job = CheckpointCopy { slot, checkpoint, boundary, end: boundary }.words();
        let kind = if has_draft { CopyKind::Restore } else { CopyKind::RestoreTrunk };
        let restored = self.queue_copies(stream, &[(kind, job)], Some((slot, blocks)));
        let restored = restored.and_then(|()| {
            let cleared = if has_draft { Ok(()) } else { self.clear_draft_windows(stream, slot) };
            cleared.map_err(|error| CopiesFailed { error, began: true })
        });
        match restored {
            Ok(()) => self.ledger_mut().enter_restored(id, boundary),
            Err(CopiesFailed { error, began }) => {
                if began {
                    self.ledger_mut().lose_rows(id);
                }
                Err(error)
            }
        }
    }

    /// Queues fills that set the windows of a slot's draft layers to zero.
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

    /// Requests a checkpoint at a position; see [`Ledger::want_checkpoint`](crate::Ledger::want_checkpoint).
    ///
    /// # Errors
    /// As [`Ledger::want_checkpoint`](crate::Ledger::want_checkpoint).
    pub fn want_checkpoint(&mut self, id: RequestId, boundary: u32) -> Result<(), KvError> {
        self.ledger_mut().want_checkpoint(id, boundary)
    }

    /// Checkpoints that were saved since the last call; see [`Ledger::take_saved`](crate::Ledger::take_saved).
    pub fn take_saved(&mut self) -> Vec<(RequestId, SavedCheckpoint)> {
        self.ledger_mut().take_saved().collect()
    }

    /// Saves the requests that passed a wanted position ([`Self::want_checkpoint`]) in a step that could not save it,
    /// for instance a decode step. Call it after the commit of the step and before the next step. Call it also before
    /// releasing a request of the step: with the request its due saves are lost. One launch saves all requests; there
    /// is none if nothing is due. A request for which no checkpoint is free is not saved. [`Self::take_saved`] hands
    /// out the checkpoints.
    ///
    /// # Errors
    /// [`KvError::Device`]; then nothing was saved, and the next call saves it. Room may have been made, as in
    /// [`Self::save_checkpoints`].
    pub fn save_wanted(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        let mut jobs = self.take_job_buffer();
        let due = |(id, saved): &(RequestId, SavedCheckpoint)| save_job(*id, saved);
        jobs.extend(self.ledger_mut().begin_due_saves().iter().map(due));
        if jobs.is_empty() {
            self.return_job_buffer(jobs);
            self.ledger_mut().finish_due_saves();
            return Ok(());
        }
        let queued = self.queue_copies(stream, &jobs, None);
        self.return_job_buffer(jobs);
        match queued {
            Ok(()) => self.ledger_mut().finish_due_saves(),
            Err(_) => self.ledger_mut().cancel_due_saves(),
        }
        Ok(queued?)
    }

    /// Consumes the cache, to measure [`crate::ops::copy_state`] over its memory. `work` receives the memory, the
    /// pieces of checkpoints, and those of slots. These are writable, so no request may use the cache afterwards. Waits
    /// for transfers to and from host memory. What `work` queues in `stream` runs after the earlier steps.
    ///
    /// # Errors
    /// [`KvError::Device`].
    pub fn into_copied_state<R>(
        mut self,
        stream: &Stream<B>,
        work: impl FnOnce(&CopyArena<'_, B>, &CopyPieces<'_, B>, &CopyPieces<'_, B>) -> R,
    ) -> Result<R, KvError> {
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        self.finish_tier_transfers(true)?;
        self.follow_steps(stream)?;
        let state = &self.core().memory.state;
        Ok(work(&state.arena(), &state.checkpoint_pieces(), &state.slot_pieces()))
    }

    /// Returns a checkpoint to its cache.
    ///
    /// # Errors
    /// [`ForeignCheckpoint`], which holds the checkpoint, if it was saved in another cache.
    pub fn discard_checkpoint(
        &mut self,
        checkpoint: SavedCheckpoint,
    ) -> Result<(), ForeignCheckpoint> {
        self.ledger_mut().discard_checkpoint(checkpoint)
    }
}

/// The copy of a request's slot to a checkpoint.
fn save_job(id: RequestId, to: &SavedCheckpoint) -> (CopyKind, JobWords) {
    let (slot, checkpoint, boundary) = (id.slot(), to.id(), to.boundary());
    (CopyKind::Save, CheckpointCopy { slot, checkpoint, boundary, end: boundary }.words())
}

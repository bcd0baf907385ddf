//! Saving requests during and after steps: a chunk writes the rows of a checkpoint itself; after a
//! decode step a copy saves them.

use kv_layout::geometry::WINDOW;

use super::Ledger;
use super::open_step::{Accepted, OpenSave, PlannedSave, StepPlan, StepRequest};
use super::wanted_checkpoints::WantedCheckpoints;
use crate::bucket::Bucket;
use crate::checkpoints::{CheckpointPool, SavedCheckpoint, is_boundary};
use crate::error::{KvError, LimitedBy};
use crate::ids::{LayerGroup, RequestId};
use crate::ops::CheckpointCopy;
use crate::step_meta::{self, SavedRows, StepLayout};

impl Ledger {
    /// Requests a checkpoint at `boundary`, a multiple of 128 that the request has not passed. A chunk that passes the
    /// boundary writes the checkpoint, without an additional launch, if one is free. After any other step,
    /// [`KvCacheManager::save_wanted`](crate::KvCacheManager::save_wanted) saves it; of several positions that a request
    /// passed since the last call, the last. A checkpoint that cannot be saved fails no step.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`]; [`KvError::NotSavable`] for a position that is no
    /// block boundary, or that it has passed; [`KvError::ContextTooLong`] for one that it cannot reach.
    pub fn want_checkpoint(&mut self, id: RequestId, boundary: u32) -> Result<(), KvError> {
        let progress = self.request(id)?.groups[LayerGroup::Trunk.index()];
        let (committed, written, limit) =
            (progress.committed, progress.written_to, self.max_decode_tokens);
        if !is_boundary(boundary) || boundary < committed {
            return Err(KvError::NotSavable { request: id, boundary, committed, written, limit });
        }
        let context = self.limits.context;
        if boundary > context {
            let (end, by) = (u64::from(boundary), LimitedBy::Cache);
            return Err(KvError::ContextTooLong { request: id, end, limit: context, by });
        }
        if boundary == committed {
            self.wanted.add_due(id, boundary);
        } else {
            self.wanted.add(id.slot(), boundary);
        }
        Ok(())
    }

    /// The checkpoints that committed steps and [`KvCacheManager::save_wanted`](crate::KvCacheManager::save_wanted)
    /// saved since the last call, in the order in which requests passed the positions. Checkpoints of requests that
    /// were admitted with their prompt are not among them: they belong to the prefix tree, which gets the last
    /// checkpoint of an output when the request ends.
    pub fn take_saved(&mut self) -> impl Iterator<Item = (RequestId, SavedCheckpoint)> {
        self.wanted.saved.drain(..)
    }

    /// Saves as [`KvCacheManager::save_wanted`](crate::KvCacheManager::save_wanted), in a ledger without device memory.
    pub fn save_wanted(&mut self) {
        self.begin_due_saves();
        self.finish_due_saves();
    }

    /// Takes a checkpoint for each request that passed a wanted position in a step that could not save it, and that can
    /// still be saved, for as many as checkpoints are free. They stay due until [`Self::finish_due_saves`]. Call
    /// [`Self::cancel_due_saves`] if the save fails.
    pub(crate) fn begin_due_saves(&mut self) -> &[(RequestId, SavedCheckpoint)] {
        let mut taken = std::mem::take(&mut self.wanted.taken);
        let can_save = |&&(id, boundary): &&(RequestId, u32)| self.check_save(id, boundary).is_ok();
        let count = self.wanted.due.iter().filter(can_save).count();
        self.make_room_for_saves(count as u32);
        for &(id, boundary) in self.wanted.due.iter() {
            let Ok(has_draft) = self.check_save(id, boundary) else { continue };
            let Some(storage) = self.checkpoints.take() else { break };
            let request = Some(self.requests.first_id(id));
            taken.push((id, storage.saved(request, boundary, has_draft)));
        }
        self.wanted.taken = taken;
        &self.wanted.taken
    }

    /// Records the taken checkpoints as saved; then nothing is due.
    pub(crate) fn finish_due_saves(&mut self) {
        let WantedCheckpoints { due, saved, taken, .. } = &mut self.wanted;
        while due.take_oldest().is_some() {}
        saved.append(taken);
        self.attach_saved();
    }

    /// Returns the checkpoints of a failed save, which stays due.
    pub(crate) fn cancel_due_saves(&mut self) {
        // In reverse, so that the pool hands them out again in the same order.
        let taken = self.wanted.taken.drain(..).rev();
        taken.for_each(|(_, saved)| self.checkpoints.give_back(saved));
    }

    /// Plans the checkpoints that a checked step writes: those wanted inside its chunks, while checkpoints are free.
    pub(super) fn plan_saves(
        &mut self,
        group: LayerGroup,
        bucket: Option<&Bucket>,
        plan: StepPlan,
        step: &[StepRequest],
    ) -> StepPlan {
        self.wanted.planned.clear();
        if group != LayerGroup::Trunk || self.checkpoints.total() == 0 {
            return plan;
        }
        let most = bucket.map_or(plan.tokens_per_request, |bucket| bucket.tokens_per_request);
        if most > self.max_decode_tokens {
            self.make_room_for_saves(self.wanted_in(step));
        }
        // A step with few tokens per request has one launch per layer, whose kernel writes no checkpoints.
        let free =
            if most <= self.max_decode_tokens { 0 } else { self.checkpoints.free() as usize };
        let WantedCheckpoints { positions, planned, .. } = &mut self.wanted;
        let mut token = 0;
        for &StepRequest { id, start, tokens } in step {
            let slot = id.slot();
            let wanted = positions.get(slot.0 as usize).map_or(&[][..], Vec::as_slice);
            let inside = wanted.iter().filter(|&&at| (start + 1..=start + tokens).contains(&at));
            let save = |&boundary: &u32| PlannedSave { slot, boundary, token, start };
            planned.extend(inside.map(save).take(free - planned.len()));
            token += tokens;
        }
        let copies = planned.iter().filter(|save| save.copied().is_some()).count();
        StepPlan { ring_copies: Some(copies as u32), ..plan }
    }

    /// Writes the planned saves to StepMeta, with the checkpoints that [`Self::enter_saves`] will take, in that order.
    pub(super) fn write_saves(&self, layout: StepLayout, array: &mut [i32]) {
        let planned = || self.wanted.planned.iter().zip(self.checkpoints.next_free());
        let rows = planned().map(|(save, checkpoint)| {
            let first = save.boundary - WINDOW;
            let from = first.max(save.start);
            SavedRows {
                token: save.token + (from - save.start),
                row: checkpoint.0 * WINDOW + (from - first),
                rows: save.boundary - from,
            }
        });
        let copies = planned().filter_map(|(save, checkpoint)| {
            let (slot, boundary, end) = (save.slot, save.boundary, save.copied()?);
            Some(CheckpointCopy { slot, checkpoint, boundary, end }.words())
        });
        step_meta::fill_saves(array, layout, rows, copies);
    }

    /// Takes the planned checkpoints for a step that begins.
    pub(super) fn enter_saves(&mut self, group: LayerGroup) {
        let Self { wanted, checkpoints, open, .. } = self;
        let WantedCheckpoints { planned, positions, .. } = wanted;
        for of_slot in planned.chunk_by(|one, next| one.slot == next.slot) {
            let saving = of_slot.iter().map_while(|&PlannedSave { slot, boundary, .. }| {
                checkpoints.take().map(|storage| OpenSave { slot, boundary, storage })
            });
            let before = open[group.index()].saving.len();
            open[group.index()].saving.extend(saving);
            let taken = open[group.index()].saving.len() - before;
            let PlannedSave { slot, boundary, .. } = of_slot[0];
            // The planned positions of a request follow each other among those that are wanted.
            let positions = &mut positions[slot.0 as usize];
            if let Ok(first) = positions.binary_search(&boundary) {
                positions.drain(first..first + taken);
            }
        }
        planned.clear();
    }

    /// Handles the checkpoints of a committed step. Those at positions that became final are saved; the others are
    /// returned, and their positions stay wanted. Requests that passed a wanted position without a save become due.
    pub(super) fn commit_saves(&mut self, group: LayerGroup, accepted: &[Accepted<'_>]) {
        if group != LayerGroup::Trunk || self.checkpoints.total() == 0 {
            return;
        }
        let Self { open, requests, wanted, checkpoints, .. } = self;
        for OpenSave { slot, boundary, storage } in open[group.index()].saving.drain(..) {
            let committed =
                |id| requests.get(id).map(|request| request.groups[group.index()].committed);
            match requests.in_slot(slot).filter(|&id| committed(id) >= Some(boundary)) {
                Some(id) => {
                    let request = Some(requests.first_id(id));
                    wanted.saved.push((id, storage.saved(request, boundary, false)));
                }
                None => wanted.give_up(OpenSave { slot, boundary, storage }, checkpoints),
            }
        }
        for part in accepted {
            let slot = part.id.slot();
            let Ok(committed) = self.committed(part.id) else { continue };
            let Some(positions) = self.wanted.positions.get_mut(slot.0 as usize) else { continue };
            let passed = positions.iter().take_while(|&&at| at <= committed).count();
            let last = positions.drain(..passed).next_back();
            last.into_iter().for_each(|boundary| self.wanted.add_due(part.id, boundary));
        }
    }

    /// Returns the checkpoints of a rejected step; their positions are wanted again.
    pub(super) fn reject_saves(&mut self, group: LayerGroup) {
        let Self { open, wanted, checkpoints, .. } = self;
        // In reverse, so that the pool hands them out again in the same order.
        let saving = open[group.index()].saving.drain(..).rev();
        saving.for_each(|saving| wanted.give_up(saving, checkpoints));
    }
}

impl WantedCheckpoints {
    /// Returns the checkpoint and marks the boundary as wanted again.
    fn give_up(&mut self, saving: OpenSave, checkpoints: &mut CheckpointPool) {
        checkpoints.give_back(saving.storage);
        self.add(saving.slot, saving.boundary);
    }
}

impl PlannedSave {
    /// One past the position of the last row that comes from the rings; `None` if all rows come from the step.
    fn copied(self) -> Option<u32> {
        (self.boundary - WINDOW < self.start).then_some(self.start)
    }
}

//! Which steps save requests: a chunk writes the rows of a checkpoint as it goes, after
//! decode they are copied.

use kv_layout::geometry::WINDOW;

use super::Ledger;
use super::open_step::{Accepted, Mark, Saving, StepPlan, StepRequest};
use super::wanted::Saves;
use crate::bucket::Bucket;
use crate::checkpoints::{SavedCheckpoint, is_boundary};
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId};
use crate::ops::CheckpointCopy;
use crate::step_meta::{self, SavedRows, StepLayout};

impl Ledger {
    /// A request is to be saved at `boundary`, a multiple of 128 that it has not passed. A chunk that passes it saves it
    /// if a checkpoint is free, with no launch more; after another step
    /// [`KvCacheManager::save_wanted`](crate::KvCacheManager::save_wanted) does. What cannot be saved fails no step.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`]; [`KvError::NotSavable`] for a position that is none, or
    /// that it has passed.
    pub fn want_checkpoint(&mut self, id: RequestId, boundary: u32) -> Result<(), KvError> {
        let progress = self.request(id)?.groups[LayerGroup::Trunk.index()];
        let (committed, written, limit) =
            (progress.committed, progress.written_to, self.rollback_tokens);
        if !is_boundary(boundary) || boundary < committed {
            return Err(KvError::NotSavable { request: id, boundary, committed, written, limit });
        }
        if boundary == committed {
            self.saves.add_due(id, boundary);
        } else {
            self.saves.add(id.slot(), boundary);
        }
        Ok(())
    }

    /// What committed steps and [`KvCacheManager::save_wanted`](crate::KvCacheManager::save_wanted) saved since the last
    /// call, in the order in which requests passed the positions. Of a request that was admitted with its prompt
    /// nothing: that belongs to the prefix tree, which gets of an answer the last one, when the request ends.
    pub fn take_saved(&mut self) -> impl Iterator<Item = (RequestId, SavedCheckpoint)> {
        self.saves.saved.drain(..)
    }

    /// The requests that passed a position at which they were to be saved, in a step that could not, and can be saved
    /// still; as many as checkpoints are free. They are due until [`Self::add_saved`].
    pub(crate) fn due(&mut self) -> Vec<(RequestId, u32)> {
        let mut due = std::mem::take(&mut self.saves.due);
        due.retain(|&(id, boundary)| self.check_save(id, boundary).is_ok());
        self.make_room_for_saves(due.len() as u32);
        due.truncate(self.checkpoints.free() as usize);
        self.saves.due.clone_from(&due);
        due
    }

    /// Takes note of what was saved after a step: all that was due.
    pub(crate) fn add_saved(&mut self, saved: impl Iterator<Item = (RequestId, SavedCheckpoint)>) {
        self.saves.due.clear();
        self.saves.saved.extend(saved);
        self.attach_saved();
    }

    /// Which checkpoints a step that was checked will write: positions inside its chunks, while checkpoints are free.
    pub(super) fn plan_saves(
        &mut self,
        group: LayerGroup,
        bucket: Option<&Bucket>,
        plan: StepPlan,
        step: &[StepRequest],
    ) -> StepPlan {
        self.saves.marks.clear();
        if group != LayerGroup::Trunk || self.checkpoints.total() == 0 {
            return plan;
        }
        let most = bucket.map_or(plan.tokens_per_request, |bucket| bucket.tokens_per_request);
        if most > self.rollback_tokens {
            self.make_room_for_saves(self.wanted_in(step));
        }
        // A step of few tokens a request has one launch a layer, which does not save.
        let free = if most <= self.rollback_tokens { 0 } else { self.checkpoints.free() as usize };
        let Saves { wanted, marks, .. } = &mut self.saves;
        let mut token = 0;
        for &StepRequest { id, start, tokens } in step {
            let slot = id.slot();
            let wanted = wanted.get(slot.0 as usize).map_or(&[][..], Vec::as_slice);
            let inside = wanted.iter().filter(|&&at| (start + 1..=start + tokens).contains(&at));
            let mark = |&boundary: &u32| Mark { slot, boundary, token, start };
            marks.extend(inside.map(mark).take(free - marks.len()));
            token += tokens;
        }
        let copies = marks.iter().filter(|mark| mark.copied().is_some()).count();
        StepPlan { saves: Some(copies as u32), ..plan }
    }

    /// Writes what the checked step saves, by the checkpoints that [`Self::enter_saves`] will take, in its order.
    pub(super) fn write_saves(&self, layout: StepLayout, array: &mut [i32]) {
        let marks = || self.saves.marks.iter().zip(self.checkpoints.next_free());
        let rows = marks().map(|(mark, checkpoint)| {
            let first = mark.boundary - WINDOW;
            let from = first.max(mark.start);
            SavedRows {
                token: mark.token + (from - mark.start),
                row: checkpoint.0 * WINDOW + (from - first),
                rows: mark.boundary - from,
            }
        });
        let copies = marks().filter_map(|(mark, checkpoint)| {
            let (slot, boundary, end) = (mark.slot, mark.boundary, mark.copied()?);
            Some(CheckpointCopy { slot, checkpoint, boundary, end }.words())
        });
        step_meta::fill_saves(array, layout, rows, copies);
    }

    /// Takes the checkpoints of a step that is entered.
    pub(super) fn enter_saves(&mut self, group: LayerGroup) {
        let Self { saves, checkpoints, open, .. } = self;
        for Mark { slot, boundary, .. } in saves.marks.drain(..) {
            let Some(storage) = checkpoints.take() else { break };
            open[group.index()].saving.push(Saving { slot, boundary, storage });
            if let Some(wanted) = saves.wanted.get_mut(slot.0 as usize) {
                wanted.retain(|&at| at != boundary);
            }
        }
    }

    /// Of a step that was committed: what it saved of final tokens is saved; requests that passed a position otherwise are
    /// to be saved after it.
    pub(super) fn commit_saves(&mut self, group: LayerGroup, accepted: &[Accepted<'_>]) {
        if group != LayerGroup::Trunk || self.checkpoints.total() == 0 {
            return;
        }
        for Saving { slot, boundary, storage } in
            std::mem::take(&mut self.open[group.index()].saving)
        {
            let id = self.requests.in_slot(slot);
            match id.filter(|&id| self.committed(id).is_ok_and(|committed| committed >= boundary)) {
                Some(id) => self.saves.saved.push((id, storage.saved(boundary, false))),
                None => self.give_up(Saving { slot, boundary, storage }),
            }
        }
        for part in accepted {
            let slot = part.id.slot();
            let Ok(committed) = self.committed(part.id) else { continue };
            let passed = self.saves.of(slot).iter().take_while(|&&at| at <= committed).count();
            if passed > 0 {
                let passed = self.saves.wanted[slot.0 as usize].drain(..passed);
                self.saves.due.extend(passed.map(|boundary| (part.id, boundary)));
            }
        }
    }

    /// Of a step that was rejected: what it should have saved is to be saved.
    pub(super) fn reject_saves(&mut self, group: LayerGroup) {
        let saving = std::mem::take(&mut self.open[group.index()].saving);
        // In reverse, so that the checkpoint taken last is the one taken next.
        saving.into_iter().rev().for_each(|saving| self.give_up(saving));
    }

    fn give_up(&mut self, saving: Saving) {
        self.checkpoints.give_back(saving.storage);
        self.saves.add(saving.slot, saving.boundary);
    }
}

impl Mark {
    /// The position behind the last row that comes from the rings; `None` if all come from the step.
    fn copied(self) -> Option<u32> {
        (self.boundary - WINDOW < self.start).then_some(self.start)
    }
}

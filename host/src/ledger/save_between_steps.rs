//! Saving requests to checkpoints and restoring them, in the ledger.

use super::Ledger;
use crate::checkpoints::{ForeignCheckpoint, SavedCheckpoint, is_boundary};
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId};
use crate::ledger::requests::Progress;

impl Ledger {
    /// Checkpoints that are free.
    #[must_use]
    pub fn free_checkpoints(&self) -> u32 {
        self.checkpoints.free()
    }

    /// Number of checkpoints in the pool, free or not.
    #[must_use]
    pub fn total_checkpoints(&self) -> u32 {
        self.checkpoints.total()
    }

    /// Returns a checkpoint to its pool.
    ///
    /// # Errors
    /// [`ForeignCheckpoint`], which holds the checkpoint, if it was saved in another cache.
    pub fn discard_checkpoint(
        &mut self,
        checkpoint: SavedCheckpoint,
    ) -> Result<(), ForeignCheckpoint> {
        if self.checkpoints.check_own(&checkpoint).is_err() {
            return Err(ForeignCheckpoint(checkpoint));
        }
        self.checkpoints.give_back(checkpoint);
        Ok(())
    }

    /// Returns the checkpoints of a failed save.
    pub(crate) fn undo_saves(&mut self, saved: Vec<SavedCheckpoint>) {
        // In reverse, so that the pool hands them out again in the same order.
        saved.into_iter().rev().for_each(|saved| self.checkpoints.give_back(saved));
    }

    /// Takes a checkpoint for each of `saves`: a request, and the position at which it is saved. Evicts unreferenced
    /// checkpoints if needed, provided that these are enough.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::NotSavable`]; [`KvError::OutOfCheckpoints`] with the shortfall of all of them. Nothing is taken then.
    pub(crate) fn take_checkpoints(
        &mut self,
        saves: &[(RequestId, u32)],
    ) -> Result<Vec<SavedCheckpoint>, KvError> {
        let drafts = saves.iter().map(|&(id, boundary)| self.check_save(id, boundary));
        let drafts = drafts.collect::<Result<Vec<_>, _>>()?;
        let needed = saves.len() as u32;
        let free = self.obtainable_checkpoints();
        if needed > free {
            return Err(KvError::OutOfCheckpoints { needed, free });
        }
        self.make_room_for_saves(needed);
        let Self { checkpoints, requests, .. } = self;
        let storage = std::iter::from_fn(|| checkpoints.take());
        let saves = saves.iter().zip(drafts).zip(storage);
        Ok(saves
            .map(|((&(id, at), has_draft), storage)| {
                storage.saved(Some(requests.first_id(id)), at, has_draft)
            })
            .collect())
    }

    /// Whether a request's slot holds all that a checkpoint at `boundary` keeps; if so, whether it holds the windows of the
    /// draft layers too.
    pub(super) fn check_save(&self, id: RequestId, boundary: u32) -> Result<bool, KvError> {
        let request = self.request(id)?;
        self.check_in_no_step(id)?;
        let [trunk, draft] = request.groups;
        let Progress { committed, written_to: written, .. } = trunk;
        let limit = self.max_decode_tokens;
        if !is_boundary(boundary) || committed < boundary || !trunk.can_resume_at(boundary, limit) {
            return Err(KvError::NotSavable { request: id, boundary, committed, written, limit });
        }
        Ok(draft.committed >= boundary && draft.can_resume_at(boundary, limit))
    }

    /// Checks that a request can continue from a checkpoint of itself.
    ///
    /// # Errors
    /// [`KvError::OtherRequest`] if it is a checkpoint of another request; else as [`Self::check_restorable`].
    pub(crate) fn check_restore(
        &self,
        id: RequestId,
        from: &SavedCheckpoint,
    ) -> Result<(), KvError> {
        self.check_restorable(id, from)?;
        match from.request() {
            Some(saved) if saved != self.requests.first_id(id) => {
                Err(KvError::OtherRequest { request: id, saved })
            }
            // Checkpoints without a request came from another tier or cache. They stay in the
            // prefix tree, so that no caller has one.
            _ => Ok(()),
        }
    }

    /// Checks that a request can continue from a checkpoint: its final tokens are in exactly the blocks of the checkpoint's tokens, and
    /// it has computed these tokens. Further blocks that it took for rejected drafts stay its own.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::ForeignCheckpoint`], [`KvError::NotRestorable`].
    pub(crate) fn check_restorable(
        &self,
        id: RequestId,
        from: &SavedCheckpoint,
    ) -> Result<(), KvError> {
        let committed = self.request(id)?.groups[LayerGroup::Trunk.index()].committed;
        self.check_in_no_step(id)?;
        self.checkpoints.check_own(from)?;
        let boundary = from.boundary();
        let (blocks, needed) = (self.blocks_of(committed), self.blocks_of(boundary));
        // Entries of tokens after `committed` are still those of the block's previous owner.
        if blocks != needed || (needed > 0 && committed < boundary) {
            return Err(KvError::NotRestorable {
                request: id,
                boundary,
                committed,
                blocks,
                needed,
            });
        }
        Ok(())
    }

    /// Sets the position of a request to `boundary`, in all layers.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub(crate) fn enter_restored(&mut self, id: RequestId, boundary: u32) -> Result<(), KvError> {
        let at = Progress::restored(boundary, self.max_decode_tokens);
        let draft = if self.has_drafts { at } else { Progress::default() };
        self.request_mut(id)?.groups = [at, draft];
        self.wanted.restart(id, boundary);
        if let Some(request_prefix) =
            self.prefix_cache.as_mut().and_then(|prefix_cache| prefix_cache.of_mut(id.slot()))
        {
            request_prefix.go_back(boundary);
        }
        Ok(())
    }

    /// Records that a request has lost rows that its tokens need: steps of both groups refuse it until it is restored
    /// or released.
    pub(crate) fn lose_rows(&mut self, id: RequestId) {
        if let Ok(request) = self.request_mut(id) {
            request.groups.iter_mut().for_each(|group| group.written_to = u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use kv_layout::config::ModelConfig;

    use super::*;
    use crate::config::CacheConfig;
    use crate::ledger::{Accepted, Prompt, StepRequest};

    fn ledger() -> Ledger {
        with_drafts(0)
    }

    fn with_drafts(max_draft: u32) -> Ledger {
        let model = ModelConfig::preset("tiny").unwrap();
        Ledger::new(&CacheConfig {
            max_requests: 2,
            num_blocks: 16,
            num_checkpoints: 4,
            max_suspended: 1,
            max_draft,
            keep_outputs: true,
            ..CacheConfig::new(model)
        })
        .unwrap()
    }

    fn told(tokens: &[u32]) -> Prompt<'_> {
        Prompt { tokens, salt: b"", adapter: b"" }
    }

    /// The request computes the tokens from `start` on.
    fn run(ledger: &mut Ledger, id: RequestId, start: u32, tokens: &[u32]) {
        run_told(ledger, id, start..start + tokens.len() as u32, tokens);
    }

    /// The request computes the tokens at `positions`, and commits the ids `told`.
    fn run_told(ledger: &mut Ledger, id: RequestId, positions: Range<u32>, told: &[u32]) {
        let mut array = vec![0; ledger.largest_layout().elements()];
        let count = positions.end - positions.start;
        let step = [StepRequest { id, start: positions.start, tokens: count }];
        ledger.begin_step(LayerGroup::Trunk, &step, &mut array).unwrap();
        let accepted = [Accepted { id, accepted: count, tokens: told }];
        ledger.commit_step(LayerGroup::Trunk, &accepted).unwrap();
    }

    /// A request that uses the prefix tree, and has tokens after its checkpoint, goes back to it: its next blocks are
    /// registered by the tokens that they hold, and the next boundary of its output is saved.
    #[test]
    fn a_request_that_goes_back_registers_its_blocks_by_their_tokens() {
        let tokens: Vec<u32> = (0..300).collect();
        for behind in [128, 129, 130, 131] {
            let mut ledger = ledger();
            let id = ledger.admit_with(&told(&tokens)).unwrap().id;
            run(&mut ledger, id, 0, &tokens[..128]);
            let saved = ledger.take_checkpoints(&[(id, 128)]).unwrap().remove(0);
            if behind > 128 {
                run(&mut ledger, id, 128, &tokens[128..behind]);
            }
            ledger.check_restore(id, &saved).unwrap();
            ledger.enter_restored(id, 128).unwrap();
            ledger.plan_checkpoints(id).unwrap();
            run(&mut ledger, id, 128, &tokens[128..]);
            let doubled = [&tokens[..behind], &tokens[128..]].concat();
            let [right, wrong] = [&tokens, &doubled].map(|tokens| {
                let admission = ledger.admit_with(&told(tokens)).unwrap();
                ledger.release(admission.id).unwrap();
                admission.matched
            });
            let expected = if behind == 128 { 256 } else { 128 };
            assert_eq!((right, wrong), (256, expected), "{behind} tokens before");
            let output: Vec<u32> = (300..400).collect();
            run(&mut ledger, id, 300, &output);
            assert_eq!(ledger.output_checkpoints(), 1, "at the 384th token");
            ledger.discard_checkpoint(saved).unwrap();
            ledger.audit().unwrap();
        }
    }

    /// A planned checkpoint that a step passed, and that is due at the very position of a restore, is still saved.
    #[test]
    fn what_is_due_where_a_request_restarts_is_saved() {
        let tokens: Vec<u32> = (0..132).collect();
        let mut ledger = with_drafts(3);
        let id = ledger.admit_with(&told(&tokens[..129])).unwrap().id;
        run(&mut ledger, id, 0, &tokens[..126]);
        run(&mut ledger, id, 126, &tokens[126..129]);
        assert_eq!(ledger.wanted.due.get(id.slot()), Some(&(id, 128)));
        let saved = ledger.take_checkpoints(&[(id, 128)]).unwrap().remove(0);
        ledger.check_restore(id, &saved).unwrap();
        ledger.enter_restored(id, 128).unwrap();
        ledger.plan_checkpoints(id).unwrap();
        assert_eq!(ledger.wanted.due.get(id.slot()), Some(&(id, 128)));
        ledger.discard_checkpoint(saved).unwrap();
        ledger.audit().unwrap();
    }

    /// A request that registers no more blocks evicts no checkpoint of another after a restore either: the prefix tree
    /// would not take its own.
    #[test]
    fn who_registers_no_more_evicts_nothing_after_a_restore() {
        let mut ledger = ledger();
        for first in [1000, 2000, 3000] {
            let tokens: Vec<u32> = (first..first + 129).collect();
            let id = ledger.admit_with(&told(&tokens)).unwrap().id;
            run(&mut ledger, id, 0, &tokens);
            ledger.release(id).unwrap();
        }
        let tokens: Vec<u32> = (0..300).collect();
        let id = ledger.admit_with(&told(&tokens)).unwrap().id;
        run_told(&mut ledger, id, 0..128, &[]);
        let saved = ledger.take_checkpoints(&[(id, 128)]).unwrap().remove(0);
        ledger.check_restore(id, &saved).unwrap();
        ledger.enter_restored(id, 128).unwrap();
        ledger.plan_checkpoints(id).unwrap();
        let before = (ledger.tree_counts(), ledger.reuse_stats());
        assert_eq!((before.0.checkpoints, ledger.free_checkpoints()), (3, 0), "none is to spare");
        // It passes the last boundary of its prompt.
        run_told(&mut ledger, id, 128..300, &[]);
        assert_eq!((ledger.tree_counts(), ledger.reuse_stats()), before);
        ledger.discard_checkpoint(saved).unwrap();
        ledger.audit().unwrap();
    }

    /// A request that was suspended and resumed is still the request that was saved; a fork of it is another.
    #[test]
    fn a_resumed_request_goes_on_from_its_checkpoint() {
        let mut ledger = ledger();
        let id = ledger.admit().unwrap();
        run(&mut ledger, id, 0, &[0; 128]);
        let saved = ledger.take_checkpoints(&[(id, 128)]).unwrap().remove(0);
        let mut now = id;
        for _ in 0..2 {
            let suspended = ledger.suspend(now).unwrap();
            now = ledger.resume(suspended).unwrap();
            assert_ne!(now, id);
            ledger.check_restore(now, &saved).unwrap();
        }
        let later = ledger.take_checkpoints(&[(now, 128)]).unwrap().remove(0);
        ledger.check_restore(now, &later).unwrap();
        ledger.release(now).unwrap();
        // The next request in the slot is another one.
        let next = ledger.admit().unwrap();
        assert_eq!(next.slot(), now.slot());
        run(&mut ledger, next, 0, &[0; 128]);
        for saved in [saved, later] {
            let refused = ledger.check_restore(next, &saved);
            assert!(
                matches!(refused, Err(KvError::OtherRequest { saved, .. }) if saved == id),
                "{refused:?}"
            );
            ledger.discard_checkpoint(saved).unwrap();
        }
    }

    /// A request that takes part in an open step of either group is neither saved nor restored, and nothing changes. A cache
    /// rejects the step first, so that only its ledger can be asked.
    #[test]
    fn a_request_in_a_step_is_neither_saved_nor_restored() {
        let model = ModelConfig::preset("tiny").unwrap();
        let config = CacheConfig { num_checkpoints: 2, ..CacheConfig::new(model) };
        for open in LayerGroup::ALL {
            let mut ledger = Ledger::new(&config).unwrap();
            let mut array = vec![0; ledger.largest_layout().elements()];
            let id = ledger.admit().unwrap();
            for group in LayerGroup::ALL {
                let step = [StepRequest { id, start: 0, tokens: 128 }];
                ledger.begin_step(group, &step, &mut array).unwrap();
                ledger.commit_step(group, &[Accepted::count(id, 128)]).unwrap();
            }
            let saved = ledger.take_checkpoints(&[(id, 128)]).unwrap().remove(0);
            let step = [StepRequest { id, start: 128, tokens: 1 }];
            ledger.begin_step(open, &step, &mut array).unwrap();
            let before = serde_json::to_value(&ledger).unwrap();
            let refused = [
                ledger.take_checkpoints(&[(id, 128)]).map(|_| ()),
                ledger.check_restore(id, &saved),
            ];
            for refused in refused {
                let is_right = matches!(
                    refused,
                    Err(KvError::RequestInStep { request, group }) if (request, group) == (id, open)
                );
                assert!(is_right, "{open:?}: {refused:?}");
            }
            assert_eq!(serde_json::to_value(&ledger).unwrap(), before);
            ledger.discard_checkpoint(saved).unwrap();
        }
    }
}

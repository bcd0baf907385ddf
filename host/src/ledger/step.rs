//! A step in the ledger: begun, then committed or rejected.

use super::Ledger;
use super::open_step::{Accepted, Growth, OpenStep, StepPlan, StepRequest, Written};
use crate::block::RequestBlock;
use crate::bucket::Bucket;
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId};
use crate::ledger::limits::StepLimits;
use crate::ledger::requests::Progress;
use crate::step_meta::{self, Chunk, NONE, Section, StepLayout};

impl Ledger {
    /// Begins a step of `group`: takes the blocks that it needs and writes its StepMeta to the beginning of
    /// `array`, by [`StepPlan::layout`]; later elements stay as they are.
    ///
    /// All or nothing: on an error no block is taken, no request changes, and `array` is as it was.
    /// If the group still has an open step, that one is rejected first, even if the new step is then refused; its rows
    /// count as written.
    ///
    /// # Errors
    /// Of the step: [`KvError::NoSuchGroup`]; [`KvError::TooManyRequests`]; [`KvError::StepTooLong`]; [`KvError::OutOfBlocks`] with the
    /// shortfall of the whole step, which a scheduler answers by preempting a request.
    ///
    /// Of the first request that cannot take part: [`KvError::UnknownRequest`]; [`KvError::ForeignRequest`];
    /// [`KvError::Overwritten`] after a rejected step of too many tokens; [`KvError::WrongStart`]; [`KvError::NoTokens`];
    /// [`KvError::ContextTooLong`]; [`KvError::ChunkTooLong`]; [`KvError::DuplicateRequest`].
    ///
    /// # Panics
    /// If `array` is shorter than the layout; [`Self::largest_layout`] gives a length that is enough for every step.
    pub fn begin_step(
        &mut self,
        group: LayerGroup,
        step: &[StepRequest],
        array: &mut [i32],
    ) -> Result<StepPlan, KvError> {
        let plan = self.stage_step(group, None, step, array)?;
        self.enter_step(group, step);
        Ok(plan)
    }

    /// Checks a step and writes its StepMeta to the beginning of `array`, by [`StepPlan::layout_in`], without
    /// taking anything.
    ///
    /// # Errors
    /// As [`Self::begin_step`].
    ///
    /// # Panics
    /// As [`Self::begin_step`].
    pub(crate) fn stage_step(
        &mut self,
        group: LayerGroup,
        bucket: Option<&Bucket>,
        step: &[StepRequest],
        array: &mut [i32],
    ) -> Result<StepPlan, KvError> {
        if self.open[group.index()].is_open {
            self.reject_step(group, Written::Rows);
        }
        let limits = bucket.map_or(self.limits, StepLimits::of_bucket);
        let plan = self.check(group, &limits, step)?;
        let plan = self.plan_saves(group, bucket, plan, step);
        let layout = plan.layout_in(bucket);
        let array = &mut array[..layout.elements()];
        self.write_table_updates(layout, array);
        let chunks = step.iter().map(|part| Chunk {
            slot: part.id.slot(),
            start: part.start,
            end: part.start + part.tokens,
        });
        step_meta::fill(array, layout, self.ring, chunks);
        self.write_saves(layout, array);
        Ok(plan)
    }

    /// Names the blocks that [`Self::enter_step`] will take, in its order.
    fn write_table_updates(&self, layout: StepLayout, array: &mut [i32]) {
        let updates = array[layout.range(Section::TableIndex).start..]
            .split_at_mut(layout.capacity(Section::TableIndex) as usize);
        let mut entries = updates.0.iter_mut().zip(updates.1);
        let mut free = self.blocks.next_free();
        for &Growth { slot, held, needed } in &self.growing {
            for logical in held..needed {
                let Some(((index, entry), block)) = entries.next().zip(free.next()) else {
                    unreachable!("counted by `check`, and the layout has room for every new block")
                };
                *index = (slot.0 * self.max_blocks + logical) as i32;
                *entry = block.0 as i32;
            }
        }
        entries.for_each(|(index, entry)| (*index, *entry) = (NONE, NONE));
    }

    /// Takes the blocks of a step that [`Self::stage_step`] accepted, with nothing in between, and
    /// opens it.
    pub(crate) fn enter_step(&mut self, group: LayerGroup, step: &[StepRequest]) {
        let Self { blocks, requests, open, growing, .. } = self;
        let open = &mut open[group.index()];
        open.is_open = true;
        for part in step {
            if let Some(request) = requests.of_slot_mut(part.id.slot()) {
                request.groups[group.index()].in_step = part.tokens;
            }
        }
        open.slots.extend(step.iter().map(|part| part.id.slot()));
        for Growth { slot, held, needed } in growing.drain(..) {
            let Some(request) = requests.of_slot_mut(slot) else { continue };
            let new = std::iter::from_fn(|| blocks.take()).map(RequestBlock::Own);
            request.blocks.extend(new.take((needed - held) as usize));
            open.taken.push((slot, needed - held));
        }
        self.enter_saves(group);
    }

    /// Ends the open step of `group`: the first `accepted` tokens of each of its requests become
    /// final, and the others are discarded. A request keeps the blocks of its rejected tokens, for
    /// the tokens that take their place.
    ///
    /// # Errors
    /// [`KvError::NoOpenStep`]; [`KvError::CommitMismatch`] unless `accepted` names as many requests as the step has;
    /// [`KvError::UnknownRequest`]; [`KvError::ForeignRequest`]; [`KvError::NotInStep`]; [`KvError::AcceptedTooMany`];
    /// [`KvError::NotRollbackable`]; [`KvError::TokenCount`]; [`KvError::DuplicateRequest`]. The step stays open then, and
    /// nothing changes.
    pub fn commit_step(
        &mut self,
        group: LayerGroup,
        accepted: &[Accepted<'_>],
    ) -> Result<(), KvError> {
        self.check_commit(group, accepted)?;
        for part in accepted {
            if let Some(request) = self.requests.of_slot_mut(part.id.slot()) {
                let progress = &mut request.groups[group.index()];
                *progress = progress.after_step(part.accepted);
            }
        }
        self.commit_saves(group, accepted);
        self.register(group, accepted);
        self.close(group);
        Ok(())
    }

    fn check_commit(
        &mut self,
        group: LayerGroup,
        accepted: &[Accepted<'_>],
    ) -> Result<(), KvError> {
        let open = &self.open[group.index()];
        if !open.is_open {
            return Err(KvError::NoOpenStep { group });
        }
        if accepted.len() != open.slots.len() {
            let (named, requests) = (accepted.len(), open.slots.len());
            return Err(KvError::CommitMismatch { named, requests });
        }
        let max_decode_tokens = self.max_decode_tokens;
        let mut check = self.requests.check();
        for part in accepted {
            let Some((request, met)) = check.visit(part.id) else {
                return Err(self.refused(part.id));
            };
            let progress = request.groups[group.index()];
            if met | !is_acceptable(max_decode_tokens, part, progress) {
                return Err(commit_refusal(group, max_decode_tokens, part, progress));
            }
        }
        accepted.iter().try_for_each(|part| self.check_prompt_tokens(group, part))
    }

    /// Rejects the open step of `group`, if there is one: every request has the tokens and blocks
    /// that it had before. If kernels wrote rows, a request with more than `max_draft` + 1 tokens in
    /// the step has lost rows that it needs ([`KvError::Overwritten`]).
    ///
    /// Calls `returned` with each block that was taken for the step, and returns the block to the pool.
    pub(crate) fn reject_step_with(
        &mut self,
        group: LayerGroup,
        written: Written,
        mut returned: impl FnMut(crate::ids::BlockId),
    ) {
        let Self { open, requests, blocks, .. } = self;
        let OpenStep { slots, taken, .. } = &open[group.index()];
        for &(slot, taken) in taken.iter().rev() {
            let Some(request) = requests.of_slot_mut(slot) else { continue };
            for _ in 0..taken {
                let Some(block) = request.blocks.pop().and_then(RequestBlock::into_own) else {
                    break;
                };
                returned(block.id());
                blocks.give_back(block);
            }
        }
        for &slot in slots {
            let Some(request) = requests.of_slot_mut(slot) else { continue };
            let progress = &mut request.groups[group.index()];
            match written {
                Written::Nothing => progress.in_step = 0,
                Written::Rows => *progress = progress.after_step(0),
            }
        }
        self.reject_saves(group);
        self.close(group);
    }

    /// Rejects the open step of `group`, if there is one: every request has the tokens and blocks that it
    /// had before. If kernels wrote rows, a request with more than `max_draft` + 1 tokens in the step has
    /// lost rows that it needs ([`KvError::Overwritten`]).
    pub fn reject_step(&mut self, group: LayerGroup, written: Written) {
        self.reject_step_with(group, written, drop);
    }

    /// Whether a request takes part in the open step of a group.
    pub(super) fn is_in_step(&self, group: LayerGroup, id: RequestId) -> bool {
        self.requests.get(id).is_some_and(|request| request.groups[group.index()].in_step > 0)
    }

    fn close(&mut self, group: LayerGroup) {
        let open = &mut self.open[group.index()];
        open.is_open = false;
        open.slots.clear();
        open.taken.clear();
    }
}

/// Whether the tokens of `part` can become final for a request with this progress: [`commit_refusal`] without the
/// reason.
#[inline]
fn is_acceptable(max_decode_tokens: u32, part: &Accepted<'_>, progress: Progress) -> bool {
    let Accepted { accepted, tokens, .. } = *part;
    let after = progress.after_step(accepted.min(progress.in_step));
    (progress.in_step != 0)
        & (accepted <= progress.in_step)
        & after.can_resume_at(after.committed, max_decode_tokens)
        & (tokens.is_empty() | (tokens.len() == accepted as usize))
}

/// Why the tokens of `part` cannot become final: the first reason, or else that the request is named twice.
#[cold]
fn commit_refusal(
    group: LayerGroup,
    limit: u32,
    part: &Accepted<'_>,
    progress: Progress,
) -> KvError {
    let Accepted { id: request, accepted, tokens } = *part;
    let written = progress.in_step;
    if written == 0 {
        return KvError::NotInStep { request, group };
    }
    if accepted > written {
        return KvError::AcceptedTooMany { request, accepted, written };
    }
    let after = progress.after_step(accepted);
    if !after.can_resume_at(after.committed, limit) {
        return KvError::NotRollbackable { request, accepted, written, limit };
    }
    if !tokens.is_empty() && tokens.len() != accepted as usize {
        return KvError::TokenCount { request, accepted, given: tokens.len() };
    }
    KvError::DuplicateRequest { request }
}

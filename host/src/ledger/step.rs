//! A step in the ledger: begun, then committed or rejected.

use super::Ledger;
use super::open_step::{Accepted, StepPlan, StepRequest, Written};
use crate::bucket::Bucket;
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId};
use crate::limits::StepLimits;
use crate::step_meta::{self, Chunk, NONE, Section, StepLayout};

impl Ledger {
    /// Begins a step of `group`: takes the blocks that it needs and writes its StepMeta to the beginning of
    /// `array`, by [`StepPlan::layout`]; what lies behind stays.
    ///
    /// All or nothing: on an error no block is taken, no request changes, and `array` is as it was.
    /// A step of the group that is still open is rejected first, as if its rows had been written.
    ///
    /// # Errors
    /// The [`KvError`] of the first request that cannot take part, among them
    /// [`KvError::Overwritten`] after a rejected step of too many tokens; or
    /// [`KvError::OutOfBlocks`] with the shortfall of the whole step.
    ///
    /// # Panics
    /// If `array` is shorter than that; [`Self::largest_layout`] says what is long enough for every step.
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
        let layout = plan.layout_in(bucket);
        let array = &mut array[..layout.elements()];
        self.write_table_updates(group, step, layout, array);
        let chunks = step.iter().map(|part| Chunk {
            slot: part.id.slot(),
            start: part.start,
            end: part.start + part.tokens,
        });
        step_meta::fill(array, layout, self.ring, chunks);
        Ok(plan)
    }

    /// Names the blocks that [`Self::enter_step`] will take, in its order.
    fn write_table_updates(
        &self,
        group: LayerGroup,
        step: &[StepRequest],
        layout: StepLayout,
        array: &mut [i32],
    ) {
        let updates = array[layout.range(Section::TableIndex).start..]
            .split_at_mut(layout.capacity(Section::TableIndex) as usize);
        let mut entries = updates.0.iter_mut().zip(updates.1);
        let mut free = self.blocks.next_free();
        for part in step {
            let held = self.requests.get(part.id).map_or(0, |request| request.blocks.len() as u32);
            for logical in held..self.needed_blocks(group, part) {
                let Some(((index, entry), block)) = entries.next().zip(free.next()) else {
                    unreachable!("counted by `check`, and the layout has room for every new block")
                };
                *index = (part.id.slot().0 * self.max_blocks + logical) as i32;
                *entry = block.0 as i32;
            }
        }
        entries.for_each(|(index, entry)| (*index, *entry) = (NONE, NONE));
    }

    /// Takes the blocks of a step that [`Self::stage_step`] accepted, with nothing in between, and
    /// opens it.
    pub(crate) fn enter_step(&mut self, group: LayerGroup, step: &[StepRequest]) {
        self.open[group.index()].is_open = true;
        for part in step {
            let needed = self.needed_blocks(group, part) as usize;
            let Some(request) = self.requests.get_mut(part.id) else { continue };
            let held = request.blocks.len();
            let new = std::iter::from_fn(|| self.blocks.take());
            request.blocks.extend(new.take(needed.saturating_sub(held)));
            let taken = (request.blocks.len() - held) as u32;
            request.groups[group.index()].in_step = part.tokens;
            self.open[group.index()].parts.push((*part, taken));
        }
    }

    /// Ends the open step of `group`: of each of its requests the first `accepted` tokens become
    /// final; the others never were. A request keeps the blocks of its rejected tokens, for the
    /// tokens that take their place.
    ///
    /// # Errors
    /// [`KvError::NoOpenStep`]; [`KvError::CommitMismatch`] unless `accepted` names every request of
    /// the step once; [`KvError::AcceptedTooMany`]; [`KvError::NotRollbackable`];
    /// [`KvError::TokenCount`]. The step stays open then, and nothing changes.
    pub fn commit_step(
        &mut self,
        group: LayerGroup,
        accepted: &[Accepted<'_>],
    ) -> Result<(), KvError> {
        self.check_commit(group, accepted)?;
        for part in accepted {
            let Some(request) = self.requests.get_mut(part.id) else { continue };
            let progress = &mut request.groups[group.index()];
            *progress = progress.after_step(part.accepted);
        }
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
        if accepted.len() != open.parts.len() {
            let (named, requests) = (accepted.len(), open.parts.len());
            return Err(KvError::CommitMismatch { named, requests });
        }
        self.seen.fill(0);
        for part in accepted {
            self.check_accepted(group, part)?;
            let slot = part.id.slot().0;
            let seen = &mut self.seen[(slot / u64::BITS) as usize];
            if *seen >> (slot % u64::BITS) & 1 == 1 {
                return Err(KvError::DuplicateRequest { request: part.id });
            }
            *seen |= 1 << (slot % u64::BITS);
        }
        Ok(())
    }

    fn check_accepted(&self, group: LayerGroup, part: &Accepted<'_>) -> Result<(), KvError> {
        let Accepted { id, accepted, tokens } = *part;
        let progress = self.request(id)?.groups[group.index()];
        let written = progress.in_step;
        if written == 0 {
            return Err(KvError::NotInStep { request: id, group });
        }
        if accepted > written {
            return Err(KvError::AcceptedTooMany { request: id, accepted, written });
        }
        let (after, limit) = (progress.after_step(accepted), self.rollback_tokens);
        if !after.can_resume_at(after.committed, limit) {
            return Err(KvError::NotRollbackable { request: id, accepted, written, limit });
        }
        if !tokens.is_empty() && tokens.len() != accepted as usize {
            return Err(KvError::TokenCount { request: id, accepted, told: tokens.len() });
        }
        Ok(())
    }

    /// Rejects the open step of `group`, if there is one: every request has the tokens and blocks
    /// that it had before. Of rows that kernels wrote, a step of at most `max_draft` + 1 tokens of a
    /// request left none that is needed; a longer one did ([`KvError::Overwritten`]).
    ///
    /// The blocks that were taken for the step are handed to `returned`, then given back.
    pub(crate) fn reject_step_with(
        &mut self,
        group: LayerGroup,
        written: Written,
        mut returned: impl FnMut(crate::ids::BlockId),
    ) {
        let Self { open, requests, blocks, .. } = self;
        for (part, taken) in open[group.index()].parts.iter().rev() {
            let Some(request) = requests.get_mut(part.id) else { continue };
            for _ in 0..*taken {
                let Some(block) = request.blocks.pop() else { break };
                returned(block.id());
                blocks.give_back(block);
            }
            let progress = &mut request.groups[group.index()];
            match written {
                Written::Nothing => progress.in_step = 0,
                Written::Rows => *progress = progress.after_step(0),
            }
        }
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
        open.parts.clear();
    }
}

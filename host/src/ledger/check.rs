//! Which steps are refused. Checking changes nothing but scratch memory.

use super::Ledger;
use super::open_step::{StepPlan, StepRequest};
use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::limits::StepLimits;

impl Ledger {
    /// Checks a step of `group` against `limits`; its numbers.
    pub(super) fn check(
        &mut self,
        group: LayerGroup,
        limits: &StepLimits,
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError> {
        if group == LayerGroup::Draft && !self.has_drafts {
            return Err(KvError::NoSuchGroup { group });
        }
        let by = limits.by;
        if step.len() > limits.requests as usize {
            let limit = limits.requests;
            return Err(KvError::TooManyRequests { requests: step.len(), limit, by });
        }
        self.seen.fill(0);
        let (mut tokens, mut tokens_per_request, mut new_blocks) = (0, 0, 0);
        for part in step {
            let held = self.check_request(group, limits, part)?;
            let slot = part.id.slot().0;
            let seen = &mut self.seen[(slot / u64::BITS) as usize];
            if *seen >> (slot % u64::BITS) & 1 == 1 {
                return Err(KvError::DuplicateRequest { request: part.id });
            }
            *seen |= 1 << (slot % u64::BITS);
            tokens += u64::from(part.tokens);
            tokens_per_request = tokens_per_request.max(part.tokens);
            new_blocks += self.needed_blocks(group, part).saturating_sub(held);
        }
        if tokens > u64::from(limits.tokens) {
            return Err(KvError::StepTooLong { tokens, limit: limits.tokens, by });
        }
        if new_blocks > self.blocks.free() {
            return Err(KvError::OutOfBlocks { needed: new_blocks, free: self.blocks.free() });
        }
        let requests = step.len() as u32;
        Ok(StepPlan { tokens: tokens as u32, tokens_per_request, requests, new_blocks })
    }

    /// Checks one request's part; the blocks it holds.
    fn check_request(
        &self,
        group: LayerGroup,
        limits: &StepLimits,
        part: &StepRequest,
    ) -> Result<u32, KvError> {
        let (id, by) = (part.id, limits.by);
        let request = self.request(id)?;
        let progress = request.groups[group.index()];
        let committed = progress.committed;
        if !progress.can_resume_at(committed, self.rollback_tokens) {
            return Err(KvError::Overwritten { request: id, group, committed });
        }
        if part.start != committed {
            return Err(KvError::WrongStart { request: id, committed, start: part.start });
        }
        if part.tokens == 0 {
            return Err(KvError::NoTokens { request: id });
        }
        let end = u64::from(part.start) + u64::from(part.tokens);
        if end > u64::from(limits.context) {
            return Err(KvError::ContextTooLong { request: id, end, limit: limits.context, by });
        }
        if part.tokens > limits.tokens_per_request {
            let (tokens, limit) = (part.tokens, limits.tokens_per_request);
            return Err(KvError::ChunkTooLong { request: id, tokens, limit, by });
        }
        Ok(request.blocks.len() as u32)
    }

    /// Blocks that a request needs for its part of a step. Draft layers store no entries.
    pub(super) fn needed_blocks(&self, group: LayerGroup, part: &StepRequest) -> u32 {
        match group {
            LayerGroup::Trunk => self.blocks_of(part.start + part.tokens),
            LayerGroup::Draft => 0,
        }
    }
}

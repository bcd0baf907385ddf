//! Checks of a step. A check changes only scratch memory, and evicts the blocks that an accepted step lacks.

use super::Ledger;
use super::open_step::{Growth, StepPlan, StepRequest};
use crate::block;
use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::ledger::limits::StepLimits;
use crate::ledger::requests::Progress;

impl Ledger {
    /// Checks a step of `group` against `limits`; returns its sizes.
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
        let (mut tokens, mut tokens_per_request) = (0, 0);
        let (mut context, mut new_blocks) = (0, 0);
        self.growing.clear();
        // Local copies, so that the loop finds these in registers and does not load them through `self`.
        let (needs, max_decode_tokens) = (self.block_needs(group), self.max_decode_tokens);
        let Self { requests, growing, .. } = self;
        let mut check = requests.check();
        for part in step {
            let Some((request, met)) = check.visit(part.id) else {
                return Err(self.refused(part.id));
            };
            let (progress, held) = (request.groups[group.index()], request.blocks.len() as u32);
            if met | !takes_part(limits, max_decode_tokens, part, progress) {
                return Err(refusal(group, limits, max_decode_tokens, part, progress));
            }
            tokens += u64::from(part.tokens);
            tokens_per_request = tokens_per_request.max(part.tokens);
            let end = part.start + part.tokens;
            context = context.max(end);
            let needed = needs.of(end);
            if needed > held {
                new_blocks += needed - held;
                growing.push(Growth { slot: part.id.slot(), held, needed });
            }
        }
        if tokens > u64::from(limits.tokens) {
            return Err(KvError::StepTooLong { tokens, limit: limits.tokens, by });
        }
        self.require_blocks(new_blocks)?;
        let requests = step.len() as u32;
        let (tokens, ring_copies) = (tokens as u32, None);
        Ok(StepPlan { tokens, tokens_per_request, requests, context, new_blocks, ring_copies })
    }

    /// The blocks that requests need for a step of `group`. Draft layers store no entries.
    fn block_needs(&self, group: LayerGroup) -> BlockNeeds {
        BlockNeeds { none: !self.has_entries || group == LayerGroup::Draft }
    }
}

/// Computes the number of blocks that a request needs.
#[derive(Clone, Copy)]
struct BlockNeeds {
    none: bool,
}

impl BlockNeeds {
    /// Blocks of a request of `end` tokens.
    fn of(self, end: u32) -> u32 {
        if self.none { 0 } else { block::blocks_of(end) }
    }
}

/// Whether a request with this progress can take part in a step: [`refusal`] without the reason.
#[inline]
fn takes_part(
    limits: &StepLimits,
    max_decode_tokens: u32,
    part: &StepRequest,
    progress: Progress,
) -> bool {
    let end = u64::from(part.start) + u64::from(part.tokens);
    // `&` instead of `&&`, to avoid branches: all operands are in registers.
    progress.can_resume_at(progress.committed, max_decode_tokens)
        & (part.start == progress.committed)
        & (part.tokens != 0)
        & (end <= u64::from(limits.context))
        & (part.tokens <= limits.tokens_per_request)
}

/// Why a request cannot take part in a step: the first reason, or else that the step names it twice.
#[cold]
fn refusal(
    group: LayerGroup,
    limits: &StepLimits,
    max_decode_tokens: u32,
    part: &StepRequest,
    progress: Progress,
) -> KvError {
    let (request, by) = (part.id, limits.by);
    let committed = progress.committed;
    if !progress.can_resume_at(committed, max_decode_tokens) {
        return KvError::Overwritten { request, group, committed };
    }
    if part.start != committed {
        return KvError::WrongStart { request, committed, start: part.start };
    }
    if part.tokens == 0 {
        return KvError::NoTokens { request };
    }
    let end = u64::from(part.start) + u64::from(part.tokens);
    if end > u64::from(limits.context) {
        return KvError::ContextTooLong { request, end, limit: limits.context, by };
    }
    if part.tokens > limits.tokens_per_request {
        let (tokens, limit) = (part.tokens, limits.tokens_per_request);
        return KvError::ChunkTooLong { request, tokens, limit, by };
    }
    KvError::DuplicateRequest { request }
}

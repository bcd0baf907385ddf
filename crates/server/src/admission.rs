//! Which requests fit in the cache, and what drafts take of it.

use dsv4_kv::{Ledger, Prompt};
use dsv4_kv_model::sequence::{Sequence, Work};
use kv_layout::geometry::BLOCK_TOKENS;

use crate::accepted::Request;

/// After this many preemptions a request shares blocks only if it would not fit otherwise. Sharing may take blocks that
/// it would not need alone, so it could be preempted again and again.
const MAX_SHARED: u32 = 2;

/// Whether a request may share blocks: it reuses tokens, and did not run out of blocks when it ran alone.
pub(crate) fn may_share(request: &Request) -> bool {
    request.sequence.may_reuse() && !request.shares_nothing
}

/// Whether a request that is admitted with `free` blocks, free or evictable, shares blocks.
pub(crate) fn shares(ledger: &Ledger, request: &Request, free: u32) -> bool {
    let fits_alone = ledger.blocks_of(request.sequence.tokens().len() as u32) <= free;
    may_share(request) && !(fits_alone && request.preemptions >= MAX_SHARED)
}

/// Whether the tokens of a request fit in `free` blocks, which are free or evictable. It takes none for blocks that it
/// shares with running requests.
pub(crate) fn fits(ledger: &Ledger, request: &Request, free: u32) -> bool {
    let tokens = request.sequence.tokens();
    let needed = ledger.blocks_of(tokens.len() as u32);
    let prompt = Prompt { tokens, salt: &request.salt, adapter: b"" };
    needed <= free
        || (may_share(request) && needed.saturating_sub(ledger.referenced_blocks(&prompt)) <= free)
}

/// Blocks that the drafts of `work` take, and its other tokens do not.
pub(crate) fn blocks_of_drafts(ledger: &Ledger, sequence: &Sequence, work: &Work) -> u32 {
    let all = sequence.cached() + work.tokens.len();
    let blocks = |tokens: usize| ledger.blocks_of(tokens as u32);
    blocks(all) - blocks(all - work.drafts)
}

/// Most tokens of a sequence: the context, or the capacity of the cache if that is less.
pub(crate) fn longest(context: u32, ledger: &Ledger) -> u32 {
    if ledger.blocks_of(context) <= ledger.total_blocks() {
        context
    } else {
        ledger.total_blocks().saturating_mul(BLOCK_TOKENS)
    }
}

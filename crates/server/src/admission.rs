//! Which requests fit in the cache.

use dsv4_kv::{Ledger, Prompt};
use kv_layout::geometry::BLOCK_TOKENS;

use crate::queue::Request;

/// Whether a request may share blocks: it reuses tokens, and did not run out of blocks when it ran alone.
pub(crate) fn may_share(request: &Request) -> bool {
    request.sequence.may_reuse() && !request.is_alone
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

/// Most tokens of a sequence: the context, or the capacity of the cache if that is less.
pub(crate) fn longest(context: u32, ledger: &Ledger) -> u32 {
    if ledger.blocks_of(context) <= ledger.total_blocks() {
        context
    } else {
        ledger.total_blocks().saturating_mul(BLOCK_TOKENS)
    }
}

//! Counts of reused prompt tokens, and of others by reason.

/// Tokens of prompts, counted when a prompt is matched ([`crate::PrefixTree::match_and_lock`]). If the device fails in
/// an admission, its next attempt counts again. Each token is in exactly one of the six groups, so that these add up to
/// [`Self::prompt_tokens`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseStats {
    /// Prompts, those included whose admission failed afterwards, because the device did.
    pub prompts: u64,
    /// Prompts that reused something.
    pub hits: u64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens that were reused, and not computed again.
    pub reused: u64,
    /// Tokens whose blocks are in the tree, but after the last checkpoint: computed again.
    pub no_checkpoint: u64,
    /// Tokens whose blocks were in the tree and were evicted, as far as that is remembered.
    pub missed_by_eviction: u64,
    /// Tokens of the first block of prompts that matched nothing, if another root has that block, as far as that is
    /// remembered.
    pub other_root: u64,
    /// Tokens after the last boundary that leaves a token to compute: they fill no block.
    pub tail: u64,
    /// Tokens of new prompts, or of new continuations: no root has had them, as far as is known.
    pub never_seen: u64,
    /// Prompts by the origin of the checkpoint from which they continued, by [`crate::policy::Origin::index`].
    pub hits_by_origin: [u64; 4],
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted.
    pub evicted_checkpoints: u64,
}

//! Why tokens were reused, or were not.

/// Tokens of prompts, counted when they are adopted: an admission that the device fails afterwards counts, and its next
/// attempt counts again. Each token is in one of the six groups, so that they add up to [`Self::prompt_tokens`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseStats {
    /// Prompts.
    pub prompts: u64,
    /// Prompts that reused something.
    pub hits: u64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Reused: not computed again.
    pub reused: u64,
    /// Their blocks are in the tree, but behind the last checkpoint: computed again.
    pub no_checkpoint: u64,
    /// Their blocks were in the tree and were evicted, as far as that is remembered.
    pub evicted: u64,
    /// Of prompts of which nothing matched the first block, if another root has had it, as far as that is remembered.
    pub other_root: u64,
    /// Behind the last boundary that leaves a token to compute: they fill no block.
    pub partial: u64,
    /// No root has them, as far as is known.
    pub diverged: u64,
    /// Prompts by the origin of the checkpoint that they went on from, by [`crate::policy::Origin::index`].
    pub hits_by_origin: [u64; 4],
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted.
    pub evicted_checkpoints: u64,
}

//! Eviction: leaf first, by rank, and never what someone refers to.

use crate::mistake::{Mistake, made};
use crate::policy::Policy;
use crate::tree::{Freed, PrefixTree};

/// What is to be freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Blocks.
    pub blocks: u32,
    /// Checkpoints.
    pub checkpoints: u32,
}

/// More was asked for than nobody refers to. Nothing was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} blocks and {} checkpoints were asked for, and {} and {} can be evicted",
    needed.blocks, needed.checkpoints, evictable.blocks, evictable.checkpoints
)]
pub struct NotEvictable {
    /// What was asked for.
    pub needed: Need,
    /// What nobody refers to.
    pub evictable: Need,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Frees at least what is needed, or nothing. Whole segments go, so that it can be more.
    ///
    /// # Errors
    /// [`NotEvictable`].
    pub fn evict(
        &mut self,
        needed: Need,
        mut freed: impl FnMut(Freed<B, C>),
    ) -> Result<(), NotEvictable> {
        let counts = self.counts;
        let evictable =
            Need { blocks: counts.evictable_blocks, checkpoints: counts.evictable_checkpoints };
        if needed.blocks > evictable.blocks || needed.checkpoints > evictable.checkpoints {
            return Err(NotEvictable { needed, evictable });
        }
        let short = u32::from(made(Mistake::OneShort));
        let blocks = counts.blocks - needed.blocks.saturating_sub(short);
        let checkpoints = counts.checkpoints - needed.checkpoints;
        while self.counts.blocks > blocks || self.counts.checkpoints > checkpoints {
            if !self.evict_first(&mut freed) {
                break;
            }
        }
        Ok(())
    }

    /// Evicts the leaf of the lowest rank, and what needs nothing else then: its checkpoint, its blocks, and the
    /// blocks above it up to the next branch, checkpoint or reference. `false` if there is no leaf that nobody refers
    /// to.
    pub fn evict_first(&mut self, mut freed: impl FnMut(Freed<B, C>)) -> bool {
        let Some((_, key)) = self.order.pop_first() else { return false };
        let node = &mut self.nodes[key];
        node.rank = None;
        if let Some(checkpoint) = node.checkpoint.take() {
            self.counts.checkpoints -= 1;
            self.counts.evictable_checkpoints -= u32::from(node.holds == 0);
            self.stats.evicted_checkpoints += 1;
            freed(Freed::Checkpoint(checkpoint));
        }
        self.settle(key, true, &mut freed);
        true
    }
}

//! Eviction: leaves first, by rank, and nothing that a reference protects. Of a path that stays, only expendable
//! checkpoints are evicted.

use crate::mistake::{Mistake, made};
use crate::node::NodeKey;
use crate::order::Order;
use crate::policy::Policy;
use crate::tree::{Freed, PrefixTree};

/// Number of blocks and checkpoints to free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Blocks.
    pub blocks: u32,
    /// Checkpoints.
    pub checkpoints: u32,
}

/// More was requested than can be evicted. Nothing was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} blocks and {} checkpoints were asked for, and {} and {} can be evicted",
    needed.blocks, needed.checkpoints, evictable.blocks, evictable.checkpoints
)]
pub struct NotEvictable {
    /// The requested numbers.
    pub needed: Need,
    /// The numbers that can be evicted.
    pub evictable: Need,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Frees at least `needed`, or nothing. Whole segments are evicted, so that more may be freed. For blocks only
    /// leaves are evicted; for checkpoints also expendable ones.
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
        while self.counts.checkpoints > checkpoints && self.evict_first(&mut freed) {}
        while self.counts.blocks > blocks {
            let Some(key) = self.leaves.pop_first() else { break };
            self.evict_node(key, &mut freed);
        }
        Ok(())
    }

    /// Evicts the leaf or expendable checkpoint of the lowest rank. A leaf is evicted with its checkpoint, its blocks,
    /// and the blocks above it up to the next branch, checkpoint or reference; of an expendable segment only the
    /// checkpoint is. `false` if nothing can be evicted.
    pub fn evict_first(&mut self, mut freed: impl FnMut(Freed<B, C>)) -> bool {
        let firsts = [&self.leaves, &self.expendable].map(Order::first);
        let Some((_, key)) = firsts.into_iter().flatten().min() else { return false };
        let _ = self.leaves.remove(key) || self.expendable.remove(key);
        self.evict_node(key, &mut freed);
        true
    }

    /// Evicts a segment that was listed.
    fn evict_node(&mut self, key: NodeKey, freed: &mut impl FnMut(Freed<B, C>)) {
        let node = &mut self.nodes[key];
        node.is_listed = false;
        if let Some(checkpoint) = node.checkpoint.take() {
            self.counts.checkpoints -= 1;
            self.counts.evictable_checkpoints -= u32::from(node.lock_ref == 0);
            self.stats.evicted_checkpoints += 1;
            freed(Freed::Checkpoint(checkpoint));
        }
        self.settle(key, true, freed);
    }
}

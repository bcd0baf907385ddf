//! Leases: prefixes that are kept until a time, although no request references them.

use std::time::Duration;

use crate::mistake::{Mistake, made};
use crate::node::{LeaseEntry, NodeKey};
use crate::policy::Policy;
use crate::reference::Foreign;
use crate::root::RootKey;
use crate::tree::{Freed, PrefixTree, TreeId};

/// A prefix that is pinned until a time. Dropping it changes nothing: it still ends at that time.
#[derive(Debug)]
pub struct Lease {
    tree: TreeId,
    number: u64,
    tokens: u32,
    bytes: u64,
}

impl Lease {
    /// Tokens that it keeps, down to the deepest checkpoint of the requested prefix.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Bytes that it counts against the budget: all blocks and checkpoints of those tokens, also if
    /// other leases pin them too.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Why a prefix was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinRefused {
    /// The tree has no checkpoint of it.
    #[error("no checkpoint of this prefix is there, so there is nothing to pin")]
    NothingThere,
    /// All leases together would exceed the budget.
    #[error("this lease needs {needed} bytes, and leases hold {held} of {budget}")]
    OverBudget {
        /// Bytes of this lease.
        needed: u64,
        /// Bytes of all other leases.
        held: u64,
        /// Budget of all leases.
        budget: u64,
    },
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Keeps the blocks and checkpoints of the whole blocks of `prefix`, down to the deepest checkpoint, until
    /// [`Self::expire`] is called with a later time than `until`. The caller chooses the origin of these times.
    ///
    /// # Errors
    /// [`PinRefused`].
    pub fn pin(
        &mut self,
        root: &RootKey,
        prefix: &[u32],
        until: Duration,
    ) -> Result<Lease, PinRefused> {
        let blocks = &prefix[..prefix.len().min(u32::MAX as usize / T * T)];
        let walk = self.root(root).map(|root| self.walk(root, blocks.as_chunks().0));
        let walk = walk.filter(|walk| walk.hit_depth > 0).ok_or(PinRefused::NothingThere)?;
        let up = |&key: &NodeKey| self.nodes[key].parent;
        let path = std::iter::successors(Some(walk.hit), up);
        let checkpoints = path.filter(|&key| self.nodes[key].checkpoint.is_some()).count() as u64;
        let needed = self.block_bytes(walk.hit_depth as usize);
        let checkpoint_bytes = checkpoints.saturating_mul(self.limits.checkpoint_bytes);
        let needed = needed.saturating_add(checkpoint_bytes);
        let (held, budget) = (self.leased_bytes, self.limits.lease_bytes);
        if needed > budget.saturating_sub(held) {
            return Err(PinRefused::OverBudget { needed, held, budget });
        }
        if !made(Mistake::LeaseIgnored) {
            self.lock(walk.hit);
        }
        self.leased_bytes += needed;
        let number = self.next_lease;
        self.next_lease += 1;
        self.leases.insert(number, LeaseEntry { node: walk.hit, until, bytes: needed });
        Ok(Lease { tree: self.id, number, tokens: walk.hit_depth * T as u32, bytes: needed })
    }

    /// Ends a lease; `false` if it has expired.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn unpin(
        &mut self,
        lease: Lease,
        mut freed: impl FnMut(Freed<B, C>),
    ) -> Result<bool, Foreign> {
        if lease.tree != self.id {
            return Err(Foreign);
        }
        Ok(self.end(lease.number, &mut freed))
    }

    /// Ends all leases whose time is before `now`; returns their number.
    pub fn expire(&mut self, now: Duration, mut freed: impl FnMut(Freed<B, C>)) -> usize {
        let over = self.leases.iter().filter(|(_, lease)| lease.until < now);
        let over: Vec<_> = over.map(|(&number, _)| number).collect();
        over.iter().filter(|&&number| self.end(number, &mut freed)).count()
    }

    fn end(&mut self, number: u64, freed: &mut impl FnMut(Freed<B, C>)) -> bool {
        let Some(entry) = self.leases.remove(&number) else { return false };
        self.leased_bytes -= entry.bytes;
        if !made(Mistake::LeaseIgnored) {
            self.unlock(entry.node, freed);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Lru, Origin};
    use crate::tree::Limits;

    /// A lease that has expired does not end the one that was taken after it.
    #[test]
    fn an_expired_lease_ends_no_other() {
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 1,
            lease_bytes: 2,
            remembered: 0,
            reserved_blocks: 1,
        };
        let mut tree = PrefixTree::<u32, u32, _, 2>::new(limits, Lru);
        let root = RootKey::new(b"", b"", b"");
        let mut at = tree.match_and_lock(&root, &[]).reference;
        tree.extend(&mut at, &[[1, 2]], |_| 0, drop).unwrap();
        tree.attach(&at, 1, Origin::Prompt, 0).unwrap();
        tree.release(at, drop).unwrap();
        let expired = tree.pin(&root, &[1, 2], Duration::ZERO).unwrap();
        assert_eq!(tree.expire(Duration::from_secs(1), drop), 1);
        let lease = tree.pin(&root, &[1, 2], Duration::from_secs(2)).unwrap();
        assert_ne!(lease.number, expired.number);
        assert_eq!(tree.unpin(expired, drop), Ok(false));
        assert_eq!(tree.counts().evictable_blocks, 0, "the other one holds the block");
        assert_eq!(tree.unpin(lease, drop), Ok(true));
        assert_eq!(tree.counts().evictable_blocks, 1);
        tree.audit().unwrap();
    }
}

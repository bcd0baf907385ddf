//! The shared prefixes of a cache, as far as the model knows them.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_kv::{BlockId, RequestId};

use super::request::{Lease, Request};
use super::wanted::Tier;
use crate::answer::Counts;
use crate::op::Name;
use crate::text::{Prefix, Text};

/// The shared prefixes of a cache.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    pub suspended: BTreeMap<Name, Request>,
    pub leases: BTreeMap<Name, Lease>,
    /// Blocks that the tree may have, and the prefix that each ends.
    pub tree: BTreeMap<BlockId, Prefix>,
    /// The inverse of `tree`.
    pub blocks: BTreeMap<Prefix, BlockId>,
    /// Prefixes that came back from host memory to blocks that the model does not know yet. The tree may have them too.
    pub unseen: BTreeSet<Prefix>,
    /// Prefixes at whose end a checkpoint may be.
    pub checkpoints: BTreeSet<Prefix>,
    /// Prefixes at whose end a checkpoint must be: it was used, and the prefix has had a reference since.
    pub seen: BTreeSet<Prefix>,
    /// From the last commit: requests whose token ids were passed, their number of tokens before it, and whether the
    /// step could save.
    pub pending: Vec<(RequestId, u32, bool)>,
    /// The counts after the last operation.
    pub counts: Option<Counts>,
    /// Whether the tree has every block that it may have, because the events after the last operation said so.
    pub is_told: bool,
    pub tier: Tier,
}

impl Sharing {
    /// The block moves to the tree.
    pub fn register(&mut self, prefix: Prefix, block: BlockId) {
        // An earlier block of this prefix was evicted, with its checkpoint.
        if let Some(before) = self.blocks.insert(prefix.clone(), block) {
            self.tree.remove(&before);
        }
        self.unseen.remove(&prefix);
        self.checkpoints.remove(&prefix);
        self.seen.remove(&prefix);
        self.tree.insert(block, prefix);
    }

    /// The tree has the prefix again, in the same block or in another.
    pub fn restored(&mut self, prefix: Prefix) {
        if let Some(before) = self.blocks.remove(&prefix) {
            self.tree.remove(&before);
        }
        self.unseen.insert(prefix);
    }

    /// Records the block of a prefix that came back from host memory.
    pub fn saw_block(&mut self, prefix: Prefix, block: BlockId) {
        self.unseen.remove(&prefix);
        self.blocks.insert(prefix.clone(), block);
        self.tree.insert(block, prefix);
    }

    /// The tree has exactly these blocks.
    pub fn only(&mut self, there: &BTreeSet<&Prefix>) {
        self.tree.retain(|_, prefix| there.contains(prefix));
        self.blocks.retain(|prefix, _| there.contains(prefix));
        self.unseen.retain(|prefix| there.contains(prefix));
        self.checkpoints.retain(|prefix| there.contains(prefix));
        self.is_told = true;
    }

    /// Whether the tree may have the block at the end of a prefix.
    pub fn may_have(&self, prefix: &Prefix) -> bool {
        self.blocks.contains_key(prefix) || self.unseen.contains(prefix)
    }

    /// The number of blocks, at most `most`, of the longest prefix of a text for which `is_there` is true; 0 if there
    /// is none.
    pub fn deepest(text: &Text, most: u32, is_there: impl Fn(&Prefix) -> bool) -> u32 {
        (1..=most).rev().find(|&blocks| is_there(&text.blocks(blocks))).unwrap_or(0)
    }

    /// Whether there may be a checkpoint at the end of the prefix.
    pub fn may_go_on_from(&self, prefix: &Prefix) -> bool {
        self.checkpoints.contains(prefix)
    }

    /// Whether there must be a checkpoint at the end of the prefix.
    pub fn must_go_on_from(&self, prefix: &Prefix) -> bool {
        self.seen.contains(prefix)
    }

    /// The block at the end of a prefix, if the tree may have it.
    pub fn block(&self, prefix: &Prefix) -> Option<BlockId> {
        self.blocks.get(prefix).copied()
    }

    /// Records that a checkpoint at the end of the prefix was used.
    pub fn saw(&mut self, prefix: Prefix) {
        self.seen.insert(prefix);
    }
}

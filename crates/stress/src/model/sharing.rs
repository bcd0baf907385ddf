//! What requests of a cache share, as far as the model knows.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_kv::{BlockId, RequestId};

use super::request::{Lease, Request};
use super::wanted::Tier;
use crate::answer::Counts;
use crate::op::Name;
use crate::text::{Prefix, Text};

/// What requests of a cache share.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    pub suspended: BTreeMap<Name, Request>,
    pub leases: BTreeMap<Name, Lease>,
    /// Blocks that the tree may have, with what they hold.
    pub tree: BTreeMap<BlockId, Prefix>,
    /// The same, by what they hold.
    pub blocks: BTreeMap<Prefix, BlockId>,
    /// Blocks that came back from host memory, and that nobody has seen since: the tree may have them, too.
    pub unseen: BTreeSet<Prefix>,
    /// Where a checkpoint may be.
    pub checkpoints: BTreeSet<Prefix>,
    /// Where one must be: it was seen, and someone refers to it since.
    pub seen: BTreeSet<Prefix>,
    /// Of the last commit: requests whose tokens were told, and how many they had before.
    pub pending: Vec<(RequestId, u32, bool)>,
    /// As counted after the last operation.
    pub counts: Option<Counts>,
    /// Whether the tree has all that it may have: events told it after the last operation.
    pub is_told: bool,
    pub tier: Tier,
}

impl Sharing {
    /// The block becomes the tree's.
    pub fn register(&mut self, prefix: Prefix, block: BlockId) {
        // What was there before was evicted, with its checkpoint.
        if let Some(before) = self.blocks.insert(prefix.clone(), block) {
            self.tree.remove(&before);
        }
        self.unseen.remove(&prefix);
        self.checkpoints.remove(&prefix);
        self.seen.remove(&prefix);
        self.tree.insert(block, prefix);
    }

    /// The tree has it, in the block that it had or in another.
    pub fn restored(&mut self, prefix: Prefix) {
        if let Some(before) = self.blocks.remove(&prefix) {
            self.tree.remove(&before);
        }
        self.unseen.insert(prefix);
    }

    /// What came back is seen to be in this block.
    pub fn saw_block(&mut self, prefix: Prefix, block: BlockId) {
        self.unseen.remove(&prefix);
        self.blocks.insert(prefix.clone(), block);
        self.tree.insert(block, prefix);
    }

    /// The tree has these blocks, and no others.
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

    /// The deepest of the first `most` blocks of a text that is in `set`; 0 if none is.
    pub fn deepest(text: &Text, most: u32, is_there: impl Fn(&Prefix) -> bool) -> u32 {
        (1..=most).rev().find(|&blocks| is_there(&text.blocks(blocks))).unwrap_or(0)
    }

    /// Whether a checkpoint may be there.
    pub fn may_go_on_from(&self, prefix: &Prefix) -> bool {
        self.checkpoints.contains(prefix)
    }

    /// Whether a checkpoint must be there.
    pub fn must_go_on_from(&self, prefix: &Prefix) -> bool {
        self.seen.contains(prefix)
    }

    /// The block that holds the end of a prefix, if the tree may have it.
    pub fn block(&self, prefix: &Prefix) -> Option<BlockId> {
        self.blocks.get(prefix).copied()
    }

    /// A checkpoint was there.
    pub fn saw(&mut self, prefix: Prefix) {
        self.seen.insert(prefix);
    }
}

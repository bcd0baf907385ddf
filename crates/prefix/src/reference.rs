//! References: they protect the paths that requests use.

use std::hash::BuildHasher;

use crate::cell::CellKey;
use crate::mistake::{Mistake, made};
use crate::node::NodeKey;
use crate::policy::Policy;
use crate::root::RootKey;
use crate::tree::{Freed, PrefixTree, TreeId, tokens, whole_blocks};

/// A request's place in the tree: nothing at or above it is evicted before the reference is released.
///
/// It cannot be copied, and releasing it consumes it, so nothing is released twice. A reference that is dropped holds
/// its blocks for ever: memory is lost, but never shared by mistake.
#[derive(Debug)]
#[must_use = "a reference that is dropped holds its blocks for ever; release it"]
pub struct Reference {
    pub(crate) tree: TreeId,
    /// The segment in which it was taken. After a split it may be the lower part, below the reference.
    pub(crate) node: NodeKey,
    /// Number of blocks above it.
    pub(crate) depth: u32,
    /// The last of these blocks; `None` at a root.
    pub(crate) cell: Option<CellKey>,
}

impl Reference {
    /// Blocks from the root down to it.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.depth
    }
}

/// A reference or a lease of another tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this belongs to another prefix tree")]
pub struct Foreign;

/// What a prompt reuses, and the reference that protects it.
#[derive(Debug)]
#[must_use = "its reference holds blocks"]
pub struct PrefixMatch {
    /// To the end of the reused blocks.
    pub reference: Reference,
    /// Tokens that are not computed again. They end at a checkpoint; 0 without one.
    pub reused: u32,
    /// Tokens whose blocks are in the tree. Those after `reused` are computed again, into blocks of the request.
    pub matched: u32,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Finds the deepest checkpoint that the tree has of `prompt`, and protects the path down to it. Counts a use of
    /// it, and why the rest of the prompt is not reused.
    pub fn match_and_lock(&mut self, root: &RootKey, prompt: &[u32]) -> PrefixMatch {
        let root = self.root_or_new(root);
        let blocks = whole_blocks(prompt);
        let walk = self.walk(root, blocks);
        let prefix_hash = self.prefix_hash_at(walk.node, walk.cell);
        let evicted = self.evicted_behind(prefix_hash, &blocks[walk.depth as usize..]);
        let elsewhere = if walk.depth == 0 { self.in_another_root(root, blocks) } else { 0 };
        let elsewhere = elsewhere.max(evicted) - evicted;
        let stats = &mut self.stats;
        let (len, blocks) = (prompt.len() as u64, blocks.len() as u32);
        let in_tokens = |blocks: u32| u64::from(blocks) * T as u64;
        stats.prompts += 1;
        stats.prompt_tokens += len;
        stats.reused += in_tokens(walk.hit_depth);
        stats.no_checkpoint += in_tokens(walk.depth - walk.hit_depth);
        stats.missed_by_eviction += in_tokens(evicted);
        stats.other_root += in_tokens(elsewhere);
        stats.never_seen += in_tokens(blocks - walk.depth - evicted - elsewhere);
        stats.tail += len - in_tokens(blocks);
        if walk.hit_depth > 0 {
            stats.hits += 1;
            stats.hits_by_origin[self.nodes[walk.hit].usage.origin.index()] += 1;
        }
        let reference = self.lock_at(walk.hit, walk.hit_depth, walk.hit_cell);
        self.touch(walk.hit);
        let [reused, matched] = [walk.hit_depth, walk.depth].map(tokens::<T>);
        PrefixMatch { reference, reused, matched }
    }

    /// One more reference at the same place, for a request that continues from the same tokens.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn lock_again(&mut self, at: &Reference) -> Result<Reference, Foreign> {
        let segment = self.segment_of(at, at.depth)?;
        Ok(self.lock_at(segment, at.depth, at.cell))
    }

    /// Counts a use of the path to a reference, by a prompt that continued from another tree.
    /// [`Self::match_and_lock`] counts its own use.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn touch_at(&mut self, at: &Reference) -> Result<(), Foreign> {
        let segment = self.segment_of(at, at.depth)?;
        self.touch(segment);
        Ok(())
    }

    /// The checkpoint at a reference; `None` if there is none.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn checkpoint(&self, at: &Reference) -> Result<Option<&C>, Foreign> {
        let node = &self.nodes[self.segment_of(at, at.depth)?];
        Ok(node.checkpoint.as_ref().filter(|_| node.end() == at.depth))
    }

    /// The blocks from the root down to a reference, the deepest first, each with its number from the root.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn blocks(&self, at: &Reference) -> Result<impl Iterator<Item = (u32, &B)>, Foreign> {
        self.check(at)?;
        let cells = self.cells.upward(at.cell).map(|key| &self.cells[key].block);
        Ok((0..at.depth).rev().zip(cells))
    }

    /// Releases a reference. Frees the blocks that now have neither a reference nor a checkpoint at or below them.
    ///
    /// # Errors
    /// [`Foreign`]; then the reference is lost, and its own tree keeps the blocks.
    pub fn release(
        &mut self,
        reference: Reference,
        mut freed: impl FnMut(Freed<B, C>),
    ) -> Result<(), Foreign> {
        self.check(&reference)?;
        self.unlock(reference.node, &mut freed);
        Ok(())
    }

    pub(crate) fn check(&self, at: &Reference) -> Result<(), Foreign> {
        if at.tree == self.id { Ok(()) } else { Err(Foreign) }
    }

    /// The segment at or above `at` that the last of the first `depth` blocks belongs to.
    pub(crate) fn segment_of(&self, at: &Reference, depth: u32) -> Result<NodeKey, Foreign> {
        self.check(at)?;
        let mut segment = at.node;
        while let (true, Some(parent)) =
            (depth <= self.nodes[segment].start, self.nodes[segment].parent)
        {
            segment = parent;
        }
        Ok(segment)
    }

    /// A new reference, which protects the path down to it.
    pub(crate) fn lock_at(
        &mut self,
        node: NodeKey,
        depth: u32,
        cell: Option<CellKey>,
    ) -> Reference {
        self.lock(node);
        Reference { tree: self.id, node, depth, cell }
    }

    /// Moves a reference, and releases its previous place.
    pub(crate) fn move_to(
        &mut self,
        at: &mut Reference,
        (node, depth, cell): (NodeKey, u32, Option<CellKey>),
        freed: &mut impl FnMut(Freed<B, C>),
    ) {
        if at.node != node {
            self.lock(node);
            let left = std::mem::replace(&mut at.node, node);
            self.unlock(left, freed);
        }
        (at.depth, at.cell) = (depth, cell);
    }

    /// Counts one more reference to a node, and protects the nodes from there up to the root.
    pub(crate) fn lock(&mut self, node: NodeKey) {
        self.nodes[node].references += 1;
        if made(Mistake::ReferencedEvicted) && self.nodes[node].checkpoint.is_some() {
            return;
        }
        let mut next = Some(node);
        while let Some(key) = next {
            let node = &mut self.nodes[key];
            node.lock_ref += 1;
            if node.lock_ref > 1 {
                return;
            }
            self.counts.evictable_blocks -= node.len;
            self.counts.evictable_checkpoints -= u32::from(node.checkpoint.is_some());
            next = node.parent;
            self.unlist(key);
        }
    }

    /// Counts one reference less, and frees the segments that are no longer protected or needed.
    pub(crate) fn unlock(&mut self, node: NodeKey, freed: &mut impl FnMut(Freed<B, C>)) {
        let Some(left) = self.nodes.get_mut(node) else { return };
        left.references -= 1;
        if made(Mistake::ReferencedEvicted) && left.lock_ref == 0 {
            return;
        }
        let mut next = Some(node);
        while let Some(key) = next {
            let node = &mut self.nodes[key];
            node.lock_ref -= 1;
            if node.lock_ref > 0 {
                break;
            }
            self.counts.evictable_blocks += node.len;
            self.counts.evictable_checkpoints += u32::from(node.checkpoint.is_some());
            next = node.parent;
            if node.children > 0
                && node.checkpoint.is_some()
                && self.policy.is_expendable(&node.usage)
            {
                let rank = self.policy.rank(&node.usage);
                node.is_listed = true;
                self.expendable.insert(rank, key);
            }
        }
        self.settle(node, false, freed);
    }

    /// Removes a segment from `leaves` or `expendable`, if it is listed.
    fn unlist(&mut self, key: NodeKey) {
        if std::mem::take(&mut self.nodes[key].is_listed) {
            let _ = self.leaves.remove(key) || self.expendable.remove(key);
        }
    }

    /// Frees an unprotected segment without children and checkpoint, and those above it that become such. Lists the
    /// first one that stays if it is now an unreferenced leaf.
    pub(crate) fn settle(
        &mut self,
        mut key: NodeKey,
        evicted: bool,
        freed: &mut impl FnMut(Freed<B, C>),
    ) {
        loop {
            let node = &mut self.nodes[key];
            if node.lock_ref > 0 || node.children > 0 {
                return;
            }
            let left = made(Mistake::NothingTrimmed) && !evicted && node.root.is_none();
            if node.checkpoint.is_some() || left {
                let rank = self.policy.rank(&node.usage);
                self.unlist(key);
                self.nodes[key].is_listed = true;
                self.leaves.insert(rank, key);
                return;
            }
            match self.remove(key, evicted, freed) {
                Some(parent) => key = parent,
                None => return,
            }
        }
    }

    /// Removes a leaf that has no checkpoint; returns its parent.
    fn remove(
        &mut self,
        key: NodeKey,
        evicted: bool,
        freed: &mut impl FnMut(Freed<B, C>),
    ) -> Option<NodeKey> {
        self.unlist_child(key);
        let node = self.nodes.remove(key)?;
        let Some(parent) = node.parent else {
            self.roots.remove(&node.root?.key);
            return None;
        };
        self.stats.evicted_blocks += u64::from(if evicted { node.len } else { 0 });
        self.counts.segments -= 1;
        self.counts.blocks -= node.len;
        self.counts.evictable_blocks -= node.len;
        self.nodes[parent].children -= 1;
        self.log_removed(&node);
        // The deepest first, so that the blocks above a remaining block are always there.
        let mut next = node.last();
        for _ in 0..node.len {
            let Some(cell) = next.and_then(|key| self.cells.remove(key)) else { break };
            if evicted {
                self.evicted.insert(cell.prefix_hash, ());
            }
            next = cell.above;
            freed(Freed::Block(cell.block));
        }
        Some(parent)
    }

    /// Counts a hit of a checkpoint, and a use of its segment and all above it.
    fn touch(&mut self, hit: NodeKey) {
        // No bytes may come between two hits, and the second one counts as later.
        let is_hit = self.nodes[hit].parent.is_some();
        self.admitted_bytes = self.admitted_bytes.saturating_add(is_hit.into());
        let now = self.admitted_bytes;
        self.nodes[hit].usage.hits = self.nodes[hit].usage.hits.saturating_add(1);
        let mut next = Some(hit);
        while let Some(key) = next {
            let node = &mut self.nodes[key];
            node.usage.last_use = now;
            next = node.parent;
        }
    }

    /// Number of the blocks after a prefix that were in the tree and were evicted, as far as that is remembered.
    fn evicted_behind(&self, prefix_hash: u64, blocks: &[[u32; T]]) -> u32 {
        let behind = blocks.iter().scan(prefix_hash, |prefix_hash, block| {
            *prefix_hash = self.hasher.hash_one((*prefix_hash, block));
            self.evicted.get(*prefix_hash)
        });
        behind.count() as u32
    }

    /// 1 if another root has the first block of `prompt`, as far as that is remembered. No further blocks: the time of an
    /// admission must not tell how much of a prompt others have computed under another salt.
    fn in_another_root(&self, root: NodeKey, prompt: &[[u32; T]]) -> u32 {
        let Some(first) = prompt.first() else { return 0 };
        let found = self.first_blocks.get(self.hasher.hash_one(first));
        found.is_some_and(|other| other != root && self.nodes.contains_key(other)).into()
    }
}

//! Registration: blocks and checkpoints enter the tree.

use std::hash::BuildHasher;

use crate::cell::{Cell, CellKey};
use crate::mistake::{Mistake, made};
use crate::node::{Node, NodeKey};
use crate::policy::{Origin, Policy};
use crate::reference::{Foreign, Reference};
use crate::serial::Serial;
use crate::tree::{Freed, PrefixTree};
use crate::weak_checkpoint::WeakCheckpoint;

/// A checkpoint that the tree did not take.
#[derive(Debug, PartialEq, Eq)]
pub struct NotTaken<C>(
    /// The checkpoint.
    pub C,
);

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Registers the blocks of a request that follow `at`, and moves `at` to their end. `tokens[i]` are the tokens of
    /// the `i`-th block, and `take(i)` hands the block over. It is called, in order, only for blocks that the tree
    /// does not have yet: the first request to register a block wins, and others keep their own copies. Returns the
    /// number of blocks taken.
    ///
    /// # Errors
    /// [`Foreign`]; nothing is taken then.
    pub fn extend(
        &mut self,
        at: &mut Reference,
        tokens: &[[u32; T]],
        mut take: impl FnMut(usize) -> B,
        mut freed: impl FnMut(Freed<B, C>),
    ) -> Result<usize, Foreign> {
        let (mut node, mut depth, mut last) = (self.segment_of(at, at.depth)?, at.depth, at.cell);
        let mut known = 0;
        let mut taken = 0;
        while known < tokens.len() {
            if depth < self.nodes[node].end() {
                let is_inside = depth > self.nodes[node].start;
                let inside = last.filter(|_| is_inside).and_then(|last| self.cells[last].below);
                let next = if is_inside { inside } else { self.nodes[node].first() };
                let (equal, found) = self.cells.common(next, &tokens[known..]);
                known += equal as usize;
                (depth, last) = (depth + equal, found.or(last));
                if known < tokens.len() && depth < self.nodes[node].end() {
                    node = self.split(node, (depth, last));
                }
                continue;
            }
            let child = self.child(node, &tokens[known]);
            if let Some(child) = child.filter(|_| !made(Mistake::SecondCommitWins)) {
                node = child;
                continue;
            }
            let new = &tokens[known..];
            let is_own = at.node == node;
            (node, last) = self.append((node, is_own), new, |index| take(known + index));
            depth += new.len() as u32;
            taken = new.len();
            break;
        }
        self.move_to(at, (node, depth, last), &mut freed);
        Ok(taken)
    }

    /// Gives the tree a checkpoint at the end of the first `blocks` blocks above `at`.
    ///
    /// # Errors
    /// [`NotTaken`], with the checkpoint, if there is one already, if `blocks` is 0 or more than there are above `at`,
    /// or if `at` is of another tree.
    pub fn attach(
        &mut self,
        at: &Reference,
        blocks: u32,
        origin: Origin,
        checkpoint: C,
    ) -> Result<WeakCheckpoint, NotTaken<C>> {
        let segment = self.segment_of(at, blocks);
        let Ok(mut segment) = segment else { return Err(NotTaken(checkpoint)) };
        if blocks == 0 || blocks > at.depth {
            return Err(NotTaken(checkpoint));
        }
        if blocks < self.nodes[segment].end() {
            let last = self.cells.upward(at.cell).nth((at.depth - blocks) as usize);
            segment = self.split(segment, (blocks, last));
        }
        if self.nodes[segment].checkpoint.is_some() {
            return Err(NotTaken(checkpoint));
        }
        self.admitted_bytes = self.admitted_bytes.saturating_add(self.limits.checkpoint_bytes);
        let usage = self.usage_now(origin);
        let node = &mut self.nodes[segment];
        node.checkpoint = Some(checkpoint);
        node.usage = usage;
        self.counts.checkpoints += 1;
        self.counts.evictable_checkpoints += u32::from(node.lock_ref == 0);
        Ok(WeakCheckpoint { tree: self.id, node: segment })
    }

    /// Adds new blocks after the end of a segment. Returns the segment that has them, and the last of them. `is_own`:
    /// whether the reference for which they are added is in `parent`.
    fn append(
        &mut self,
        (parent, is_own): (NodeKey, bool),
        tokens: &[[u32; T]],
        take: impl FnMut(usize) -> B,
    ) -> (NodeKey, Option<CellKey>) {
        let (bytes, len) = (self.block_bytes(tokens.len()), tokens.len() as u32);
        self.admitted_bytes = self.admitted_bytes.saturating_add(bytes);
        self.counts.blocks += len;
        let last = self.nodes[parent].last();
        let prefix_hash = self.prefix_hash_at(parent, last);
        let Some(ends) = self.link((prefix_hash, last), tokens, take) else {
            return (parent, last);
        };
        let above = &mut self.nodes[parent];
        let open = above.children == 0 && above.checkpoint.is_none() && above.root.is_none();
        if let (true, Some((_, last))) =
            (open && is_own && above.references == 1, above.ends.as_mut())
        {
            self.cells[*last].below = Some(ends.0);
            (*last, above.len) = (ends.1, above.len + len);
            self.log_stored(parent, ends.0, len);
            return (parent, Some(ends.1));
        }
        above.children += 1;
        let (start, is_first) = (above.end(), above.root.is_some());
        let usage = self.usage_now(Origin::Prompt);
        self.counts.segments += 1;
        // Unreferenced until the reference moves here.
        self.counts.evictable_blocks += len;
        let key = self.nodes.insert(Node::new(parent, start, (ends.0, ends.1, len), usage));
        self.list_child(key);
        self.log_stored(key, ends.0, len);
        if is_first {
            self.first_blocks.insert(self.hasher.hash_one(tokens[0]), parent);
        }
        (key, Some(ends.1))
    }

    /// Creates cells for blocks after a block with this prefix hash, linked to it and to each other. Returns the
    /// first and the last.
    fn link(
        &mut self,
        (mut prefix_hash, mut above): (u64, Option<CellKey>),
        tokens: &[[u32; T]],
        take: impl FnMut(usize) -> B,
    ) -> Option<(CellKey, CellKey)> {
        let mut ends: Option<(CellKey, CellKey)> = None;
        for (tokens, block) in tokens.iter().zip((0..tokens.len()).map(take)) {
            prefix_hash = self.hasher.hash_one((prefix_hash, tokens));
            // A block that is registered again no longer counts as evicted.
            self.evicted.remove(prefix_hash);
            let serial = Serial::take(&mut self.next_serial);
            let cell = Cell { block, serial, above, below: None, prefix_hash };
            let key = self.cells.insert(tokens, cell);
            if let Some((_, last)) = ends {
                self.cells[last].below = Some(key);
            }
            ends = Some((ends.map_or(key, |(first, _)| first), key));
            above = Some(key);
        }
        ends
    }

    /// Cuts a segment after `depth` blocks, counted from the root; `last` is the block before the cut. Returns the
    /// upper part. The lower part keeps the key, the checkpoint and the references.
    pub(crate) fn split(&mut self, key: NodeKey, (depth, last): (u32, Option<CellKey>)) -> NodeKey {
        let Some((last, Some((first, end)))) = last.zip(Some(self.nodes[key].ends)) else {
            unreachable!("a segment is cut behind one of its blocks, and a root has none")
        };
        self.unlist_child(key);
        let Some(lower) = self.cells[last].below.take() else {
            unreachable!("a segment is cut before its end")
        };
        if made(Mistake::SplitMovesSerials) {
            let swapped = (self.cells[lower].serial, self.cells[last].serial);
            (self.cells[last].serial, self.cells[lower].serial) = swapped;
        }
        let node = &mut self.nodes[key];
        let (parent, start, usage) = (node.parent, node.start, node.usage);
        let checkpoint = node.checkpoint.take_if(|_| made(Mistake::SplitMovesCheckpoint));
        node.ends = Some((lower, end));
        (node.start, node.len) = (depth, node.end() - depth);
        let lock_ref = u32::from(node.lock_ref > 0);
        let upper = self.nodes.insert(Node {
            parent,
            root: None,
            start,
            len: depth - start,
            ends: Some((first, last)),
            checkpoint,
            usage,
            children: 1,
            last_child: None,
            references: 0,
            lock_ref,
            is_listed: false,
        });
        self.nodes[key].parent = Some(upper);
        self.counts.segments += 1;
        self.list_child(upper);
        self.list_child(key);
        upper
    }
}

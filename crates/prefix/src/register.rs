//! Registering: blocks and checkpoints become the tree's.

use std::hash::BuildHasher;

use crate::mistake::{Mistake, made};
use crate::node::{Node, NodeKey, common};
use crate::place::Place;
use crate::policy::{Origin, Policy};
use crate::reference::{Foreign, Reference};
use crate::tree::{Freed, PrefixTree};

/// A checkpoint that the tree did not take.
#[derive(Debug, PartialEq, Eq)]
pub struct NotTaken<C>(
    /// The checkpoint.
    pub C,
);

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Registers the blocks of a request that follow `at`, which moves behind them. `tokens[i]` are the tokens of the
    /// `i`-th; `take(i)` gives the block up, and is called for those that the tree does not have yet, in order: who
    /// registers first wins, and others keep what they have. How many were taken.
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
        let (mut node, mut depth) = (self.place_of(at, at.depth)?, at.depth);
        let mut known = 0;
        let mut taken = 0;
        while known < tokens.len() {
            if depth < self.nodes[node].end() {
                let equal = common(self.nodes[node].tokens_from(depth), &tokens[known..]);
                known += equal;
                depth += equal as u32;
                if known < tokens.len() && depth < self.nodes[node].end() {
                    node = self.split(node, depth);
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
            node = self.append((node, is_own), new, |index| take(known + index));
            depth += new.len() as u32;
            taken = new.len();
            break;
        }
        self.move_to(at, (node, depth), &mut freed);
        Ok(taken)
    }

    /// Gives the tree a checkpoint of the first `blocks` blocks above `at`; its place.
    ///
    /// # Errors
    /// [`NotTaken`], with the checkpoint, if there is one already, if there are fewer blocks, or none, or if `at` is of
    /// another tree.
    pub fn attach(
        &mut self,
        at: &Reference,
        blocks: u32,
        origin: Origin,
        checkpoint: C,
    ) -> Result<Place, NotTaken<C>> {
        let place = self.place_of(at, blocks);
        let Ok(mut place) = place else { return Err(NotTaken(checkpoint)) };
        if blocks == 0 || blocks > at.depth {
            return Err(NotTaken(checkpoint));
        }
        if blocks < self.nodes[place].end() {
            place = self.split(place, blocks);
        }
        if self.nodes[place].checkpoint.is_some() {
            return Err(NotTaken(checkpoint));
        }
        self.admitted_bytes = self.admitted_bytes.saturating_add(self.limits.checkpoint_bytes);
        let usage = self.usage_now(origin);
        let node = &mut self.nodes[place];
        node.checkpoint = Some(checkpoint);
        node.usage = usage;
        self.counts.checkpoints += 1;
        self.counts.evictable_checkpoints += u32::from(node.holds == 0);
        Ok(Place { tree: self.id, node: place })
    }

    /// Adds blocks that are not there below the end of a segment; the segment that they are in. `is_own`: whether
    /// the reference that they are added for was taken in that segment.
    fn append(
        &mut self,
        (parent, is_own): (NodeKey, bool),
        tokens: &[[u32; T]],
        take: impl FnMut(usize) -> B,
    ) -> NodeKey {
        let bytes = self.block_bytes(tokens.len());
        self.admitted_bytes = self.admitted_bytes.saturating_add(bytes);
        self.counts.blocks += tokens.len() as u32;
        let mut path = self.nodes[parent].path;
        for block in tokens {
            path = self.hasher.hash_one((path, block));
            // What comes again is not remembered as evicted.
            self.evicted.remove(path);
        }
        let blocks = (0..tokens.len()).map(take);
        let serials = self.new_serials(tokens.len());
        let above = &mut self.nodes[parent];
        let open = above.children == 0 && above.checkpoint.is_none() && above.root.is_none();
        if open && is_own && above.references == 1 {
            above.tokens.extend_from_slice(tokens);
            above.blocks.extend(blocks);
            above.serials.extend(serials);
            above.path = path;
            self.log_stored(parent, tokens.len());
            return parent;
        }
        above.children += 1;
        let start = above.end();
        let is_first = above.root.is_some();
        let node = Node {
            parent: Some(parent),
            root: None,
            start,
            tokens: tokens.to_vec(),
            blocks: blocks.collect(),
            serials: serials.collect(),
            checkpoint: None,
            usage: self.usage_now(Origin::Prompt),
            children: 0,
            references: 0,
            holds: 0,
            rank: None,
            path,
        };
        self.counts.segments += 1;
        // Nobody refers to it until the reference moves here.
        self.counts.evictable_blocks += tokens.len() as u32;
        let key = self.nodes.insert(node);
        self.list_child(key);
        self.log_stored(key, tokens.len());
        if is_first {
            self.first_blocks.insert(self.hasher.hash_one(tokens[0]), parent);
        }
        key
    }

    /// Cuts a segment behind `depth` blocks, counted from the root; the upper part. The lower part keeps its key, its
    /// checkpoint and its references.
    pub(crate) fn split(&mut self, key: NodeKey, depth: u32) -> NodeKey {
        self.unlist_child(key);
        let node = &mut self.nodes[key];
        let at = (depth - node.start) as usize;
        let (tokens, blocks) = (upper(&mut node.tokens, at), upper(&mut node.blocks, at));
        let mut serials = upper(&mut node.serials, at);
        if made(Mistake::SplitMovesSerials) {
            std::mem::swap(&mut serials[at - 1], &mut node.serials[0]);
        }
        let checkpoint = node.checkpoint.take_if(|_| made(Mistake::SplitMovesCheckpoint));
        let (parent, start, usage) = (node.parent, node.start, node.usage);
        node.start = depth;
        let holds = u32::from(node.holds > 0);
        let above = parent.map_or(0, |parent| self.nodes[parent].path);
        let path = self.path_of(above, &tokens);
        let upper = self.nodes.insert(Node {
            parent,
            root: None,
            start,
            tokens,
            blocks,
            serials,
            checkpoint,
            usage,
            children: 1,
            references: 0,
            holds,
            rank: None,
            path,
        });
        self.nodes[key].parent = Some(upper);
        self.counts.segments += 1;
        self.list_child(upper);
        self.list_child(key);
        upper
    }
}

/// Takes the first `at` elements out, in memory of their own.
fn upper<U>(all: &mut Vec<U>, at: usize) -> Vec<U> {
    let lower = all.split_off(at);
    std::mem::replace(all, lower)
}

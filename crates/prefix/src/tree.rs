//! The tree, its counts, and the matching of prompts.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use slotmap::{Key, SlotMap};

use crate::cell::{CellKey, Cells, same};
use crate::event::EventLog;
use crate::mistake::{Mistake, made};
use crate::node::{LeaseEntry, Node, NodeKey, Root};
use crate::order::Order;
use crate::policy::{Origin, Policy, Usage};
use crate::remembered::Remembered;
use crate::root::RootKey;
use crate::stats::ReuseStats;

/// Identifies the tree of a reference; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TreeId(u64);

/// Sizes and limits of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a block, for the policy and for leases.
    pub block_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Most bytes that leases hold together.
    pub lease_bytes: u64,
    /// Evicted blocks, and first blocks of prompts, that are remembered for [`ReuseStats`]: 16 bytes each.
    pub remembered: u32,
    /// Number of blocks for which memory is reserved. With at most that many blocks, the tree allocates only for leases
    /// and for roots without a block. Reserved are the tokens of each block and about 500 bytes more; the operating
    /// system commits only the pages that are used.
    pub reserved_blocks: u32,
}

/// Counts of the contents of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks.
    pub blocks: u32,
    /// Checkpoints.
    pub checkpoints: u32,
    /// Blocks without a reference at or below them.
    pub evictable_blocks: u32,
    /// Checkpoints without a reference at or below them.
    pub evictable_checkpoints: u32,
    /// Segments; roots are not counted.
    pub segments: u32,
}

/// The part of a prompt that a tree has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Tokens whose blocks are in the tree: a multiple of the tokens of a block, and less than the prompt.
    pub matched: u32,
    /// Tokens down to the deepest checkpoint among them, from which the prompt can continue.
    pub reusable: u32,
}

/// A block or checkpoint that the tree returns to its owner.
#[derive(Debug, PartialEq, Eq)]
pub enum Freed<B, C> {
    /// A block.
    Block(B),
    /// A checkpoint.
    Checkpoint(C),
}

/// A compressed radix tree of token ids, in units of `T` tokens, that owns blocks of type `B` and checkpoints of
/// type `C`.
///
/// Registering a block moves it into the tree, so that no request can write it any more. A request that uses blocks of
/// the tree has a [`crate::Reference`], which protects all segments at or above it. Unreferenced segments are evicted
/// when room is needed, leaves first, in the order of `P`; they are freed at once if no checkpoint is at or below them.
#[derive(Debug)]
pub struct PrefixTree<B, C, P, const T: usize> {
    pub(crate) id: TreeId,
    pub(crate) limits: Limits,
    pub(crate) policy: P,
    pub(crate) cells: Cells<B, T>,
    pub(crate) nodes: SlotMap<NodeKey, Node<C>>,
    pub(crate) roots: HashMap<RootKey, NodeKey>,
    /// Every segment except roots, by its parent and the tokens of its first block.
    pub(crate) children: HashTable<NodeKey>,
    pub(crate) hasher: DefaultHashBuilder,
    /// Unreferenced leaves, by rank.
    pub(crate) leaves: Order,
    /// Other unreferenced segments whose checkpoints are expendable, by rank.
    pub(crate) expendable: Order,
    /// By number.
    pub(crate) leases: BTreeMap<u64, LeaseEntry>,
    /// Number of the next lease. Numbers are never reused: a lease that has expired must not end another.
    pub(crate) next_lease: u64,
    pub(crate) leased_bytes: u64,
    pub(crate) counts: Counts,
    /// Bytes that were ever given to the tree, and one more for each hit: the clock of [`Usage::last_use`].
    pub(crate) admitted_bytes: u64,
    /// Prefix hashes of evicted blocks.
    pub(crate) evicted: Remembered<()>,
    /// Which root has a first block, by a hash without the root.
    pub(crate) first_blocks: Remembered<NodeKey>,
    pub(crate) stats: ReuseStats,
    /// The event log; `None` if events are not logged.
    pub(crate) events: Option<EventLog<T>>,
    /// Serial of the next block.
    pub(crate) next_serial: u64,
}

/// Result of matching a prompt from a root.
#[derive(Clone, Copy)]
pub(crate) struct Walk {
    /// The last segment with a block of the prompt.
    pub node: NodeKey,
    /// Number of blocks of the prompt that the tree has.
    pub depth: u32,
    /// The last of these blocks.
    pub cell: Option<CellKey>,
    /// The deepest wholly matched segment with a checkpoint; else the root.
    pub hit: NodeKey,
    /// Blocks down to its end.
    pub hit_depth: u32,
    /// The last of these blocks.
    pub hit_cell: Option<CellKey>,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// An empty tree.
    #[must_use]
    pub fn new(limits: Limits, policy: P) -> Self {
        const { assert!(T > 0 && T <= u16::MAX as usize, "a block has tokens") };
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let reserved = limits.reserved_blocks as usize;
        // A segment has at least one block, and a root one segment. Tables get twice as much, so that they rehash in
        // place after removals.
        let mut nodes = SlotMap::with_key();
        let (mut children, mut roots) = (HashTable::new(), HashMap::default());
        // If the reservation fails, they grow on demand.
        let _ = nodes.try_reserve(2 * reserved).is_ok()
            && children.try_reserve(2 * reserved, |_| 0).is_ok()
            && roots.try_reserve(2 * reserved).is_ok();
        Self {
            id: TreeId(NEXT.fetch_add(1, Ordering::Relaxed)),
            limits,
            policy,
            cells: Cells::new(reserved),
            nodes,
            roots,
            children,
            hasher: DefaultHashBuilder::default(),
            leaves: Order::new(reserved),
            expendable: Order::new(reserved),
            leases: BTreeMap::new(),
            next_lease: 0,
            leased_bytes: 0,
            counts: Counts::default(),
            admitted_bytes: 0,
            evicted: Remembered::new(limits.remembered),
            first_blocks: Remembered::new(limits.remembered),
            stats: ReuseStats::default(),
            events: None,
            next_serial: 0,
        }
    }

    /// The part of a prompt that the tree has. Protects, counts and allocates nothing.
    #[must_use]
    pub fn lookup(&self, root: &RootKey, prompt: &[u32]) -> Lookup {
        let found = self.root(root).map(|root| self.walk(root, whole_blocks(prompt)));
        found.map_or(Lookup::default(), |walk| Lookup {
            matched: tokens::<T>(walk.depth),
            reusable: tokens::<T>(walk.hit_depth),
        })
    }

    /// Of the blocks that [`Self::match_and_lock`] would reuse of a prompt, those that are referenced already: matching
    /// the prompt does not lower the number of evictable blocks by these. Protects, counts and allocates nothing.
    #[must_use]
    pub fn referenced(&self, root: &RootKey, prompt: &[u32]) -> u32 {
        let Some(root) = self.root(root) else { return 0 };
        let walk = self.walk(root, whole_blocks(prompt));
        let up = |&key: &NodeKey| self.nodes[key].parent;
        // All segments above a protected one are protected too.
        let mut path = std::iter::successors(Some(walk.hit), up);
        let held = path.find(|&key| self.nodes[key].lock_ref > 0);
        held.map_or(0, |key| self.nodes[key].end().min(walk.hit_depth))
    }

    /// Counts of its contents.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Tokens that were reused, and why others were not.
    #[must_use]
    pub fn stats(&self) -> ReuseStats {
        self.stats
    }

    /// The node of a root.
    pub(crate) fn root(&self, key: &RootKey) -> Option<NodeKey> {
        if made(Mistake::SaltIgnored) {
            return self.roots.values().next().copied();
        }
        self.roots.get(key).copied()
    }

    /// The node of a root, which is created if it does not exist.
    pub(crate) fn root_or_new(&mut self, key: &RootKey) -> NodeKey {
        if let Some(found) = self.root(key) {
            return found;
        }
        let root_hash = self.hasher.hash_one(key.bytes());
        let root = Node {
            parent: None,
            root: Some(Root { key: key.clone(), root_hash }),
            start: 0,
            len: 0,
            ends: None,
            checkpoint: None,
            usage: self.usage_now(Origin::Prompt),
            children: 0,
            last_child: None,
            references: 0,
            lock_ref: 0,
            is_listed: false,
        };
        let node = self.nodes.insert(root);
        self.roots.insert(key.clone(), node);
        node
    }

    /// Usage of a segment or checkpoint that is used for the first time.
    pub(crate) fn usage_now(&self, origin: Origin) -> Usage {
        Usage { origin, last_use: self.admitted_bytes, hits: 0 }
    }

    /// Follows `prompt` from a root as far as the tree has it.
    pub(crate) fn walk(&self, root: NodeKey, prompt: &[[u32; T]]) -> Walk {
        let mut walk =
            Walk { node: root, depth: 0, cell: None, hit: root, hit_depth: 0, hit_cell: None };
        while let Some((first, _)) = prompt[walk.depth as usize..].split_first() {
            let Some(child) = self.child(walk.node, first) else { break };
            let node = &self.nodes[child];
            let (equal, last) = self.cells.common(node.first(), &prompt[walk.depth as usize..]);
            (walk.node, walk.cell) = (child, last);
            walk.depth += equal;
            if equal < node.len {
                break;
            }
            if node.checkpoint.is_some() {
                (walk.hit, walk.hit_depth, walk.hit_cell) = (child, walk.depth, last);
            }
        }
        if made(Mistake::NoCheckpoint) {
            (walk.hit, walk.hit_depth, walk.hit_cell) = (walk.node, walk.depth, walk.cell);
        }
        walk
    }

    /// The segment below the end of `parent` that begins with `first`.
    pub(crate) fn child(&self, parent: NodeKey, first: &[u32; T]) -> Option<NodeKey> {
        let is_it = |&key: &NodeKey| {
            self.nodes.get(key).is_some_and(|node| node.parent == Some(parent))
                && self.first_tokens(key).is_some_and(|tokens| same(tokens, first))
        };
        // Most segments have one child. The table, with room for all segments, does not fit in the CPU caches.
        let Node { children, last_child, .. } = self.nodes[parent];
        if let Some(only) = last_child.filter(|key| children == 1 && is_it(key)) {
            return Some(only);
        }
        let hash = child_hash(&self.hasher, Some(parent), first);
        self.children.find(hash, is_it).copied()
    }

    /// Enters a segment in `children`, under its parent and its first block.
    pub(crate) fn list_child(&mut self, key: NodeKey) {
        let Self { children, nodes, cells, hasher, .. } = self;
        let hash = |&key: &NodeKey| {
            let Node { parent, ends: Some((first, _)), .. } = nodes[key] else {
                unreachable!("roots are listed elsewhere")
            };
            child_hash(hasher, parent, cells.tokens(first))
        };
        children.insert_unique(hash(&key), key, hash);
        if let Some(parent) = nodes[key].parent {
            nodes[parent].last_child = Some(key);
        }
    }

    /// Removes a segment from `children`, if it is there.
    pub(crate) fn unlist_child(&mut self, key: NodeKey) {
        let Some(first) = self.first_tokens(key) else { return };
        let hash = child_hash(&self.hasher, self.nodes[key].parent, first);
        if let Ok(entry) = self.children.find_entry(hash, |&found| found == key) {
            entry.remove();
        }
    }

    /// The tokens of a segment's first block; `None` for a root.
    fn first_tokens(&self, key: NodeKey) -> Option<&[u32; T]> {
        self.nodes[key].first().map(|first| self.cells.tokens(first))
    }

    /// The prefix hash of a block of a segment, or the hash of the root that is that segment.
    pub(crate) fn prefix_hash_at(&self, node: NodeKey, block: Option<CellKey>) -> u64 {
        match block {
            Some(block) => self.cells[block].prefix_hash,
            None => self.nodes[node].root.as_ref().map_or(0, |root| root.root_hash),
        }
    }

    /// Bytes of `blocks` blocks.
    pub(crate) fn block_bytes(&self, blocks: usize) -> u64 {
        self.limits.block_bytes.saturating_mul(blocks as u64)
    }
}

/// The blocks of a prompt that can be reused: at least one token is left to compute.
pub(crate) fn whole_blocks<const T: usize>(prompt: &[u32]) -> &[[u32; T]] {
    let left = usize::from(!made(Mistake::Boundary));
    let most = u32::MAX as usize / T * T;
    prompt[..prompt.len().saturating_sub(left).min(most)].as_chunks().0
}

/// Tokens of `blocks` blocks. The product fits in `u32`: see [`whole_blocks`].
pub(crate) fn tokens<const T: usize>(blocks: u32) -> u32 {
    blocks * T as u32
}

/// Hash in `children` of a segment below `parent` that begins with `first`.
fn child_hash<const T: usize>(
    hasher: &DefaultHashBuilder,
    parent: Option<NodeKey>,
    first: &[u32; T],
) -> u64 {
    let first = if made(Mistake::HalfCompared) { &first[..T / 2] } else { &first[..] };
    hasher.hash_one((parent.map(|key| key.data().as_ffi()), first))
}

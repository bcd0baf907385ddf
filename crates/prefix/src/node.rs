//! Segments of the tree, and leases that pin them.

use std::time::Duration;

use crate::cell::CellKey;
use crate::policy::Usage;
use crate::root::RootKey;

slotmap::new_key_type! {
    /// A segment: its index, and the generation of that index.
    pub(crate) struct NodeKey;
}

/// A segment that stays until a time.
#[derive(Debug)]
pub(crate) struct LeaseEntry {
    pub node: NodeKey,
    pub until: Duration,
    pub bytes: u64,
}

/// Data of a root, which has no blocks.
#[derive(Debug)]
pub(crate) struct Root {
    pub key: RootKey,
    /// Hash of the key: the prefix hash before the first block.
    pub root_hash: u64,
}

/// A segment, that is a run of blocks without a branch; or a root, which has no blocks.
#[derive(Debug)]
pub(crate) struct Node<C> {
    /// `None` for a root.
    pub parent: Option<NodeKey>,
    /// `Some` for a root only.
    pub root: Option<Root>,
    /// Number of blocks above it.
    pub start: u32,
    /// Number of its blocks.
    pub len: u32,
    /// Its first and its last block; `None` for a root.
    pub ends: Option<(CellKey, CellKey)>,
    /// The checkpoint at its end.
    pub checkpoint: Option<C>,
    pub usage: Usage,
    pub children: u32,
    /// The child that was listed last. It may have been removed, or moved to another parent, since.
    pub last_child: Option<NodeKey>,
    /// Number of references and leases that were taken in it.
    pub references: u32,
    /// `references`, plus the number of children whose `lock_ref` is not 0. Only a node with 0 can be evicted.
    pub lock_ref: u32,
    /// Whether it is in `leaves` or `expendable` of the tree.
    pub is_listed: bool,
}

impl<C> Node<C> {
    /// A segment without children or references.
    pub fn new(parent: NodeKey, start: u32, run: (CellKey, CellKey, u32), usage: Usage) -> Self {
        let (first, last, len) = run;
        Self {
            parent: Some(parent),
            root: None,
            start,
            len,
            ends: Some((first, last)),
            checkpoint: None,
            usage,
            children: 0,
            last_child: None,
            references: 0,
            lock_ref: 0,
            is_listed: false,
        }
    }

    /// Blocks down to its end.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// Its first block.
    pub fn first(&self) -> Option<CellKey> {
        self.ends.map(|(first, _)| first)
    }

    /// Its last block.
    pub fn last(&self) -> Option<CellKey> {
        self.ends.map(|(_, last)| last)
    }
}

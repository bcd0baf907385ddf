//! A segment of the tree, and what pins one.

use std::time::Duration;

use crate::cell::CellKey;
use crate::policy::Usage;
use crate::root::RootKey;

slotmap::new_key_type! {
    /// A segment: its place, and how often the place was used before.
    pub(crate) struct NodeKey;

    /// A lease.
    pub(crate) struct LeaseKey;
}

/// A segment that stays until a time.
#[derive(Debug)]
pub(crate) struct LeaseEntry {
    pub node: NodeKey,
    pub until: Duration,
    pub bytes: u64,
}

/// What a root has instead of blocks.
#[derive(Debug)]
pub(crate) struct Root {
    pub key: RootKey,
    /// Fingerprint of the key.
    pub path: u64,
}

/// A run of blocks without a branch, or a root, which has none.
#[derive(Debug)]
pub(crate) struct Node<C> {
    /// None of a root.
    pub parent: Option<NodeKey>,
    /// Of a root.
    pub root: Option<Root>,
    /// Blocks above it.
    pub start: u32,
    /// Its blocks.
    pub len: u32,
    /// The first and the last of them; none of a root.
    pub ends: Option<(CellKey, CellKey)>,
    /// At its end.
    pub checkpoint: Option<C>,
    pub usage: Usage,
    pub children: u32,
    /// The child that was listed last. It may be gone, or another's, by now.
    pub last_child: Option<NodeKey>,
    /// References and leases that were taken in it.
    pub references: u32,
    /// `references`, and children that are held.
    pub holds: u32,
    /// Whether it is among leaves, or among expendable checkpoints.
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
            holds: 0,
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

//! A segment of the tree, and what pins one.

use std::time::Duration;

use crate::event::Serial;
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

/// A run of blocks without a branch, or a root, which has none.
#[derive(Debug)]
pub(crate) struct Node<B, C, const T: usize> {
    /// None of a root.
    pub parent: Option<NodeKey>,
    /// Of a root.
    pub root: Option<RootKey>,
    /// Blocks above it.
    pub start: u32,
    /// Tokens of each of its blocks.
    pub tokens: Vec<[u32; T]>,
    /// As many.
    pub blocks: Vec<B>,
    /// As many.
    pub serials: Vec<Serial>,
    /// At its end.
    pub checkpoint: Option<C>,
    pub usage: Usage,
    pub children: u32,
    /// References and leases that were taken in it.
    pub references: u32,
    /// `references`, and children that are held.
    pub holds: u32,
    /// Its rank among leaves, or among expendable checkpoints, while it is there.
    pub rank: Option<i64>,
    /// Fingerprint of all tokens down to its end.
    pub path: u64,
}

impl<B, C, const T: usize> Node<B, C, T> {
    /// Blocks down to its end.
    pub fn end(&self) -> u32 {
        self.start + self.blocks.len() as u32
    }

    /// Tokens of its blocks from `depth` on, counted from the root.
    pub fn tokens_from(&self, depth: u32) -> &[[u32; T]] {
        &self.tokens[(depth - self.start) as usize..]
    }
}

/// How many blocks at the beginning of both are equal.
pub(crate) fn common<const T: usize>(a: &[[u32; T]], b: &[[u32; T]]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| same(a, b)).count()
}

/// Whether two blocks have the same tokens.
#[inline]
pub(crate) fn same<const T: usize>(a: &[u32; T], b: &[u32; T]) -> bool {
    use crate::mistake::{Mistake, made};
    if made(Mistake::HalfCompared) { a[..T / 2] == b[..T / 2] } else { a == b }
}

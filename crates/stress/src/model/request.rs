//! A request in the model: its blocks, its progress, and the blocks that it shares.

use std::collections::BTreeMap;
use std::time::Duration;

use dsv4_kv::{BlockId, LayerGroup};

use crate::op::Name;
use crate::text::{BLOCK, Text};

/// A request in the model.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name in the script.
    pub name: Name,
    /// Its text.
    pub says: Text,
    /// Its blocks, oldest first.
    pub blocks: Vec<BlockId>,
    pub(super) groups: [Progress; 2],
    /// The blocks of which it is not the only owner, by index in `blocks`.
    pub(super) shared: BTreeMap<u32, Kept>,
    /// Its use of the prefix tree, if it may share prefixes.
    pub(super) share: Option<Share>,
}

/// The progress of a request in one layer group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Final tokens.
    pub tokens: u32,
    /// One past the highest position that was ever written. After reuse it is higher, since the rows before the
    /// checkpoint are missing as if they had been overwritten.
    pub written_to: u32,
    /// Number of leading tokens that are those of its text.
    pub genuine: u32,
    /// First position whose window row is compared: a checkpoint may lack the rows of the draft layers.
    pub from: u32,
}

impl Progress {
    /// Whether all final tokens are those of its text; else its bytes are not compared.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.tokens <= self.genuine
    }

    /// Whether the rows of a request of `at` tokens are complete: at most `most` positions were written after them.
    #[must_use]
    pub fn is_whole_at(self, at: u32, most: u32) -> bool {
        self.written_to <= at + most
    }
}

impl Request {
    /// A request without tokens.
    pub(super) fn new(name: Name, says: Text) -> Self {
        let groups = [Progress::default(); 2];
        Self { name, says, blocks: Vec::new(), groups, shared: BTreeMap::new(), share: None }
    }

    /// Whether it is the only owner of its block of this index.
    #[must_use]
    pub fn is_own(&self, block: u32) -> bool {
        !self.shared.contains_key(&block)
    }

    /// Its text, if it shares prefixes.
    #[must_use]
    pub fn text(&self) -> Option<&Text> {
        self.share.as_ref().map(|_| &self.says)
    }

    /// Its progress in a layer group.
    #[must_use]
    pub fn group(&self, group: LayerGroup) -> Progress {
        self.groups[group.index()]
    }
}

/// The other owners of a block of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Other requests, by forks.
    Forks,
    /// The prefix tree.
    Tree,
}

/// A request's use of the prefix tree.
#[derive(Clone, Debug)]
pub(in crate::model) struct Share {
    /// Number of blocks that it refers to in the tree.
    pub blocks: u32,
    /// Whether the token ids of all its tokens were passed.
    pub told: bool,
    /// Positions in its prompt at which it may be saved.
    pub boundaries: Vec<u32>,
    /// The last block boundary of the prompt. After it, in the answer, the request may be saved at each boundary.
    pub end: u32,
}

impl Share {
    /// Whether a checkpoint may be taken at this position.
    pub fn may_be_saved_at(&self, at: u32) -> bool {
        at > self.end || self.boundaries.contains(&at)
    }

    /// The positions after `tokens` at which a checkpoint may be taken: all in the prompt, and the next in the answer.
    pub fn boundaries_behind(&self, tokens: u32) -> impl Iterator<Item = u32> {
        let answer = (tokens.max(self.end) / BLOCK + 1) * BLOCK;
        self.boundaries.iter().copied().chain([answer])
    }
}

/// A lease.
#[derive(Clone, Debug)]
pub(in crate::model) struct Lease {
    pub text: Text,
    pub blocks: u32,
    pub bytes: u64,
    pub until: Duration,
}

//! A request as the model sees it: what it has, and what it shares.

use std::collections::BTreeMap;
use std::time::Duration;

use dsv4_kv::{BlockId, LayerGroup};

use crate::op::Name;
use crate::text::{BLOCK, Text};

/// A request as the model sees it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name in the script.
    pub name: Name,
    /// What it says.
    pub says: Text,
    /// Its blocks, oldest first.
    pub blocks: Vec<BlockId>,
    pub(super) groups: [Progress; 2],
    /// Those of its blocks that it does not have alone, by their number.
    pub(super) shared: BTreeMap<u32, Kept>,
    /// What it shares with others, or may.
    pub(super) share: Option<Share>,
}

/// A request in one layer group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Final tokens.
    pub tokens: u32,
    /// One past the last position that was ever written, or as if, where rows before were not there.
    pub written_to: u32,
    /// Leading tokens that are what it says.
    pub genuine: u32,
    /// Positions before this one have window rows of nobody's business: a checkpoint may not have a draft layer's.
    pub from: u32,
}

impl Progress {
    /// Whether all final tokens are what it says; else its bytes are nobody's business.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.tokens <= self.genuine
    }

    /// Whether what is left at token `at` is whole: at most `most` positions are taken back.
    #[must_use]
    pub fn is_whole_at(self, at: u32, most: u32) -> bool {
        self.written_to <= at + most
    }
}

impl Request {
    /// Without tokens.
    pub(super) fn new(name: Name, says: Text) -> Self {
        let groups = [Progress::default(); 2];
        Self { name, says, blocks: Vec::new(), groups, shared: BTreeMap::new(), share: None }
    }

    /// Whether it has its block of that number alone.
    #[must_use]
    pub fn is_own(&self, block: u32) -> bool {
        !self.shared.contains_key(&block)
    }

    /// What it says, if it shares that.
    #[must_use]
    pub fn text(&self) -> Option<&Text> {
        self.share.as_ref().map(|_| &self.says)
    }

    /// How far it is in a layer group.
    #[must_use]
    pub fn group(&self, group: LayerGroup) -> Progress {
        self.groups[group.index()]
    }
}

/// Who has a block beside the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Requests that began as copies.
    Forks,
    /// The prefix tree.
    Tree,
}

/// A request that shares.
#[derive(Clone, Debug)]
pub(in crate::model) struct Share {
    /// Blocks that it refers to in the tree.
    pub blocks: u32,
    /// Whether all of its tokens were told.
    pub told: bool,
    /// Where it may be saved in its prompt.
    pub boundaries: Vec<u32>,
    /// The prompt's last boundary: it may be saved at each behind it, which it answers.
    pub end: u32,
}

impl Share {
    /// Whether a checkpoint may be taken there.
    pub fn may_be_saved_at(&self, at: u32) -> bool {
        at > self.end || self.boundaries.contains(&at)
    }

    /// Where one may be taken of a request of `tokens` tokens: in its prompt, and next in its answer.
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

//! A request as the model sees it: what it has, and what it shares.

use std::collections::BTreeMap;
use std::time::Duration;

use dsv4_kv::{BlockId, LayerGroup};

use crate::op::Name;
use crate::text::Text;

/// A request as the model sees it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name in the script.
    pub name: Name,
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
    /// One past the last position that was ever written.
    pub written_to: u32,
    /// Leading tokens that are of its own story.
    pub genuine: u32,
}

impl Progress {
    /// Whether all final tokens are of its own story; else its bytes are nobody's business.
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
    pub(super) fn new(name: Name) -> Self {
        let groups = [Progress::default(); 2];
        Self { name, blocks: Vec::new(), groups, shared: BTreeMap::new(), share: None }
    }

    /// Whether it has its block of that number alone.
    #[must_use]
    pub fn is_own(&self, block: u32) -> bool {
        !self.shared.contains_key(&block)
    }

    /// What it says, if it shares that.
    #[must_use]
    pub fn text(&self) -> Option<&Text> {
        self.share.as_ref().map(|share| &share.text)
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
    pub text: Text,
    /// Blocks that it refers to in the tree.
    pub blocks: u32,
    /// Whether all of its tokens were told.
    pub told: bool,
    /// Where it may be saved.
    pub boundaries: Vec<u32>,
}

/// A lease.
#[derive(Clone, Debug)]
pub(in crate::model) struct Lease {
    pub text: Text,
    pub blocks: u32,
    pub bytes: u64,
    pub until: Duration,
}

//! Suspended requests: requests without a slot.

use std::fmt;

use serde::Serialize;

use crate::block::RequestBlock;
use crate::error::KvError;
use crate::ids::{CacheId, RequestId, SlotId};
use crate::ledger::RequestPrefix;
use crate::ledger::requests::Progress;

/// A request that was suspended: its blocks, and a copy of what its slot held. It takes part in no step until it is
/// resumed, in any free slot. It holds memory until it is resumed or discarded.
#[derive(Debug, Serialize)]
#[must_use = "what a suspended request holds is lost to its cache when it is dropped; resume or discard it"]
pub struct Suspended {
    #[serde(skip)]
    pub(crate) cache: CacheId,
    /// The id under which it was admitted.
    #[serde(skip)]
    pub(crate) first_id: RequestId,
    /// In order of its tokens.
    pub(crate) blocks: Vec<RequestBlock>,
    /// By [`crate::LayerGroup::index`].
    pub(crate) groups: [Progress; 2],
    /// The spare slot that has the copy.
    pub(crate) saved_slot: SlotId,
    /// Positions at which checkpoints of it are wanted, including those that it has passed.
    pub(crate) wanted: Vec<u32>,
    /// Its reference to the prefix tree, with its other data there.
    #[serde(skip)]
    pub(crate) request_prefix: Option<RequestPrefix>,
}

impl Suspended {
    /// Final tokens that it has in the trunk.
    #[must_use]
    pub const fn committed(&self) -> u32 {
        self.groups[0].committed
    }

    /// Blocks that it holds.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks.len() as u32
    }
}

/// The operation was refused; the request is still suspended, and unchanged. It does not convert to [`KvError`], so
/// that `?` cannot drop the request: a dropped request keeps its blocks and its spare slot for good. Where `?` boxes
/// the error, the request is in the box.
#[must_use = "it holds the request; take it by `into_suspended`, to resume it later"]
pub struct StillSuspended(Box<(Suspended, KvError)>);

impl StillSuspended {
    pub(crate) fn new(suspended: Suspended, error: KvError) -> Self {
        Self(Box::new((suspended, error)))
    }

    /// Why the operation was refused.
    #[must_use]
    pub fn error(&self) -> &KvError {
        &self.0.1
    }

    /// The request, to be resumed later.
    pub fn into_suspended(self) -> Suspended {
        self.0.0
    }
}

impl fmt::Debug for StillSuspended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StillSuspended").field(self.error()).finish()
    }
}

impl fmt::Display for StillSuspended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl std::error::Error for StillSuspended {}

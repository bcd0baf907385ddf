//! The slot and the blocks that are reserved for a request from another cache.

use super::parts::Positions;
use crate::block::Block;
use crate::ids::{BlockId, CacheId, SlotId};

/// A slot and blocks for a request that comes from another cache. No request id names the slot until the request is
/// entered, so that no other call can use it before.
#[derive(Debug)]
pub(crate) struct RequestReservation {
    pub cache: CacheId,
    pub slot: SlotId,
    pub blocks: Vec<Block>,
    pub at: Positions,
}

impl RequestReservation {
    /// Numbers of the blocks, in the order of the tokens.
    pub fn block_ids(&self) -> Vec<BlockId> {
        self.blocks.iter().map(Block::id).collect()
    }
}

/// A slot and blocks reserved for a request from another cache, not yet written. They stay reserved until they are
/// given back.
#[derive(Debug)]
#[must_use = "a reservation that is dropped is lost to its cache; load a request into it, or give it back"]
pub struct Reserved(pub(super) RequestReservation);

/// A slot and blocks with every byte of a request from another cache, which is not admitted yet.
#[derive(Debug)]
#[must_use = "a reservation that is dropped is lost to its cache; enter the request, or give it back"]
pub struct Loaded(pub(super) RequestReservation);

impl Reserved {
    /// Positions of the request that it is for.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.0.at
    }
}

impl Loaded {
    /// Positions of the request.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.0.at
    }
}

impl From<Loaded> for Reserved {
    fn from(loaded: Loaded) -> Self {
        Self(loaded.0)
    }
}

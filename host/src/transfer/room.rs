//! Room for a request that comes from another cache.

use super::parts::Positions;
use crate::block::Block;
use crate::ids::{BlockId, CacheId, SlotId};

/// A slot and blocks for a request that comes from another cache. No id names the slot until the request is entered, so that
/// nothing can be done to it before.
#[derive(Debug)]
pub(crate) struct Room {
    pub ledger: CacheId,
    pub slot: SlotId,
    pub blocks: Vec<Block>,
    pub at: Positions,
}

impl Room {
    /// Which blocks, in order.
    pub fn block_ids(&self) -> Vec<BlockId> {
        self.blocks.iter().map(Block::id).collect()
    }
}

/// A slot and blocks for a request that is to come, before anything has. Nobody else gets them until they are given back.
#[derive(Debug)]
#[must_use = "room that is dropped is lost to its cache; load a request into it, or give it back"]
pub struct Reserved(pub(super) Room);

/// A slot and blocks with every byte of a request that came, which takes part in nothing yet.
#[derive(Debug)]
#[must_use = "room that is dropped is lost to its cache; enter the request, or give it back"]
pub struct Loaded(pub(super) Room);

impl Reserved {
    /// How far the request is that it is for.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.0.at
    }
}

impl Loaded {
    /// How far the request is.
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

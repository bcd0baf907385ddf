//! The indices of the cache, each a type of its own: no bare integer crosses a module.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A layer, counted from 0 through the trunk and then the multi-token-prediction layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LayerId(pub u32);

/// A physical block: [`kv_layout::geometry::BLOCK_TOKENS`] tokens of one request in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockId(pub u32);

/// The place of a request's fixed state (rings and compressor rows) in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotId(pub u32);

/// An admitted request. Slots are reused, generations are not: a handle kept past `release` is
/// refused instead of reaching the slot's next owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId {
    /// Its slot.
    pub slot: SlotId,
    /// How many requests had the slot before.
    pub generation: u32,
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {} generation {}", self.slot.0, self.generation)
    }
}

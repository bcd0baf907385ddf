//! Typed ids of layers, blocks, slots, checkpoints, caches and requests.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// A layer, counted from 0 through the trunk and then the multi-token-prediction (MTP) layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LayerId(pub u32);

/// A physical block: [`kv_layout::geometry::BLOCK_TOKENS`] tokens of one request in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockId(pub u32);

/// A slot: the place of a request's fixed-size state (rings and compressor rows) in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotId(pub u32);

/// The storage of one checkpoint: the state, in every layer, that a request needs besides its blocks to continue
/// at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CheckpointId(pub u32);

/// Identifies a cache, or a ledger without one: unique in the process. Requests, checkpoints and workspaces carry it, so that
/// another cache refuses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheId(u64);

impl CacheId {
    /// An id that no other cache or ledger of this process has.
    pub(crate) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// An admitted request. It is valid in the cache that admitted it, until it is released or suspended: slots are
/// reused, generations are not (64 bits), so an id kept past `release` never reaches the slot's next
/// owner, and an id of another cache is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId {
    cache: CacheId,
    slot: SlotId,
    generation: u64,
}

impl RequestId {
    pub(crate) const fn new(cache: CacheId, slot: SlotId, generation: u64) -> Self {
        Self { cache, slot, generation }
    }

    /// Its slot.
    #[must_use]
    pub const fn slot(self) -> SlotId {
        self.slot
    }

    /// Number of requests that had the slot before.
    #[must_use]
    pub const fn generation(self) -> u64 {
        self.generation
    }

    pub(crate) const fn cache(self) -> CacheId {
        self.cache
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {} generation {}", self.slot.0, self.generation)
    }
}

/// Layers that a step runs together. Each group has token positions of its own for every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerGroup {
    /// The layers of the model.
    Trunk,
    /// The multi-token-prediction (MTP) layers, which run ahead of the trunk to propose drafts.
    Draft,
}

impl LayerGroup {
    /// Both groups, in the order of [`Self::index`].
    pub const ALL: [Self; 2] = [Self::Trunk, Self::Draft];

    /// 0 for the trunk, 1 for the draft layers.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for LayerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trunk => "trunk",
            Self::Draft => "draft",
        })
    }
}

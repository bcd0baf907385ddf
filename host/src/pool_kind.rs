//! Kinds and units of the pools of a layer.

use serde::Serialize;

/// What a pool holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolKind {
    /// Data plane of the sliding-window ring.
    SwaData,
    /// Scale plane of the sliding-window ring.
    SwaScale,
    /// Data plane of the compressed entries.
    EntryData,
    /// Scale plane of the compressed entries.
    EntryScale,
    /// Code plane of the indexer keys.
    IndexCode,
    /// Scale plane of the indexer keys.
    IndexScale,
    /// Compressor rows of the main entries, f32.
    MainState,
    /// Compressor rows of the indexer keys, f32.
    IndexState,
}

/// The unit of a pool: it has one element per request slot, or per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolUnit {
    /// One per request slot.
    Slot,
    /// One per block of 128 tokens.
    Block,
}

impl PoolKind {
    /// All kinds, in order.
    pub(crate) const ALL: [Self; 8] = [
        Self::SwaData,
        Self::SwaScale,
        Self::EntryData,
        Self::EntryScale,
        Self::IndexCode,
        Self::IndexScale,
        Self::MainState,
        Self::IndexState,
    ];

    /// Whether it holds the rows of a compressor, f32.
    #[must_use]
    pub const fn is_state(self) -> bool {
        matches!(self, Self::MainState | Self::IndexState)
    }
}

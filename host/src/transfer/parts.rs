//! The parts of a request that moves between caches, with the rows and bytes of each.
//!
//! They depend only on the model, the formats and the request's positions, not on `max_draft`, the number of blocks or
//! addresses. So caches that differ in these agree on the parts.

use std::ops::Range;

use kv_layout::geometry::{
    BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, LayerKind, WINDOW, csa_own_rows, csa_previous_rows,
};
use serde::Serialize;

use crate::config::CacheConfig;
use crate::ids::LayerGroup;
use crate::memory::state_layout;
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::schema::{LayerCacheSchema, Pool, Schema};

/// Final tokens of a request in each layer group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Positions {
    /// Final tokens in the trunk.
    pub trunk: u32,
    /// Final tokens in the draft (MTP) layers; 0 without draft layers.
    pub draft: u32,
}

/// What a part holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PartKind {
    /// A block: entries and indexer keys of up to 128 tokens in all layers, one pool after the other, each at a
    /// multiple of 16 bytes. Rows whose window the request has not closed are zero.
    Block,
    /// Data plane of a layer's window: `[rows, 576]`.
    WindowData,
    /// Scale plane of a layer's window.
    WindowScale,
    /// Own halves of a CSA layer's main compressor, for the open window: `[rows, 1024]` f32.
    MainOwn,
    /// Previous halves of the same compressor, for the open window and the one before.
    MainPrevious,
    /// As [`Self::MainOwn`], for the indexer's compressor: `[rows, 256]` f32.
    IndexOwn,
    /// As [`Self::MainPrevious`], for the indexer's compressor.
    IndexPrevious,
    /// Running sums of an HCA layer after the last token: `[1, 1536]` f32; no rows at the end of a window.
    Sums,
    /// The checkpoint at the end of a prefix, of all layers or only of the trunk; see [`crate::checkpoints`].
    Checkpoint,
}

impl PartKind {
    /// All kinds, in order.
    pub const ALL: [Self; 9] = [
        Self::Block,
        Self::WindowData,
        Self::WindowScale,
        Self::MainOwn,
        Self::MainPrevious,
        Self::IndexOwn,
        Self::IndexPrevious,
        Self::Sums,
        Self::Checkpoint,
    ];

    /// Positions of the rows that a request needs to continue at `position`.
    fn rows(self, position: u32) -> Range<u32> {
        let open = position - position % CSA_RATIO;
        let first = match self {
            Self::Block => 0,
            // 127 rows: the token at `position` writes the last row of its window itself. The row before these may be
            // that of a rejected draft.
            Self::WindowData | Self::WindowScale => position.saturating_sub(WINDOW - 1),
            Self::MainOwn | Self::IndexOwn => open,
            Self::MainPrevious | Self::IndexPrevious => open.saturating_sub(CSA_RATIO),
            Self::Sums => position - u32::from(!position.is_multiple_of(HCA_RATIO)),
            Self::Checkpoint => position.saturating_sub(WINDOW),
        };
        first..position
    }
}

/// A part of a request, or of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Kind of the part.
    pub kind: PartKind,
    /// For a block, its number, counted from the request's first block; else its layer; 0 for a checkpoint.
    pub unit: u32,
    /// Position of its first row; for a block, of its first token.
    pub first: u32,
    /// Number of rows; for a block, of tokens.
    pub entries: u32,
    /// Bytes of all of it.
    pub bytes: u64,
}

/// Where the ring of a part lies in a slot of its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    pub kind: PartKind,
    /// Rows of the slot before the ring.
    pub first: u32,
    /// Rows of the ring: a position has row `position mod rows`.
    pub rows: u32,
}

/// The rings of a pool of slots. A change needs a new [`LAYOUT_VERSION`](crate::memory::state_layout::LAYOUT_VERSION).
pub(super) fn rings(layer: LayerKind, pool: &Pool) -> Vec<Ring> {
    let whole = |kind| vec![Ring { kind, first: 0, rows: pool.rows }];
    let halves = |own_kind, previous_kind| {
        // `pool.rows` counts both rings; the second one is four rows longer.
        let own = (pool.rows - CSA_RATIO) / 2;
        let previous = Ring { kind: previous_kind, first: own, rows: csa_previous_rows(own) };
        vec![Ring { kind: own_kind, first: 0, rows: own }, previous]
    };
    match (pool.kind, layer) {
        (PoolKind::SwaData, _) => whole(PartKind::WindowData),
        (PoolKind::SwaScale, _) => whole(PartKind::WindowScale),
        (PoolKind::MainState, LayerKind::Hca) => whole(PartKind::Sums),
        (PoolKind::MainState, _) => halves(PartKind::MainOwn, PartKind::MainPrevious),
        (PoolKind::IndexState, _) => halves(PartKind::IndexOwn, PartKind::IndexPrevious),
        _ => Vec::new(),
    }
}

/// The parts of requests of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartLayout {
    schema: Schema,
    /// Layers of the trunk.
    trunk: u32,
    block_bytes: u64,
    /// Bytes of a checkpoint of the trunk's layers, and of one of all layers.
    checkpoint_bytes: [u64; 2],
}

impl PartLayout {
    /// The layout for caches of this configuration; only model and formats matter.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let schema = Schema::new(config);
        let trunk = config.group_layers(LayerGroup::Trunk).end;
        let of_trunk = Schema { layers: schema.layers[..trunk as usize].to_vec() };
        Self {
            checkpoint_bytes: [&of_trunk, &schema].map(state_layout::checkpoint_bytes),
            block_bytes: state_layout::unit_image_bytes(&schema, PoolUnit::Block),
            schema,
            trunk,
        }
    }

    /// Bytes of the image of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Whether the model has draft (MTP) layers.
    #[must_use]
    pub fn has_draft_layers(&self) -> bool {
        self.schema.layers.len() as u32 > self.trunk
    }

    /// Number of blocks that hold entries of a request of `tokens` tokens.
    #[must_use]
    pub fn blocks(&self, tokens: u32) -> u32 {
        if self.block_bytes == 0 { 0 } else { crate::block::blocks_of(tokens) }
    }

    /// Number of blocks that later tokens of a request at `at` do not change.
    #[must_use]
    pub fn full_blocks(&self, at: Positions) -> u32 {
        // Draft layers are sliding windows (`KvError::DraftLayerKind`): they have no entries in blocks.
        self.blocks(at.trunk).min(at.trunk / BLOCK_TOKENS)
    }

    /// The part for block number `block` of a request of `tokens` tokens.
    #[must_use]
    pub fn block(&self, block: u32, tokens: u32) -> Part {
        let first = block.saturating_mul(BLOCK_TOKENS);
        let entries = tokens.saturating_sub(first).min(BLOCK_TOKENS);
        Part { kind: PartKind::Block, unit: block, first, entries, bytes: self.block_bytes }
    }

    /// The parts of a request's slot: for each layer, those that have rows.
    pub fn state(&self, at: Positions) -> impl Iterator<Item = Part> {
        self.schema.layers.iter().flat_map(move |layer| self.layer_state(layer, at))
    }

    fn layer_state(&self, layer: &LayerCacheSchema, at: Positions) -> Vec<Part> {
        let position = if layer.layer.0 < self.trunk { at.trunk } else { at.draft };
        let slots = layer.pools.iter().filter(|pool| pool.unit == PoolUnit::Slot);
        let parts = slots.flat_map(|pool| {
            rings(layer.kind, pool).into_iter().map(|ring| {
                let rows = ring.kind.rows(position);
                let (first, entries) = (rows.start, rows.len() as u32);
                let bytes = u64::from(entries) * pool.row_bytes;
                Part { kind: ring.kind, unit: layer.layer.0, first, entries, bytes }
            })
        });
        parts.filter(|part| part.entries > 0).collect()
    }

    /// Bytes of all parts of a request.
    #[must_use]
    pub fn bytes(&self, at: Positions) -> u64 {
        self.parts(at).iter().map(|part| part.bytes).sum()
    }

    /// All parts of a request, in the order of an image: blocks, then what its slot holds.
    #[must_use]
    pub fn parts(&self, at: Positions) -> Vec<Part> {
        let blocks = (0..self.blocks(at.trunk)).map(|block| self.block(block, at.trunk));
        blocks.chain(self.state(at)).collect()
    }

    /// The parts of a prefix, in the order of an image: whole blocks, then the checkpoint at its end, which has the
    /// windows of the draft layers if `at.draft` is not 0.
    #[must_use]
    pub fn prefix_parts(&self, at: Positions) -> Vec<Part> {
        let (kind, rows) = (PartKind::Checkpoint, PartKind::Checkpoint.rows(at.trunk));
        let bytes = self.checkpoint_bytes[usize::from(at.draft > 0)];
        let (first, entries) = (rows.start, rows.len() as u32);
        let checkpoint = Part { kind, unit: 0, first, entries, bytes };
        let blocks = (0..self.blocks(at.trunk)).map(|block| self.block(block, at.trunk));
        blocks.chain([checkpoint]).collect()
    }

    /// Bytes of all parts of a prefix.
    #[must_use]
    pub fn prefix_bytes(&self, at: Positions) -> u64 {
        self.prefix_parts(at).iter().map(|part| part.bytes).sum()
    }
}

const _: () = assert!(csa_previous_rows(csa_own_rows(1)) == csa_own_rows(1) + CSA_RATIO);

#[cfg(test)]
mod tests {
    use kv_layout::config::ModelConfig;

    use super::*;

    fn layout(model: &str, max_draft: u32) -> PartLayout {
        let model = ModelConfig::preset(model).expect("a preset");
        PartLayout::new(&CacheConfig { max_draft, ..CacheConfig::new(model) })
    }

    /// At the end of a block the state is a checkpoint without the first row of each window, which no later query
    /// needs. Elsewhere it also has at most three own halves of each CSA layer and one row of sums of each HCA layer.
    #[test]
    fn at_a_boundary_the_state_is_a_checkpoint() {
        for (model, bytes) in [("flash", 3_719_168), ("pro", 5_249_024)] {
            let layout = layout(model, 3);
            let state = |tokens| {
                let at = Positions { trunk: tokens, draft: tokens };
                layout.state(at).map(|part| part.bytes).sum::<u64>()
            };
            let window = |pool: &&Pool| matches!(pool.kind, PoolKind::SwaData | PoolKind::SwaScale);
            let pools = layout.schema.layers.iter().flat_map(|layer| &layer.pools);
            let first_rows: u64 = pools.filter(window).map(|pool| pool.row_bytes).sum();
            assert_eq!(state(1024) + first_rows, bytes, "{model}");
            assert!(state(1027) > bytes && state(1027) < bytes + bytes / 4, "{model}");
            assert_eq!(state(0), 0);
        }
    }

    #[test]
    fn drafts_change_no_part() {
        for tokens in [1, 3, 4, 127, 128, 130, 1000] {
            let at = Positions { trunk: tokens, draft: tokens - 1 };
            assert_eq!(layout("tiny", 0).parts(at), layout("tiny", 9).parts(at));
        }
    }
}

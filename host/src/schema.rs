//! The schema: which pools a layer has, and how large they are (decisions D1, D2, D6).

use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, swa_ring_rows};
use kv_layout::main_row::DATA_BYTES;
use serde::Serialize;

use crate::config::CacheConfig;
use crate::ids::LayerId;
pub use crate::pool_kind::{PoolKind, PoolUnit};

/// One pool of one layer: `[units, rows, row_bytes]` bytes, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pool {
    /// What it holds.
    pub kind: PoolKind,
    /// What it has one of.
    pub unit: PoolUnit,
    /// Rows of one slot or block.
    pub rows: u32,
    /// Bytes of one row.
    pub row_bytes: u64,
}

impl Pool {
    /// Bytes of one slot or block.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        self.rows as u64 * self.row_bytes
    }
}

/// The pools of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerCacheSchema {
    /// The layer.
    pub layer: LayerId,
    /// What its attention reads.
    pub kind: LayerKind,
    /// Its pools, in a fixed order.
    pub pools: Vec<Pool>,
}

impl LayerCacheSchema {
    fn new(layer: LayerId, kind: LayerKind, config: &CacheConfig) -> Self {
        let step = config.step_tokens_with_rollback();
        let pool = |kind, unit, rows, row_bytes| Pool { kind, unit, rows, row_bytes };
        let state =
            |kind, rows, floats: u32| pool(kind, PoolUnit::Slot, rows, 4 * u64::from(floats));
        let (main, index) = (config.main_format, config.index_format);
        let ring = swa_ring_rows(step);
        let mut pools = vec![
            pool(PoolKind::SwaData, PoolUnit::Slot, ring, DATA_BYTES),
            pool(PoolKind::SwaScale, PoolUnit::Slot, ring, main.scale_bytes()),
        ];
        let entries = kind.entries_per_block();
        if entries > 0 {
            pools.push(pool(PoolKind::EntryData, PoolUnit::Block, entries, DATA_BYTES));
            pools.push(pool(PoolKind::EntryScale, PoolUnit::Block, entries, main.scale_bytes()));
        }
        match kind {
            LayerKind::Swa => {}
            LayerKind::Csa => {
                pools.push(pool(PoolKind::IndexCode, PoolUnit::Block, entries, index.code_bytes()));
                pools.push(pool(
                    PoolKind::IndexScale,
                    PoolUnit::Block,
                    entries,
                    index.scale_bytes(),
                ));
                // Keys and gates of both halves of a token: the previous window's and its own.
                let rows = state_ring_rows(2 * CSA_RATIO, step);
                pools.push(state(PoolKind::MainState, rows, 4 * HEAD_DIM));
                pools.push(state(PoolKind::IndexState, rows, 4 * INDEX_DIM));
            }
            LayerKind::Hca => {
                let rows = state_ring_rows(HCA_RATIO, step);
                pools.push(state(PoolKind::MainState, rows, 2 * HEAD_DIM));
            }
        }
        Self { layer, kind, pools }
    }

    /// The pool of the given kind, if the layer has one.
    #[must_use]
    pub fn pool(&self, kind: PoolKind) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.kind == kind)
    }

    /// Bytes of one slot or block in this layer.
    #[must_use]
    pub fn unit_bytes(&self, unit: PoolUnit) -> u64 {
        self.pools.iter().filter(|pool| pool.unit == unit).map(Pool::unit_bytes).sum()
    }
}

/// Compressor rows of one request: the `window` rows one entry is made of, and enough more that all
/// of a step of `step_tokens` can be rejected.
///
/// The next step may close a window whose oldest row is `window - 1` positions back, and a rejected
/// draft may have been written `step_tokens - 1` positions ahead: as in the sliding window's ring.
#[must_use]
pub const fn state_ring_rows(window: u32, step_tokens: u32) -> u32 {
    window + step_tokens.saturating_sub(1)
}

/// The pools of every layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Schema {
    /// One per layer, in order.
    pub layers: Vec<LayerCacheSchema>,
}

impl Schema {
    /// The schema of `config`.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let kinds = config.model.layers.iter().enumerate();
        let layers = kinds
            .map(|(layer, &kind)| LayerCacheSchema::new(LayerId(layer as u32), kind, config))
            .collect();
        Self { layers }
    }

    /// Bytes of one request slot over all layers.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.unit_bytes(PoolUnit::Slot)).sum()
    }

    /// Bytes of one block over all layers.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.unit_bytes(PoolUnit::Block)).sum()
    }
}

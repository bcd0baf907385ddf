//! The schema: which pools a layer has, and how large they are (decisions D1, D2, D6).

use kv_layout::geometry::{
    CompressorKind, LayerKind, csa_own_rows, csa_state_rows, hca_state_rows, swa_ring_rows,
};
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
    /// Its unit: slot or block.
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
    /// Kind of the layer, by what its attention reads.
    pub kind: LayerKind,
    /// Its pools, in a fixed order.
    pub pools: Vec<Pool>,
}

impl LayerCacheSchema {
    fn new(layer: LayerId, kind: LayerKind, config: &CacheConfig) -> Self {
        let step = config.max_decode_tokens();
        let pool = |kind, unit, rows, row_bytes| Pool { kind, unit, rows, row_bytes };
        let state = |kind, rows, which: CompressorKind| {
            pool(kind, PoolUnit::Slot, rows, 4 * u64::from(which.row_floats()))
        };
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
                let rows = csa_state_rows(csa_own_rows(step));
                pools.push(state(PoolKind::MainState, rows, CompressorKind::CsaMain));
                pools.push(state(PoolKind::IndexState, rows, CompressorKind::CsaIndex));
            }
            LayerKind::Hca => {
                pools.push(state(PoolKind::MainState, hca_state_rows(step), CompressorKind::Hca));
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

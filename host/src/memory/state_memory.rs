//! Device memory for copies of request state: the checkpoints, and the tables of the copy kernel.

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, Memory, Stream, View};
use crate::error::KvError;
use crate::ids::{CheckpointId, LayerGroup, LayerId};
use crate::memory::pools::Pools;
use crate::memory::state_layout::{self, Piece, checkpoint_pieces, unit_pieces};
use crate::ops::{CheckpointRows, CopyArena, CopyPieces, LayerImage};
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::schema::Schema;

/// Bytes of all checkpoints.
pub(crate) fn checkpoint_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    u64::from(config.num_checkpoints).saturating_mul(state_layout::checkpoint_bytes(schema))
}

/// The pieces of checkpoints (none in a cache without checkpoints), of slots, and of blocks. Their number does not
/// depend on `offset`.
fn pieces(
    config: &CacheConfig,
    schema: &Schema,
    offset: impl Fn(LayerId, PoolKind) -> u64,
) -> [Vec<Piece>; 3] {
    let checkpoints = match config.num_checkpoints {
        0 => Vec::new(),
        _ => checkpoint_pieces(schema, &offset),
    };
    let [slots, blocks] =
        [PoolUnit::Slot, PoolUnit::Block].map(|unit| unit_pieces(schema, unit, &offset));
    [checkpoints, slots, blocks]
}

/// Bytes of the kernel's tables.
pub(crate) fn table_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    let pieces: usize = pieces(config, schema, |_, _| 0).iter().map(Vec::len).sum();
    (pieces * size_of::<Piece>()) as u64
}

/// The checkpoints, and the tables by which they and slots are copied.
pub(crate) struct StateMemory<B: Backend> {
    slots: Buffer<B, u8>,
    number_of_slots: u32,
    pools: Buffer<B, u8>,
    blocks: u32,
    checkpoints: Buffer<B, u8>,
    number: u32,
    checkpoint_bytes: u64,
    /// Bytes of the trunk's part of a checkpoint, which comes first.
    trunk_bytes: u64,
    /// Pieces of checkpoints, of slots, and of blocks.
    tables: [Buffer<B, u32>; 3],
    /// Pieces of the trunk's part of checkpoints.
    trunk: Buffer<B, u32>,
    /// Where each layer's rows lie in a checkpoint.
    images: Vec<LayerImage>,
    memory: Option<Memory<B>>,
}

impl<B: Backend> StateMemory<B> {
    /// Allocates the checkpoints, and fills the tables of `pools`.
    pub fn new(
        device: &Device<B>,
        stream: &Stream<B>,
        (schema, config): (&Schema, &CacheConfig),
        pools: &Pools<B>,
    ) -> Result<Self, KvError> {
        let slots = pools.slots().clone();
        let checkpoints = match config.num_checkpoints {
            0 => slots.slice(0, 0).expect("every buffer has no bytes"),
            _ => device.allocate("checkpoints", checkpoint_bytes(config, schema))?,
        };
        let offset = |layer, kind| pools.offset(layer, kind).expect("a pool of the schema");
        let (table, mut next) = (pools.tables().cast::<u32>()?, 0);
        let mut fill = |pieces: Vec<Piece>| {
            let words: &[u32] = bytemuck::cast_slice(&pieces);
            stream.upload(words, &table, next)?;
            let len = words.len() as u64;
            let filled = table.slice(next, len).expect("counted by `table_bytes`");
            next += len;
            Ok::<_, KvError>(filled)
        };
        let [of_checkpoints, of_slots, of_blocks] = pieces(config, schema, offset);
        let tables = [fill(of_checkpoints)?, fill(of_slots)?, fill(of_blocks)?];
        let layers = config.group_layers(LayerGroup::Trunk).len();
        let trunk = Schema { layers: schema.layers[..layers].to_vec() };
        let [of_trunk, ..] = pieces(config, &trunk, |_, _| 0);
        let words = of_trunk.as_flattened().len() as u64;
        let trunk_pieces =
            tables[0].slice(0, words).expect("the trunk comes before the draft layers");
        let memory = (config.num_checkpoints > 0).then(|| checkpoints.memory());
        Ok(Self {
            slots,
            number_of_slots: config.units(PoolUnit::Slot),
            pools: pools.whole().clone(),
            blocks: config.num_blocks,
            checkpoints,
            number: config.num_checkpoints,
            checkpoint_bytes: state_layout::checkpoint_bytes(schema),
            trunk_bytes: state_layout::checkpoint_bytes(&trunk),
            tables,
            trunk: trunk_pieces,
            images: state_layout::images(schema),
            memory,
        })
    }

    /// The slots and checkpoints that [`crate::ops::copy_state`] reads and writes.
    pub fn arena(&self) -> CopyArena<'_, B> {
        CopyArena {
            units: &self.slots,
            number_of_units: self.number_of_slots,
            images: &self.checkpoints,
            number_of_images: self.number,
            image_bytes: self.checkpoint_bytes,
        }
    }

    /// As [`Self::arena`], with blocks in place of slots.
    pub fn block_arena(&self) -> CopyArena<'_, B> {
        CopyArena { units: &self.pools, number_of_units: self.blocks, ..self.arena() }
    }

    /// The pieces of checkpoints.
    pub fn checkpoint_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.tables[0])
    }

    /// The trunk's pieces of checkpoints.
    pub fn trunk_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.trunk)
    }

    /// The checkpoints as a launch over a layer writes them: `row`, `[tokens]` i32, names the row of each token.
    pub fn rows<'a>(&'a self, layer: LayerId, row: &'a View<B, i32>) -> CheckpointRows<'a, B> {
        let Self { checkpoints, number, checkpoint_bytes, images, .. } = self;
        let image = images[layer.0 as usize];
        CheckpointRows {
            checkpoints,
            number: *number,
            checkpoint_bytes: *checkpoint_bytes,
            row,
            image,
        }
    }

    /// The pieces of slots.
    pub fn slot_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.tables[1])
    }

    /// The pieces of blocks.
    pub fn block_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.tables[2])
    }

    /// All checkpoints, `[checkpoints, bytes]`.
    pub fn checkpoints(&self) -> &Buffer<B, u8> {
        &self.checkpoints
    }

    /// One checkpoint.
    pub fn checkpoint(&self, checkpoint: CheckpointId) -> Buffer<B, u8> {
        let bytes = self.checkpoint_bytes;
        let found = self.checkpoints.slice(u64::from(checkpoint.0) * bytes, bytes);
        found.expect("ids are given out for checkpoints that there are")
    }

    /// The windows of the draft layers in a checkpoint; empty without such layers.
    pub fn draft_windows(&self, checkpoint: CheckpointId) -> Buffer<B, u8> {
        let (start, bytes) = (self.trunk_bytes, self.checkpoint_bytes - self.trunk_bytes);
        self.checkpoint(checkpoint).slice(start, bytes).expect("the trunk's part comes first")
    }

    /// The memory outside the pools, for a graph to retain; `None` without checkpoints.
    pub fn memory(&self) -> Option<Memory<B>> {
        self.memory.clone()
    }
}

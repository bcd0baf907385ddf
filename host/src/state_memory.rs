//! What copies of request state need on the device: the checkpoints, and the tables of the kernel.

use kernels_gpu::launch::CopyState;

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, Memory, Operation, Stream};
use crate::error::KvError;
use crate::ids::LayerId;
use crate::ops::{CopyPieces, StateArena};
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::pools::Pools;
use crate::schema::Schema;
use crate::state_layout::{self, Piece, checkpoint_pieces, slot_pieces};

/// Bytes of all checkpoints.
pub(crate) fn checkpoint_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    u64::from(config.num_checkpoints).saturating_mul(state_layout::checkpoint_bytes(schema))
}

/// The pieces of checkpoints, none without any, then those of slots. Places of pools change no number of pieces.
fn pieces(
    config: &CacheConfig,
    schema: &Schema,
    offset: impl Fn(LayerId, PoolKind) -> u64,
) -> [Vec<Piece>; 2] {
    let checkpoints = match config.num_checkpoints {
        0 => Vec::new(),
        _ => checkpoint_pieces(schema, &offset),
    };
    [checkpoints, slot_pieces(schema, &offset)]
}

/// Bytes of the kernel's tables.
pub(crate) fn table_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    let pieces: usize = pieces(config, schema, |_, _| 0).iter().map(Vec::len).sum();
    (pieces * size_of::<Piece>()) as u64
}

/// The checkpoints, and the tables by which they and slots are copied.
pub(crate) struct StateMemory<B: Backend> {
    slots: Buffer<B, u8>,
    units: u32,
    checkpoints: Buffer<B, u8>,
    number: u32,
    checkpoint_bytes: u64,
    /// Of checkpoints, then of slots.
    tables: [Buffer<B, u32>; 2],
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
        let [of_checkpoints, of_slots] = pieces(config, schema, offset);
        let tables = [fill(of_checkpoints)?, fill(of_slots)?];
        let memory = (config.num_checkpoints > 0).then(|| checkpoints.memory());
        Ok(Self {
            slots,
            units: config.units(PoolUnit::Slot),
            checkpoints,
            number: config.num_checkpoints,
            checkpoint_bytes: state_layout::checkpoint_bytes(schema),
            tables,
            memory,
        })
    }

    /// What [`crate::ops::copy_state`] reads and writes.
    pub fn arena(&self) -> StateArena<'_, B> {
        StateArena {
            slots: &self.slots,
            number_of_slots: self.units,
            checkpoints: &self.checkpoints,
            number_of_checkpoints: self.number,
            checkpoint_bytes: self.checkpoint_bytes,
        }
    }

    /// The pieces of checkpoints.
    pub fn checkpoint_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.tables[0])
    }

    /// The pieces of slots.
    pub fn slot_pieces(&self) -> CopyPieces<'_, B> {
        CopyPieces(&self.tables[1])
    }

    /// All checkpoints, `[checkpoints, bytes]`.
    pub fn checkpoints(&self) -> &Buffer<B, u8> {
        &self.checkpoints
    }

    /// The memory that is not that of the pools, for a graph to retain.
    pub fn memory(&self) -> Option<Memory<B>> {
        self.memory.clone()
    }
}

/// The word in which the copy counts what it refuses.
pub(crate) fn fault_word() -> usize {
    CopyState::kernel(())
}

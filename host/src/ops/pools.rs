//! The pools of one layer: window rows, compressor state, entries, indexer keys.

use kv_layout::geometry::{BLOCK_TOKENS, CompressorKind, csa_own_rows, hca_state_rows};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use super::{check_argument, check_equal, check_length, check_most};
use crate::device::{Backend, Buffer, DeviceError};

/// The ring planes of one layer.
pub struct SwaRing<'a, B: Backend> {
    /// `[slots * ring, 576]` u8.
    pub data: &'a Buffer<B, u8>,
    /// `[slots * ring, 8]` UE8M0 or `[slots * ring]` f32, as bytes.
    pub scale: &'a Buffer<B, u8>,
    /// How rows are scaled.
    pub format: MainFormat,
    /// Rows of one request's ring.
    pub ring: u32,
    /// Request slots.
    pub slots: u32,
}

impl<B: Backend> SwaRing<'_, B> {
    /// Rows of all slots. Fails for more than `i32::MAX`.
    pub(super) fn rows(&self) -> Result<u32, DeviceError> {
        let rows = u64::from(self.slots) * u64::from(self.ring);
        check_most("ring rows", rows, i32::MAX as u32)?;
        Ok(rows as u32)
    }
}

/// The state that a compressor keeps for later windows.
pub struct StateRing<'a, B: Backend> {
    /// `[slots, rows, row]` f32. In a CSA compressor the rows are the ring of own halves, then that of previous
    /// halves; a row has the keys of half the columns, then their scores. In an HCA compressor the rows are one
    /// ring; a row has maximum, sum and weighted sum.
    pub rows: &'a Buffer<B, f32>,
    /// Rows of one request's ring; in a CSA compressor, of the ring of own halves.
    pub ring: u32,
    /// Request slots.
    pub slots: u32,
}

impl<B: Backend> StateRing<'_, B> {
    /// Refuses a ring with fewer rows than a step of one token needs.
    pub(super) fn check(&self, which: CompressorKind) -> Result<(), DeviceError> {
        let needed = match which {
            CompressorKind::CsaMain | CompressorKind::CsaIndex => csa_own_rows(1),
            CompressorKind::Hca => hca_state_rows(1),
        };
        check_length("rows of a state ring", self.ring.into(), needed.into())
    }
}

/// The compressed entries of one layer.
pub struct Entries<'a, B: Backend> {
    /// `[num_blocks * entries_per_block, 576]` u8.
    pub data: &'a Buffer<B, u8>,
    /// `[num_blocks * entries_per_block, 8]` UE8M0 or `[num_blocks * entries_per_block]` f32, as bytes.
    pub scale: &'a Buffer<B, u8>,
    /// How rows are scaled.
    pub format: MainFormat,
    /// Entries of one block: 32 in a CSA layer, 1 in an HCA layer.
    pub entries_per_block: u32,
    /// Blocks.
    pub num_blocks: u32,
}

impl<B: Backend> Entries<'_, B> {
    /// The tokens of an entry.
    pub(super) fn ratio(&self) -> Result<u32, DeviceError> {
        let entries_per_block = self.entries_per_block;
        if entries_per_block == 0 || !BLOCK_TOKENS.is_multiple_of(entries_per_block) {
            let (value, of) = (entries_per_block.into(), BLOCK_TOKENS.into());
            return Err(DeviceError::NotADivisor { what: "entries of a block", value, of });
        }
        Ok(BLOCK_TOKENS / entries_per_block)
    }

    /// Refuses entries of other than `ratio` tokens.
    pub(super) fn check_ratio(&self, ratio: u32) -> Result<(), DeviceError> {
        self.ratio()?;
        check_equal("entries of a block", self.entries_per_block, BLOCK_TOKENS / ratio)
    }
}

/// The indexer keys of one CSA layer.
pub struct IndexKeys<'a, B: Backend> {
    /// `[num_blocks * 32, code_bytes]` u8: 64 bytes a key (MXFP4, NVFP4), or 128 (FP8).
    pub code: &'a Buffer<B, u8>,
    /// `[num_blocks * 32, scale_bytes]` u8: 4 bytes a key (MXFP4, FP8), or 8 (NVFP4).
    pub scale: &'a Buffer<B, u8>,
    /// How keys are stored.
    pub format: IndexFormat,
    /// Whether keys are multiplied by the Hadamard matrix before they are quantised, as the released
    /// model does.
    pub hadamard: bool,
    /// Blocks.
    pub num_blocks: u32,
}

impl<B: Backend> IndexKeys<'_, B> {
    /// Fails unless there is at least one block of keys.
    pub(super) fn check_blocks(&self) -> Result<(), DeviceError> {
        check_argument("blocks of indexer keys", self.num_blocks, 1, i32::MAX as u32)
    }
}

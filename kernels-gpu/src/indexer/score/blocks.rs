//! The cache blocks of a request, and their copies to shared memory.

use simt::mem::Global;
use simt::{copy, thread, warp};

use super::keys::{Keys, ScoreMemory};
use crate::block_table::TableRow;
use crate::indexer::TILE;

/// Words of a cache block's keys in shared memory.
#[must_use]
pub const fn words<K: Keys>() -> u32 {
    TILE * K::FORMAT.row_bytes() as u32 / 4
}

/// Index of the lane's key in a tile.
#[inline(always)]
#[must_use]
pub fn own_key() -> u32 {
    let lane = thread::lane_id();
    8 * (lane % 4) + lane / 4
}

/// Marks a missing block.
pub const NO_BLOCK: u32 = u32::MAX;

/// The cache blocks of a warp's tiles; lane `i` holds the block of round `i`.
#[derive(Clone, Copy)]
pub struct Blocks(pub u32);

impl Blocks {
    /// Loads the block of `tile`, the warp's tile in round `lane_id()`, if it is before `end`.
    ///
    /// # Safety
    /// The table holds the request's row; no warp has more than 32 rounds.
    #[inline(always)]
    pub unsafe fn load(request: TableRow, tile: u32, end: u32) -> Self {
        // SAFETY: by this function's own contract.
        let row = unsafe { request.plane_row(TILE * tile, tile < end) };
        Self(row.map_or(NO_BLOCK, |row| (row / u64::from(TILE)) as u32))
    }

    /// The block of a round.
    ///
    /// # Safety
    /// All lanes of the warp call it together; `round < 32`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_round(self, round: u32) -> u32 {
        // SAFETY: by this function's own contract.
        unsafe { warp::shuffle_idx_u32(self.0, round) }
    }
}

/// The planes of the keys, and the memory that they are copied to.
#[derive(Clone, Copy)]
pub struct Planes {
    /// The code plane.
    pub code: Global<u8>,
    /// The scale plane.
    pub scale: Global<u8>,
    /// The memory.
    pub memory: ScoreMemory,
}

impl Planes {
    /// Starts the copy of a round's block to word `to` if it `is_wanted`, and commits it as a group. For a missing block
    /// it copies block 0, and for a round after the last one the block of that.
    ///
    /// # Safety
    /// The planes hold the blocks, at least one; no lane reads the words from `to` on;
    /// all lanes of the warp call it together.
    #[inline(always)]
    pub unsafe fn start_copy<K: Keys>(
        self,
        blocks: Blocks,
        (round, rounds): (u32, u32),
        is_wanted: bool,
        to: u32,
    ) {
        let lane = thread::lane_id();
        let (code_bytes, scale_bytes) = (K::FORMAT.code_bytes(), K::FORMAT.scale_bytes());
        // SAFETY: by this function's own contract: the block's rows, all of them.
        unsafe {
            let block = blocks.of_round(round.min(rounds - 1));
            let row = u64::from(TILE) * u64::from(if block == NO_BLOCK { 0 } else { block });
            let (code_vectors, scale_vectors) = (2 * code_bytes as u32, 2 * scale_bytes as u32);
            let (codes, scales) = (row * code_bytes, row * scale_bytes);
            let code = |vector: u32| {
                if vector < code_vectors {
                    let (place, at) = (to + 4 * K::place(vector), codes + 16 * u64::from(vector));
                    self.memory.copy_from_if(is_wanted, place, self.code, at);
                }
            };
            code(lane);
            code(lane + 32);
            code(lane + 64);
            code(lane + 96);
            code(lane + 128);
            code(lane + 160);
            code(lane + 192);
            code(lane + 224);
            let (place, at) = (to + 4 * (code_vectors + lane), scales + 16 * u64::from(lane));
            self.memory.copy_from_if(is_wanted && lane < scale_vectors, place, self.scale, at);
        }
        copy::commit_group();
    }
}

//! Indexer keys as the A operand of matrix products: how each format is read from shared memory, unpacked
//! into fragments in registers, and multiplied by the query, the B operand.
//!
//! | module | what it holds |
//! |---|---|
//! | [`bf16`] | NVFP4: BF16 operands, scales included |
//! | [`s8`] | MXFP4: 8-bit integers, differences of scales included |
//! | [`e4m3`] | FP8: E4M3 operands, one product for each 64 channels |

pub mod bf16;
pub mod e4m3;
pub mod s8;

use kv_layout::index_row::IndexFormat;
use simt::shared::Shared;
use simt::thread;

pub use super::warpgroup::{THREADS, WARPS, own_thread};
use super::weights::Weights;

/// The shared memory of a warpgroup: the query of all heads, the B operand; tables to unpack keys, if the
/// format has any; for each warp a ring of `STAGES` cache blocks of keys; the weights of the heads.
pub type ScoreMemory = Shared<u32, 11_088>;

/// The 32 keys of a cache block in shared memory: their codes, then their scales.
#[derive(Clone, Copy)]
pub struct Block {
    /// The memory that holds it.
    pub memory: ScoreMemory,
    /// First word of the block.
    pub at: u32,
}

impl Block {
    /// Four words of codes: the `vector`-th 16 bytes of the block in the code plane.
    ///
    /// # Safety
    /// The block is in shared memory and has them.
    #[inline(always)]
    unsafe fn codes<K: Keys>(self, vector: u32) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.memory.load_u32x4(self.at + 4 * K::place(vector)) }
    }

    /// A word of the scales.
    ///
    /// # Safety
    /// The block is in shared memory and has it.
    #[inline(always)]
    unsafe fn scales<K: Keys>(self, word: u32) -> u32 {
        let first = 32 * K::FORMAT.code_bytes() as u32 / 4;
        // SAFETY: by this function's own contract.
        unsafe { self.memory.load(self.at + first + word) }
    }
}

/// 16 keys of a block.
#[derive(Clone, Copy)]
pub struct Half {
    /// The block.
    pub block: Block,
    /// First key of the half, 0 or 16.
    pub first: u32,
}

impl Half {
    /// The lane's keys: `first + g` and `first + g + 8`, with `g = lane_id() / 4`.
    #[inline(always)]
    fn keys(self) -> [u32; 2] {
        let upper = self.first + thread::lane_id() / 4;
        [upper, upper + 8]
    }
}

/// A format of keys, with the steps that score it.
pub trait Keys: Copy {
    /// The layout of the format in memory.
    const FORMAT: IndexFormat;
    /// Cache blocks in a warp's ring in shared memory.
    const STAGES: u32;
    /// Factor of the weighted sums of these keys; it is folded into the weights.
    const UNIT: f32;
    /// Words of shared memory after the query that [`Self::prepare`] writes, a multiple of four.
    const PREPARED_WORDS: u32 = 0;
    /// A lane's fragments of operand A for two keys.
    type Left: Copy;

    /// Position in shared memory of the `vector`-th 16 bytes of codes of a block: a swizzle that avoids bank
    /// conflicts.
    #[inline(always)]
    #[must_use]
    fn place(vector: u32) -> u32 {
        vector
    }

    /// Waits for the oldest of the `STAGES - 1` copy groups in flight, one for each block.
    fn wait_for_oldest();

    /// Writes the tables that unpacking needs, from word `at` on; a barrier must follow.
    ///
    /// # Safety
    /// The memory is free; all threads of the four warps call it.
    #[inline(always)]
    unsafe fn prepare(_arena: ScoreMemory, _at: u32) {}

    /// Unpacks the lane's fragments of half of a block.
    ///
    /// # Safety
    /// The half is in shared memory, and [`Self::prepare`] was called, with a barrier since.
    unsafe fn unpack(half: Half) -> Self::Left;

    /// The weighted sums over the lane's heads of keys `first + g` and `first + g + 8` of a half, and the
    /// result of `meanwhile`, which may run while the product is in flight.
    ///
    /// # Safety
    /// `left` was [`Self::unpack`]ed from the half; half, query and weights are in shared memory; all threads
    /// of the warpgroup call it together.
    unsafe fn sums<T>(
        half: Half,
        left: Self::Left,
        weights: Weights,
        meanwhile: impl FnOnce() -> T,
    ) -> ([f32; 2], T);

    /// Whether the scales of a key's groups differ too much for the operands of [`Self::sums`], so that these
    /// keys must be scored by [`Self::sums_by_group`].
    #[inline(always)]
    fn needs_group_scaling(_: Self::Left) -> bool {
        false
    }

    /// Whether the query requires [`Self::sums_by_group`] for all keys.
    ///
    /// # Safety
    /// The query is in shared memory; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn query_needs_group_scaling(_query: ScoreMemory) -> bool {
        false
    }

    /// As [`Self::sums`], for any scales: one product for each group of channels, scaled in f32.
    ///
    /// # Safety
    /// The half, query and weights are in shared memory; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn sums_by_group(_: Half, _: Weights) -> [f32; 2] {
        [f32::NAN; 2]
    }

    /// Factor of the sums of a key.
    ///
    /// # Safety
    /// The block is in shared memory, `key < 32`.
    unsafe fn factor(block: Block, key: u32) -> f32;
}

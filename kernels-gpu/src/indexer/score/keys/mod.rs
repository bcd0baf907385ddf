//! Indexer keys as left sides of matrix products: how a format is read from shared memory, unpacked in a
//! warp's registers, and multiplied by the query.
//!
//! | module | what it holds |
//! |---|---|
//! | [`bf16`] | NVFP4: BF16 operands, scales included |
//! | [`s8`] | MXFP4: integers of 8 bits, and how far scales are apart included |
//! | [`e4m3`] | FP8: E4M3 operands, a product for each 32 channels |

pub mod bf16;
pub mod e4m3;
pub mod s8;

use kv_layout::index_row::IndexFormat;
use simt::shared::Shared;
use simt::thread;

use super::weights::Weights;

/// Warps that multiply together.
pub const WARPS: u32 = 4;
/// Their threads.
pub const THREADS: u32 = 32 * WARPS;

/// The shared memory of four warps: the query of all heads, the right side of products; then what a
/// format needs to unpack keys; then keys, as many blocks of the cache for each warp as fit; then the
/// heads' weights.
pub type ScoreMemory = Shared<u32, 11_088>;

/// The thread's number among those of its four warps.
#[inline(always)]
#[must_use]
pub fn own_thread() -> u32 {
    thread::thread_idx_x() % THREADS
}

/// The keys of a block of the cache in shared memory: the codes of 32, then their scales.
#[derive(Clone, Copy)]
pub struct Block {
    /// Where it is.
    pub memory: ScoreMemory,
    /// The word where it begins.
    pub at: u32,
}

impl Block {
    /// Four words of codes, `vector` being their place in the plane's block in units of 16 bytes.
    ///
    /// # Safety
    /// The block is there and has them.
    #[inline(always)]
    unsafe fn codes<K: Keys>(self, vector: u32) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { self.memory.load_u32x4(self.at + 4 * K::place(vector)) }
    }

    /// A word of the scales.
    ///
    /// # Safety
    /// The block is there and has it.
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
    /// Whose half.
    pub block: Block,
    /// Its first key, 0 or 16.
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

/// A format of keys.
pub trait Keys: Copy {
    /// Its layout in memory.
    const FORMAT: IndexFormat;
    /// Blocks of a warp in shared memory.
    const STAGES: u32;
    /// What the weighted sums of these keys are to be multiplied by.
    const UNIT: f32;
    /// Words of shared memory behind the query that [`Self::prepare`] writes, a multiple of four.
    const PREPARED_WORDS: u32 = 0;
    /// What a lane holds of two keys, unpacked.
    type Left: Copy;

    /// Where the 16 bytes of codes lie whose place in the plane's block is `vector`: so that lanes which
    /// read together meet different banks.
    #[inline(always)]
    #[must_use]
    fn place(vector: u32) -> u32 {
        vector
    }

    /// Waits for the copies of the oldest of `STAGES - 1` blocks, a group each.
    fn wait_for_oldest();

    /// Writes what unpacking needs, from word `at` on; to be followed by a barrier.
    ///
    /// # Safety
    /// The memory is free; all threads of the four warps call it.
    #[inline(always)]
    unsafe fn prepare(_arena: ScoreMemory, _at: u32) {}

    /// The lane's part of a half of a block.
    ///
    /// # Safety
    /// The half is there, and so is what was prepared.
    unsafe fn unpack(half: Half) -> Self::Left;

    /// The weighted sums over the lane's heads of keys `first + g` and `first + g + 8` of a half, and what
    /// `meanwhile` returns, which may run while the product is under way.
    ///
    /// # Safety
    /// `left` is [`Self::unpack`]ed from the half, which is still there, with query and weights, and all
    /// threads of the four warps call it together.
    unsafe fn sums<T>(
        half: Half,
        left: Self::Left,
        weights: Weights,
        meanwhile: impl FnOnce() -> T,
    ) -> ([f32; 2], T);

    /// Whether the products of these keys with any query are of no use, and their sums to be had from
    /// [`Self::far_sums`].
    #[inline(always)]
    fn are_far(_: Self::Left) -> bool {
        false
    }

    /// Whether the products of a query with any keys are.
    ///
    /// # Safety
    /// The query is there; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn is_far(_query: ScoreMemory) -> bool {
        false
    }

    /// The sums as [`Self::sums`] has them, of keys or for a query that are far.
    ///
    /// # Safety
    /// The half is there, with query and weights; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn far_sums(_: Half, _: Weights) -> [f32; 2] {
        [f32::NAN; 2]
    }

    /// What the sums of a key are to be multiplied by besides.
    ///
    /// # Safety
    /// The block is there, `key < 32`.
    unsafe fn factor(block: Block, key: u32) -> f32;
}

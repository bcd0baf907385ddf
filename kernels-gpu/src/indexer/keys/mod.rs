//! Indexer keys as left sides of matrix products: how a format is read from shared memory, unpacked in a
//! warp's registers, and multiplied by the query.
//!
//! | module | what it holds |
//! |---|---|
//! | [`bf16`] | MXFP4 and NVFP4: BF16 operands, scales included |
//! | [`e4m3`] | FP8: E4M3 operands, a product for each 32 channels |

pub mod bf16;
pub mod e4m3;

use kv_layout::index_row::IndexFormat;
use simt::shared::Shared;

use super::weights::Weights;

/// The shared memory of a block of threads: the query of all heads, the right side of products; then the
/// keys of four warps, as many blocks of the cache each as fit; then the heads' weights.
pub type Arena = Shared<u32, 11_088>;

/// The keys of a block of the cache in shared memory: the codes of 32, then their scales.
#[derive(Clone, Copy)]
pub struct Block {
    /// Where it is.
    pub arena: Arena,
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
        unsafe { self.arena.load_u32x4(self.at + 4 * K::place(vector)) }
    }

    /// A word of the scales.
    ///
    /// # Safety
    /// The block is there and has it.
    #[inline(always)]
    unsafe fn scales<K: Keys>(self, word: u32) -> u32 {
        let first = 32 * K::FORMAT.code_bytes() as u32 / 4;
        // SAFETY: by this function's own contract.
        unsafe { self.arena.load(self.at + first + word) }
    }
}

/// A format of keys.
pub trait Keys: Copy {
    /// Its layout in memory.
    const FORMAT: IndexFormat;
    /// Blocks of a warp in shared memory.
    const STAGES: u32;
    /// What a product with these keys is to be multiplied by.
    const UNIT: f32;

    /// Where the 16 bytes of codes lie whose place in the plane's block is `vector`: so that lanes which
    /// read together meet different banks.
    #[inline(always)]
    #[must_use]
    fn place(vector: u32) -> u32 {
        vector
    }

    /// Waits for the copies of the oldest of `STAGES - 1` blocks, a group each.
    fn wait_for_oldest();

    /// The weighted sums over the lane's heads of keys `first + g` and `first + g + 8` of a block.
    ///
    /// # Safety
    /// Block, query and weights are there, `first` is 0 or 16, and all threads of the block of threads
    /// call it together.
    unsafe fn sums(block: Block, first: u32, query: Arena, weights: Weights) -> [f32; 2];

    /// What the sums of a key are to be multiplied by besides.
    ///
    /// # Safety
    /// The block is there, `key < 32`.
    unsafe fn factor(block: Block, key: u32) -> f32;
}

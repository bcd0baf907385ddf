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
use simt::mem::Global;
use simt::shared::Shared;
use simt::thread;

pub use super::warpgroup::{THREADS, WARPS, own_thread};
use super::weights::Weights;
use crate::unroll::unroll;

/// The shared memory of a warpgroup that scores one query: the query of all heads, the B operand; tables to unpack keys,
/// if the format has any; for each warp a ring of `STAGES` cache blocks of keys; the weights of the heads. NVFP4 takes
/// the most words: 4,096 for the query, 12 times 576 for blocks, and 80 for weights.
pub type ScoreMemory = Shared<u32, 11_088>;

/// A query of all heads in shared memory, the B operand.
#[derive(Clone, Copy)]
pub struct Query {
    /// Byte offset in the block's shared memory, a multiple of 16.
    pub byte: u32,
}

impl Query {
    /// Its first `N` words.
    ///
    /// # Safety
    /// The query has them.
    #[inline(always)]
    unsafe fn words<const N: usize>(self) -> Shared<u32, N> {
        // SAFETY: by this function's own contract.
        unsafe { Shared::at(self.byte) }
    }

    /// Starts the copy of the query of row `row` from global memory, by `THREADS` threads, of which this is `thread()`.
    ///
    /// # Safety
    /// `source` holds the row; the memory has room for the query; all threads call it.
    #[inline(always)]
    pub unsafe fn start_copy<K: Keys, const THREADS: u32>(
        self,
        source: Global<u8>,
        row: u32,
        thread: impl Fn() -> u32,
    ) {
        const { assert!(8 * 16 * THREADS >= IndexFormat::MAX_QUERY_BYTES) };
        let first = u64::from(row) * u64::from(IndexFormat::MAX_QUERY_BYTES);
        unroll::<8>(|i| {
            let before = THREADS * i as u32;
            let vector = before + thread();
            if 16 * before < K::FORMAT.query_bytes() && 16 * vector < K::FORMAT.query_bytes() {
                // SAFETY: 16 bytes of the row, once.
                unsafe {
                    let to = Shared::<u32, 4>::at(self.byte + 16 * vector);
                    to.copy_from(0, source, first + 16 * u64::from(vector));
                }
            }
        });
    }
}

/// The 32 keys of a cache block in shared memory: their codes, then their scales.
#[derive(Clone, Copy)]
pub struct Block {
    /// The memory that holds it, and the tables.
    pub memory: ScoreMemory,
    /// First word of the tables.
    pub tables: u32,
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
    /// Words of shared memory that [`Self::prepare`] writes, a multiple of four.
    const PREPARED_WORDS: u32 = 0;
    /// Whether [`Self::product`] runs `meanwhile` while the products are in flight, and not after them.
    const ARE_IN_FLIGHT: bool = false;
    /// A lane's fragments of operand A for two keys.
    type Left: Copy;
    /// A lane's products of two keys and all heads of a query.
    type Products: Copy;

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
    unsafe fn prepare(_memory: ScoreMemory, _at: u32) {}

    /// Unpacks the lane's fragments of half of a block.
    ///
    /// # Safety
    /// The half is in shared memory, and [`Self::prepare`] was called, with a barrier since.
    unsafe fn unpack(half: Half) -> Self::Left;

    /// The products of a half's keys and the query, and the result of `meanwhile`, which may run while they are in
    /// flight.
    ///
    /// # Safety
    /// `left` was [`Self::unpack`]ed from the half; the query is in shared memory; all threads of the warpgroup call it
    /// together.
    unsafe fn product<T>(
        left: Self::Left,
        query: Query,
        meanwhile: impl FnOnce() -> T,
    ) -> (Self::Products, T);

    /// The weighted sums over the lane's heads of keys `first + g` and `first + g + 8` of a half. `of_sixteen` is as
    /// [`Weights::of_sixteen`].
    fn sums(products: Self::Products, of_sixteen: impl Fn(usize) -> [f32; 4]) -> [f32; 2];

    /// [`Self::sums`] of [`Self::product`], and the result of `meanwhile`, which runs while the products are in flight,
    /// or after the sums if they cannot be.
    ///
    /// # Safety
    /// As [`Self::product`]; the weights are in shared memory.
    #[inline(always)]
    unsafe fn weighted<T>(
        left: Self::Left,
        query: Query,
        weights: Weights,
        meanwhile: impl FnOnce() -> T,
    ) -> ([f32; 2], T) {
        // SAFETY: by this function's own contract.
        let of_sixteen = |i: usize| unsafe { weights.of_sixteen(i) };
        // SAFETY: by this function's own contract.
        unsafe {
            if Self::ARE_IN_FLIGHT {
                let (products, then) = Self::product(left, query, meanwhile);
                (Self::sums(products, of_sixteen), then)
            } else {
                let (products, ()) = Self::product(left, query, || ());
                let sums = Self::sums(products, of_sixteen);
                (sums, meanwhile())
            }
        }
    }

    /// Whether the scales of a key's groups differ too much for the operands of [`Self::product`], so that these
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
    unsafe fn query_needs_group_scaling(_query: Query) -> bool {
        false
    }

    /// As [`Self::product`] and [`Self::sums`], for any scales: one product for each group of channels, scaled in f32.
    ///
    /// # Safety
    /// The half, query and weights are in shared memory; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn sums_by_group(_: Half, _: Query, _: Weights) -> [f32; 2] {
        [f32::NAN; 2]
    }

    /// Factor of the sums of a key.
    ///
    /// # Safety
    /// The block is in shared memory, `key < 32`.
    unsafe fn factor(block: Block, key: u32) -> f32;
}

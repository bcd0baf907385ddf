//! The product of a block: 64 columns by 8 to 64 tokens.
//!
//! The weight is the left side, so that a product takes as few as 8 tokens. A warp has 16 columns and every fourth
//! chunk of 128 elements of the inner dimension; four chunks are a stage. A lane loads its part of the weight to
//! registers, a stage ahead, and unpacks it there. Activations are copied to shared memory, a stage ahead too.
//!
//! Sums have one order for every number of tokens: those of every fourth chunk in order, from 0; then the four of
//! them.

use simt::mem::Global;
use simt::shared::Shared;
use simt::{copy, grid, thread};

use super::weights::{CHUNK_PIECES, Weights};
use crate::fragment::{Piece, Place, multiply};
use crate::unroll::{array_from_fn, unroll};

/// Threads of a block.
pub const THREADS: u32 = 512;
/// Columns of a block.
pub const COLUMNS: u32 = 64;
/// Warps side by side along the columns, and along the inner dimension.
const WARP_COLUMNS: u32 = COLUMNS / 16;
const PARTS: u32 = THREADS / 32 / WARP_COLUMNS;
/// Pieces of a row of activations in a stage.
const PIECES: u32 = PARTS * CHUNK_PIECES;
/// Stride of a token in a stage, in words: with 64 bytes more than a multiple of 128, loads have no bank conflicts.
const ROW: u32 = 4 * PIECES + 16;
/// Stride of a token's sums, in words: stores of fragments have no bank conflicts.
pub const SUM_ROW: u32 = COLUMNS + 4;

/// Longest rows that are prefetched: of longer ones all blocks together would fill the L2 cache.
const MOST_PREFETCHED: u32 = 2048;

/// Words of shared memory for `tokens` tokens: two stages of activations. The sums of the parts, and those of the
/// block behind them, take their place.
#[must_use]
pub const fn words(tokens: u32) -> usize {
    (2 * tokens * ROW) as usize
}

/// Bytes of shared memory for `tokens` tokens.
#[must_use]
pub const fn shared_bytes(tokens: u32) -> u32 {
    4 * words(tokens) as u32
}

/// First word of the block's sums.
#[must_use]
pub const fn sums_at(tokens: u32) -> u32 {
    PARTS * tokens * SUM_ROW
}
const _: () = assert!((PARTS + 1) * SUM_ROW <= 2 * ROW, "all sums fit where the stages were");

/// A block's part of a product, `8 * N` tokens by 64 columns, with `M` words of shared memory.
#[derive(Clone, Copy)]
pub struct Block<W, const N: usize, const M: usize> {
    /// The weight.
    pub weights: W,
    /// `[tokens, inner]` BF16.
    pub input: Global<u16>,
    /// Tokens of the launch.
    pub tokens: u32,
    /// Columns of the weight.
    pub columns: u32,
    /// Elements that are added up, a multiple of 32.
    pub inner: u32,
    /// The block's first token, one that exists.
    pub first_token: u32,
    /// The block's first column, one that exists.
    pub first_column: u32,
}

impl<W: Weights, const N: usize, const M: usize> Block<W, N, M> {
    /// Most tokens of the block.
    pub const TOKENS: u32 = 8 * N as u32;

    /// Tokens that the block has.
    #[inline(always)]
    #[must_use]
    pub fn rows(self) -> u32 {
        (self.tokens - self.first_token).min(Self::TOKENS)
    }

    /// Prefetches the block's part of the weight, a hint, and waits for the launch before.
    ///
    /// # Safety
    /// Shapes as above, but that the first column need not exist.
    #[inline(always)]
    pub unsafe fn wait(self) {
        let Self { weights, columns, inner, first_column, .. } = self;
        let is_wanted = first_column < columns && inner <= MOST_PREFETCHED;
        if thread::thread_idx_x() == 0 && is_wanted {
            // SAFETY: rows of the weight.
            unsafe { weights.prefetch(first_column, (columns - first_column).min(COLUMNS)) }
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();
    }

    /// Calls `take` with token and column, both counted from the block's first, and the sum of each that exists:
    /// each by one thread, with consecutive columns in consecutive threads.
    ///
    /// # Safety
    /// Shapes as above; all threads of the block call it together; shared memory starts at `memory`.
    #[inline(always)]
    pub unsafe fn sums(self, memory: Shared<u32, M>, mut take: impl FnMut(u32, u32, f32)) {
        const { assert!(M == words(Self::TOKENS)) };
        // SAFETY: by this function's own contract; each word is written by one thread, with a barrier before
        // others read it.
        unsafe {
            let acc = self.parts(memory);
            thread::sync_threads();
            self.store_parts(memory, acc);
            thread::sync_threads();
            let column = thread::thread_idx_x() % COLUMNS;
            let mut token = thread::thread_idx_x() / COLUMNS;
            while token < self.rows() {
                let part = |part: u32| {
                    f32::from_bits(memory.load((part * Self::TOKENS + token) * SUM_ROW + column))
                };
                let sum = ((part(0) + part(1)) + part(2)) + part(3);
                if self.first_column + column < self.columns {
                    take(token, column, sum * W::UNIT);
                }
                token += THREADS / COLUMNS;
            }
        }
    }

    /// The warp's sums over its chunks.
    ///
    /// # Safety
    /// As [`Self::sums`].
    #[inline(always)]
    unsafe fn parts(self, memory: Shared<u32, M>) -> [[f32; 4]; N] {
        let stages = self.inner.div_ceil(8 * PIECES);
        let other = Self::TOKENS * ROW;
        let mut acc = [[0.0; 4]; N];
        // SAFETY: by this function's own contract; a stage is copied to after the barrier that follows its last
        // reading, and read after the wait and the barrier that follow its copies.
        unsafe {
            self.start_copies(memory, 0, 0);
            self.start_copies(memory, other, 1);
            let (mut now, mut next) = (self.load(0), self.load(1));
            let (mut stage, mut at) = (0, 0);
            while stage < stages {
                copy::wait_for_groups::<1>();
                thread::sync_threads();
                acc = self.multiply(memory, at, now, acc);
                now = next;
                next = self.load(stage + 2);
                thread::sync_threads();
                self.start_copies(memory, at, stage + 2);
                at = other - at;
                stage += 1;
            }
        }
        acc
    }

    /// The lane's part of the weight in stage `stage`: of two columns. Columns past the last one repeat it; their
    /// sums are not used.
    ///
    /// # Safety
    /// As [`Self::sums`].
    #[inline(always)]
    unsafe fn load(self, stage: u32) -> [W::Run; 2] {
        let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
        let column = self.first_column + warp % WARP_COLUMNS * 16 + place.row;
        let chunk = stage * PARTS + warp / WARP_COLUMNS;
        [column, column + 8].map(|column| {
            // SAFETY: the column exists.
            unsafe { self.weights.load(column.min(self.columns - 1), chunk, place.pair) }
        })
    }

    /// Starts the thread's copies of stage `stage` to word `to`, as a group; zeros where rows have ended.
    ///
    /// # Safety
    /// As [`Self::sums`]; no thread reads the stage any more.
    #[inline(always)]
    unsafe fn start_copies(self, memory: Shared<u32, M>, to: u32, stage: u32) {
        let mut i = thread::thread_idx_x();
        let first = stage * 8 * PIECES;
        while first < self.inner && i < self.rows() * PIECES {
            let (row, piece) = (i / PIECES, i % PIECES);
            let (lane, of_run) = W::place(piece % CHUNK_PIECES);
            let slot = piece / CHUNK_PIECES * CHUNK_PIECES + 4 * of_run + lane;
            let to = to + row * ROW + 4 * slot;
            let k = first + 8 * piece;
            let at = u64::from(self.first_token + row) * u64::from(self.inner) + u64::from(k);
            // SAFETY: eight elements of the row, at a multiple of eight, if it has them; each slot once.
            unsafe {
                if k < self.inner {
                    memory.copy_from(to, self.input, at);
                } else {
                    memory.store_u32x4(to, [0; 4]);
                }
            }
            i += THREADS;
        }
        copy::commit_group();
    }

    /// Adds the products of the stage at word `at`. Tokens past the last one repeat it; their sums are not used.
    ///
    /// # Safety
    /// As [`Self::sums`]; the stage is written, with a barrier since.
    #[inline(always)]
    unsafe fn multiply(
        self,
        memory: Shared<u32, M>,
        at: u32,
        [low, high]: [W::Run; 2],
        acc: [[f32; 4]; N],
    ) -> [[f32; 4]; N] {
        let place = Place::of(thread::lane_id());
        let chunk = at + thread::warp_id() / WARP_COLUMNS * CHUNK_PIECES * 4 + 4 * place.pair;
        let last = self.rows() - 1;
        let rows: [u32; N] = array_from_fn(|n| (8 * n as u32 + place.row).min(last) * ROW);
        let add = |of_run: u32, low: Piece, high: Piece, acc: [[f32; 4]; N]| {
            array_from_fn(|n| {
                // SAFETY: by this function's own contract.
                unsafe {
                    let input = memory.load_u32x4(chunk + rows[n] + 16 * of_run);
                    multiply(low, high, input, acc[n])
                }
            })
        };
        let acc = add(0, W::piece::<0>(low), W::piece::<0>(high), acc);
        let acc = add(1, W::piece::<1>(low), W::piece::<1>(high), acc);
        let acc = add(2, W::piece::<2>(low), W::piece::<2>(high), acc);
        add(3, W::piece::<3>(low), W::piece::<3>(high), acc)
    }

    /// Puts the warp's sums into shared memory, `[parts, tokens, columns]`.
    ///
    /// # Safety
    /// As [`Self::sums`]; no thread reads a stage any more; a barrier follows.
    #[inline(always)]
    unsafe fn store_parts(self, memory: Shared<u32, M>, acc: [[f32; 4]; N]) {
        let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
        let column = warp % WARP_COLUMNS * 16 + place.row;
        let token = warp / WARP_COLUMNS * Self::TOKENS + 2 * place.pair;
        unroll::<N>(|n| {
            let at = (token + 8 * n as u32) * SUM_ROW + column;
            let [a, b, c, d] = acc[n].map(f32::to_bits);
            // SAFETY: each element of the warp's part once.
            unsafe {
                memory.store(at, a);
                memory.store(at + SUM_ROW, b);
                memory.store(at + 8, c);
                memory.store(at + SUM_ROW + 8, d);
            }
        });
    }
}

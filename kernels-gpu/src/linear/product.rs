//! The product of a block: 64 columns by 8 to 32 tokens.
//!
//! The weight is operand A, so that a product takes as few as 8 tokens. The inner dimension is cut into chunks of 128
//! elements; every fourth chunk belongs to one of four parts. A part is processed by one warp that has all 64 columns,
//! or by several warps side by side. A lane loads its part of the weight to registers and unpacks it there; activations
//! are copied to shared memory. Both are loaded two chunks ahead, and the warps of a part wait only for each other.
//!
//! The order of a sum is the same for every number of tokens: each part adds its chunks in order, from 0; then the four
//! parts are added in order.

use simt::mem::Global;
use simt::shared::Shared;
use simt::{copy, grid, thread, warp};

use super::weights::{CHUNK_PIECES, Weights};
use crate::fragment::{LanePlace, Piece, multiply};
use crate::unroll::{array_from_fn, unroll};

/// Columns of a block.
pub const COLUMNS: u32 = 64;
/// Parts of the inner dimension.
const PARTS: u32 = 4;
/// Elements of a chunk.
const CHUNK: u32 = 8 * CHUNK_PIECES;
/// Words of a token in a chunk.
const ROW: u32 = 4 * CHUNK_PIECES;
/// Number of chunks of a part in shared memory.
const STAGES: u32 = 2;
/// Stride of a token's sums, in words, chosen so that stores of fragments have no bank conflicts.
pub const SUM_ROW: u32 = COLUMNS + 4;
/// Number of columns that a thread adds up.
const SUMMED: u32 = 4;

/// Length of the longest rows that are prefetched: longer rows of all blocks together would fill the L2 cache.
const MAX_PREFETCHED: u32 = 2048;

/// Threads of a block whose warps have `fragments` times 16 columns each.
#[must_use]
pub const fn threads(fragments: usize) -> u32 {
    32 * PARTS * COLUMNS / (16 * fragments as u32)
}

/// Words of shared memory for `tokens` tokens: two chunks of activations for each part, then the sums of the parts,
/// then those of the block.
#[must_use]
pub const fn words(tokens: u32) -> usize {
    (sums_at(tokens) + tokens * SUM_ROW) as usize
}

/// Bytes of shared memory for `tokens` tokens.
#[must_use]
pub const fn shared_bytes(tokens: u32) -> u32 {
    4 * words(tokens) as u32
}

/// First word of the parts' sums.
const fn parts_at(tokens: u32) -> u32 {
    STAGES * PARTS * tokens * ROW
}

/// First word of the block's sums.
#[must_use]
pub const fn sums_at(tokens: u32) -> u32 {
    parts_at(tokens) + PARTS * tokens * SUM_ROW
}

/// Place of piece `piece` of token `row` among the pieces of a token: a swizzle within 128 bytes, so that neither
/// copies nor loads have bank conflicts.
#[inline(always)]
fn slot(piece: u32, row: u32) -> u32 {
    piece ^ (piece >> 2 & 2) ^ (row % 2 * 5)
}

/// A block's part of a product, `8 * N` tokens by 64 columns, with `M` words of shared memory. A warp has `16 * F` of
/// the columns.
#[derive(Clone, Copy)]
pub struct Block<W, const F: usize, const N: usize, const M: usize> {
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
    /// The block's first token, which exists.
    pub first_token: u32,
    /// The block's first column, which exists.
    pub first_column: u32,
}

/// A lane's part of the sums of a warp: `F` times 16 columns by `N` times 8 tokens.
type Sums<const F: usize, const N: usize> = [[[f32; 4]; N]; F];

impl<W: Weights, const F: usize, const N: usize, const M: usize> Block<W, F, N, M> {
    /// Most tokens of the block.
    pub const TOKENS: u32 = 8 * N as u32;
    /// Warps of a part, side by side along the columns.
    const WARPS: u32 = COLUMNS / (16 * F as u32);
    /// Number of tokens of a chunk that the threads of a part copy at once, one piece a thread.
    const ROWS_AT_ONCE: u32 = 32 * Self::WARPS / CHUNK_PIECES;
    /// Threads of the block.
    pub const THREADS: u32 = threads(F);

    /// Number of tokens of the block.
    #[inline(always)]
    #[must_use]
    pub fn rows(self) -> u32 {
        (self.tokens - self.first_token).min(Self::TOKENS)
    }

    /// Prefetches the block's part of the weight and one row of the activations, which are hints, and waits for the
    /// previous launch. Returns the lane's first two chunks of the weight, for [`Self::sums`]; a weight that no launch
    /// writes is loaded before the wait.
    ///
    /// # Safety
    /// Shapes as above, but that the first column of a weight that no launch writes need not exist.
    #[inline(always)]
    pub unsafe fn wait(self) -> [W::Chunk; 2] {
        let Self { weights, input, columns, inner, first_column, first_token, .. } = self;
        let (thread, row) = (thread::thread_idx_x(), first_column / COLUMNS);
        let is_short = inner <= MAX_PREFETCHED;
        // SAFETY: rows of the weight, and one of the activations, which is a multiple of 64 bytes.
        unsafe {
            if thread == 0 && is_short && first_column < columns {
                weights.prefetch(first_column, (columns - first_column).min(COLUMNS));
            }
            if thread == 32 && is_short && row < self.rows() {
                let at = u64::from(first_token + row) * u64::from(inner);
                input.prefetch_l2(at, 2 * inner);
            }
        }
        let part = thread::warp_id() / Self::WARPS;
        // SAFETY: the first column exists where this is called.
        let load = || unsafe { [self.load(part), self.load(part + PARTS)] };
        if W::IS_FIXED {
            let is_there = first_column < columns;
            let ahead = if is_there { load() } else { [W::Chunk::default(); 2] };
            grid::wait_for_dependencies();
            grid::launch_dependents();
            return ahead;
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();
        load()
    }

    /// Calls `take` with a token and a column, both counted from the block's first, and the sums of that and the next
    /// three columns: once for each token that exists and each fourth column. Some of the columns may not exist.
    ///
    /// # Safety
    /// Shapes as above; all threads of the block call it together; shared memory starts at `memory`; `ahead` is what
    /// [`Self::wait`] gave.
    #[inline(always)]
    pub unsafe fn sums(
        self,
        memory: Shared<u32, M>,
        ahead: [W::Chunk; 2],
        mut take: impl FnMut(u32, u32, [f32; 4]),
    ) {
        const { assert!(M == words(Self::TOKENS) && F == W::FRAGMENTS) };
        // SAFETY: by this function's own contract; each word is written by one thread, with a barrier before
        // others read it.
        unsafe {
            let acc = self.parts(memory, ahead);
            Self::store_parts(memory, acc);
            thread::sync_threads();
            let column = SUMMED * (thread::thread_idx_x() % (COLUMNS / SUMMED));
            let mut token = thread::thread_idx_x() / (COLUMNS / SUMMED);
            while token < self.rows() {
                let part = |part: u32| {
                    let row = parts_at(Self::TOKENS) + (part * Self::TOKENS + token) * SUM_ROW;
                    memory.load_u32x4(row + column).map(f32::from_bits)
                };
                let [a, b, c, d] = [part(0), part(1), part(2), part(3)];
                let sum = |i: usize| (((a[i] + b[i]) + c[i]) + d[i]) * W::UNIT;
                take(token, column, [sum(0), sum(1), sum(2), sum(3)]);
                token += Self::THREADS / (COLUMNS / SUMMED);
            }
        }
    }

    /// Computes the warp's sums over the chunks of its part.
    ///
    /// # Safety
    /// As [`Self::sums`].
    #[inline(always)]
    unsafe fn parts(
        self,
        memory: Shared<u32, M>,
        [mut now, mut next]: [W::Chunk; 2],
    ) -> Sums<F, N> {
        let (part, chunks) = (thread::warp_id() / Self::WARPS, self.inner.div_ceil(CHUNK));
        let mut acc = [[[0.0; 4]; N]; F];
        // SAFETY: by this function's own contract; a stage is copied to after the barrier that follows its last
        // reading, and read after the wait and the barrier that follow its copies.
        unsafe {
            let (mut at, mut other) =
                (part * Self::TOKENS * ROW, (PARTS + part) * Self::TOKENS * ROW);
            self.start_copies(memory, at, part);
            self.start_copies(memory, other, part + PARTS);
            let mut first = 0;
            while first < chunks {
                copy::wait_for_groups::<{ STAGES as usize - 1 }>();
                Self::sync_part();
                if first + part < chunks {
                    acc = self.multiply(memory, at, now, acc);
                }
                now = next;
                next = self.load(first + part + STAGES * PARTS);
                Self::sync_part();
                self.start_copies(memory, at, first + part + STAGES * PARTS);
                (at, other) = (other, at);
                first += PARTS;
            }
        }
        acc
    }

    /// Waits for the warps of the part.
    ///
    /// # Safety
    /// All threads of the block call it together.
    #[inline(always)]
    unsafe fn sync_part() {
        // SAFETY: by this function's own contract.
        unsafe { if Self::WARPS == 1 { warp::sync_warp() } else { thread::sync_threads() } }
    }

    /// Loads the lane's part of the weight in chunk `chunk`.
    ///
    /// # Safety
    /// As [`Self::sums`].
    #[inline(always)]
    unsafe fn load(self, chunk: u32) -> W::Chunk {
        let first = self.first_column + thread::warp_id() % Self::WARPS * 16 * F as u32;
        // SAFETY: by this function's own contract.
        unsafe { self.weights.load(first, chunk, LanePlace::of(thread::lane_id())) }
    }

    /// Starts the thread's copies of chunk `chunk` to the words from `to` on, as one group; writes zeros past the end
    /// of rows.
    ///
    /// # Safety
    /// As [`Self::sums`]; no thread reads the words any more.
    #[inline(always)]
    unsafe fn start_copies(self, memory: Shared<u32, M>, to: u32, chunk: u32) {
        let thread = thread::thread_idx_x() % (32 * Self::WARPS);
        let (first, piece) = (thread / CHUNK_PIECES, thread % CHUNK_PIECES);
        let (k, rows) = (chunk * CHUNK + 8 * piece, self.rows());
        let word = |row: u32| to + row * ROW + 4 * slot(piece, row);
        unroll::<16>(|i| {
            let below = i as u32 * Self::ROWS_AT_ONCE;
            if below < Self::TOKENS {
                let row = first + below;
                let at = u64::from(self.first_token + row) * u64::from(self.inner) + u64::from(k);
                // SAFETY: eight elements of the row, at a multiple of eight, if it has them; each slot once.
                unsafe {
                    memory.copy_from_if(k < self.inner && row < rows, word(row), self.input, at);
                }
            }
        });
        // The rows end inside the chunk.
        if chunk * CHUNK < self.inner && k >= self.inner {
            let mut row = first;
            while row < rows {
                // SAFETY: each slot once, one that is not copied to.
                unsafe { memory.store_u32x4(word(row), [0; 4]) }
                row += Self::ROWS_AT_ONCE;
            }
        }
        copy::commit_group();
    }

    /// Adds the products of the chunk at word `at`. Tokens past the last one repeat it; their sums are not used.
    ///
    /// # Safety
    /// As [`Self::sums`]; the chunk is written, with a barrier since.
    #[inline(always)]
    unsafe fn multiply(
        self,
        memory: Shared<u32, M>,
        at: u32,
        weights: W::Chunk,
        mut acc: Sums<F, N>,
    ) -> Sums<F, N> {
        let place = LanePlace::of(thread::lane_id());
        let last = self.rows() - 1;
        let mut add = |of_lane: u32, pieces: fn(W::Chunk, usize) -> [Piece; 2]| {
            let input: [Piece; N] = array_from_fn(|n| {
                let row = (8 * n as u32 + place.row).min(last);
                let slot = slot(W::piece_of(place.pair, of_lane), row);
                // SAFETY: by this function's own contract.
                unsafe { memory.load_u32x4(at + row * ROW + 4 * slot) }
            });
            unroll::<F>(|f| {
                let [low, high] = pieces(weights, f);
                // SAFETY: by this function's own contract.
                unroll::<N>(|n| acc[f][n] = unsafe { multiply(low, high, input[n], acc[f][n]) });
            });
        };
        add(0, W::pieces::<0>);
        add(1, W::pieces::<1>);
        add(2, W::pieces::<2>);
        add(3, W::pieces::<3>);
        acc
    }

    /// Stores the warp's sums in shared memory, `[parts, tokens, columns]`.
    ///
    /// # Safety
    /// All threads of the block call it, each once; a barrier follows.
    #[inline(always)]
    unsafe fn store_parts(memory: Shared<u32, M>, acc: Sums<F, N>) {
        let (place, warp) = (LanePlace::of(thread::lane_id()), thread::warp_id());
        let column = warp % Self::WARPS * 16 * F as u32 + place.row;
        let token = warp / Self::WARPS * Self::TOKENS + 2 * place.pair;
        let first = parts_at(Self::TOKENS) + token * SUM_ROW + column;
        unroll::<F>(|f| {
            unroll::<N>(|n| {
                let at = first + 16 * f as u32 + 8 * n as u32 * SUM_ROW;
                let [a, b, c, d] = acc[f][n].map(f32::to_bits);
                // SAFETY: each element of the warp's part once.
                unsafe {
                    memory.store(at, a);
                    memory.store(at + SUM_ROW, b);
                    memory.store(at + 8, c);
                    memory.store(at + SUM_ROW + 8, d);
                }
            });
        });
    }
}

//! `bf16_narrow_*`: products with a weight of few columns and long rows. With blocks of 64 columns there would be too
//! few blocks to read it quickly.
//!
//! A cluster of eight blocks has 16 columns by 8 to 32 tokens. Each block has an eighth of the inner dimension, and
//! each of its eight warps an eighth of that. Warps take fragments directly from global memory: each value of the
//! weight is used by one warp. Sums are added through shared memory, of the block and then of the cluster.
//!
//! The order of a sum is the same for every number of tokens. A warp adds its products to 0, in order of the inner
//! dimension; then the sums of the eight warps are added, and then those of the eight blocks. This is the order of
//! `crate::router::order`, so that the tiled product of a router's logits gives the same bits, and serves batches of
//! many tokens.

use kv_layout::router::DECODE_SLICES;
use simt::cluster::{block_rank, cluster_arrive, cluster_wait, sync_cluster};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{grid, thread};

use crate::args::Bf16Narrow;
use crate::fragment::{DEPTH, LanePlace, Piece, multiply};
use crate::router::order::{self, Slice, add_slices};
use crate::unroll::{array_from_fn, unroll};

/// Blocks of a cluster, and warps of a block.
pub const PARTS: u32 = order::PARTS;
const _: () = assert!(PARTS == DECODE_SLICES);
/// Columns of a cluster.
pub const COLUMNS: u32 = 16;
/// Threads of a block.
pub const THREADS: u32 = 32 * PARTS;
/// Stride of a token's sums, in words, chosen so that stores of fragments have no bank conflicts.
const SUM_ROW: u32 = COLUMNS + 4;
/// Number of columns that a thread adds up.
const SUMMED: u32 = 4;
/// Number of chunks that a warp loads at once.
const AT_ONCE: usize = 4;

/// Words of shared memory for `tokens` tokens: the sums of the warps, then those of the block.
#[must_use]
pub const fn words(tokens: u32) -> usize {
    (sums_at(tokens) + tokens * SUM_ROW) as usize
}

/// Bytes of shared memory for `tokens` tokens.
#[must_use]
pub const fn shared_bytes(tokens: u32) -> u32 {
    4 * words(tokens) as u32
}

/// First word of the block's sums.
const fn sums_at(tokens: u32) -> u32 {
    PARTS * tokens * SUM_ROW
}

/// A lane's pieces of a chunk: of two columns, and of `N` tokens.
type Operands<const N: usize> = ([Piece; 2], [Piece; N]);

/// A cluster's part of a product, 16 columns by `8 * N` tokens, with `M` words of shared memory a block.
#[derive(Clone, Copy)]
struct Tile<const N: usize, const M: usize> {
    /// `[tokens, inner]` BF16.
    input: Global<u16>,
    /// `[columns, inner]` BF16.
    weight: Global<u16>,
    tokens: u32,
    columns: u32,
    inner: u32,
    /// The first token, which exists.
    first_token: u32,
    /// The first column, which exists.
    first_column: u32,
    /// The chunks of the block.
    chunks: Slice,
}

impl<const N: usize, const M: usize> Tile<N, M> {
    /// Most tokens.
    const TOKENS: u32 = 8 * N as u32;

    /// Prefetches the block's part of the weight, which is a hint, and waits for the previous launch.
    ///
    /// # Safety
    /// Shapes as above.
    #[inline(always)]
    unsafe fn wait(self) {
        let row = self.first_column + thread::thread_idx_x();
        let Slice { from, to } = self.chunks;
        if thread::thread_idx_x() < COLUMNS && row < self.columns && from < to {
            let at = u64::from(row) * u64::from(self.inner) + u64::from(from * DEPTH);
            // SAFETY: chunks of the row, of 64 bytes each.
            unsafe { self.weight.prefetch_l2(at, 2 * (to - from) * DEPTH) }
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();
    }

    /// Computes the warp's sums: 16 columns by `N` times 8 tokens.
    ///
    /// # Safety
    /// Shapes as above; all threads of the block call it.
    #[inline(always)]
    unsafe fn part(self) -> [[f32; 4]; N] {
        let warp_id = thread::warp_id();
        let (from, to) = (self.chunks.part(warp_id), self.chunks.part(warp_id + 1));
        let mut acc = [[0.0; 4]; N];
        let mut chunk = from;
        while chunk < to {
            // SAFETY: by this function's own contract; the branches are the warp's.
            acc = unsafe {
                match to - chunk {
                    1 => self.add::<1>(chunk, acc),
                    2 => self.add::<2>(chunk, acc),
                    3 => self.add::<3>(chunk, acc),
                    _ => self.add::<AT_ONCE>(chunk, acc),
                }
            };
            chunk += AT_ONCE as u32;
        }
        acc
    }

    /// Adds the products of `C` chunks from `chunk` on, at most [`AT_ONCE`], to `acc`. No load depends on a branch, so
    /// that all of them are in flight before the first product.
    ///
    /// # Safety
    /// The chunks exist; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn add<const C: usize>(self, chunk: u32, mut acc: [[f32; 4]; N]) -> [[f32; 4]; N] {
        // SAFETY: by this function's own contract.
        unsafe {
            let load = |i: u32| {
                if i < C as u32 { self.load(chunk + i) } else { ([[0; 4]; 2], [[0; 4]; N]) }
            };
            let operands: [Operands<N>; AT_ONCE] = [0, 1, 2, 3].map(load);
            unroll::<C>(|i| {
                let ([low, high], tokens) = operands[i];
                unroll::<N>(|n| acc[n] = multiply(low, high, tokens[n], acc[n]));
            });
        }
        acc
    }

    /// The lane's pieces of chunk `chunk`. Rows past the last column or token repeat it; their sums are not used.
    ///
    /// # Safety
    /// The chunk exists.
    #[inline(always)]
    unsafe fn load(self, chunk: u32) -> Operands<N> {
        let place = LanePlace::of(thread::lane_id());
        // SAFETY: row and chunk exist.
        let load = |matrix: Global<u16>, row: u32, rows: u32| unsafe {
            place.load(matrix, self.inner, (row + place.row).min(rows - 1), chunk * DEPTH)
        };
        let column = |row: u32| load(self.weight, self.first_column + row, self.columns);
        let token = |n: usize| load(self.input, self.first_token + 8 * n as u32, self.tokens);
        ([column(0), column(8)], array_from_fn(token))
    }

    /// Stores the warp's sums in shared memory, `[warps, tokens, columns]`.
    ///
    /// # Safety
    /// All threads of the block call it, each once; a barrier follows.
    #[inline(always)]
    unsafe fn store_part(memory: Shared<f32, M>, acc: [[f32; 4]; N]) {
        let place = LanePlace::of(thread::lane_id());
        let token = thread::warp_id() * Self::TOKENS + 2 * place.pair;
        let first = token * SUM_ROW + place.row;
        unroll::<N>(|n| {
            let at = first + 8 * n as u32 * SUM_ROW;
            let [a, b, c, d] = acc[n];
            // SAFETY: each element of the warp's part once.
            unsafe {
                memory.store(at, a);
                memory.store(at + SUM_ROW, b);
                memory.store(at + 8, c);
                memory.store(at + SUM_ROW + 8, d);
            }
        });
    }

    /// Adds the sums of the warps, and stores the sums of the block in shared memory.
    ///
    /// # Safety
    /// The sums of the warps are written, with a barrier since; all threads of the block call it; a barrier of the
    /// cluster follows.
    #[inline(always)]
    unsafe fn add_parts(memory: Shared<f32, M>) {
        let (thread, row) = (thread::thread_idx_x(), COLUMNS / SUMMED);
        let (token, column) = (thread / row, SUMMED * (thread % row));
        if token < Self::TOKENS {
            let at = token * SUM_ROW + column;
            // SAFETY: by this function's own contract; each word once.
            unsafe {
                let part = |part: u32| {
                    memory.load_u32x4(part * Self::TOKENS * SUM_ROW + at).map(f32::from_bits)
                };
                let parts = [0, 1, 2, 3, 4, 5, 6, 7].map(part);
                let sum = |i: usize| parts.iter().fold(0.0, |sum, part| sum + part[i]);
                let sums = [sum(0), sum(1), sum(2), sum(3)].map(f32::to_bits);
                memory.store_u32x4(sums_at(Self::TOKENS) + at, sums);
            }
        }
    }

    /// Adds the sums of the cluster's blocks, and stores them: each block for every eighth token.
    ///
    /// # Safety
    /// The sums of all blocks are written, with a barrier of the cluster since; `output` as in the kernel table.
    #[inline(always)]
    unsafe fn store(self, memory: Shared<f32, M>, output: GlobalMut<f32>) {
        let thread = thread::thread_idx_x();
        let (of_tile, of_row) = (thread / COLUMNS * PARTS + block_rank(), thread % COLUMNS);
        let (token, column) = (self.first_token + of_tile, self.first_column + of_row);
        if of_tile < Self::TOKENS && token < self.tokens && column < self.columns {
            let at = sums_at(Self::TOKENS) + of_tile * SUM_ROW + of_row;
            // SAFETY: by this function's own contract; each element once.
            unsafe {
                let sum = add_slices(|rank| memory.load_from(rank, at));
                output.store(u64::from(token) * u64::from(self.columns) + u64::from(column), sum);
            }
        }
    }
}

/// Multiplies by a narrow weight in BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 16 clusters of 8, tokens /
/// 8 N)`, rounded up, call it.
#[inline(always)]
pub unsafe fn narrow<const N: usize, const M: usize>(args: Bf16Narrow) {
    const { assert!(M == words(8 * N as u32)) };
    let params = args.params;
    let tile = Tile::<N, M> {
        input: args.input,
        weight: args.weight,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
        first_token: thread::block_idx_y() * 8 * N as u32,
        first_column: thread::block_idx_x() / PARTS * COLUMNS,
        chunks: Slice::of(block_rank(), params.inner),
    };
    // SAFETY: by this function's own contract; words of shared memory are written by one thread each, with a barrier
    // before others read them.
    unsafe {
        tile.wait();
        let memory = Shared::<f32, M>::at(0);
        Tile::<N, M>::store_part(memory, tile.part());
        thread::sync_threads();
        Tile::<N, M>::add_parts(memory);
        sync_cluster();
        tile.store(memory, args.output);
        cluster_arrive();
        cluster_wait();
    }
}

//! `router_logits`: the product of many hidden states with the gate, tile by tile.
//!
//! A block computes a tile of 128 tokens by 64 experts, each warp 32 by 32 of it. Operands go through shared
//! memory, 64 elements of the hidden state at a time, double-buffered: while one buffer is multiplied, the next
//! is loaded from global memory.

use crate::args::RouterLogits;
use crate::params::RouterLogitsParams;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::thread;

use super::fragment::{DEPTH, Piece, Place, multiply};

/// Threads of a block.
const THREADS: u32 = 256;
/// Tokens of a block.
pub const TOKENS: u32 = 128;
/// Experts of a block.
pub const EXPERTS: u32 = 64;
/// Elements of the hidden state in a buffer, and the pieces of a row of them.
const STAGE: u32 = 2 * DEPTH;
const PIECES: u32 = STAGE / 8;
/// Rows that the block's threads load at once, a piece each.
const ROWS_AT_ONCE: u32 = THREADS / PIECES;
/// Words of a buffer: the tokens' rows, then the experts'.
const BUFFER: u32 = 4 * PIECES * (TOKENS + EXPERTS);
/// Bytes of shared memory: two buffers.
pub const SHARED_BYTES: u32 = Buffers::BYTES;
/// Warps side by side along the experts.
const WARP_COLUMNS: u32 = EXPERTS / 32;

type Buffers = Shared<u32, { 2 * BUFFER as usize }>;
/// What a thread loads of a stage: pieces of 4 rows of tokens and 2 of experts.
type Loaded = [Piece; 6];
/// Sums of a warp: two times 16 tokens by four times 8 experts.
type Sums = [[[f32; 4]; 4]; 2];

/// First word of piece `piece` of row `row` in a buffer. Odd rows have their halves swapped, a swizzle that
/// avoids bank conflicts of eight lanes that read together.
#[inline(always)]
fn word(row: u32, piece: u32) -> u32 {
    4 * (row * PIECES + (piece ^ (row % 2 * 4)))
}

/// A block's tile of the product.
#[derive(Clone, Copy)]
struct Tile {
    x: Global<u16>,
    gate: Global<u16>,
    first_token: u32,
    first_expert: u32,
    params: RouterLogitsParams,
}

impl Tile {
    /// Loads the thread's pieces of the stage that starts at `depth`; zeros outside the matrices.
    ///
    /// # Safety
    /// The matrices have their shapes.
    #[inline(always)]
    unsafe fn load(self, depth: u32) -> Loaded {
        let RouterLogitsParams { tokens, experts, hidden } = self.params;
        let (own_row, piece) = own();
        let depth = depth + 8 * piece;
        let load = |matrix: Global<u16>, row: u32, rows: u32| {
            if row >= rows || depth >= hidden {
                return [0; 4];
            }
            let at = u64::from(row) * u64::from(hidden) + u64::from(depth);
            // SAFETY: inside the matrix, and a multiple of 8 elements.
            unsafe { matrix.load_u32x4(at) }
        };
        let token = |i: u32| load(self.x, self.first_token + own_row + i * ROWS_AT_ONCE, tokens);
        let expert =
            |i: u32| load(self.gate, self.first_expert + own_row + i * ROWS_AT_ONCE, experts);
        [token(0), token(1), token(2), token(3), expert(0), expert(1)]
    }
}

/// The first row that the thread loads, and the piece of it; its other rows follow every [`ROWS_AT_ONCE`].
#[inline(always)]
fn own() -> (u32, u32) {
    let thread = thread::thread_idx_x();
    (thread / PIECES, thread % PIECES)
}

/// Stores the thread's loaded pieces to the buffer that starts at word `buffer`.
///
/// # Safety
/// A barrier separates it from reads of the buffer.
#[inline(always)]
unsafe fn store(buffers: Buffers, buffer: u32, loaded: Loaded) {
    let (own_row, piece) = own();
    let store = |i: u32, piece_of_row: Piece| {
        // SAFETY: rows of tokens and of experts follow each other in the buffer.
        unsafe {
            buffers.store_u32x4(buffer + word(own_row + i * ROWS_AT_ONCE, piece), piece_of_row);
        }
    };
    let [a, b, c, d, e, f] = loaded;
    store(0, a);
    store(1, b);
    store(2, c);
    store(3, d);
    store(4, e);
    store(5, f);
}

/// Adds the products of the stage in the buffer that starts at word `buffer`.
///
/// # Safety
/// The buffer is written, with a barrier since; all lanes of the warp call it together.
#[inline(always)]
unsafe fn multiply_stage(buffers: Buffers, buffer: u32, acc: Sums) -> Sums {
    // SAFETY: by this function's own contract.
    unsafe {
        let acc = multiply_half(buffers, buffer, 0, acc);
        multiply_half(buffers, buffer, 4, acc)
    }
}

/// [`multiply_stage`] for the four pieces of every row from `first_piece` on.
///
/// # Safety
/// As [`multiply_stage`].
#[inline(always)]
unsafe fn multiply_half(buffers: Buffers, buffer: u32, first_piece: u32, acc: Sums) -> Sums {
    let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
    let tokens = warp / WARP_COLUMNS * 32 + place.row;
    let experts = TOKENS + warp % WARP_COLUMNS * 32 + place.row;
    // SAFETY: by this function's own contract.
    unsafe {
        let load = |row: u32| buffers.load_u32x4(buffer + word(row, first_piece + place.pair));
        let [a, b, c, d] = [load(tokens), load(tokens + 8), load(tokens + 16), load(tokens + 24)];
        let column = |n: usize| {
            let other = load(experts + 8 * n as u32);
            [multiply(a, b, other, acc[0][n]), multiply(c, d, other, acc[1][n])]
        };
        let [p, q, r, s] = [column(0), column(1), column(2), column(3)];
        [[p[0], q[0], r[0], s[0]], [p[1], q[1], r[1], s[1]]]
    }
}

/// Logits of any number of tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens / 128, experts /
/// 64)`, rounded up, with 256 threads a block call it.
#[inline(always)]
pub unsafe fn logits(args: RouterLogits) {
    let RouterLogits { x, gate, logits, params } = args;
    let (first_token, first_expert) =
        (thread::block_idx_x() * TOKENS, thread::block_idx_y() * EXPERTS);
    let tile = Tile { x, gate, first_token, first_expert, params };
    // SAFETY: a buffer is written after the barrier that follows its last reading, and read after the
    // barrier that follows its writing.
    unsafe {
        let buffers = Buffers::at(0);
        let mut acc: Sums = [[[0.0; 4]; 4]; 2];
        store(buffers, 0, tile.load(0));
        thread::sync_threads();
        let (mut buffer, mut depth) = (0, STAGE);
        while depth < params.hidden {
            let next = tile.load(depth);
            acc = multiply_stage(buffers, buffer, acc);
            buffer = BUFFER - buffer;
            store(buffers, buffer, next);
            thread::sync_threads();
            depth += STAGE;
        }
        acc = multiply_stage(buffers, buffer, acc);
        store_logits(logits, tile, acc);
    }
}

/// Writes a warp's sums.
///
/// # Safety
/// The logits have their shape.
#[inline(always)]
unsafe fn store_logits(logits: GlobalMut<f32>, tile: Tile, acc: Sums) {
    let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
    let RouterLogitsParams { tokens, experts, .. } = tile.params;
    let token = tile.first_token + warp / WARP_COLUMNS * 32 + place.row;
    let expert = tile.first_expert + warp % WARP_COLUMNS * 32 + 2 * place.pair;
    let pair = |row: u32, column: u32, pair: [f32; 2]| {
        let (token, expert) = (token + row, expert + column);
        if token < tokens && expert < experts {
            let at = u64::from(token) * u64::from(experts) + u64::from(expert);
            // SAFETY: inside the token's row, and an even element of it.
            unsafe { logits.store_u32x2(at, pair.map(f32::to_bits)) }
        }
    };
    let quarter = |n: usize| {
        let column = 8 * n as u32;
        let half = |row: u32, [a, b, c, d]: [f32; 4]| {
            pair(row, column, [a, b]);
            pair(row + 8, column, [c, d]);
        };
        half(0, acc[0][n]);
        half(16, acc[1][n]);
    };
    quarter(0);
    quarter(1);
    quarter(2);
    quarter(3);
}

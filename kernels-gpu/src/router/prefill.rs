//! `router_logits`: the product of many hidden states with the gate, tile by tile.
//!
//! A cluster of eight blocks computes a tile of 128 tokens by 64 experts, each block over an eighth of the hidden
//! state, each warp 32 by 32 of the tile. Operands go through shared memory, two chunks of the hidden state at a
//! time, copied three stages ahead. Chunks come in the order of [`super::order`], part after part, so that a warp
//! needs two sums at a time: that of the part and that of the slice. Then the blocks exchange the slices' sums,
//! and each adds those of 16 tokens.

use crate::args::RouterLogits;
use crate::params::RouterLogitsParams;
use kv_layout::router::DECODE_SLICES;
use simt::cluster::{block_rank, cluster_arrive, cluster_wait, sync_cluster};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{copy, thread};

use super::order::{Slice, Walk};
use crate::fragment::{DEPTH, Place, multiply};

/// Threads of a block.
const THREADS: u32 = 256;
/// Tokens of a tile.
pub const TOKENS: u32 = 128;
/// Experts of a tile.
pub const EXPERTS: u32 = 64;
/// Blocks of a tile.
pub const SLICES: u32 = DECODE_SLICES;
/// Pieces of a row in a stage: those of two chunks.
const PIECES: u32 = 2 * CHUNK_PIECES;
const CHUNK_PIECES: u32 = DEPTH / 8;
/// Rows that the block's threads copy at once, a piece each.
const ROWS_AT_ONCE: u32 = THREADS / PIECES;
/// Words of a stage: the tokens' rows, then the experts'.
const STAGE: u32 = 4 * PIECES * (TOKENS + EXPERTS);
/// Stages in shared memory.
const STAGES: u32 = 4;
/// Copies that may be under way when a stage is multiplied.
const AHEAD: usize = STAGES as usize - 2;
/// Words of the stages.
const WORDS: usize = (STAGES * STAGE) as usize;
/// Stride of the slice's sums of a token, in words: stores of pairs by a warp have no bank conflicts.
const STRIDE: u32 = EXPERTS + 8;
/// Words of the slice's sums, which take the place of the stages.
const SUMS: usize = (TOKENS * STRIDE) as usize;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = Stages::BYTES;
const _: () = assert!(SUMS <= WORDS);
/// Warps side by side along the experts.
const WARP_COLUMNS: u32 = EXPERTS / 32;

type Stages = Shared<u32, WORDS>;
/// Sums of a warp: two times 16 tokens by four times 8 experts.
type Sums = [[[f32; 4]; 4]; 2];

/// First word of piece `piece` of row `row` in a stage. Odd rows have their halves swapped, a swizzle that
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
    /// Starts the thread's copies of a stage, whose chunk of the thread is that of `walk`, to word `stage`. Rows
    /// past the last token or expert repeat the last one; their results are not used.
    ///
    /// # Safety
    /// The matrices have their shapes; no thread reads the stage any more.
    #[inline(always)]
    unsafe fn start_copies(self, stages: Stages, stage: u32, walk: Walk) {
        let RouterLogitsParams { tokens, experts, hidden } = self.params;
        let (own_row, piece) = own();
        let depth = walk.chunk * DEPTH + piece % CHUNK_PIECES * 8;
        let start = |matrix: Global<u16>, row: u32, rows: u32, to: u32| {
            let at = u64::from(row.min(rows - 1)) * u64::from(hidden) + u64::from(depth);
            // SAFETY: inside the matrix if the chunk exists, and a multiple of 8 elements; rows of tokens and of
            // experts follow each other in the stage.
            unsafe { stages.copy_from_if(walk.exists(), stage + word(to, piece), matrix, at) }
        };
        let token = |i: u32| {
            let row = own_row + i * ROWS_AT_ONCE;
            start(self.x, self.first_token + row, tokens, row);
        };
        let expert = |i: u32| {
            let row = own_row + i * ROWS_AT_ONCE;
            start(self.gate, self.first_expert + row, experts, TOKENS + row);
        };
        token(0);
        token(1);
        token(2);
        token(3);
        expert(0);
        expert(1);
    }
}

/// The first row that the thread copies, and the piece of it; its other rows follow every [`ROWS_AT_ONCE`].
#[inline(always)]
fn own() -> (u32, u32) {
    let thread = thread::thread_idx_x();
    (thread / PIECES, thread % PIECES)
}

/// Adds the products of a chunk, whose pieces of every row start with `first_piece` in the stage at word
/// `stage`.
///
/// # Safety
/// The stage is written, with a barrier since; all lanes of the warp call it together.
#[inline(always)]
unsafe fn multiply_chunk(stages: Stages, stage: u32, first_piece: u32, acc: Sums) -> Sums {
    let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
    let tokens = warp / WARP_COLUMNS * 32 + place.row;
    let experts = TOKENS + warp % WARP_COLUMNS * 32 + place.row;
    // SAFETY: by this function's own contract.
    unsafe {
        let load = |row: u32| stages.load_u32x4(stage + word(row, first_piece + place.pair));
        let [a, b, c, d] = [load(tokens), load(tokens + 8), load(tokens + 16), load(tokens + 24)];
        let column = |n: usize| {
            let other = load(experts + 8 * n as u32);
            [multiply(a, b, other, acc[0][n]), multiply(c, d, other, acc[1][n])]
        };
        let [p, q, r, s] = [column(0), column(1), column(2), column(3)];
        [[p[0], q[0], r[0], s[0]], [p[1], q[1], r[1], s[1]]]
    }
}

/// A warp's sums while it walks along its slice.
#[derive(Clone, Copy)]
struct Progress {
    walk: Walk,
    /// Of the part so far.
    part: Sums,
    /// Of the parts before.
    slice: Sums,
}

impl Progress {
    /// Takes the chunk of the walk, if there is one.
    ///
    /// # Safety
    /// As [`multiply_chunk`]; the walk is the same in all lanes of the warp.
    #[inline(always)]
    unsafe fn take(self, stages: Stages, stage: u32, first_piece: u32) -> Self {
        let Self { walk, part, slice } = self;
        if !walk.exists() {
            return self;
        }
        // SAFETY: by this function's own contract.
        let part = unsafe { multiply_chunk(stages, stage, first_piece, part) };
        if walk.ends_part() {
            Self { walk: walk.next(), part: [[[0.0; 4]; 4]; 2], slice: add(slice, part) }
        } else {
            Self { walk: walk.next(), part, slice }
        }
    }
}

#[inline(always)]
fn add(a: Sums, b: Sums) -> Sums {
    let four = |a: [f32; 4], b: [f32; 4]| [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]];
    let half = |a: [[f32; 4]; 4], b: [[f32; 4]; 4]| {
        [four(a[0], b[0]), four(a[1], b[1]), four(a[2], b[2]), four(a[3], b[3])]
    };
    [half(a[0], b[0]), half(a[1], b[1])]
}

/// Logits of any number of tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(8 * tokens / 128, experts /
/// 64)`, quotients rounded up, with 256 threads a block and 8 blocks a cluster call it.
#[inline(always)]
pub unsafe fn logits(args: RouterLogits) {
    let RouterLogits { x, gate, logits, params } = args;
    let (first_token, first_expert) =
        (thread::block_idx_x() / SLICES * TOKENS, thread::block_idx_y() * EXPERTS);
    let tile = Tile { x, gate, first_token, first_expert, params };
    // SAFETY: words of shared memory are written by one thread each, with a barrier before others read them;
    // the sums take the place of the stages after a barrier.
    unsafe {
        let slice = sum_slice(tile, Slice::of(block_rank(), params.hidden));
        thread::sync_threads();
        let sums = Shared::<f32, SUMS>::at(0);
        store_sums(sums, slice);
        sync_cluster();
        let all = load_logits(sums);
        cluster_arrive();
        store_logits(logits, tile, all);
        cluster_wait();
    }
}

/// The warp's sums over the block's slice.
///
/// # Safety
/// As [`logits`].
#[inline(always)]
unsafe fn sum_slice(tile: Tile, slice: Slice) -> Sums {
    let zeros = [[[0.0; 4]; 4]; 2];
    let mut progress = Progress { walk: Walk::new(slice), part: zeros, slice: zeros };
    let (_, piece) = own();
    // The threads with the first pieces of a row copy the first chunk of each stage, the others the second.
    let first = Walk::new(slice);
    let mut walk = if piece < CHUNK_PIECES { first } else { first.next() };
    // SAFETY: a stage is copied to after the barrier that follows its last reading, and read after the wait and
    // the barrier that follow its copies.
    unsafe {
        let stages = Stages::at(0);
        let mut ahead = 0;
        while ahead < (STAGES - 1) * STAGE {
            tile.start_copies(stages, ahead, walk);
            copy::commit_group();
            walk = walk.next().next();
            ahead += STAGE;
        }
        let mut stage = 0;
        while progress.walk.exists() {
            copy::wait_for_groups::<AHEAD>();
            thread::sync_threads();
            tile.start_copies(stages, ahead, walk);
            copy::commit_group();
            walk = walk.next().next();
            ahead = stage;
            progress = progress.take(stages, stage, 0);
            progress = progress.take(stages, stage, CHUNK_PIECES);
            stage = if stage == (STAGES - 1) * STAGE { 0 } else { stage + STAGE };
        }
    }
    progress.slice
}

/// Puts a warp's sums into shared memory, `[128, 64]`.
///
/// # Safety
/// All threads of the block call it; a barrier follows before others read.
#[inline(always)]
unsafe fn store_sums(sums: Shared<f32, SUMS>, own: Sums) {
    let (place, warp) = (Place::of(thread::lane_id()), thread::warp_id());
    let token = warp / WARP_COLUMNS * 32 + place.row;
    let expert = warp % WARP_COLUMNS * 32 + 2 * place.pair;
    let at = token * STRIDE + expert;
    // SAFETY: each pair once, at a multiple of 8 bytes.
    let half = |at: u32, [a, b, c, d]: [f32; 4]| unsafe {
        sums.store_u32x2(at, [a, b].map(f32::to_bits));
        sums.store_u32x2(at + 8 * STRIDE, [c, d].map(f32::to_bits));
    };
    let quarter = |n: usize| {
        half(at + 8 * n as u32, own[0][n]);
        half(at + 16 * STRIDE + 8 * n as u32, own[1][n]);
    };
    quarter(0);
    quarter(1);
    quarter(2);
    quarter(3);
}

/// Tokens of which a block adds the slices.
const OWN_TOKENS: u32 = TOKENS / SLICES;
/// Logits that a thread makes of them.
const OWN: usize = (OWN_TOKENS * EXPERTS / THREADS) as usize;

/// Token, of the tile, and expert of a thread's logit `i`.
#[inline(always)]
fn own_logit(i: u32) -> (u32, u32) {
    let at = thread::thread_idx_x() + i * THREADS;
    (block_rank() * OWN_TOKENS + at / EXPERTS, at % EXPERTS)
}

/// The thread's logits: sums over all slices, in their order.
///
/// # Safety
/// The sums of all blocks of the cluster are written, with a barrier of the cluster since.
#[inline(always)]
unsafe fn load_logits(sums: Shared<f32, SUMS>) -> [f32; OWN] {
    [0, 1, 2, 3].map(|i| {
        let (token, expert) = own_logit(i);
        // SAFETY: by this function's own contract.
        let of = |rank: u32| unsafe { sums.load_from(rank, token * STRIDE + expert) };
        [0, 1, 2, 3, 4, 5, 6, 7].map(of).into_iter().fold(0.0, |sum, part| sum + part)
    })
}

/// Writes the thread's logits.
///
/// # Safety
/// The logits have their shape.
#[inline(always)]
unsafe fn store_logits(to: GlobalMut<f32>, tile: Tile, logits: [f32; OWN]) {
    let RouterLogitsParams { tokens, experts, .. } = tile.params;
    let store = |i: u32, logit: f32| {
        let (token, expert) = own_logit(i);
        let (token, expert) = (tile.first_token + token, tile.first_expert + expert);
        if token < tokens && expert < experts {
            // SAFETY: inside the token's row.
            unsafe { to.store(u64::from(token) * u64::from(experts) + u64::from(expert), logit) }
        }
    };
    let [a, b, c, d] = logits;
    store(0, a);
    store(1, b);
    store(2, c);
    store(3, d);
}

//! `router_logits_*`: the product of many hidden states with the gate, tile by tile.
//!
//! A cluster of eight or two blocks computes a tile of 128 tokens by 128 experts. Each block computes it over one or
//! four slices of the hidden state; each of its two warpgroups has 64 tokens and all experts of the tile. Both operands
//! go through shared memory, two chunks of the hidden state at a time, copied five stages ahead. A thread needs three
//! sums for each of its logits ([`super::order`]): of the current part, of the current slice, and of the slices before.
//! At the end the blocks exchange their sums, and each adds those of its share of the tokens.

use crate::args::RouterLogits;
use crate::params::RouterLogitsParams;
use kv_layout::router::{DECODE_SLICES, LogitsSplit};
use simt::cluster::{block_rank, cluster_arrive_release, cluster_wait, sync_cluster};
use simt::mem::Global;
use simt::shared::Shared;
use simt::warpgroup::{FragmentsN128, Rows, bf16_m64n128k32, fence_proxy_async};
use simt::{copy, thread};

use super::order::{PARTS, Slice, add_slices};
use crate::fragment::{DEPTH, LanePlace, add, stage_place};
use crate::unroll::{array_from_fn, unroll};

/// Threads of a block: two warpgroups.
const THREADS: u32 = 256;
const TOKENS: u32 = LogitsSplit::TOKENS;
const EXPERTS: u32 = LogitsSplit::EXPERTS;
/// Number of rows of a stage: tokens, then experts.
const ROWS: u32 = TOKENS + EXPERTS;
/// Number of chunks of a stage.
const CHUNKS: u32 = 2;
/// Number of 16-byte pieces of a chunk of a row.
const CHUNK_SIXTEENS: u32 = DEPTH / 8;
/// Words of a stage: rows of two chunks.
const STAGE: u32 = ROWS * Rows::<WORDS>::WORDS;
const _: () = assert!(CHUNKS * CHUNK_SIXTEENS * 4 == Rows::<WORDS>::WORDS);
const _: () = assert!(STAGE.is_multiple_of(Rows::<WORDS>::ALIGN) && TOKENS.is_multiple_of(8));
/// Number of stages in shared memory.
const STAGES: u32 = 6;
/// Number of copy groups that may be under way when a stage is multiplied.
const AHEAD: usize = STAGES as usize - 2;
/// Words of the stages.
const WORDS: usize = (STAGES * ROWS * 32) as usize;
/// Stride of the block's sums of a token, in words, chosen so that a warp's stores of pairs have no bank conflicts.
const STRIDE: u32 = EXPERTS + 8;
/// Words of the block's sums, which replace the stages.
const SUMS: usize = (TOKENS * STRIDE) as usize;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = Stages::BYTES;
const _: () = assert!(SUMS <= WORDS);

type Stages = Shared<u32, WORDS>;
/// A thread's sums: of its warpgroup's 64 tokens by 128 experts.
type Sums = FragmentsN128;

/// A block's tile of the product.
#[derive(Clone, Copy)]
struct Tile {
    x: Global<u16>,
    gate: Global<u16>,
    first_token: u32,
    first_expert: u32,
    params: RouterLogitsParams,
}

/// The part of each stage that a thread copies: 8 bytes of every sixteenth row.
#[derive(Clone, Copy)]
struct Share {
    /// The first row.
    row: u32,
    /// The chunk of the stage.
    chunk: u32,
    /// Index of the 8-byte piece in the chunk.
    eight: u32,
}

/// Number of 8-byte pieces of a chunk of a row.
const EIGHTS: u32 = DEPTH / 4;
/// Number of rows that the block's threads copy at once.
const ROWS_AT_ONCE: u32 = THREADS / (CHUNKS * EIGHTS);
/// Number of copies of a thread from each matrix.
const COPIES: usize = (TOKENS / ROWS_AT_ONCE) as usize;
const _: () = assert!(TOKENS == EXPERTS);

impl Share {
    #[inline(always)]
    fn own() -> Self {
        let thread = thread::thread_idx_x();
        let (row, at) = (thread / (CHUNKS * EIGHTS), thread % (CHUNKS * EIGHTS));
        Self { row, chunk: at / EIGHTS, eight: at % EIGHTS }
    }

    /// The word of a stage to which the thread's 8 bytes of its first row go. Its other rows follow at distances of
    /// [`ROWS_AT_ONCE`] rows.
    #[inline(always)]
    fn word(self, rows: Rows<WORDS>) -> u32 {
        let (sixteen, word) = stage_place(self.eight);
        rows.word(self.chunk * CHUNK_SIXTEENS + sixteen, self.row) + word
    }
}
const _: () = assert!(ROWS_AT_ONCE.is_multiple_of(8), "the swizzle has a period of eight rows");

/// The pipeline that brings the chunks of a block's slices through shared memory.
#[derive(Clone, Copy)]
struct Pipeline {
    tile: Tile,
    share: Share,
    /// The first chunk, and one past the last.
    first: u32,
    end: u32,
    /// The next chunk that the thread copies.
    next: u32,
    /// First word of the next stage to be copied to, and of the stage that is multiplied.
    ahead: u32,
    stage: u32,
}

/// The rows of the stage at word `stage`.
#[inline(always)]
fn rows_at(stage: u32) -> Rows<WORDS> {
    // SAFETY: the whole shared memory of the block; stages are multiples of eight rows.
    unsafe { Rows::at(Stages::at(0), stage) }
}

impl Pipeline {
    /// Starts the copies of all stages but one.
    ///
    /// # Safety
    /// The matrices have their shapes; the stages are free.
    #[inline(always)]
    unsafe fn start(tile: Tile, first: u32, end: u32) -> Self {
        let share = Share::own();
        let (next, last) = (first + share.chunk, (STAGES - 1) * STAGE);
        let mut pipeline = Self { tile, share, first, end, next, ahead: 0, stage: last };
        let mut stage = 0;
        while stage < STAGES - 1 {
            // SAFETY: by this function's own contract.
            unsafe { pipeline.copy() }
            stage += 1;
        }
        pipeline
    }

    /// Starts the thread's copies of a stage, as one group, which is empty after the last chunk. Rows past the last
    /// token or expert repeat the last one; their results are not used.
    ///
    /// # Safety
    /// The matrices have their shapes; no thread reads the stage any more.
    #[inline(always)]
    unsafe fn copy(&mut self) {
        let Self { tile, share, end, next, ahead, .. } = *self;
        let RouterLogitsParams { tokens, experts, hidden } = tile.params;
        // SAFETY: the whole shared memory of the block.
        let stages = unsafe { Stages::at(0) };
        let depth = u64::from(next * DEPTH + 4 * share.eight);
        let start = |matrix: Global<u16>, first: u32, rows: u32, to: u32| {
            let last = u64::from(rows - 1) * u64::from(hidden) + depth;
            let mut at = u64::from(first + share.row) * u64::from(hidden) + depth;
            unroll::<COPIES>(|i| {
                let to = to + Rows::<WORDS>::WORDS * ROWS_AT_ONCE * i as u32;
                // SAFETY: inside the matrix if the chunk exists, and a multiple of 4 elements; each 8 bytes of the
                // stage once.
                unsafe { stages.copy_8_from_if(next < end, to, matrix, at.min(last)) }
                at += u64::from(ROWS_AT_ONCE) * u64::from(hidden);
            });
        };
        let to = share.word(rows_at(ahead));
        start(tile.x, tile.first_token, tokens, to);
        start(tile.gate, tile.first_expert, experts, to + Rows::<WORDS>::WORDS * TOKENS);
        copy::commit_group();
        self.next += CHUNKS;
        self.ahead = if ahead == (STAGES - 1) * STAGE { 0 } else { ahead + STAGE };
    }

    /// Adds the products of chunk `chunk` to `sum`, or to 0 unless `adds`. Chunks come in order.
    ///
    /// # Safety
    /// The matrices have their shapes; all threads of the block call it together.
    #[inline(always)]
    unsafe fn multiply(&mut self, chunk: u32, adds: bool, sum: Sums) -> Sums {
        let of_stage = (chunk - self.first) % CHUNKS;
        if of_stage == 0 {
            self.stage = if self.stage == (STAGES - 1) * STAGE { 0 } else { self.stage + STAGE };
            copy::wait_for_groups::<AHEAD>();
            fence_proxy_async();
            // SAFETY: all threads come together, behind the products of the stage before, which is copied to.
            unsafe {
                thread::sync_threads();
                self.copy();
            }
        }
        let rows = rows_at(self.stage).from(of_stage * CHUNK_SIXTEENS, 0);
        let (tokens, experts) = (rows.from(0, thread::warp_id() / 4 * 64), rows.from(0, TOKENS));
        // SAFETY: the stage is there since the barrier.
        unsafe { bf16_m64n128k32(tokens, experts, adds, sum) }
    }
}

const ZEROS: Sums = [[0.0; 4]; 16];

/// Computes the logits of any number of tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(BLOCKS * tokens / 128, experts /
/// 128)`, quotients rounded up, with 256 threads a block and `BLOCKS` blocks a cluster call it.
#[inline(always)]
pub unsafe fn logits<const BLOCKS: u32>(args: RouterLogits) {
    let RouterLogits { x, gate, params, .. } = args;
    let (first_token, first_expert) =
        (thread::block_idx_x() / BLOCKS * TOKENS, thread::block_idx_y() * EXPERTS);
    let tile = Tile { x, gate, first_token, first_expert, params };
    let slices = DECODE_SLICES / BLOCKS;
    let first = block_rank() * slices;
    // SAFETY: words of shared memory are written by one thread each, with a barrier before others read them;
    // the sums take the place of the stages after a barrier.
    unsafe {
        let total = sum_slices(tile, first, first + slices);
        thread::sync_threads();
        let sums = Shared::<f32, SUMS>::at(0);
        store_sums(sums, total);
        sync_cluster();
        store_logits::<BLOCKS>(args, tile, sums);
        // A block must not exit while others load its sums. That includes sums of tokens and experts that do not exist,
        // which are loaded but not used.
        cluster_arrive_release();
        cluster_wait();
    }
}

/// Computes the thread's sums over slices `first..end`, in the order of [`super::order`].
///
/// # Safety
/// As [`logits`].
#[inline(always)]
unsafe fn sum_slices(tile: Tile, first: u32, end: u32) -> Sums {
    let slice_of = |rank: u32| Slice::of(rank, tile.params.hidden);
    let mut total = ZEROS;
    // SAFETY: by this function's own contract; the loops are the block's.
    unsafe {
        let mut pipeline = Pipeline::start(tile, slice_of(first).from, slice_of(end - 1).to);
        let mut rank = first;
        while rank < end {
            let slice = slice_of(rank);
            let mut of_slice = ZEROS;
            let mut part = 0;
            while part < PARTS {
                let (from, to) = (slice.part(part), slice.part(part + 1));
                let mut of_part = ZEROS;
                let mut chunk = from;
                while chunk < to {
                    of_part = pipeline.multiply(chunk, chunk > from, of_part);
                    chunk += 1;
                }
                of_slice = add(of_slice, of_part);
                part += 1;
            }
            total = add(total, of_slice);
            rank += 1;
        }
    }
    total
}

/// Stores a thread's sums in shared memory, `[128, 128]`.
///
/// # Safety
/// All threads of the block call it; a barrier follows before others read.
#[inline(always)]
unsafe fn store_sums(sums: Shared<f32, SUMS>, own: Sums) {
    let (place, warp) = (LanePlace::of(thread::lane_id()), thread::warp_id());
    let at = (warp * 16 + place.row) * STRIDE + 2 * place.pair;
    unroll::<16>(|n| {
        let (at, [a, b, c, d]) = (at + 8 * n as u32, own[n].map(f32::to_bits));
        // SAFETY: each pair once, at a multiple of 8 bytes.
        unsafe {
            sums.store_u32x2(at, [a, b]);
            sums.store_u32x2(at + 8 * STRIDE, [c, d]);
        }
    });
}

/// Adds the sums of the cluster's blocks for the block's share of the tokens, and writes their logits. A thread handles
/// eight logits at a time.
///
/// # Safety
/// The sums of all blocks of the cluster are written, with a barrier of the cluster since; the logits have their
/// shape.
#[inline(always)]
unsafe fn store_logits<const BLOCKS: u32>(args: RouterLogits, tile: Tile, sums: Shared<f32, SUMS>) {
    const AT_ONCE: u32 = THREADS / EXPERTS;
    let RouterLogitsParams { tokens, experts, .. } = tile.params;
    let own_tokens = TOKENS / BLOCKS;
    let thread = thread::thread_idx_x();
    let (expert, first) = (thread % EXPERTS, block_rank() * own_tokens + thread / EXPERTS);
    let mut done = 0;
    while done < own_tokens {
        let token = |i: u32| first + done + AT_ONCE * i;
        let logits: [f32; 8] = array_from_fn(|i| {
            // SAFETY: by this function's own contract.
            let of = |rank: u32| unsafe { sums.load_from(rank, token(i as u32) * STRIDE + expert) };
            if BLOCKS == 2 { of(0) + of(1) } else { add_slices(of) }
        });
        unroll::<8>(|i| {
            let (token, expert) = (tile.first_token + token(i as u32), tile.first_expert + expert);
            if token < tokens && expert < experts {
                let at = u64::from(token) * u64::from(experts) + u64::from(expert);
                // SAFETY: inside the token's row.
                unsafe { args.logits.store(at, logits[i]) }
            }
        });
        done += 8 * AT_ONCE;
    }
}

//! Products of many tokens with a weight in BF16, tile by tile.
//!
//! A tile is 192 tokens by 128 columns; each of the block's three warpgroups has 64 tokens of it. Blocks are
//! persistent: a block has the tokens of one tile, and the columns of several tiles in turn. Both operands go through
//! shared memory, in stages of 64 elements of the inner dimension. They are copied three stages ahead, past the end of
//! a tile into the next one.
//!
//! Sums have the same order as in the kernels for few tokens ([`super::product`]), so that a token has the same bits in
//! every batch. Every fourth chunk of 128 elements belongs to one of four parts; each part is added up from 0, chunk
//! after chunk; then the four parts are added in order. So the block takes the chunks part by part, and a thread has
//! two sums for each of its products.

use kv_layout::linear::TILE_INNER;
use simt::mem::Global;
use simt::shared::Shared;
use simt::warpgroup::{FragmentsN128, Rows, bf16_m64n128k64, fence_proxy_async};
use simt::{copy, thread};

use crate::fragment::{add, stage_place};
use crate::unroll::unroll;

/// Threads of a block: three warpgroups.
pub const THREADS: u32 = 384;
/// Tokens of a tile.
pub const TOKENS: u32 = 192;
/// Columns of a tile.
pub const COLUMNS: u32 = 128;
/// Parts of the inner dimension.
const PARTS: u32 = 4;
/// Elements of a chunk.
const CHUNK: u32 = TILE_INNER;
/// Elements of a stage.
const DEPTH: u32 = 64;
/// Number of rows of a stage: tokens, then columns.
const ROWS: u32 = TOKENS + COLUMNS;
/// Words of a stage.
const STAGE: u32 = ROWS * Rows::<WORDS>::WORDS;
const _: () = assert!(STAGE.is_multiple_of(Rows::<WORDS>::ALIGN) && TOKENS.is_multiple_of(8));
/// Number of stages in shared memory.
const STAGES: u32 = 4;
/// First word of the last stage.
const LAST: u32 = (STAGES - 1) * STAGE;
/// Number of copy groups that may be under way when a stage is multiplied.
const AHEAD: usize = STAGES as usize - 2;
/// Words of the stages.
const WORDS: usize = (STAGES * ROWS * 32) as usize;
/// Bytes of shared memory for the stages.
pub const SHARED_BYTES: u32 = Stages::BYTES;

type Stages = Shared<u32, WORDS>;

/// A thread's sums: of its warpgroup's 64 tokens by all columns.
pub type Sums = FragmentsN128;

/// Number of blocks for each [`TOKENS`] of `tokens` tokens, with `units` tiles of columns: the largest number with
/// which all blocks run at once, if `at_once` blocks can; at least one, and at most `units`.
#[must_use]
pub const fn splits(tokens: u32, units: u32, at_once: u32) -> u32 {
    let tiles = if tokens < TOKENS { 1 } else { tokens.div_ceil(TOKENS) };
    match at_once / tiles {
        0 => 1,
        splits if splits > units => units,
        splits => splits,
    }
}

/// The operands of a product.
#[derive(Clone, Copy)]
pub struct Operands {
    /// `[tokens, inner]` BF16.
    pub input: Global<u16>,
    /// `[columns, inner]` BF16.
    pub weight: Global<u16>,
    /// Tokens of the launch.
    pub tokens: u32,
    /// Columns of the weight.
    pub columns: u32,
    /// Elements that are added up, a multiple of 32.
    pub inner: u32,
}

/// A block's share of the product: its first token, and its tiles of columns.
#[derive(Clone, Copy)]
pub struct Share {
    /// The first token, which exists.
    pub first_token: u32,
    /// The first tile of columns.
    pub from: u32,
    /// One past the last tile.
    pub to: u32,
}

impl Share {
    /// The block's share of `units` tiles of columns, in a launch of `splits` blocks for each tile of tokens.
    #[inline(always)]
    #[must_use]
    pub fn own(splits: u32, units: u32) -> Self {
        let (tile, rank) = (thread::block_idx_x() / splits, thread::block_idx_x() % splits);
        let unit = |rank: u32| rank * units / splits;
        Self { first_token: tile * TOKENS, from: unit(rank), to: unit(rank + 1) }
    }
}

/// Number of 8-byte pieces of a row of a stage.
const EIGHTS: u32 = DEPTH / 4;
/// Number of rows that the block's threads copy at once.
const ROWS_AT_ONCE: u32 = THREADS / EIGHTS;
const _: () = assert!(ROWS_AT_ONCE.is_multiple_of(8), "the swizzle has a period of eight rows");

/// The part of each stage that a thread copies: 8 bytes of every 24th row.
#[derive(Clone, Copy)]
struct Copies {
    /// The first row.
    row: u32,
    /// The first element of the 8 bytes.
    element: u32,
    /// The word of a stage to which the thread's 8 bytes of its first row go. Its other rows follow at distances of
    /// [`ROWS_AT_ONCE`] rows.
    word: u32,
}

impl Copies {
    #[inline(always)]
    fn own() -> Self {
        let thread = thread::thread_idx_x();
        let (row, eight) = (thread / EIGHTS, thread % EIGHTS);
        let (sixteen, word) = stage_place(eight % 8);
        let word = rows_at(0).word(4 * (eight / 8) + sixteen, row) + word;
        Self { row, element: 4 * eight, word }
    }
}

/// The rows of the stage at word `stage`.
#[inline(always)]
fn rows_at(stage: u32) -> Rows<WORDS> {
    // SAFETY: the whole shared memory of the stages; they are multiples of eight rows.
    unsafe { Rows::at(Stages::at(0), stage) }
}

/// The place of a stage in the operands: the tile of columns, the part, and the first element.
#[derive(Clone, Copy)]
struct Cursor {
    unit: u32,
    part: u32,
    element: u32,
}

impl Cursor {
    /// The stage after this one. Rows end at element `end`, a multiple of a chunk.
    #[inline(always)]
    fn next(self, end: u32) -> Self {
        let Self { unit, part, element } = self;
        let in_chunk = element + DEPTH;
        let element =
            if in_chunk.is_multiple_of(CHUNK) { in_chunk + (PARTS - 1) * CHUNK } else { in_chunk };
        let next = (part + 1) * CHUNK;
        match (element < end, part + 1 < PARTS && next < end) {
            (true, _) => Self { unit, part, element },
            (_, true) => Self { unit, part: part + 1, element: next },
            _ => Self { unit: unit + 1, part: 0, element: 0 },
        }
    }
}

/// The pipeline that brings a block's operands through shared memory.
#[derive(Clone, Copy)]
pub struct Pipeline {
    operands: Operands,
    share: Share,
    copies: Copies,
    /// The stage that is copied next.
    next: Cursor,
    /// First word of the stage that is multiplied.
    stage: u32,
}

impl Pipeline {
    /// Starts the copies of all stages but one.
    ///
    /// # Safety
    /// The matrices have their shapes; no thread uses the words of the stages.
    #[inline(always)]
    #[must_use]
    pub unsafe fn start(operands: Operands, share: Share) -> Self {
        let next = Cursor { unit: share.from, part: 0, element: 0 };
        let mut pipeline = Self { operands, share, copies: Copies::own(), next, stage: LAST };
        let mut stage = 0;
        while stage < LAST {
            // SAFETY: by this function's own contract.
            unsafe { pipeline.copy(stage) }
            stage += STAGE;
        }
        pipeline
    }

    /// One past the last element of a row, in whole chunks.
    #[inline(always)]
    fn end(self) -> u32 {
        self.operands.inner.next_multiple_of(CHUNK)
    }

    /// Starts the thread's copies to the stage at word `to`, as one group, which is empty after the last tile; writes
    /// zeros past the end of rows. Rows past the last token or column repeat the last one; their results are not used.
    ///
    /// # Safety
    /// The matrices have their shapes; no thread reads the stage any more.
    #[inline(always)]
    unsafe fn copy(&mut self, to: u32) {
        let Self { operands, share, copies, next, .. } = *self;
        let Operands { input, weight, tokens, columns, inner } = operands;
        let element = next.element + copies.element;
        // SAFETY: the whole shared memory of the stages.
        let stages = unsafe { Stages::at(0) };
        let to = to + copies.word;
        let word = |row: u32| to + Rows::<WORDS>::WORDS * row;
        // The last copies of column rows would go past the last of these rows.
        let has_column = |row: u32| row + ROWS_AT_ONCE <= COLUMNS || copies.row + row < COLUMNS;
        if next.unit < share.to && element < inner {
            let start = |matrix: Global<u16>, row: u32, rows: u32, to: u32| {
                let row = (row + copies.row).min(rows - 1);
                let at = u64::from(row) * u64::from(inner) + u64::from(element);
                // SAFETY: inside the matrix, and a multiple of 4 elements; each 8 bytes of the stage once.
                unsafe { stages.copy_8_from_if(true, to, matrix, at) }
            };
            unroll::<{ (TOKENS / ROWS_AT_ONCE) as usize }>(|i| {
                let row = ROWS_AT_ONCE * i as u32;
                start(input, share.first_token + row, tokens, word(row));
            });
            unroll::<{ COLUMNS.div_ceil(ROWS_AT_ONCE) as usize }>(|i| {
                let row = ROWS_AT_ONCE * i as u32;
                if has_column(row) {
                    start(weight, next.unit * COLUMNS + row, columns, word(TOKENS + row));
                }
            });
        } else if next.unit < share.to {
            let mut row = copies.row;
            while row < ROWS {
                // SAFETY: each 8 bytes of the stage once.
                unsafe { stages.store_u32x2(word(row - copies.row), [0; 2]) }
                row += ROWS_AT_ONCE;
            }
        }
        copy::commit_group();
        self.next = next.next(self.end());
    }

    /// Adds the products of the next stage to `sum`, and meanwhile starts the copies of another stage.
    ///
    /// # Safety
    /// The matrices have their shapes; all threads of the block call it together.
    #[inline(always)]
    unsafe fn multiply(&mut self, sum: Sums) -> Sums {
        let before = self.stage;
        self.stage = if before == LAST { 0 } else { before + STAGE };
        copy::wait_for_groups::<AHEAD>();
        fence_proxy_async();
        let rows = rows_at(self.stage);
        let (tokens, columns) = (rows.from(0, thread::warp_id() / 4 * 64), rows.from(0, TOKENS));
        // SAFETY: all threads come together, behind the products of the stage before, which is copied to; the stage
        // that is multiplied is there since the barrier.
        unsafe {
            thread::sync_threads();
            bf16_m64n128k64(tokens, columns, sum, || self.copy(before)).0
        }
    }

    /// Computes the thread's sums for the next tile of columns.
    ///
    /// # Safety
    /// The matrices have their shapes; the tile is one of the block's; all threads of the block call it together.
    #[inline(always)]
    pub unsafe fn sums(&mut self) -> Sums {
        let end = self.end();
        // -0 plus a sum is the sum.
        let mut total = [[-0.0; 4]; 16];
        let mut part = 0;
        while part < PARTS {
            let mut of_part = [[0.0; 4]; 16];
            let mut element = part * CHUNK;
            while element < end {
                // SAFETY: by this function's own contract; a chunk is two stages.
                unsafe {
                    of_part = self.multiply(of_part);
                    of_part = self.multiply(of_part);
                }
                element += PARTS * CHUNK;
            }
            total = add(total, of_part);
            part += 1;
        }
        total
    }
}

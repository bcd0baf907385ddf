//! `bf16_index_query_*`: queries of the indexer for many tokens, from activations to the layout that the score kernels
//! read, in one launch. A head is a tile of columns; its queries are finished in the registers in which the product
//! leaves them, while the operands of the next head are copied.

use kv_layout::index_row::QUERY_HEADS;
use simt::shared::Shared;
use simt::thread;

use super::tiled::{
    COLUMNS, Operands, Pipeline, SHARED_BYTES as STAGES_BYTES, Share, Sums, THREADS,
};
use crate::args::Bf16IndexQuery;
use crate::compress::Quad;
use crate::fragment::LanePlace;
use crate::index_row::IndexRowFormat;
use crate::indexer::CHANNELS;
use crate::indexer::score::query::{Queries, queries};
use crate::indexer::score::query_rows::LANE_PAIRS;
use crate::math::cos_sin;
use crate::params::Bf16IndexQueryParams;
use crate::unroll::array_from_fn;

const _: () = assert!(COLUMNS == CHANNELS);

/// Number of rows of a tile of which a thread has a part.
const OWN_ROWS: u32 = 2;
/// Words of cosines and sines: those of a thread's rotated pairs of its rows.
const ROTATION_WORDS: usize = (THREADS * OWN_ROWS * LANE_PAIRS * 2) as usize;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = STAGES_BYTES + Shared::<u32, ROTATION_WORDS>::BYTES;

/// Computes the queries of each token's heads, and their weights.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of as many blocks as the table says call it.
#[inline(always)]
pub unsafe fn query<F: IndexRowFormat>(args: Bf16IndexQuery) {
    let Bf16IndexQueryParams { tokens, heads, inner, splits, .. } = args.params;
    let queries = queries!(args);
    let operands = Operands {
        input: args.input,
        weight: args.query_weight,
        tokens,
        columns: heads * CHANNELS,
        inner,
    };
    let share = Share::own(splits, QUERY_HEADS);
    let of_products = Share { to: share.to.min(heads), ..share };
    let rows = Rows::new(queries, share.first_token, tokens);
    // SAFETY: by this function's own contract; the loops are the block's.
    unsafe {
        let mut pipeline = Pipeline::start(operands, of_products);
        rows.store_rotations();
        let mut head = share.from;
        while head < of_products.to {
            rows.store::<F>(head, pipeline.sums());
            head += 1;
        }
        while head < share.to {
            rows.store_zeros::<F>(head);
            head += 1;
        }
    }
}

/// The 16 tokens of a warp; a lane has a part of two of them.
#[derive(Clone, Copy)]
struct Rows {
    queries: Queries,
    tokens: u32,
    /// The warp's first row.
    first: u32,
    place: LanePlace,
}

impl Rows {
    #[inline(always)]
    fn new(queries: Queries, first_token: u32, tokens: u32) -> Self {
        let first = first_token + 16 * thread::warp_id();
        Self { queries, tokens, first, place: LanePlace::of(thread::lane_id()) }
    }

    /// The lane's row `i` of two, replaced by the last row if it does not exist; and whether it exists and is not
    /// padding.
    #[inline(always)]
    unsafe fn own(self, i: u32) -> (u32, bool) {
        let row = self.first + self.place.row + 8 * i;
        let existing = row.min(self.tokens - 1);
        // SAFETY: the token exists.
        (existing, row < self.tokens && !unsafe { self.queries.is_padding(existing) })
    }

    /// The word at which cosine and sine of pair `pair` of the lane's row `i` are.
    #[inline(always)]
    fn rotation_word(i: u32, pair: u32) -> u32 {
        2 * (THREADS * (LANE_PAIRS * i + pair) + thread::thread_idx_x())
    }

    /// Stores cosines and sines of the lane's pairs in shared memory, for the lane itself.
    ///
    /// # Safety
    /// The tokens' positions and the frequencies are there.
    #[inline(always)]
    unsafe fn store_rotations(self) {
        let mut i = 0;
        while i < OWN_ROWS {
            // SAFETY: by this function's own contract; words behind the stages, each once.
            unsafe {
                let (row, _) = self.own(i);
                let token = u64::from(self.queries.first + row);
                let position = self.queries.token_position.load(token) as u32 as f32;
                let rotations = Shared::<u32, ROTATION_WORDS>::at(STAGES_BYTES);
                let mut pair = 0;
                while pair < LANE_PAIRS {
                    let of_head = u64::from(4 * pair + self.place.pair);
                    let (cos, sin) = cos_sin(position * self.queries.frequencies.load(of_head));
                    let bits = [cos.to_bits(), sin.to_bits()];
                    rotations.store_u32x2(Self::rotation_word(i, pair), bits);
                    pair += 1;
                }
            }
            i += 1;
        }
    }

    /// Finishes the queries of head `head`, from the thread's sums.
    ///
    /// # Safety
    /// As [`query`]; the rotations are stored; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn store<F: IndexRowFormat>(self, head: u32, sums: Sums) {
        let quads = |first: usize| -> [Quad; 8] {
            array_from_fn(|i| {
                let [a, b] = [sums[2 * i], sums[2 * i + 1]];
                [a[first], a[first + 1], b[first], b[first + 1]]
            })
        };
        let (mut now, next) = (quads(0), quads(2));
        let mut i = 0;
        // A loop, so that the code exists only once.
        while i < OWN_ROWS {
            // SAFETY: by this function's own contract; words that the thread has stored.
            unsafe {
                let rotations = Shared::<u32, ROTATION_WORDS>::at(STAGES_BYTES);
                let rotation = |pair: u32| {
                    let [cos, sin] = rotations.load_u32x2(Self::rotation_word(i, pair));
                    (f32::from_bits(cos), f32::from_bits(sin))
                };
                self.queries.store_of_four::<F>(self.own(i), head, now, rotation);
            }
            now = next;
            i += 1;
        }
    }

    /// Stores zeros for head `head`, which is `heads` or more: a head that the model does not have.
    ///
    /// # Safety
    /// As [`query`]; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn store_zeros<F: IndexRowFormat>(self, head: u32) {
        let mut row = self.first;
        while row < self.tokens.min(self.first + 16) {
            // SAFETY: the token exists; the branch is the warp's.
            unsafe {
                if !self.queries.is_padding(row) {
                    self.queries.store_zeros::<F>(row, head);
                }
            }
            row += 1;
        }
    }
}

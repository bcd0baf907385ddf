//! Queries of the indexer: rotated, multiplied by the Hadamard matrix, and quantised in the format of the keys, as the
//! released model does to queries and keys.

use crate::args::IndexQuery;
use kv_layout::geometry::ROPE_DIM;
use kv_layout::index_row::IndexFormat;
use simt::math::{permute_bytes, sqrt};
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::compress::{Quad, load_quad};
use crate::convert::{bf16x2_from_f32, e4m3x4_from_f32};
use crate::index_row::{IndexRowFormat, Lanes, Requantised, WholeWarp, quad_from_bf16};
use crate::indexer::CHANNELS;
use crate::math::{cos_sin, rotate};
use crate::params::IndexQueryParams;
use crate::unroll::unroll;

/// Warps of a block.
pub const WARPS: u32 = 4;
/// Number of heads that a warp takes in turn in launches of many tokens, which fill the GPU: it computes cosines and
/// sines once for all of them.
const MAX_HEADS: u32 = 8;
/// Fewest tokens of such a launch.
const MANY_TOKENS: u32 = 200;

/// Number of heads of a warp.
#[must_use]
pub const fn heads_of_warp(tokens: u32) -> u32 {
    if tokens < MANY_TOKENS { 1 } else { MAX_HEADS }
}

/// Cosine and sine of a lane's two pairs of channels; `None` for channels that are not rotated.
pub type Rotation = Option<[(f32, f32); 2]>;

/// Number of lanes that hold a group of MXFP4.
const GROUP_LANES: u32 = IndexFormat::Mxfp4.group() / 4;

/// The outputs for the queries of a launch's tokens, and the inputs except for the projected queries.
#[derive(Clone, Copy)]
pub struct Queries {
    /// `[tokens, heads]` f32, projected.
    pub projected_weight: Global<f32>,
    /// `[32]` radians per token of each rotated pair.
    pub frequencies: Global<f32>,
    /// `[step]` absolute position of each query.
    pub token_position: Global<i32>,
    /// `[step]` slot of each query's request; -1 = padding.
    pub token_slot: Global<i32>,
    /// `[tokens, 16384]` u8.
    pub query: GlobalMut<u8>,
    /// `[tokens, heads]` f32.
    pub weight: GlobalMut<f32>,
    /// The first query token of the launch.
    pub first: u32,
    /// Heads of a query.
    pub heads: u32,
}

/// The [`Queries`] of a kernel with these arguments.
macro_rules! queries {
    ($args:ident) => {
        $crate::indexer::score::query::Queries {
            projected_weight: $args.projected_weight,
            frequencies: $args.frequencies,
            token_position: $args.token_position,
            token_slot: $args.token_slot,
            query: $args.query,
            weight: $args.weight,
            first: $args.params.first,
            heads: $args.params.heads,
        }
    };
}
pub(crate) use queries;

impl Queries {
    /// Whether the token of row `row` is padding.
    ///
    /// # Safety
    /// The token exists.
    #[inline(always)]
    pub unsafe fn is_padding(self, row: u32) -> bool {
        // SAFETY: by this function's own contract.
        unsafe { self.token_slot.load(u64::from(self.first + row)) < 0 }
    }

    /// Stores zeros for head `head`, which is `heads` or more: a head that the model does not have.
    ///
    /// # Safety
    /// Row and head exist; all lanes of one warp call it together.
    #[inline(always)]
    pub unsafe fn store_zeros<F: IndexRowFormat>(self, row: u32, head: u32) {
        // SAFETY: by this function's own contract.
        unsafe { self.store_values::<F>(row, head, [0.0; 4], 0) }
    }

    /// Cosine and sine for the lane's two pairs of channels of row `row`; `None` if they are not rotated.
    ///
    /// # Safety
    /// The token exists.
    #[inline(always)]
    #[must_use]
    pub unsafe fn rotation(self, row: u32) -> Rotation {
        let channel = 4 * thread::lane_id();
        if channel < CHANNELS - ROPE_DIM {
            return None;
        }
        let pair = u64::from((channel - (CHANNELS - ROPE_DIM)) / 2);
        // SAFETY: by this function's own contract.
        unsafe {
            let position = self.token_position.load(u64::from(self.first + row)) as u32 as f32;
            let of_pair = |i: u64| cos_sin(position * self.frequencies.load(pair + i));
            Some([of_pair(0), of_pair(1)])
        }
    }

    /// Rotates the query of head `head`, multiplies it by the Hadamard matrix, quantises it in the format of the keys,
    /// and stores it. Scales the head's weight. Lane `l` has the projected channels `4 l .. 4 l + 4`.
    ///
    /// # Safety
    /// Row and head exist; all lanes of one warp call it together; `rotation` is that of the row.
    #[inline(always)]
    pub unsafe fn store<F: IndexRowFormat>(
        self,
        row: u32,
        head: u32,
        [a, b, c, d]: Quad,
        rotation: Rotation,
    ) {
        let ([a, b], [c, d]) = match rotation {
            Some([first, second]) => (rotate(a, b, first), rotate(c, d, second)),
            None => ([a, b], [c, d]),
        };
        let rounded = quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]);
        // SAFETY: by this function's own contract; channels are below 128.
        unsafe {
            let Requantised { values: [values], scale, exponent_gaps: [exponent_gap] } =
                F::requantised::<WholeWarp, 1>(WholeWarp::hadamard([rounded]));
            self.store_values::<F>(row, head, values, exponent_gap);
            if thread::lane_id() == 0 {
                self.store_weight(row, head, scale);
            }
        }
    }

    /// Stores the weight of head `head`, times `scale`, by which the stored values of the head must be multiplied.
    ///
    /// # Safety
    /// Row and head exist; one thread calls it.
    #[inline(always)]
    pub unsafe fn store_weight(self, row: u32, head: u32, scale: f32) {
        let constant = 1.0 / sqrt((CHANNELS * self.heads) as f32);
        let at = u64::from(row) * u64::from(self.heads) + u64::from(head);
        // SAFETY: by this function's own contract.
        unsafe { self.weight.store(at, self.projected_weight.load(at) * constant * scale) }
    }

    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn store_values<F: IndexRowFormat>(
        self,
        row: u32,
        head: u32,
        values: Quad,
        exponent_gap: u32,
    ) {
        let lane = thread::lane_id();
        let at =
            |byte: u32| u64::from(row) * u64::from(IndexFormat::MAX_QUERY_BYTES) + u64::from(byte);
        let of_channel = |i: u32| at(F::FORMAT.query_byte(head, 4 * lane + i));
        // SAFETY: by this function's own contract; four bytes follow each other.
        unsafe {
            match F::FORMAT {
                IndexFormat::Nvfp4 => unroll::<4>(|i| {
                    let bits = bf16x2_from_f32(values[i], 0.0) as u16;
                    self.query.cast::<u16>().store(of_channel(i as u32) / 2, bits);
                }),
                IndexFormat::Mxfp4 => {
                    self.query.cast::<u32>().store(of_channel(0) / 4, bytes_of_integers(values));
                }
                IndexFormat::Fp8 => {
                    self.query.cast::<u32>().store(of_channel(0) / 4, e4m3x4_from_f32(values));
                }
            }
        }
        if F::FORMAT == IndexFormat::Mxfp4 && lane.is_multiple_of(GROUP_LANES) {
            let at = at(IndexFormat::query_exponent_gap_byte(head, lane / GROUP_LANES));
            // SAFETY: by this function's own contract.
            unsafe { self.query.store(at, exponent_gap as u8) }
        }
    }
}

/// Four integers of up to 8 bits as bytes.
#[inline(always)]
#[must_use]
pub fn bytes_of_integers(values: Quad) -> u32 {
    /// 1.5 * 2^23: an integer that is added to it appears in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let [a, b, c, d] = values.map(|value| (value + ROUND).to_bits());
    permute_bytes(permute_bytes(a, b, 0x0040), permute_bytes(c, d, 0x0040), 0x5410)
}

/// Computes the queries of each token's heads, and their weights.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, 64 / heads of a block)`
/// call it.
#[inline(always)]
pub unsafe fn query<F: IndexRowFormat>(args: IndexQuery) {
    let IndexQueryParams { tokens, heads, .. } = args.params;
    let row = thread::block_idx_x();
    let queries = queries!(args);
    // SAFETY: a token of the step, a head of it, and channels below 128. Branches are the warp's.
    unsafe {
        if row >= tokens || queries.is_padding(row) {
            return;
        }
        let of_warp = heads_of_warp(tokens);
        let mut head = (thread::block_idx_y() * WARPS + thread::warp_id()) * of_warp;
        let end = head + of_warp;
        let projected = |head: u32| {
            let vector = u64::from(row) * u64::from(heads) + u64::from(head);
            load_quad(
                args.projected,
                vector * u64::from(CHANNELS) + u64::from(4 * thread::lane_id()),
            )
        };
        let mut next = if head < heads { projected(head) } else { [0.0; 4] };
        let rotation = queries.rotation(row);
        while head < end.min(heads) {
            let now = next;
            if head + 1 < end.min(heads) {
                next = projected(head + 1);
            }
            queries.store::<F>(row, head, now, rotation);
            head += 1;
        }
        while head < end {
            queries.store_zeros::<F>(row, head);
            head += 1;
        }
    }
}

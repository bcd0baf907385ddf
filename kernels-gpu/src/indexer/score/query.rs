//! A query of the indexer: rotated, multiplied by the Hadamard matrix, and taken through the format
//! of the keys, as the released model does to both sides.

use crate::args::IndexQuery;
use kv_layout::geometry::ROPE_DIM;
use kv_layout::index_row::IndexFormat;
use simt::math::sqrt;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::compress::{Quad, load_quad, rotate};
use crate::convert::{bf16x2_from_f32, e4m3x4_from_f32};
use crate::index_row::{IndexRowFormat, Requantised, hadamard, quad_from_bf16};
use crate::indexer::CHANNELS;
use crate::math::cos_sin;
use crate::params::IndexQueryParams;

/// Heads of a block, one warp each.
pub const WARPS: u32 = 4;

/// Lanes that hold a group of MXFP4.
const GROUP_LANES: u32 = IndexFormat::Mxfp4.group() / 4;

/// Where the queries of a launch's tokens go, and what they are made with besides the projections.
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

    /// Stores zeros for head `head`, one from `heads` on.
    ///
    /// # Safety
    /// Row and head exist; all lanes of one warp call it together.
    #[inline(always)]
    pub unsafe fn store_zeros<F: IndexRowFormat>(self, row: u32, head: u32) {
        // SAFETY: by this function's own contract.
        unsafe { self.store_values::<F>(row, head, [0.0; 4], 0) }
    }

    /// Rotates the query of head `head`, of which lane `l` has the projected channels `4 l .. 4 l + 4`,
    /// multiplies it by the Hadamard matrix, takes it through the format of the keys, and stores it; scales the
    /// head's weight.
    ///
    /// # Safety
    /// Row and head exist; all lanes of one warp call it together.
    #[inline(always)]
    pub unsafe fn store<F: IndexRowFormat>(self, row: u32, head: u32, projected: Quad) {
        let lane = thread::lane_id();
        let channel = 4 * lane;
        // SAFETY: by this function's own contract; channels are below 128.
        unsafe {
            let mut values = projected;
            if channel >= CHANNELS - ROPE_DIM {
                let pair = u64::from((channel - (CHANNELS - ROPE_DIM)) / 2);
                let token = u64::from(self.first + row);
                let position = self.token_position.load(token) as u32 as f32;
                let turn = |i: u64| cos_sin(position * self.frequencies.load(pair + i));
                let [a, b, c, d] = values;
                let ([a, b], [c, d]) = (rotate(a, b, turn(0)), rotate(c, d, turn(1)));
                values = [a, b, c, d];
            }
            let [a, b, c, d] = values;
            let rounded = quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]);
            let Requantised { values, scale, exponent_gap } =
                F::requantised(hadamard(rounded, lane));
            self.store_values::<F>(row, head, values, exponent_gap);
            if lane == 0 {
                let constant = 1.0 / sqrt((CHANNELS * self.heads) as f32);
                let at = u64::from(row) * u64::from(self.heads) + u64::from(head);
                self.weight.store(at, self.projected_weight.load(at) * constant * scale);
            }
        }
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
        let store = |i: u32, value: f32| {
            let at = at(F::FORMAT.query_byte(head, 4 * lane + i));
            // SAFETY: by this function's own contract.
            unsafe {
                match F::FORMAT {
                    IndexFormat::Nvfp4 => {
                        self.query.cast::<u16>().store(at / 2, bf16x2_from_f32(value, 0.0) as u16);
                    }
                    IndexFormat::Mxfp4 => self.query.store(at, value as i32 as u8),
                    IndexFormat::Fp8 => self.query.store(at, e4m3x4_from_f32([value; 4]) as u8),
                }
            }
        };
        let [a, b, c, d] = values;
        store(0, a);
        store(1, b);
        store(2, c);
        store(3, d);
        if F::FORMAT == IndexFormat::Mxfp4 && lane.is_multiple_of(GROUP_LANES) {
            let at = at(IndexFormat::query_exponent_gap_byte(head, lane / GROUP_LANES));
            // SAFETY: by this function's own contract.
            unsafe { self.query.store(at, exponent_gap as u8) }
        }
    }
}

/// Makes the queries of each token's heads, and their weights.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, 16)`
/// call it.
#[inline(always)]
pub unsafe fn query<F: IndexRowFormat>(args: IndexQuery) {
    let IndexQueryParams { first, tokens, heads } = args.params;
    let row = thread::block_idx_x();
    let head = thread::block_idx_y() * WARPS + thread::warp_id();
    let queries = Queries {
        projected_weight: args.projected_weight,
        frequencies: args.frequencies,
        token_position: args.token_position,
        token_slot: args.token_slot,
        query: args.query,
        weight: args.weight,
        first,
        heads,
    };
    // SAFETY: a token of the step, a head of it, and channels below 128. Branches are the warp's.
    unsafe {
        if row >= tokens || queries.is_padding(row) {
            return;
        }
        if head >= heads {
            queries.store_zeros::<F>(row, head);
            return;
        }
        let vector = u64::from(row) * u64::from(heads) + u64::from(head);
        let at = vector * u64::from(CHANNELS) + u64::from(4 * thread::lane_id());
        queries.store::<F>(row, head, load_quad(args.projected, at));
    }
}

//! A query of the indexer: rotated, multiplied by the Hadamard matrix, and taken through the format
//! of the keys, as the released model does to both sides.

use crate::args::IndexQuery;
use kv_layout::geometry::ROPE_DIM;
use kv_layout::index_row::IndexFormat;
use simt::math::sqrt;
use simt::thread;

use crate::compress::{Quad, load_quad, rotate};
use crate::convert::{bf16x2_from_f32, e4m3x4_from_f32};
use crate::index_row::{IndexRowFormat, Requantised, hadamard, quad_from_bf16};
use crate::indexer::CHANNELS;
use crate::math::cos_sin;

/// Heads of a block, one warp each.
pub const WARPS: u32 = 4;

/// Lanes that hold a group of MXFP4.
const GROUP_LANES: u32 = IndexFormat::Mxfp4.group() / 4;

/// Makes the queries of each token's heads, and their weights.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, 16)`
/// call it.
#[inline(always)]
pub unsafe fn query<F: IndexRowFormat>(args: IndexQuery) {
    let params = args.params;
    let lane = thread::lane_id();
    let row = thread::block_idx_x();
    let head = thread::block_idx_y() * WARPS + thread::warp_id();
    if row >= params.tokens {
        return;
    }
    let token = u64::from(params.first + row);
    // SAFETY: a token of the step, a head of it, and channels below 128. Branches with collectives
    // are the warp's.
    unsafe {
        if args.token_slot.load(token) < 0 {
            return;
        }
        let channel = 4 * lane;
        let store = |values: Quad, exponent_gap: u32| {
            let at = |byte: u32| {
                u64::from(row) * u64::from(IndexFormat::MAX_QUERY_BYTES) + u64::from(byte)
            };
            for (i, value) in (0..).zip(values) {
                let at = at(F::FORMAT.query_byte(head, channel + i));
                match F::FORMAT {
                    IndexFormat::Nvfp4 => {
                        args.query.cast::<u16>().store(at / 2, bf16x2_from_f32(value, 0.0) as u16);
                    }
                    IndexFormat::Mxfp4 => args.query.store(at, value as i32 as u8),
                    IndexFormat::Fp8 => args.query.store(at, e4m3x4_from_f32([value; 4]) as u8),
                }
            }
            if F::FORMAT == IndexFormat::Mxfp4 && lane.is_multiple_of(GROUP_LANES) {
                args.query.store(
                    at(IndexFormat::query_exponent_gap_byte(head, lane / GROUP_LANES)),
                    exponent_gap as u8,
                );
            }
        };
        if head >= params.heads {
            store([0.0; 4], 0);
            return;
        }
        let vector = u64::from(row) * u64::from(params.heads) + u64::from(head);
        let mut values =
            load_quad(args.projected, vector * u64::from(CHANNELS) + u64::from(channel));
        if channel >= CHANNELS - ROPE_DIM {
            let pair = u64::from((channel - (CHANNELS - ROPE_DIM)) / 2);
            let position = args.token_position.load(token) as u32 as f32;
            let turn = |i: u64| cos_sin(position * args.frequencies.load(pair + i));
            let [a, b, c, d] = values;
            let ([a, b], [c, d]) = (rotate(a, b, turn(0)), rotate(c, d, turn(1)));
            values = [a, b, c, d];
        }
        let [a, b, c, d] = values;
        let rounded = quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]);
        let Requantised { values, scale, exponent_gap } = F::requantised(hadamard(rounded, lane));
        store(values, exponent_gap);
        if lane == 0 {
            let constant = 1.0 / sqrt((CHANNELS * params.heads) as f32);
            args.weight.store(vector, args.projected_weight.load(vector) * constant * scale);
        }
    }
}

//! `bf16_linear_many`: the product of many tokens, stored.

use super::tiled::{COLUMNS, Operands, Pipeline, Share, Sums};
use crate::args::Bf16LinearMany;
use crate::fragment::LanePlace;
use crate::unroll::unroll;
use simt::mem::GlobalMut;
use simt::thread;

/// Multiplies by a weight in BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of as many blocks as the table says call it.
#[inline(always)]
pub unsafe fn bf16(args: Bf16LinearMany) {
    let params = args.params;
    let operands = Operands {
        input: args.input,
        weight: args.weight,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
    };
    let share = Share::own(params.splits, params.columns.div_ceil(COLUMNS));
    // SAFETY: by this function's own contract; the loop is the block's.
    unsafe {
        let mut pipeline = Pipeline::start(operands, share);
        let mut unit = share.from;
        while unit < share.to {
            let sums = pipeline.sums();
            store(args.output, operands, (share.first_token, unit * COLUMNS), sums);
            unit += 1;
        }
    }
}

/// Stores the thread's sums of a tile.
///
/// # Safety
/// As [`bf16`].
#[inline(always)]
unsafe fn store(
    output: GlobalMut<f32>,
    operands: Operands,
    (first_token, first_column): (u32, u32),
    sums: Sums,
) {
    let Operands { tokens, columns, .. } = operands;
    let place = LanePlace::of(thread::lane_id());
    let token = first_token + 16 * thread::warp_id() + place.row;
    unroll::<16>(|n| {
        let column = first_column + 8 * n as u32 + 2 * place.pair;
        unroll::<2>(|half| {
            let token = token + 8 * half as u32;
            if token >= tokens || column >= columns {
                return;
            }
            let at = u64::from(token) * u64::from(columns) + u64::from(column);
            let [low, high] = [sums[n][2 * half], sums[n][2 * half + 1]];
            // SAFETY: inside the token's row; of a row of an even number of columns a pair is at a multiple of two.
            unsafe {
                if columns.is_multiple_of(2) {
                    output.store_u32x2(at, [low.to_bits(), high.to_bits()]);
                } else {
                    output.store(at, low);
                    if column + 1 < columns {
                        output.store(at + 1, high);
                    }
                }
            }
        });
    });
}

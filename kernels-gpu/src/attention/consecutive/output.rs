//! Writes the heads' results from registers: inverse RoPE, rounded to BF16.

use kv_layout::geometry::HEAD_DIM;
use simt::warpgroup::FragmentsN256;
use simt::{thread, warp};

use super::super::output::inverse_rope;
use super::super::softmax::{Softmax, first_row, output_scales};
use super::super::work_item::Heads;
use super::memory::Arrays;
use crate::args::Attend;
use crate::convert::bf16x2_from_f32;
use crate::unroll::{array_from_fn, unroll};

/// Number of groups of eight channels in a panel.
const FRAGMENTS: usize = 8;

/// Stores each head's output scale in shared memory, and writes its log-sum-exp if it is requested.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the first warpgroup call it together, and a barrier
/// follows.
#[inline(always)]
pub unsafe fn store_output_scales(
    args: &Attend,
    heads: Heads,
    arrays: Arrays,
    (softmax, sinks): (Softmax, [f32; 2]),
) {
    // SAFETY: by this function's own contract; words by one thread each.
    unsafe {
        let (base, sum) = softmax.bases_and_sums();
        unroll::<2>(|i| {
            let row = first_row() + 8 * i as u32;
            let sink = sinks[i] * core::f32::consts::LOG2_E;
            let ([scale], lse) = output_scales(sink, [base[i]], [sum[i]]);
            if thread::lane_id().is_multiple_of(4) {
                arrays.output_scales.store(row, scale);
                if args.params.lse_heads > 0 && row < heads.count(args) {
                    let to = heads.row(args) + u64::from(row);
                    args.lse.store(to, lse * core::f32::consts::LN_2);
                }
            }
        });
    }
}

/// Writes 256 channels of the thread's heads, from panel `panel` on, which is 0 or 4. The channels of the last panel of
/// all get inverse RoPE: `rotation` has the cosine and sine of the angle of one pair in each lane.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the warpgroup call it together.
#[inline(always)]
pub unsafe fn write(
    args: &Attend,
    heads: Heads,
    (values, scales): (FragmentsN256, [f32; 2]),
    (panel, rotation): (u32, [f32; 2]),
) {
    unroll::<4>(|i| {
        let pairs = array_from_fn(|n| {
            let n = FRAGMENTS * i + n;
            let four = values[n / 16][n % 16];
            // Added to 0, as in the other forms, with a rounding after the product and after the sum: a product that
            // rounds to -0 gives 0.
            array_from_fn(|j| [0, 1].map(|k| 0.0 + scales[j] * four[2 * j + k]))
        });
        // SAFETY: by this function's own contract; the condition is the same in all lanes.
        unsafe {
            let is_rotary = i == 3 && warp::all(panel > 0);
            let pairs = if is_rotary { inverse_rope_pairs(pairs, rotation) } else { pairs };
            write_panel(args, heads, (panel + i as u32, pairs));
        }
    });
}

/// The thread's pairs of channels in a panel: for each group of eight channels, a pair of each of its two heads.
type Pairs = [[[f32; 2]; 2]; FRAGMENTS];

/// Applies inverse RoPE to the pairs.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn inverse_rope_pairs(pairs: Pairs, rotation: [f32; 2]) -> Pairs {
    array_from_fn(|n| {
        let lane = 4 * n as u32 + thread::lane_id() % 4;
        // SAFETY: by this function's own contract.
        let rotation = unsafe { rotation.map(|of| warp::shuffle_idx_f32(of, lane)) };
        pairs[n].map(|pair| inverse_rope(pair, rotation))
    })
}

/// Writes a panel of the thread's heads. Two lanes exchange pairs, so that four lanes write 32 contiguous bytes of a
/// head.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn write_panel(args: &Attend, heads: Heads, (panel, pairs): (u32, Pairs)) {
    let (row, count) = (first_row(), heads.count(args));
    let (half, odd) = (thread::lane_id() % 4 / 2, thread::lane_id() % 2);
    let to = (heads.row(args) + u64::from(row)) * u64::from(HEAD_DIM);
    let to = to + u64::from(64 * panel + 8 * odd + 4 * half);
    // SAFETY: by this function's own contract; eight bytes of a head once.
    unsafe {
        unroll::<{ FRAGMENTS / 2 }>(|n| {
            unroll::<2>(|i| {
                let [even, next] = [0, 1].map(|j| {
                    let [a, b] = pairs[2 * n + j][i];
                    bf16x2_from_f32(a, b)
                });
                // The even lane has the first eight of 16 channels, the odd one the others.
                let theirs = warp::shuffle_xor_u32(if odd == 1 { even } else { next }, 1);
                let words = if odd == 1 { [theirs, next] } else { [even, theirs] };
                if row + 8 * (i as u32) < count {
                    let at = u64::from(16 * n as u32 + 8 * HEAD_DIM * i as u32);
                    args.out.store_u32x2(to + at, words);
                }
            });
        });
    }
}

//! The kernel that writes the largest score of each group of 8 or 32, from which a long row's selection
//! starts.

use crate::args::ScoreMaxima;
use crate::params::ScoreMaximaParams;
use simt::math;
use simt::{thread, warp};

use crate::unroll::{array_from_fn, unroll};

/// Threads of a block.
const THREADS: u32 = 256;
/// Vector loads of four scores of a thread.
const VECTORS: usize = 2;
/// Scores of a block.
pub const BLOCK_SCORES: u32 = 4 * VECTORS as u32 * THREADS;

/// Writes the largest score of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 2048
/// rounded up, rows)` call it.
#[inline(always)]
pub unsafe fn maxima(args: ScoreMaxima) {
    let ScoreMaximaParams { columns, group_log2, .. } = args.params;
    let row = u64::from(thread::block_idx_y());
    let vector = thread::block_idx_x() * VECTORS as u32 * THREADS + thread::thread_idx_x();
    let first = |i: usize| 4 * (vector + i as u32 * THREADS);
    let start = row * u64::from(columns);
    // SAFETY: four scores of the row; all lanes take part in the reduction. Scores are loaded before the
    // row's length is known, in use or not.
    unsafe {
        let at = |i| start + u64::from(first(i).min(columns - 4));
        let fetched: [[u32; 4]; VECTORS] =
            array_from_fn(|i| args.scores.load_u32x4_volatile(at(i)));
        let length = (args.lengths.load(row).max(0) as u32).min(columns);
        unroll::<VECTORS>(|i| {
            let of = |j: usize| {
                let score = f32::from_bits(fetched[i][j]);
                if first(i) + (j as u32) < length { score } else { f32::NAN }
            };
            let largest = math::max(math::max(of(0), of(1)), math::max(of(2), of(3)));
            let pair = warp::reduce_max_f32_width::<2>(largest);
            let eight = warp::reduce_max_f32_width::<8>(largest);
            let small = group_log2 == 3;
            let group = if small { pair } else { eight };
            let lanes = if small { 2 } else { 8 };
            if thread::lane_id().is_multiple_of(lanes) && first(i) < columns {
                let groups = u64::from(columns >> group_log2);
                args.maxima.store(row * groups + u64::from(first(i) >> group_log2), group);
            }
        });
    }
}

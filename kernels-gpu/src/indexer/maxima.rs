//! The largest score of each group of 8 or 32: what a selection looks at before the scores.

use kv_layout::params::ScoreMaximaParams;
use simt::math;
use simt::mem::{Global, GlobalMut};
use simt::{thread, warp};

/// Threads of a block, four scores each.
const THREADS: u32 = 256;

/// Writes the largest score of each group.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 1024
/// rounded up, rows)` call it.
#[inline(always)]
pub unsafe fn maxima(
    scores: Global<f32>,
    lengths: Global<i32>,
    maxima: GlobalMut<f32>,
    params: ScoreMaximaParams,
) {
    let row = u64::from(thread::block_idx_y());
    let first = 4 * (thread::block_idx_x() * THREADS + thread::thread_idx_x());
    // SAFETY: four scores of the row, or none; a lane without any takes part in the reduction.
    unsafe {
        let length = (lengths.load(row) as u32).min(params.columns);
        let mut largest = f32::NAN;
        if first < length {
            let at = row * u64::from(params.columns) + u64::from(first);
            let [a, b, c, d] = scores.load_u32x4(at).map(f32::from_bits);
            let of = |i: u32, score: f32| if first + i < length { score } else { f32::NAN };
            largest = math::max(math::max(a, of(1, b)), math::max(of(2, c), of(3, d)));
        }
        let pair = warp::reduce_max_f32_width::<2>(largest);
        let eight = warp::reduce_max_f32_width::<8>(largest);
        let small = params.group_log2 == 3;
        let group = if small { pair } else { eight };
        let lanes = if small { 2 } else { 8 };
        if thread::lane_id().is_multiple_of(lanes) && first < params.columns {
            let groups = u64::from(params.columns >> params.group_log2);
            maxima.store(row * groups + u64::from(first >> params.group_log2), group);
        }
    }
}

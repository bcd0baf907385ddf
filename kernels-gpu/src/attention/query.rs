//! Brings the queries of a block's heads into shared memory: as they are, or normed and rotated. Heads past the last are
//! zero.
//!
//! Queries that are ready are copied by the first warpgroup alone, so that the second can look for the first rows. Raw
//! queries are normed and rotated by both, each for a share of the heads.

use kv_layout::geometry::{HEAD_DIM, NOPE_DIM};
use simt::math::mul_add;
use simt::shared::Shared;
use simt::warpgroup::Panels;
use simt::{thread, warp};

use super::memory::{
    Arrays, HEAD_VECTORS, HEADS, MULTIPLYING_THREADS, Memory, QUERIES, WARPGROUP, panels,
};
use super::output::rotation;
use super::work_item::Task;
use crate::args::Attend;
use crate::convert::{bf16x2_from_f32, f32x2_from_bf16};
use crate::math::{rms_scale, rotate};
use crate::unroll::{array_from_fn, unroll};

/// Starts copies (`cp.async`, a group not yet committed) of queries that are normed and rotated.
///
/// # Safety
/// The heads exist; all threads of the first warpgroup call it together, and wait for the group and at
/// [`QUERIES_FULL`](super::memory::QUERIES_FULL) before they read queries.
#[inline(always)]
pub unsafe fn start_copies(args: &Attend, task: Task) {
    let rows = (task.heads.row(args), task.heads.count(args));
    // SAFETY: by this function's own contract; the whole shared memory of the block.
    unsafe { copy_ready::<WARPGROUP, _>(args, rows, (Memory::at(0), panels(QUERIES))) }
}

/// Starts copies (`cp.async`) of `heads` rows of `args.query`, `[rows, 512]` BF16, from row `row` on, to a matrix of 64
/// rows in shared memory; zeroes the other rows of the matrix.
///
/// # Safety
/// The rows exist; the block's first `THREADS` threads call it once; the matrix lies in `memory`.
#[inline(always)]
pub unsafe fn copy_ready<const THREADS: u32, const N: usize>(
    args: &Attend,
    (row, heads): (u64, u32),
    (memory, queries): (Shared<u32, N>, Panels<N>),
) {
    let heads_at_once = THREADS / HEAD_VECTORS;
    let (mut head, vector) =
        (thread::thread_idx_x() / HEAD_VECTORS, thread::thread_idx_x() % HEAD_VECTORS);
    let panel = queries.panel(vector / 8);
    let mut from = (row + u64::from(head)) * u64::from(HEAD_DIM) + u64::from(8 * vector);
    while head < HEADS {
        let to = panel.word(vector % 8, head);
        // SAFETY: by this function's own contract.
        unsafe {
            if head < heads {
                memory.copy_from(to, args.query, from);
            } else {
                memory.store_u32x4(to, [0; 4]);
            }
        }
        head += heads_at_once;
        from += u64::from(heads_at_once * HEAD_DIM);
    }
}

/// Norms and rotates raw queries, one head a warp, and rounds them once. A lane has eight channels of each half of a
/// head.
///
/// # Safety
/// The heads exist; all threads of the multiplying warpgroups call it, after
/// [`ROTATION_FULL`](super::memory::ROTATION_FULL). The first warpgroup waits at
/// [`QUERIES_FULL`](super::memory::QUERIES_FULL) before it reads queries.
#[inline(always)]
pub unsafe fn norm_and_rotate(args: &Attend, arrays: Arrays, task: Task) {
    const WARPS: u32 = MULTIPLYING_THREADS / 32;
    /// Heads of a warp whose loads are under way together.
    const AT_ONCE: usize = 4;
    let (row, heads) = (task.heads.row(args), task.heads.count(args));
    let lane = thread::lane_id();
    let channel = HEAD_DIM / 2 + 8 * lane;
    let places = [0, HEAD_VECTORS / 2].map(|first| {
        let vector = first + lane;
        (panels(QUERIES).panel(vector / 8), vector % 8)
    });
    // SAFETY: 16 bytes of a matrix once; the branch on the head is the same in all lanes.
    unsafe {
        let memory = Memory::at(0);
        let rotations = [rotation(arrays, channel), rotation(arrays, channel + 4)];
        let mut first = thread::warp_id();
        while first < HEADS {
            let halves: [[[u32; 4]; 2]; AT_ONCE] = array_from_fn(|i| {
                let head = first + WARPS * i as u32;
                if head >= heads {
                    return [[0; 4]; 2];
                }
                let from = (row + u64::from(head)) * u64::from(HEAD_DIM) + u64::from(8 * lane);
                [from, from + u64::from(HEAD_DIM / 2)].map(|from| args.query.load_u32x4(from))
            });
            unroll::<AT_ONCE>(|i| {
                let head = first + WARPS * i as u32;
                let halves = finish(halves[i], rotations, channel >= NOPE_DIM);
                unroll::<2>(|half| {
                    let (panel, vector) = places[half];
                    memory.store_u32x4(panel.word(vector, head), halves[half]);
                });
            });
            first += WARPS * AT_ONCE as u32;
        }
    }
}

/// Norms a lane's channels of a head, and rotates those in its second half if `is_rotary`.
///
/// # Safety
/// All lanes of the warp call it together, with the channels of one head.
#[inline(always)]
unsafe fn finish(
    halves: [[u32; 4]; 2],
    rotations: [[f32; 4]; 2],
    is_rotary: bool,
) -> [[u32; 4]; 2] {
    let values = halves.map(|half| half.map(f32x2_from_bf16));
    let mut squares = 0.0_f32;
    unroll::<16>(|i| {
        let value = values[i / 8][i / 2 % 4][i % 2];
        squares = mul_add(value, value, squares);
    });
    // SAFETY: by this function's own contract.
    let scale = rms_scale::<HEAD_DIM>(unsafe { warp::reduce_add_f32(squares) });
    let [low, high] = values.map(|half| half.map(|pair| pair.map(|value| value * scale)));
    let high: [[f32; 2]; 4] = array_from_fn(|i| {
        let [even, odd] = high[i];
        let [cos, sin] = [rotations[i / 2][i % 2 * 2], rotations[i / 2][i % 2 * 2 + 1]];
        if is_rotary { rotate(even, odd, (cos, sin)) } else { [even, odd] }
    });
    [low, high].map(|half| half.map(|[even, odd]| bf16x2_from_f32(even, odd)))
}

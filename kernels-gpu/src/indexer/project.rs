//! Projections of activations, for the small batches of decode: the product of BF16 rows with a
//! transposed BF16 weight, in f32.

use crate::args::Project;
use crate::params::ProjectParams;
use simt::mem::Global;
use simt::mma::bf16_m16n8k16;
use simt::shared::Shared;
use simt::thread;

/// Warps of a block: each sums a part of the inner dimension.
const WARPS: u32 = 4;
/// Rows of a block.
pub const ROWS: u32 = 16;
/// Columns of a block.
pub const COLUMNS: u32 = 32;
/// Products side by side.
const TILES: usize = (COLUMNS / 8) as usize;
/// Channels that a warp takes at a time: eight in a row from each of four lanes.
const CHUNK: u32 = 32;
/// Elements of a block's product.
const ELEMENTS: u32 = ROWS * COLUMNS;
/// Bytes of shared memory: a product for each warp.
pub const SHARED_BYTES: u32 = 4 * WARPS * ELEMENTS;

/// A lane's part of a 16 x 32 product.
type Sums = [[f32; 4]; TILES];

/// Writes 16 rows by 32 columns of the product a block.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 32, rows /
/// 16)`, rounded up, call it.
#[inline(always)]
pub unsafe fn project(args: Project) {
    let params = args.params;
    // SAFETY: by this function's own contract; all threads reach the barrier.
    unsafe {
        let parts: Shared<f32, { (WARPS * ELEMENTS) as usize }> = Shared::at(0);
        store_part(parts, partial(args.input, args.weight, params));
        thread::sync_threads();
        // Parts are added in the order of the inner dimension.
        let mut element = thread::thread_idx_x();
        while element < ELEMENTS {
            let part = |warp: u32| parts.load(warp * ELEMENTS + element);
            let sum = ((part(0) + part(1)) + part(2)) + part(3);
            let row = thread::block_idx_y() * ROWS + element / COLUMNS;
            let column = thread::block_idx_x() * COLUMNS + element % COLUMNS;
            if row < params.rows && column < params.columns {
                args.output
                    .store(u64::from(row) * u64::from(params.columns) + u64::from(column), sum);
            }
            element += 32 * WARPS;
        }
    }
}

/// The sums over this warp's part of the inner dimension.
///
/// # Safety
/// As [`project`].
#[inline(always)]
unsafe fn partial(input: Global<u16>, weight: Global<u16>, params: ProjectParams) -> Sums {
    let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
    let chunks = params.inner / CHUNK;
    let part = |warp: u32| warp * chunks / WARPS * CHUNK;
    let mut channel = part(thread::warp_id());
    let end = part(thread::warp_id() + 1);
    let row = thread::block_idx_y() * ROWS + group;
    let column = thread::block_idx_x() * COLUMNS + group;
    // A row or a column past the end reads the last one and is not written.
    let at = |row: u32| {
        u64::from(row.min(params.rows - 1)) * u64::from(params.inner) + u64::from(8 * quarter)
    };
    let (upper, lower) = (at(row), at(row + 8));
    let right_at = |tile: u32| {
        u64::from((column + 8 * tile).min(params.columns - 1)) * u64::from(params.inner)
            + u64::from(8 * quarter)
    };
    let right = [right_at(0), right_at(1), right_at(2), right_at(3)];
    let mut sums = [[0.0; 4]; TILES];
    while channel < end {
        let offset = u64::from(channel);
        // SAFETY: eight channels of a row of either side; the trip count is the warp's.
        unsafe {
            let [a, b] = [upper, lower].map(|at| input.load_u32x4(at + offset));
            let right = right.map(|at| weight.load_u32x4(at + offset));
            // The inner index runs over lanes' channels as they lie in registers.
            let first = [a[0], b[0], a[1], b[1]];
            let second = [a[2], b[2], a[3], b[3]];
            let add = |tile: usize, sums: Sums| {
                let [c, d, e, f] = right[tile];
                bf16_m16n8k16(second, [e, f], bf16_m16n8k16(first, [c, d], sums[tile]))
            };
            sums = [add(0, sums), add(1, sums), add(2, sums), add(3, sums)];
        }
        channel += CHUNK;
    }
    sums
}

/// Puts a warp's sums into shared memory, row by row.
///
/// # Safety
/// All threads of the block call it; a barrier follows.
#[inline(always)]
unsafe fn store_part(parts: Shared<f32, { (WARPS * ELEMENTS) as usize }>, sums: Sums) {
    let (group, pair) = (thread::lane_id() / 4, 2 * (thread::lane_id() % 4));
    let own = thread::warp_id() * ELEMENTS;
    let store = |tile: u32, [a, b, c, d]: [f32; 4]| {
        let column = 8 * tile + pair;
        let at = |row: u32| own + row * COLUMNS + column;
        // SAFETY: each element of the warp's part once.
        unsafe {
            parts.store(at(group), a);
            parts.store(at(group) + 1, b);
            parts.store(at(group + 8), c);
            parts.store(at(group + 8) + 1, d);
        }
    };
    let [first, second, third, fourth] = sums;
    store(0, first);
    store(1, second);
    store(2, third);
    store(3, fourth);
}

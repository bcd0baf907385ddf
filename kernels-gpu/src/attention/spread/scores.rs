//! Multiplies queries by the keys of the block's tiles, and computes the tiles' weights.

use simt::cluster::{cluster_arrive, cluster_arrive_release};
use simt::warpgroup::{Fragments, start_bf16_m64n64k512};
use simt::{thread, warp};

use super::super::keys::KeySet;
use super::super::softmax::{self, are_near, are_small, first_row, largest, masked};
use super::exchange::{Exchange, Weights};
use super::memory::{
    Arrays, CLUSTER_BLOCKS, FIRST_SCORED, QUERIES, SCORED, THIRD_UNPACKED, TILE, WARPS,
    may_score_three, wait_for_cluster,
};
use super::task::Task;
use crate::unroll::{array_from_fn, unroll};

/// The scores of a warpgroup's tiles: its last tile, and the one before.
pub type Scores = [Fragments; 2];

/// Whether warpgroup `group` scores the block's third tile. The first warpgroup scores the first and third tile, the
/// second the second.
#[inline(always)]
const fn has_third<W: KeySet>(task: Task, group: u32) -> bool {
    may_score_three::<W>() && group == 0 && task.scored_tiles > 2
}

/// Computes the scores of the warpgroup's tiles, and returns them with the result of `meanwhile`. Stores their weights
/// with base 0, and in all blocks a flag that says whether the base of some of them may not be 0.
///
/// # Safety
/// The first two tiles of keys and the queries are in shared memory, fenced, and a barrier has passed, and one of the
/// cluster; all threads of a multiplying warpgroup call it together, those of the unpacking ones
/// [`super::unpack::unpack_values`]; a barrier of the cluster follows.
#[inline(always)]
pub unsafe fn multiply<W: KeySet, T>(
    task: Task,
    arrays: Arrays,
    group: u32,
    meanwhile: impl Fn() -> (Exchange, T),
) -> (Scores, (Exchange, T)) {
    let mut scores: Scores = [[[0.0; 4]; 8]; 2];
    let mut of_block = group;
    let mut needs_rescale = false;
    // SAFETY: by this function's own contract.
    unsafe {
        if group >= task.scored_tiles {
            SCORED.arrive();
            publish_rescale_flag(arrays, task, needs_rescale);
            return (scores, meanwhile());
        }
        loop {
            let is_last = !has_third::<W>(task, group) || of_block == 2;
            let products = start_bf16_m64n64k512(arrays.panels(QUERIES), arrays.keys(of_block));
            let missing = missing_of(arrays, task.first_tile + of_block);
            // Called again for a third tile.
            let (exchange, other) = meanwhile();
            let products = products.wait::<0>();
            if is_last {
                SCORED.arrive()
            } else {
                FIRST_SCORED.arrive()
            }
            scores = [mask(products, missing), scores[0]];
            let tile = task.first_tile + of_block;
            let sum = store_weights(exchange, (scores[0], tile), [0.0; 2]);
            let is_first = tile == 0 || tile == task.second;
            needs_rescale |= !if is_first { are_near(sum) } else { are_small(sum) };
            if is_last {
                publish_rescale_flag(arrays, task, needs_rescale);
                return (scores, (exchange, other));
            }
            of_block = 2;
            THIRD_UNPACKED.sync();
        }
    }
}

/// The thread's keys of tile `tile` that are missing. The thread has two of each eight keys: bit `8 n + i` of the first
/// word is its key `i` of the eight keys from `8 n` on, with `n` below 4; the second word has the other 32 keys.
///
/// # Safety
/// The tile's keys are found.
#[inline(always)]
unsafe fn missing_of(arrays: Arrays, tile: u32) -> [u32; 2] {
    const OF_PAIR: u32 = 0x0303_0303;
    let first = 2 * (thread::lane_id() % 4);
    // SAFETY: by this function's own contract; two words.
    let missing = unsafe { arrays.missing.load_u32x2(2 * tile) };
    // The optimisation barrier has it computed before the wait for the products.
    missing.map(|missing| thread::opt_barrier_u32(missing >> first & OF_PAIR))
}

/// Sets the scores of missing keys to -infinity. Most tiles have none.
#[inline(always)]
fn mask(scores: Fragments, missing: [u32; 2]) -> Fragments {
    if missing == [0; 2] {
        return scores;
    }
    masked(scores, |n, key| missing[n / 4] >> (8 * (n as u32 % 4) + key) & 1 == 0)
}

/// Stores the largest scores of tile `tile`, for the thread's heads, in all blocks of the cluster. Each of the four
/// threads of a head stores them in two blocks.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn publish_largest(arrays: Arrays, tile: u32, row_max: [f32; 2]) {
    const QUAD_LANES: u32 = 4;
    unroll::<{ (CLUSTER_BLOCKS / QUAD_LANES) as usize }>(|i| {
        let rank = thread::lane_id() % QUAD_LANES + QUAD_LANES * i as u32;
        let at = TILE * tile + first_row();
        // SAFETY: a word of each block, by one thread of the cluster.
        unsafe {
            arrays.row_max.store_to(rank, at, row_max[0]);
            arrays.row_max.store_to(rank, at + 8, row_max[1]);
        }
    });
}

/// Stores, in all blocks of the cluster, whether the warp has weights whose base may not be 0.
///
/// # Safety
/// As [`multiply`], whose last act it is.
#[inline(always)]
unsafe fn publish_rescale_flag(arrays: Arrays, task: Task, needs_rescale: bool) {
    let rank = thread::lane_id();
    if rank < CLUSTER_BLOCKS {
        let at = WARPS * task.rank + thread::warp_id();
        // SAFETY: a word of each block, by one thread of the cluster.
        unsafe { arrays.rescale_flags.store_to(rank, at, u32::from(needs_rescale)) }
    }
}

/// Whether a warp of the cluster has set the flag of `publish_rescale_flag`. The same in all threads of the cluster.
///
/// # Safety
/// All multiplying warps have set or cleared theirs, and a barrier of the cluster has passed; all lanes of the warp
/// call it together.
#[inline(always)]
pub unsafe fn needs_rescale(arrays: Arrays) -> bool {
    // SAFETY: by this function's own contract; 64 words.
    unsafe {
        let [a, b] = arrays.rescale_flags.load_u32x2(2 * thread::lane_id());
        warp::any(a | b != 0)
    }
}

/// The bases of the weights of the thread's heads after tile `tile`.
///
/// # Safety
/// The tile's largest scores are there, and a barrier of the cluster has passed.
#[inline(always)]
pub unsafe fn raised(arrays: Arrays, base: [f32; 2], tile: u32) -> [f32; 2] {
    let at = TILE * tile + first_row();
    // SAFETY: by this function's own contract.
    let row_max = unsafe { [arrays.row_max.load(at), arrays.row_max.load(at + 8)] };
    [0, 1].map(|i| softmax::raised(base[i], row_max[i]))
}

/// Stores the weights of the warpgroup's tiles again, with the bases that follow from all tiles in order: for scores
/// that are too far from 0. First all blocks exchange the largest scores.
///
/// # Safety
/// Nobody reads weights before a barrier of the cluster; all threads of the multiplying warpgroups of all its blocks
/// call it, those of the others [`pass_barriers`].
#[inline(always)]
pub unsafe fn weigh_again<W: KeySet>(
    exchange: Exchange,
    task: Task,
    arrays: Arrays,
    (scores, group): (Scores, u32),
) {
    let has_third = has_third::<W>(task, group);
    let mut is_told = false;
    // SAFETY: by this function's own contract.
    unsafe {
        loop {
            let (mut scores, mut of_block) = (scores, if has_third { 2 } else { group });
            while of_block < task.scored_tiles {
                let tile = task.first_tile + of_block;
                if is_told {
                    store_weights(exchange, (scores[0], tile), base_of(task, arrays, tile));
                } else {
                    publish_largest(arrays, tile, [0, 1].map(|i| largest(scores[0], i)));
                }
                if !has_third || of_block == 0 {
                    break;
                }
                (scores[0], of_block) = (scores[1], 0);
            }
            cluster_arrive_release();
            wait_for_cluster();
            if is_told {
                return;
            }
            is_told = true;
        }
    }
}

/// The barriers of [`weigh_again`], for threads that have no scores.
///
/// # Safety
/// As [`weigh_again`].
#[inline(always)]
pub unsafe fn pass_barriers() {
    // SAFETY: by this function's own contract.
    unsafe {
        unroll::<2>(|_| {
            cluster_arrive();
            wait_for_cluster();
        });
    }
}

/// The bases of the weights of tile `tile`, for the thread's heads.
///
/// # Safety
/// All largest scores are stored, and a barrier of the cluster has passed.
#[inline(always)]
unsafe fn base_of(task: Task, arrays: Arrays, tile: u32) -> [f32; 2] {
    let mut base = [f32::NEG_INFINITY; 2];
    let mut before = if tile >= task.second { task.second } else { 0 };
    while before <= tile {
        // SAFETY: by this function's own contract.
        base = unsafe { raised(arrays, base, before) };
        before += 1;
    }
    base
}

/// Stores a tile's weights relative to `base`, and each thread's sums of them; returns these sums.
///
/// # Safety
/// As [`Exchange::store`].
#[inline(always)]
unsafe fn store_weights(
    exchange: Exchange,
    (scores, tile): (Fragments, u32),
    base: [f32; 2],
) -> [f32; 2] {
    let (pairs, sum) = softmax::weights(scores, base);
    let words = array_from_fn(|step| {
        let ([a, b], [c, d]) = (pairs[2 * step], pairs[2 * step + 1]);
        [a, b, c, d]
    });
    // SAFETY: by this function's own contract.
    unsafe { exchange.store(tile, Weights { words, sums: sum.map(f32::to_bits) }) }
    sum
}

//! Queries times the keys of the block's tiles, and the tiles' weights.

use simt::warpgroup::{Fragments, start_bf16_m64n64k512};
use simt::{copy, thread, warp};

use super::super::memory::HEADS;
use super::super::softmax::{SLACK, first_row, largest, store_weights};
use super::super::source::is_none;
use super::memory::{Arrays, BLOCKS, GROUP, PANEL, QUERIES, SCORED, TILE};
use super::task::Task;
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// The scores of the warpgroup's tile, if it has one: warpgroup `group` has tile `group` of the block's. Tells all blocks the heads'
/// largest scores.
///
/// # Safety
/// Keys and queries are in shared memory, fenced, and a barrier has passed, and one of the cluster; all threads of a multiplying
/// warpgroup call it together; a barrier of the cluster follows.
#[inline(always)]
pub unsafe fn multiply(task: Task, arrays: Arrays, group: u32) -> Fragments {
    // SAFETY: by this function's own contract.
    unsafe {
        if group >= task.own {
            SCORED.arrive();
            return [[0.0; 4]; 8];
        }
        let tile = task.first + group;
        let scores = start_bf16_m64n64k512(arrays.panels(QUERIES), arrays.keys(group));
        let none = none_of(arrays, tile);
        let scores = scores.wait::<0>();
        SCORED.arrive();
        let scores = mask(scores, none);
        tell(arrays, tile, [0, 1].map(|i| largest(scores, i)));
        scores
    }
}

/// Which of the thread's keys of tile `tile` there are none of: bit `2 n + i` for its key `i` of the eight from key `8 n` on.
///
/// # Safety
/// The tile's keys are found.
#[inline(always)]
unsafe fn none_of(arrays: Arrays, tile: u32) -> u32 {
    let mut none = 0;
    unroll::<8>(|n| {
        let key = TILE * tile + 8 * n as u32 + 2 * (thread::lane_id() % 4);
        // SAFETY: by this function's own contract; two keys' words.
        let [_, a, _, b] = unsafe { arrays.found.load_u32x4(2 * key) };
        none |= (u32::from(is_none(a)) | u32::from(is_none(b)) << 1) << (2 * n as u32);
    });
    // Held, so that it is computed before the products are waited for.
    thread::hold_u32(none)
}

/// -infinity where there is no key. Most tiles have all.
#[inline(always)]
fn mask(scores: Fragments, none: u32) -> Fragments {
    if none == 0 {
        return scores;
    }
    array_from_fn(|n| {
        let masked = |score: f32, bit: usize| {
            if none >> (2 * n + bit) & 1 != 0 { f32::NEG_INFINITY } else { score }
        };
        let [a, b, c, d] = scores[n];
        [masked(a, 0), masked(b, 1), masked(c, 0), masked(d, 1)]
    })
}

/// Tells all blocks of the cluster the largest scores of the thread's heads of tile `tile`: each of the four threads of a head two blocks.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn tell(arrays: Arrays, tile: u32, most: [f32; 2]) {
    const QUARTERS: u32 = 4;
    unroll::<{ (BLOCKS / QUARTERS) as usize }>(|i| {
        let rank = thread::lane_id() % QUARTERS + QUARTERS * i as u32;
        let at = TILE * tile + first_row();
        // SAFETY: a word of each block, by one thread of the cluster.
        unsafe {
            arrays.most.store_to(rank, at, most[0]);
            arrays.most.store_to(rank, at + 8, most[1]);
        }
    });
}

/// What the weights of the thread's heads are relative to, once tile `tile` is taken in: as [`super::super::softmax`] raises it.
///
/// # Safety
/// The tile's largest scores are there, and a barrier of the cluster has passed.
#[inline(always)]
pub unsafe fn raised(arrays: Arrays, base: [f32; 2], tile: u32) -> [f32; 2] {
    let at = TILE * tile + first_row();
    // SAFETY: by this function's own contract.
    let most = unsafe { [arrays.most.load(at), arrays.most.load(at + 8)] };
    let raise = |i: usize| if most[i] > base[i] + SLACK { most[i] } else { base[i] };
    [raise(0), raise(1)]
}

/// Leaves the weights of a tile, and each thread's sums of them, in the memory for exchange, weights as they lie in shared memory.
///
/// # Safety
/// All largest scores are there; all threads of the warpgroup call it together; a barrier of the cluster follows.
#[inline(always)]
pub unsafe fn weigh(args: &Attend, task: Task, arrays: Arrays, (scores, tile): (Fragments, u32)) {
    let (row, quarter) = (first_row(), thread::lane_id() % 4);
    let mut base = [f32::NEG_INFINITY; 2];
    let mut before = if tile >= task.second { task.second } else { 0 };
    // SAFETY: by this function's own contract; the tile's place is free once the block's products are done; a warp
    // reads its own rows alone.
    unsafe {
        while before <= tile {
            base = raised(arrays, base, before);
            before += 1;
        }
        let weights = arrays.weights(task.own, tile);
        let sum = store_weights(scores, base, (arrays.memory, weights));
        warp::sync_warp();
        let to = task.exchange(args, tile);
        // The warp's 16 rows, in their own order of words.
        let first = PANEL / 4 * (thread::warp_id() % 4) + 4 * thread::lane_id();
        unroll::<4>(|i| {
            let at = first + GROUP * i as u32;
            let words = arrays.memory.load_u32x4(weights.word(0, 0) + at);
            args.exchange.store_u32x4(to + u64::from(at), words);
        });
        let of_row = to + u64::from(PANEL + 4 * row + quarter);
        args.exchange.store(of_row, sum[0].to_bits());
        args.exchange.store(of_row + 32, sum[1].to_bits());
    }
}

/// Copies all tiles' weights and sums of weights to shared memory.
///
/// # Safety
/// All are left, and a barrier of the cluster has passed; all threads of the multiplying warpgroups call it together.
#[inline(always)]
pub unsafe fn copy_weights(args: &Attend, task: Task, arrays: Arrays) {
    let word = 4 * thread::thread_idx_x();
    let mut tile = 0;
    while tile < task.tiles {
        let (to, from) = (arrays.weights(task.own, tile).word(0, 0), task.exchange(args, tile));
        // SAFETY: by this function's own contract; 16 bytes a thread.
        unsafe {
            unroll::<2>(|i| {
                let at = word + PANEL / 2 * i as u32;
                arrays.memory.copy_from_mut(to + at, args.exchange, from + u64::from(at));
            });
            if word < 4 * HEADS {
                let sums = from + u64::from(PANEL + word);
                arrays.sums.copy_from_mut(4 * HEADS * tile + word, args.exchange, sums);
            }
        }
        tile += 1;
    }
    copy::commit_group();
}

//! Queries times the keys of the block's tiles, and the tiles' weights.

use simt::thread;
use simt::warpgroup::{Fragments, start_bf16_m64n64k512};

use super::super::softmax::{self, SLACK, first_row, largest};
use super::super::source::{Which, is_none};
use super::memory::{
    Arrays, BLOCKS, FIRST_SCORED, GROUP, PANEL, QUERIES, SCORED, THIRD_UNPACKED, TILE,
    may_score_three,
};
use super::task::Task;
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// The scores of a warpgroup's tiles: of its last one, and of the one before.
pub type Scores = [Fragments; 2];

/// Whether warpgroup `group` scores the block's third tile too. The first has the first tile and the third, the second the second.
#[inline(always)]
const fn has_third<W: Which>(task: Task, group: u32) -> bool {
    may_score_three::<W>() && group == 0 && task.own > 2
}

/// The scores of the warpgroup's tiles. Tells all blocks the heads' largest scores of each.
///
/// # Safety
/// The first two tiles of keys and the queries are in shared memory, fenced, and a barrier has passed, and one of the cluster; all
/// threads of a multiplying warpgroup call it together, those of the unpacking ones [`super::keys::unpack_values`]; a barrier
/// of the cluster follows.
#[inline(always)]
pub unsafe fn multiply<W: Which>(task: Task, arrays: Arrays, group: u32) -> Scores {
    let mut scores: Scores = [[[0.0; 4]; 8]; 2];
    let mut of_block = group;
    // SAFETY: by this function's own contract.
    unsafe {
        if group >= task.own {
            SCORED.arrive();
            return scores;
        }
        loop {
            let is_last = !has_third::<W>(task, group) || of_block == 2;
            let products = start_bf16_m64n64k512(arrays.panels(QUERIES), arrays.keys(of_block));
            let none = none_of(arrays, task.first + of_block);
            let products = products.wait::<0>();
            if is_last {
                SCORED.arrive()
            } else {
                FIRST_SCORED.arrive()
            }
            scores = [mask(products, none), scores[0]];
            tell(arrays, task.first + of_block, [0, 1].map(|i| largest(scores[0], i)));
            if is_last {
                return scores;
            }
            of_block = 2;
            THIRD_UNPACKED.sync();
        }
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

/// Leaves the weights of the warpgroup's tiles, and each thread's sums of them, in the memory for exchange.
///
/// # Safety
/// All largest scores are there; all threads of the warpgroup call it together; a barrier of the cluster follows.
#[inline(always)]
pub unsafe fn weigh<W: Which>(
    args: &Attend,
    task: Task,
    arrays: Arrays,
    (scores, group): (Scores, u32),
) {
    let has_third = has_third::<W>(task, group);
    let mut of_block = if has_third { 2 } else { group };
    let mut scores = scores;
    // SAFETY: by this function's own contract.
    unsafe {
        while of_block < task.own {
            weigh_tile(args, task, arrays, (scores[0], task.first + of_block));
            if !has_third || of_block == 0 {
                return;
            }
            (scores[0], of_block) = (scores[1], 0);
        }
    }
}

/// The same for one tile.
///
/// # Safety
/// As [`weigh`].
#[inline(always)]
unsafe fn weigh_tile(args: &Attend, task: Task, arrays: Arrays, (scores, tile): (Fragments, u32)) {
    let mut base = [f32::NEG_INFINITY; 2];
    let mut before = if tile >= task.second { task.second } else { 0 };
    // SAFETY: by this function's own contract; words by one thread each.
    unsafe {
        while before <= tile {
            base = raised(arrays, base, before);
            before += 1;
        }
        let (pairs, sum) = softmax::weights(scores, base);
        let to = task.exchange(args, tile);
        unroll::<4>(|step| {
            let ([a, b], [c, d]) = (pairs[2 * step], pairs[2 * step + 1]);
            args.exchange.store_u32x4(to + weights_of(step as u32), [a, b, c, d]);
        });
        args.exchange.store_u32x2(to + sums_of(), sum.map(f32::to_bits));
    }
}

/// Where the thread's words of a step of 16 keys' weights lie in those of a tile: as products read them.
#[inline(always)]
fn weights_of(step: u32) -> u64 {
    u64::from(4 * (GROUP * step + thread::thread_idx_x() % GROUP))
}

/// Where the thread's sums of its two heads' weights lie in the words of a tile.
#[inline(always)]
fn sums_of() -> u64 {
    u64::from(PANEL + 2 * (thread::thread_idx_x() % GROUP))
}

/// A thread's weights of a tile, 16 keys a step, and their sums, of two heads.
#[derive(Clone, Copy, Default)]
pub struct Weights {
    pub words: [[u32; 4]; 4],
    pub sums: [u32; 2],
}

impl Weights {
    /// Starts the loads of those of tile `tile`, if it is before tile `end`.
    ///
    /// # Safety
    /// They are left, and a barrier of the cluster has passed.
    #[inline(always)]
    pub unsafe fn load(args: &Attend, task: Task, (tile, end): (u32, u32)) -> Self {
        if tile >= end {
            return Self::default();
        }
        let from = task.exchange(args, tile);
        // SAFETY: by this function's own contract.
        unsafe {
            Self {
                words: array_from_fn(|step| {
                    args.exchange.load_u32x4(from + weights_of(step as u32))
                }),
                sums: args.exchange.load_u32x2(from + sums_of()),
            }
        }
    }
}

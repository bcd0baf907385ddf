//! The end of a work item: the blocks that share its keys combine their partial outputs, each for some of the heads.
//! They write the sums: the results of the heads, or those of a split, which [`super::combine_splits`] adds up.

use kv_layout::geometry::{HEAD_DIM, ROPE_DIM};
use simt::cluster::{cluster_arrive, cluster_wait, sync_cluster};
use simt::shared::Shared;
use simt::thread;
use simt::warpgroup::FragmentsN256;

use super::combine_splits;
use super::keys::{KeySet, Keys};
use super::memory::{
    Arrays, CLUSTER_BLOCKS, HEADS, MULTIPLYING_THREADS, QUERIES, WARPGROUP, barrier,
};
use super::output::{CHANNELS, QUARTERS, last_rotation, pair_rotation, store_head};
use super::softmax::{first_row, output_scales};
use super::work_item::{SplitBlocks, Task};
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// Stride of a head's sums in shared memory, in words, chosen so that a warp's stores of pairs have no bank conflicts.
const STRIDE: u32 = HEAD_DIM + 8;
/// Words of a block's sums, which replace its keys and the first tile of weights.
const SUMS: usize = (HEADS * STRIDE) as usize;
const _: () = assert!(SUMS <= QUERIES as usize);

/// Loads the data that [`write`] needs at the end: returns the sink of the thread's head, times log2 e, in each of the
/// first 64 threads; stores the cosines and sines of the rotary angles in `arrays`.
///
/// # Safety
/// As [`write`], in the first warpgroup; a barrier follows.
#[inline(always)]
pub unsafe fn load_early(args: &Attend, keys: Keys, arrays: Arrays, task: Task) -> f32 {
    let thread = thread::thread_idx_x();
    // SAFETY: by this function's own contract.
    unsafe {
        if thread >= WARPGROUP - ROPE_DIM / 2 {
            let pair = WARPGROUP - 1 - thread;
            arrays.rotation.store_u32x2(2 * pair, pair_rotation(args, keys.position, pair));
        }
        if thread < task.heads.count(args) {
            args.sinks.load(u64::from(task.heads.first + thread)) * core::f32::consts::LOG2_E
        } else {
            0.0
        }
    }
}

/// Stores a thread's sums of values for [`write`], once all products of the block are complete: each thread has waited
/// for its own. The sums overwrite keys and weights.
///
/// # Safety
/// All threads of a multiplying warpgroup call it together, or [`store_none`], before [`write`]; the others call
/// [`wait`].
#[inline(always)]
pub unsafe fn store(values: FragmentsN256) {
    // SAFETY: by this function's own contract.
    unsafe {
        barrier();
        store_sums(Shared::at(0), values);
    }
}

/// The barrier of [`store`], for a warpgroup that has no sums.
///
/// # Safety
/// As [`store`].
#[inline(always)]
pub unsafe fn store_none() {
    // SAFETY: by this function's own contract.
    unsafe { barrier() }
}

/// Combines the partial outputs of the blocks and writes the heads. The first warpgroup has stored the bases and the
/// sums of the heads' weights in `arrays`, where the queries were until [`store`].
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the multiplying warpgroups call it together, the others
/// [`wait`].
#[inline(always)]
pub unsafe fn write<W: KeySet>(args: &Attend, keys: Keys, arrays: Arrays, sink: f32, task: Task) {
    // SAFETY: words of shared memory by one thread each, with a barrier before others read them; no block leaves while
    // others read its memory.
    unsafe {
        let sums = Shared::<f32, SUMS>::at(0);
        sync_blocks(task.blocks);
        store_output_scales::<W>(args, keys, arrays, (sink, task));
        barrier();
        if task.channels.halves == 1 {
            write_heads::<W, QUARTERS>(args, keys, (arrays, sums), task);
        } else {
            write_heads::<W, { QUARTERS / 2 }>(args, keys, (arrays, sums), task);
        }
        wait_before_exit(task.blocks);
        if W::HAS_SPLITS && task.heads.num_splits > 1 {
            combine_splits::finish::<W>(args, arrays, task);
        }
    }
}

/// The barriers of [`store`] and [`write`], for threads that take no part in them.
///
/// # Safety
/// As [`write`].
#[inline(always)]
pub unsafe fn wait(blocks: SplitBlocks) {
    // SAFETY: by this function's own contract.
    unsafe {
        barrier();
        sync_blocks(blocks);
        barrier();
        wait_before_exit(blocks);
    }
}

/// Waits for all threads of `blocks`.
///
/// # Safety
/// All threads of these blocks call it, those of a warp from the same place.
#[inline(always)]
unsafe fn sync_blocks(blocks: SplitBlocks) {
    // SAFETY: by this function's own contract.
    unsafe { if blocks.count > 1 { sync_cluster() } else { thread::sync_threads() } }
}

/// Waits until no thread of these blocks still reads another block's memory.
///
/// # Safety
/// As [`sync_blocks`].
#[inline(always)]
unsafe fn wait_before_exit(blocks: SplitBlocks) {
    // SAFETY: by this function's own contract.
    unsafe {
        if blocks.count > 1 {
            cluster_arrive();
            cluster_wait();
        }
    }
}

/// Stores a thread's sums in shared memory, `[64, 512]`: those of the second warpgroup in the last 256 columns.
///
/// # Safety
/// As [`store`].
#[inline(always)]
unsafe fn store_sums(sums: Shared<f32, SUMS>, values: FragmentsN256) {
    let pair = 2 * (thread::lane_id() % 4);
    let at = first_row() * STRIDE + HEAD_DIM / 2 * (thread::warp_id() / 4) + pair;
    unroll::<2>(|half| {
        unroll::<16>(|n| {
            let at = at + HEAD_DIM / 4 * half as u32 + 8 * n as u32;
            let [a, b, c, d] = values[half][n].map(f32::to_bits);
            // SAFETY: by this function's own contract; each pair once, at a multiple of 8 bytes.
            unsafe {
                sums.store_u32x2(at, [a, b]);
                sums.store_u32x2(at + 8 * STRIDE, [c, d]);
            }
        });
    });
}

/// Element `i` of `memory` in block `rank` of the cluster.
///
/// # Safety
/// As [`Shared::load_from`].
#[inline(always)]
unsafe fn load<W: KeySet, const N: usize>(memory: Shared<f32, N>, rank: u32, i: u32) -> f32 {
    // SAFETY: by this function's own contract.
    unsafe { if W::CLUSTER_BLOCKS > 1 { memory.load_from(rank, i) } else { memory.load(i) } }
}

/// Computes the factors by which the sums of each block are multiplied, one head a thread, and stores them in `arrays`;
/// writes the log-sum-exp if it is requested.
///
/// # Safety
/// As [`write`], after [`sync_blocks`].
#[inline(always)]
unsafe fn store_output_scales<W: KeySet>(
    args: &Attend,
    keys: Keys,
    arrays: Arrays,
    (sink, task): (f32, Task),
) {
    let head = thread::thread_idx_x();
    if head >= HEADS {
        return;
    }
    let tiles = keys.tiles;
    let is_split = W::HAS_SPLITS && task.heads.num_splits > 1;
    // The sink belongs to no split: it is added with all splits.
    let sink = if is_split { f32::NEG_INFINITY } else { sink };
    let blocks = task.blocks;
    let has_keys = |rank: u32| {
        let (from, to) = blocks.tiles_of(tiles, rank);
        rank < blocks.count && from < to
    };
    // SAFETY: by this function's own contract.
    unsafe {
        let bases: [f32; CLUSTER_BLOCKS as usize] = array_from_fn(|i| {
            let rank = i as u32;
            if has_keys(rank) {
                load::<W, _>(arrays.base, blocks.in_cluster(rank), head)
            } else {
                f32::NEG_INFINITY
            }
        });
        let weights: [f32; CLUSTER_BLOCKS as usize] = array_from_fn(|i| {
            let rank = i as u32;
            if has_keys(rank) {
                load::<W, _>(arrays.sum, blocks.in_cluster(rank), head)
            } else {
                0.0
            }
        });
        let (scales, lse) = output_scales(sink, bases, weights);
        unroll::<{ CLUSTER_BLOCKS as usize }>(|i| {
            arrays.output_scales.store(CLUSTER_BLOCKS * head + i as u32, scales[i]);
        });
        if is_split && head % blocks.count == blocks.rank && task.channels.is_first() {
            args.split_softmax.store(
                task.heads.split_index(args, task.heads.split) * u64::from(HEADS) + u64::from(head),
                lse,
            );
        }
        if !is_split
            && args.params.lse_heads > 0
            && blocks.rank == 0
            && task.channels.is_first()
            && head < task.heads.count(args)
        {
            args.lse.store(task.heads.row(args) + u64::from(head), lse * core::f32::consts::LN_2);
        }
    }
}

/// Adds up the block's share of the heads, `N` quarters of their channels, and writes them, one head a warp: with
/// inverse RoPE, unless they belong to one of several splits.
///
/// # Safety
/// As [`write`], with the output scales in `arrays`.
#[inline(always)]
unsafe fn write_heads<W: KeySet, const N: usize>(
    args: &Attend,
    keys: Keys,
    (arrays, sums): (Arrays, Shared<f32, SUMS>),
    task: Task,
) {
    const WARPS: u32 = MULTIPLYING_THREADS / 32;
    // Half of the channels lies where the sums of the second warpgroup are.
    let column = 4 * thread::lane_id() + HEAD_DIM - CHANNELS * N as u32;
    let (tiles, blocks) = (keys.tiles, task.blocks);
    // SAFETY: by this function's own contract.
    unsafe {
        let rotation = last_rotation(arrays);
        let mut head = blocks.rank + blocks.count * thread::warp_id();
        while head < task.heads.count(args) {
            let mut values = [[0.0_f32; 4]; N];
            unroll::<{ CLUSTER_BLOCKS as usize }>(|i| {
                let rank = i as u32;
                let (from, to) = blocks.tiles_of(tiles, rank);
                if rank < blocks.count && from < to {
                    let factor = arrays.output_scales.load(CLUSTER_BLOCKS * head + rank);
                    let words: [[u32; 4]; N] = array_from_fn(|n| {
                        let at = head * STRIDE + column + CHANNELS * n as u32;
                        if W::CLUSTER_BLOCKS > 1 {
                            sums.load_u32x4_from(blocks.in_cluster(rank), at)
                        } else {
                            sums.load_u32x4(at)
                        }
                    });
                    values = array_from_fn(|n| {
                        array_from_fn(|j| values[n][j] + factor * f32::from_bits(words[n][j]))
                    });
                }
            });
            if W::HAS_SPLITS && task.heads.num_splits > 1 {
                combine_splits::store(args, task, head, values);
            } else {
                store_head(args, task, head, (values, rotation));
            }
            head += blocks.count * WARPS;
        }
    }
}

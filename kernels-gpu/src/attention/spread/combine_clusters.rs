//! Adds up the pieces of a query's keys, one piece a cluster. Of the blocks that have the same channels, the last to
//! finish adds up the pieces, in their order.

use simt::thread;

use super::super::combine_splits::{AT_ONCE, SplitsSoftmax, arrive};
use super::super::memory::HEADS;
use super::super::softmax::{first_row, output_scales};
use super::memory::{Arrays, CLUSTER_BLOCKS, MULTIPLIED, WARPGROUP};
use super::task::Task;
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// A thread's results for its two heads: 32 channels, the half of the block's channels that its warpgroup has.
pub type Half = [[f32; 4]; 4];

/// The element of `split_softmax` at which the values of the block start, for cluster `cluster` of the query. Each
/// block has a copy of its own.
#[inline(always)]
fn lse_index(args: &Attend, task: Task, cluster: u32) -> u64 {
    let block = task.cluster(args, cluster) * u64::from(CLUSTER_BLOCKS) + u64::from(task.rank);
    block * u64::from(2 * HEADS)
}

/// The element of `split_out` at which those of the thread start, for cluster `cluster` of the query. The order is that
/// of the threads, so that each reads the elements that it has written.
#[inline(always)]
fn sums_of(args: &Attend, task: Task, cluster: u32) -> u64 {
    /// Words of a warpgroup's half of a block's channels.
    const HALF: u32 = 16 * WARPGROUP;
    let block = task.cluster(args, cluster) * u64::from(CLUSTER_BLOCKS) + u64::from(task.rank);
    let (group, thread) = (thread::thread_idx_x() / WARPGROUP, thread::thread_idx_x() % WARPGROUP);
    block * u64::from(2 * HALF) + u64::from(HALF * group + 4 * thread)
}

/// Stores log2 of the softmax's denominator of the split, for a head. The blocks that have the same channels of the
/// query's other keys read it.
///
/// # Safety
/// As [`super::sums::write`], where there are several clusters.
#[inline(always)]
pub unsafe fn store_lse(args: &Attend, task: Task, row: u32, lse: f32) {
    // SAFETY: by this function's own contract.
    unsafe {
        args.split_softmax.store(lse_index(args, task, task.own_cluster()) + u64::from(row), lse)
    }
}

/// As [`store_lse`], for a half of a split: stores the base of a head's weights, and their sum.
///
/// # Safety
/// As [`store_lse`].
#[inline(always)]
pub unsafe fn store_end(args: &Attend, task: Task, row: u32, [base, total]: [f32; 2]) {
    let to = lse_index(args, task, task.own_cluster()) + u64::from(row);
    // SAFETY: by this function's own contract.
    unsafe {
        args.split_softmax.store(to, base);
        args.split_softmax.store(to + u64::from(HEADS), total);
    }
}

/// Stores the thread's partial outputs of the cluster's keys. If all other clusters have stored theirs, adds up those
/// of all clusters and returns the sum; otherwise returns `None`.
///
/// # Safety
/// As [`super::sums::write`], where there are several clusters, after [`store_lse`] or [`store_end`] of all heads; no
/// thread reads [`Arrays::found`] any more.
#[inline(always)]
pub unsafe fn add_up(
    args: &Attend,
    task: Task,
    arrays: Arrays,
    (values, sinks): (Half, [f32; 2]),
) -> Option<Half> {
    let to = sums_of(args, task, task.own_cluster());
    // SAFETY: by this function's own contract; one thread arrives, between two barriers.
    unsafe {
        unroll::<4>(|n| {
            let words = values[n].map(f32::to_bits);
            args.split_out.store_u32x4(to + u64::from(4 * WARPGROUP * n as u32), words);
        });
        MULTIPLIED.sync();
        if thread::thread_idx_x() == 0 {
            let counter = task.heads.group(args) * u64::from(CLUSTER_BLOCKS) + u64::from(task.rank);
            let is_last = arrive(args, counter, task.clusters());
            arrays.found.store(0, u32::from(is_last));
        }
        MULTIPLIED.sync();
        if arrays.found.load(0) == 0 {
            return None;
        }
        Some(sum(args, task, sinks))
    }
}

/// Log-sum-exps and output scales of two clusters, for the thread's two heads. The clusters have two splits, or the
/// halves of one split.
#[derive(Clone, Copy)]
struct Pair {
    /// log2 of the splits' denominators; -infinity if there is no split.
    lse: [[f32; 2]; 2],
    /// If the two are the halves of a split, the factors by which their sums are multiplied.
    scales: [[f32; 2]; 2],
}

impl Pair {
    /// Loads the two clusters from `first` on. If the query has one split, its denominator includes the sink.
    ///
    /// # Safety
    /// As [`sum`].
    #[inline(always)]
    unsafe fn load(args: &Attend, task: Task, first: u32, sinks: [f32; 2]) -> Self {
        let at = |i: u32, head: usize| {
            let cluster = (first + i).min(task.clusters() - 1);
            lse_index(args, task, cluster) + u64::from(first_row() + 8 * head as u32)
        };
        // SAFETY: by this function's own contract.
        let load = |from: u64| unsafe { args.split_softmax.load(from) };
        let x: [[f32; 2]; 2] = array_from_fn(|head| [load(at(0, head)), load(at(1, head))]);
        if task.halves == 1 {
            let is_there = first + 1 < task.clusters();
            let lse = x.map(|[a, b]| [a, if is_there { b } else { f32::NEG_INFINITY }]);
            return Self { lse, scales: [[1.0; 2]; 2] };
        }
        let (mut lse, mut of_both) = ([[f32::NEG_INFINITY; 2]; 2], [[0.0; 2]; 2]);
        unroll::<2>(|head| {
            let totals = [0, 1].map(|i| load(at(i, head) + u64::from(HEADS)));
            let is_split = task.heads.num_splits > 1;
            let sink =
                if is_split { f32::NEG_INFINITY } else { sinks[head] * core::f32::consts::LOG2_E };
            (of_both[head], lse[head][0]) = output_scales(sink, x[head], totals);
        });
        Self { lse, scales: of_both }
    }
}

/// The results of the thread's heads over all keys. Writes their log-sum-exps if they are requested.
///
/// # Safety
/// All clusters' partial outputs are stored.
#[inline(always)]
unsafe fn sum(args: &Attend, task: Task, sinks: [f32; 2]) -> Half {
    let clusters = task.clusters();
    let is_split = task.heads.num_splits > 1;
    let mut softmax = sinks.map(SplitsSoftmax::new);
    let mut values: Half = [[0.0; 4]; 4];
    // For a query with one split.
    let mut scales_and_lses = [(1.0, 0.0); 2];
    // SAFETY: by this function's own contract.
    unsafe {
        let mut first = 0;
        while is_split && first < clusters {
            let pair = Pair::load(args, task, first, sinks);
            unroll::<2>(|i| softmax[i].raise(pair.lse[i]));
            first += AT_ONCE as u32;
        }
        first = 0;
        while first < clusters {
            // After the last cluster, the last one again; it is not used.
            let words: [Words; AT_ONCE] = array_from_fn(|i| {
                let from = sums_of(args, task, (first + i as u32).min(clusters - 1));
                array_from_fn(|n| {
                    args.split_out.load_u32x4(from + u64::from(4 * WARPGROUP * n as u32))
                })
            });
            let Pair { lse, scales } = Pair::load(args, task, first, sinks);
            if task.halves == 2 {
                let weight: [f32; 2] =
                    array_from_fn(|i| if is_split { softmax[i].weight(lse[i][0]) } else { 1.0 });
                let both = weighted([[0.0; 4]; 4], scales.map(|of| of[0]), words[0]);
                let both = weighted(both, scales.map(|of| of[1]), words[1]);
                values = weighted(values, weight, both.map(|of| of.map(f32::to_bits)));
                scales_and_lses = lse.map(|[lse, _]| (1.0, lse * core::f32::consts::LN_2));
            } else {
                unroll::<AT_ONCE>(|i| {
                    if first + (i as u32) < clusters {
                        let weight: [f32; 2] =
                            array_from_fn(|head| softmax[head].weight(lse[head][i]));
                        values = weighted(values, weight, words[i]);
                    }
                });
            }
            first += AT_ONCE as u32;
        }
        end(
            args,
            task,
            if is_split { softmax.map(SplitsSoftmax::end) } else { scales_and_lses },
            values,
        )
    }
}

/// A thread's sums, as they are stored in global memory.
type Words = [[u32; 4]; 4];

/// Adds other sums, times the weights of the heads, to `values`.
#[inline(always)]
fn weighted(values: Half, weight: [f32; 2], words: Words) -> Half {
    array_from_fn(|n| array_from_fn(|j| values[n][j] + weight[j / 2] * f32::from_bits(words[n][j])))
}

/// Multiplies the heads' sums by their scales. Writes their log-sum-exps if they are requested.
///
/// # Safety
/// As [`sum`].
#[inline(always)]
unsafe fn end(args: &Attend, task: Task, scales_and_lses: [(f32, f32); 2], values: Half) -> Half {
    let [(a, lse_a), (b, lse_b)] = scales_and_lses;
    let has_lse = args.params.lse_heads > 0 && task.rank == 0 && thread::thread_idx_x() < WARPGROUP;
    if has_lse && thread::lane_id().is_multiple_of(4) {
        let (row, count) = (first_row(), task.heads.count(args));
        let to = task.heads.row(args) + u64::from(row);
        // SAFETY: by this function's own contract.
        unsafe {
            if row < count {
                args.lse.store(to, lse_a);
            }
            if row + 8 < count {
                args.lse.store(to + 8, lse_b);
            }
        }
    }
    values.map(|[x, y, z, w]| [x * a, y * a, z * b, w * b])
}

//! The splits of a query's keys (split-KV). Each split has a partial output and a log-sum-exp in global memory. The
//! block that is the last to store those of its heads adds up the splits, in their order.

use kv_layout::geometry::HEAD_DIM;
use simt::atomic::DeviceAtomicU32;
use simt::math::approx::{ex2, lg2};
use simt::math::max;
use simt::thread;

use super::keys::KeySet;
use super::memory::{Arrays, HEADS, MULTIPLYING_THREADS, SPLIT_WRITTEN};
use super::output::{CHANNELS, QUARTERS, last_rotation, store_head};
use super::softmax::finite;
use super::work_item::{Channels, Heads, SplitBlocks, Task};
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// The element of `split_out` at which the lane's channels of head `head` of split `split` start.
#[inline(always)]
fn sums_of(args: &Attend, task: Task, split: u32, head: u32) -> u64 {
    let row = task.heads.split_index(args, split) * u64::from(HEADS) + u64::from(head);
    row * u64::from(HEAD_DIM) + u64::from(4 * thread::lane_id())
}

/// Stores the partial output of head `head` for the block's split: of each 128 channels a lane has four. `values` are
/// all channels, or the block's half.
///
/// # Safety
/// As [`super::combine_cluster::write`], in a launch with several splits.
#[inline(always)]
pub unsafe fn store<const N: usize>(args: &Attend, task: Task, head: u32, values: [[f32; 4]; N]) {
    let to = sums_of(args, task, task.heads.split, head) + u64::from(task.first_channel());
    unroll::<N>(|n| {
        let words = values[n].map(f32::to_bits);
        // SAFETY: by this function's own contract.
        unsafe { args.split_out.store_u32x4(to + u64::from(CHANNELS * n as u32), words) }
    });
}

/// Adds up the splits for the block's share of the heads, with all their channels, if all other blocks have stored
/// theirs.
///
/// # Safety
/// As [`super::combine_cluster::write`], whose threads call it when they have stored their partial outputs and no
/// thread reads the block's shared memory any more.
#[inline(always)]
pub unsafe fn finish<W: KeySet>(args: &Attend, arrays: Arrays, task: Task) {
    const WARPS: u32 = MULTIPLYING_THREADS / 32;
    let SplitBlocks { count: blocks, rank, .. } = task.blocks;
    // SAFETY: one thread arrives, between two barriers.
    unsafe {
        SPLIT_WRITTEN.sync();
        if thread::thread_idx_x() == 0 {
            let counter = task.heads.group(args) * u64::from(W::CLUSTER_BLOCKS) + u64::from(rank);
            let is_last = arrive(args, counter, task.heads.num_splits * task.channels.halves);
            // The mask of keys is no longer read, so its first word is free.
            arrays.mask.store(0, u32::from(is_last));
        }
        SPLIT_WRITTEN.sync();
        if arrays.mask.load(0) == 0 {
            return;
        }
        let rotation = last_rotation(arrays);
        let all = Task { channels: Channels::ALL, ..task };
        let is_there = |head: u32| head < task.heads.count(args);
        let mut head = rank + blocks * thread::warp_id();
        while is_there(head) {
            let other = head + blocks * WARPS;
            // Two heads at a time: their loads overlap.
            let [of_head, of_other] =
                add_up(args, task, [head, if is_there(other) { other } else { head }]);
            store_head(args, all, head, (of_head, rotation));
            if is_there(other) {
                store_head(args, all, other, (of_other, rotation));
            }
            head += 2 * blocks * WARPS;
        }
    }
}

/// Increments counter `counter`, after the block has stored its partial output. Returns whether this block is the last
/// of `blocks` to do so; the last block sets the counter to 0.
///
/// # Safety
/// One thread of the block calls it. A barrier before the call orders the block's stores, and one after it orders the
/// loads of all partial outputs. `counter` is one of `arrivals`, at which `blocks` blocks arrive in a launch, and 0
/// before it.
#[inline(always)]
pub unsafe fn arrive(args: &Attend, counter: u64, blocks: u32) -> bool {
    // SAFETY: by this function's own contract; the arrival is ordered behind what the block has stored, and what
    // others stored before theirs before what follows.
    unsafe {
        let arrivals = DeviceAtomicU32::new(args.arrivals, counter);
        let is_last = arrivals.add_acq_rel(1) == blocks - 1;
        if is_last {
            arrivals.store(0);
        }
        is_last
    }
}

/// Number of splits whose loads are under way together.
pub const AT_ONCE: usize = 2;

/// The results of two heads over all splits: of each 128 channels a lane has four. Writes their log-sum-exps if they
/// are requested.
///
/// # Safety
/// All splits are stored; all lanes of the warp call it together.
#[inline(always)]
unsafe fn add_up(args: &Attend, task: Task, heads: [u32; 2]) -> [[[f32; 4]; QUARTERS]; 2] {
    // SAFETY: by this function's own contract.
    unsafe {
        let [a, b] = heads;
        let mut sums = [Sum::new(args, task.heads, a), Sum::new(args, task.heads, b)];
        let mut first = 0;
        while first < task.heads.num_splits {
            let lse = [lse_of(args, task, first, a), lse_of(args, task, first, b)];
            unroll::<2>(|i| sums[i].softmax.raise(lse[i]));
            first += AT_ONCE as u32;
        }
        first = 0;
        while first < task.heads.num_splits {
            let lse = [lse_of(args, task, first, a), lse_of(args, task, first, b)];
            let values = [values_of(args, task, first, a), values_of(args, task, first, b)];
            unroll::<2>(|i| sums[i].add(task.heads.num_splits - first, lse[i], values[i]));
            first += AT_ONCE as u32;
        }
        let [of_a, of_b] = sums;
        [of_a.finish(args, task.heads, a), of_b.finish(args, task.heads, b)]
    }
}

/// log2 of the softmax's denominators of a head, for the splits from `first` on; -infinity past the last split.
///
/// # Safety
/// As [`add_up`].
#[inline(always)]
unsafe fn lse_of(args: &Attend, task: Task, first: u32, head: u32) -> [f32; AT_ONCE] {
    array_from_fn(|i| {
        let split = first + i as u32;
        let of_head = task.heads.split_index(args, split) * u64::from(HEADS) + u64::from(head);
        if split < task.heads.num_splits {
            // SAFETY: by this function's own contract.
            unsafe { args.split_softmax.load(of_head) }
        } else {
            f32::NEG_INFINITY
        }
    })
}

/// The partial outputs of a head for the splits from `first` on: of each 128 channels a lane has four. Past the last
/// split the values are undefined: those of the last split.
///
/// # Safety
/// As [`add_up`].
#[inline(always)]
unsafe fn values_of(
    args: &Attend,
    task: Task,
    first: u32,
    head: u32,
) -> [[[u32; 4]; QUARTERS]; AT_ONCE] {
    array_from_fn(|i| {
        let from = sums_of(args, task, (first + i as u32).min(task.heads.num_splits - 1), head);
        // SAFETY: by this function's own contract.
        array_from_fn(|n| unsafe {
            args.split_out.load_u32x4(from + u64::from(CHANNELS * n as u32))
        })
    })
}

/// A head's softmax over splits: first all of [`Self::raise`], then all of [`Self::weight`], in the order of the
/// splits.
#[derive(Clone, Copy)]
pub struct SplitsSoftmax {
    sink: f32,
    max_lse: f32,
    total: f32,
}

impl SplitsSoftmax {
    /// The softmax of a head with this sink, without splits.
    #[inline(always)]
    pub fn new(sink: f32) -> Self {
        let sink = sink * core::f32::consts::LOG2_E;
        Self { sink, max_lse: sink, total: 0.0 }
    }

    /// Raises the base of the weights to the largest log2 denominator of these splits, if that is larger.
    #[inline(always)]
    pub fn raise(&mut self, lse: [f32; AT_ONCE]) {
        self.max_lse = lse.iter().fold(self.max_lse, |before, &lse| max(before, lse));
        self.total = ex2(self.sink - finite(self.max_lse));
    }

    /// The weight of the next split, whose denominator is `2^lse`.
    #[inline(always)]
    pub fn weight(&mut self, lse: f32) -> f32 {
        let weight = ex2(lse - finite(self.max_lse));
        self.total += weight;
        weight
    }

    /// The factor by which the weighted sum of all splits is multiplied, and the natural logarithm of the whole
    /// denominator.
    #[inline(always)]
    pub fn end(self) -> (f32, f32) {
        let Self { max_lse, total, .. } = self;
        let scale = if total == 0.0 { 0.0 } else { 1.0 / total };
        let lse = if total == 0.0 { f32::NEG_INFINITY } else { max_lse + lg2(total) };
        (scale, lse * core::f32::consts::LN_2)
    }
}

/// A head's sum over splits: first all of [`Self::raise`], then all of [`Self::add`], in the order of the splits.
#[derive(Clone, Copy)]
struct Sum {
    softmax: SplitsSoftmax,
    values: [[f32; 4]; QUARTERS],
}

impl Sum {
    /// # Safety
    /// As [`add_up`].
    #[inline(always)]
    unsafe fn new(args: &Attend, heads: Heads, head: u32) -> Self {
        // SAFETY: a head of the query, by this function's own contract.
        let sink = unsafe { args.sinks.load(u64::from(heads.first + head)) };
        Self { softmax: SplitsSoftmax::new(sink), values: [[0.0; 4]; QUARTERS] }
    }

    /// Adds the first `count` of some splits.
    #[inline(always)]
    fn add(&mut self, count: u32, lse: [f32; AT_ONCE], values: [[[u32; 4]; QUARTERS]; AT_ONCE]) {
        unroll::<AT_ONCE>(|i| {
            if (i as u32) < count {
                let weight = self.softmax.weight(lse[i]);
                self.values = array_from_fn(|n| {
                    array_from_fn(|j| self.values[n][j] + weight * f32::from_bits(values[i][n][j]))
                });
            }
        });
    }

    /// # Safety
    /// As [`add_up`].
    #[inline(always)]
    unsafe fn finish(self, args: &Attend, heads: Heads, head: u32) -> [[f32; 4]; QUARTERS] {
        let (scale, lse) = self.softmax.end();
        if args.params.lse_heads > 0 && thread::lane_id() == 0 {
            let to = heads.row(args) + u64::from(head);
            // SAFETY: by this function's own contract.
            unsafe { args.lse.store(to, lse) }
        }
        self.values.map(|quarter| quarter.map(|value| value * scale))
    }
}

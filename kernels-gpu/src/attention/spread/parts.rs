//! The parts of a query's keys, each a cluster's: the last of the blocks that have the same channels adds them up, in their order.

use simt::thread;

use super::super::memory::HEADS;
use super::super::parts::{AT_ONCE, Softmax, arrive};
use super::super::softmax::first_row;
use super::memory::{Arrays, BLOCKS, GROUP, MULTIPLIED};
use super::task::Task;
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// A thread's results of its two heads: 32 of the block's channels, those of its warpgroup.
pub type Half = [[f32; 4]; 4];

/// The element of the parts' denominators where those of the block's copy start, of part `part`.
#[inline(always)]
fn lse_of(args: &Attend, task: Task, part: u32) -> u64 {
    (task.heads.part(args, part) * u64::from(BLOCKS) + u64::from(task.rank)) * u64::from(HEADS)
}

/// The element of the parts' sums where those of the thread start, of part `part`: as threads have them, so that each reads what
/// it has written.
#[inline(always)]
fn sums_of(args: &Attend, task: Task, part: u32) -> u64 {
    /// Words of a warpgroup's half of a block's channels.
    const HALF: u32 = 16 * GROUP;
    let block = task.heads.part(args, part) * u64::from(BLOCKS) + u64::from(task.rank);
    let (group, thread) = (thread::thread_idx_x() / GROUP, thread::thread_idx_x() % GROUP);
    block * u64::from(2 * HALF) + u64::from(HALF * group + 4 * thread)
}

/// Leaves log2 of the softmax's denominator of a head of the part, for the blocks that have the same channels of others.
///
/// # Safety
/// As [`super::sums::write`], where there are several parts.
#[inline(always)]
pub unsafe fn leave_lse(args: &Attend, task: Task, row: u32, lse: f32) {
    // SAFETY: by this function's own contract.
    unsafe { args.part_lse.store(lse_of(args, task, task.heads.part) + u64::from(row), lse) }
}

/// Leaves what the thread's heads get of the part, and adds up all parts if all others are left; nothing if they are not.
///
/// # Safety
/// As [`super::sums::write`], where there are several parts, behind [`leave_lse`] of all heads; nobody reads
/// [`Arrays::found`] any more.
#[inline(always)]
pub unsafe fn add_up(
    args: &Attend,
    task: Task,
    arrays: Arrays,
    (values, sinks): (Half, [f32; 2]),
) -> Option<Half> {
    let to = sums_of(args, task, task.heads.part);
    // SAFETY: by this function's own contract; one thread arrives, between two barriers.
    unsafe {
        unroll::<4>(|n| {
            let words = values[n].map(f32::to_bits);
            args.part_sums.store_u32x4(to + u64::from(4 * GROUP * n as u32), words);
        });
        MULTIPLIED.sync();
        if thread::thread_idx_x() == 0 {
            let counter = task.heads.group(args) * u64::from(BLOCKS) + u64::from(task.rank);
            let is_last = arrive(args, counter, task.heads.parts);
            arrays.found.store(0, u32::from(is_last));
        }
        MULTIPLIED.sync();
        if arrays.found.load(0) == 0 {
            return None;
        }
        Some(sum(args, task, sinks))
    }
}

/// The thread's heads' results over all parts; their log-sum-exps are written if they are asked for.
///
/// # Safety
/// All parts are left.
#[inline(always)]
unsafe fn sum(args: &Attend, task: Task, sinks: [f32; 2]) -> Half {
    let parts = task.heads.parts;
    let mut softmax = sinks.map(Softmax::new);
    let mut values: Half = [[0.0; 4]; 4];
    // SAFETY: by this function's own contract.
    unsafe {
        let mut first = 0;
        while first < parts {
            let lse = load_lse(args, task, first);
            unroll::<2>(|i| softmax[i].raise(lse[i]));
            first += AT_ONCE as u32;
        }
        first = 0;
        while first < parts {
            let lse = load_lse(args, task, first);
            // Past the last part it again.
            let words: [[[u32; 4]; 4]; AT_ONCE] = array_from_fn(|i| {
                let from = sums_of(args, task, (first + i as u32).min(parts - 1));
                array_from_fn(|n| args.part_sums.load_u32x4(from + u64::from(4 * GROUP * n as u32)))
            });
            unroll::<AT_ONCE>(|i| {
                if first + (i as u32) < parts {
                    let weight = [softmax[0].weight(lse[0][i]), softmax[1].weight(lse[1][i])];
                    values = array_from_fn(|n| {
                        array_from_fn(|j| {
                            values[n][j] + weight[j / 2] * f32::from_bits(words[i][n][j])
                        })
                    });
                }
            });
            first += AT_ONCE as u32;
        }
        end(args, task, softmax, values)
    }
}

/// log2 of the denominators of the thread's two heads, of parts from `first` on; -infinity past the last.
///
/// # Safety
/// As [`sum`].
#[inline(always)]
unsafe fn load_lse(args: &Attend, task: Task, first: u32) -> [[f32; AT_ONCE]; 2] {
    array_from_fn(|head| {
        array_from_fn(|i| {
            let part = first + i as u32;
            let at = lse_of(args, task, part) + u64::from(first_row() + 8 * head as u32);
            if part < task.heads.parts {
                // SAFETY: by this function's own contract.
                unsafe { args.part_lse.load(at) }
            } else {
                f32::NEG_INFINITY
            }
        })
    })
}

/// The heads' results, from their sums; their log-sum-exps are written if they are asked for.
///
/// # Safety
/// As [`sum`].
#[inline(always)]
unsafe fn end(args: &Attend, task: Task, softmax: [Softmax; 2], values: Half) -> Half {
    let [(a, lse_a), (b, lse_b)] = softmax.map(Softmax::end);
    let has_lse = args.params.lse_heads > 0 && task.rank == 0 && thread::thread_idx_x() < GROUP;
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

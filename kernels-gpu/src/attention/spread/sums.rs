//! Computes the sums of values, and writes the heads' results.

use kv_layout::geometry::{HEAD_DIM, ROPE_DIM};
use simt::math::approx::ex2;
use simt::warpgroup::{Fragments, Panels, bf16_m64n64k64, bf16_m64n64k64_twice, fence_proxy_async};
use simt::{thread, warp};

use super::super::keys::KeySet;
use super::super::memory::HEADS;
use super::super::output::{inverse_rope, pair_rotation};
use super::super::softmax::{first_row, output_scales};
use super::combine_clusters::{self, Half};
use super::exchange::{Exchange, Weights};
use super::memory::{
    Arrays, CHANNELS, EXCHANGED, MULTIPLIED, VALUES_UNPACKED, WARPGROUP, WORDS, may_have_clusters,
};
use super::scores::raised;
use super::task::Task;
use crate::args::Attend;
use crate::convert::bf16x2_from_f32;
use crate::unroll::{array_from_fn, unroll};

/// Stores the cosines and sines of the rotary angles, which the block with the rotary channels needs at the end.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the unpacking warpgroups call it, and a barrier follows.
#[inline(always)]
pub unsafe fn store_rotations(args: &Attend, position: u32, arrays: Arrays) {
    let pair = thread::thread_idx_x() - 2 * WARPGROUP;
    if pair < ROPE_DIM / 2 {
        // SAFETY: by this function's own contract.
        unsafe { arrays.rotation.store_u32x2(2 * pair, pair_rotation(args, position, pair)) }
    }
}

/// One of the two sums of a query, for the block's channels and the thread's heads.
#[derive(Clone, Copy)]
pub struct Sum {
    values: Fragments,
    base: [f32; 2],
    /// The sums of the weights.
    total: [f32; 2],
}

/// Multiplies weights by values: warpgroup 0 for the tiles of the first sum, warpgroup 1 for those of the second.
///
/// # Safety
/// Weights and their sums are stored, and a barrier of the cluster has passed; all threads of a multiplying warpgroup
/// call it together, and those of the unpacking ones have arrived or arrive at [`VALUES_UNPACKED`].
#[inline(always)]
pub unsafe fn multiply(exchange: Exchange, task: Task, arrays: Arrays, group: u32) -> Sum {
    let (tile, end) = if group == 0 { (0, task.second) } else { (task.second, task.tiles) };
    // SAFETY: by this function's own contract.
    unsafe {
        let sum = if task.needs_rescale {
            add_rescaled(exchange, (tile, end), arrays)
        } else {
            add_unscaled(exchange, (tile, end), arrays)
        };
        let total = sum.total.map(|total| {
            let total = total + warp::shuffle_xor_f32(total, 1);
            total + warp::shuffle_xor_f32(total, 2)
        });
        Sum { total, ..sum }
    }
}

/// The sum of tiles `first..end`, whose weights all have base 0. The products of two tiles are in flight together, and
/// the loads of the weights of the next two.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn add_unscaled(exchange: Exchange, (first, end): (u32, u32), arrays: Arrays) -> Sum {
    // SAFETY: by this function's own contract.
    unsafe {
        let two = |tile: u32| [exchange.load((tile, end)), exchange.load((tile + 1, end))];
        let (mut even, mut odd) = (two(first), two(first + 2));
        VALUES_UNPACKED.sync();
        // For the values, which other threads have written.
        fence_proxy_async();
        let mut sum = Sum {
            values: [[0.0; 4]; 8],
            base: [if first < end { 0.0 } else { f32::NEG_INFINITY }; 2],
            total: [0.0; 2],
        };
        let mut tile = first;
        while tile + 1 < end {
            sum = add_two(even, [tile, tile + 1].map(|tile| arrays.values(tile)), sum);
            even = two(tile + 4);
            tile += 2;
            if tile + 1 < end {
                sum = add_two(odd, [tile, tile + 1].map(|tile| arrays.values(tile)), sum);
                odd = two(tile + 4);
                tile += 2;
            } else {
                even = odd;
            }
        }
        if tile < end { add(even[0], arrays.values(tile), sum) } else { sum }
    }
}

/// Adds the products of two tiles to `sum`.
///
/// # Safety
/// As [`multiply`]: these are their weights and values.
#[inline(always)]
unsafe fn add_two(weights: [Weights; 2], values: [Panels<WORDS>; 2], sum: Sum) -> Sum {
    let words = weights.map(|weights| weights.words);
    // SAFETY: by this function's own contract.
    unsafe {
        let (values, total) = bf16_m64n64k64_twice(words, values, sum.values, || {
            let [a, b] = weights.map(|weights| weights.sums.map(f32::from_bits));
            // The optimisation barriers have them computed before the wait for the products.
            [0, 1].map(|i| thread::opt_barrier_f32(sum.total[i] + a[i] + b[i]))
        });
        Sum { values, total, ..sum }
    }
}

/// Adds the products of a tile to `sum`.
///
/// # Safety
/// As [`add_two`].
#[inline(always)]
unsafe fn add(weights: Weights, values: Panels<WORDS>, sum: Sum) -> Sum {
    // SAFETY: by this function's own contract.
    unsafe {
        let (values, total) = bf16_m64n64k64(weights.words, values, sum.values, || {
            [0, 1].map(|i| thread::opt_barrier_f32(sum.total[i] + f32::from_bits(weights.sums[i])))
        });
        Sum { values, total, ..sum }
    }
}

/// The sum of tiles `first..end`, whose weights have different bases. This is seldom, so it has little code.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn add_rescaled(exchange: Exchange, (first, end): (u32, u32), arrays: Arrays) -> Sum {
    let mut sum = Sum { values: [[0.0; 4]; 8], base: [f32::NEG_INFINITY; 2], total: [0.0; 2] };
    let mut tile = first;
    // SAFETY: by this function's own contract.
    unsafe {
        VALUES_UNPACKED.sync();
        fence_proxy_async();
        while tile < end {
            let weights = exchange.load((tile, end));
            sum = raise(sum, raised(arrays, sum.base, tile));
            sum = add(weights, arrays.values(tile), sum);
            tile += 1;
        }
    }
    sum
}

/// Rescales the sum to the base `base`. Does nothing where no base of the warp is raised.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn raise(sum: Sum, base: [f32; 2]) -> Sum {
    // SAFETY: by this function's own contract.
    if unsafe { warp::all(base[0] == sum.base[0] && base[1] == sum.base[1]) } {
        return sum;
    }
    let factor = |i: usize| {
        let is_raised = base[i] != sum.base[i] && sum.base[i] > f32::NEG_INFINITY;
        if is_raised { ex2(sum.base[i] - base[i]) } else { 1.0 }
    };
    let [x, y] = [factor(0), factor(1)];
    let values = array_from_fn(|n| {
        let [a, b, c, d] = sum.values[n];
        [a * x, b * x, c * y, d * y]
    });
    Sum { values, base, total: [sum.total[0] * x, sum.total[1] * y] }
}

/// Adds up the two sums, and all clusters of the query if there are several and this block is the last. Writes the
/// block's channels of the heads, and the log-sum-exps if they are requested.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the multiplying warpgroups call it together.
#[inline(always)]
pub unsafe fn write<W: KeySet>(
    args: &Attend,
    task: Task,
    arrays: Arrays,
    (sum, group, sinks): (Sum, u32, [f32; 2]),
) {
    // SAFETY: by this function's own contract; all products are done behind the first barrier.
    unsafe {
        store_bases_and_sums(arrays, sum, group);
        MULTIPLIED.sync();
        let scale =
            [0, 1].map(|i| output_scale::<W>(args, task, arrays, (group, i, sinks[i as usize])));
        let scaled: Fragments = array_from_fn(|n| {
            let [a, b, c, d] = sum.values[n];
            [(0, a), (0, b), (1, c), (1, d)].map(|(i, value)| scale[i] * value)
        });
        let [low, high] = [0, 4].map(|n| [scaled[n], scaled[n + 1], scaled[n + 2], scaled[n + 3]]);
        // Each warpgroup adds up half of the channels, and stores the others for the other one.
        let (own, others) = if group == 0 { (low, high) } else { (high, low) };
        let place = EXCHANGED + 4 * (thread::thread_idx_x() % WARPGROUP);
        let half = |group: u32| place + 4 * (4 * WARPGROUP) * group;
        unroll::<4>(|n| {
            let at = half(group) + 4 * WARPGROUP * n as u32;
            arrays.memory.store_u32x4(at, others[n].map(f32::to_bits));
        });
        MULTIPLIED.sync();
        let theirs: Half = array_from_fn(|n| {
            let at = half(1 - group) + 4 * WARPGROUP * n as u32;
            arrays.memory.load_u32x4(at).map(f32::from_bits)
        });
        let mut values = if group == 0 { added(own, theirs) } else { added(theirs, own) };
        if may_have_clusters::<W>() && task.clusters() > 1 {
            let Some(of_all) = combine_clusters::add_up(args, task, arrays, (values, sinks)) else {
                return;
            };
            values = of_all;
        }
        store(args, task, arrays, (4 * group, values));
    }
}

/// Adds both sums of 32 channels, in their order, to 0, as in the other forms: -0 plus -0 gives 0.
#[inline(always)]
fn added(first: Half, second: Half) -> Half {
    array_from_fn(|n| array_from_fn(|j| 0.0 + first[n][j] + second[n][j]))
}

/// Stores a sum's bases and sums of weights for both warpgroups.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn store_bases_and_sums(arrays: Arrays, sum: Sum, group: u32) {
    if thread::lane_id().is_multiple_of(4) {
        unroll::<2>(|i| {
            let at = HEADS * group + first_row() + 8 * i as u32;
            // SAFETY: by this function's own contract, a word by one thread.
            unsafe {
                arrays.bases_and_sums.store(at, sum.base[i]);
                arrays.bases_and_sums.store(2 * HEADS + at, sum.total[i]);
            }
        });
    }
}

/// The factor by which a warpgroup's sums of the thread's head `i` are multiplied. Stores the head's log-sum-exp, for
/// the other splits, or as a result if it is requested.
///
/// # Safety
/// As [`write`], after [`store_bases_and_sums`] and a barrier.
#[inline(always)]
unsafe fn output_scale<W: KeySet>(
    args: &Attend,
    task: Task,
    arrays: Arrays,
    (group, i, sink): (u32, u32, f32),
) -> f32 {
    let row = first_row() + 8 * i;
    let is_split = W::HAS_SPLITS && task.heads.num_splits > 1;
    if may_have_clusters::<W>() && task.halves == 2 {
        // The scales are known only when both halves are.
        if group == 0 && thread::lane_id().is_multiple_of(4) {
            // SAFETY: by this function's own contract.
            unsafe {
                let end =
                    [arrays.bases_and_sums.load(row), arrays.bases_and_sums.load(2 * HEADS + row)];
                combine_clusters::store_end(args, task, row, end);
            }
        }
        return 1.0;
    }
    // The sink belongs to no split: it is added with all splits.
    let sink = if is_split { f32::NEG_INFINITY } else { sink * core::f32::consts::LOG2_E };
    // SAFETY: by this function's own contract.
    unsafe {
        let bases = [arrays.bases_and_sums.load(row), arrays.bases_and_sums.load(HEADS + row)];
        let totals = [
            arrays.bases_and_sums.load(2 * HEADS + row),
            arrays.bases_and_sums.load(3 * HEADS + row),
        ];
        let (scales, lse) = output_scales(sink, bases, totals);
        if group == 0 && thread::lane_id().is_multiple_of(4) {
            if is_split {
                combine_clusters::store_lse(args, task, row, lse);
            } else if args.params.lse_heads > 0 && task.rank == 0 && row < task.heads.count(args) {
                let to = task.heads.row(args) + u64::from(row);
                args.lse.store(to, lse * core::f32::consts::LN_2);
            }
        }
        if group == 0 { scales[0] } else { scales[1] }
    }
}

/// Writes 32 of the block's channels, from its group of eight `eight` on, of the thread's heads; rotary ones with
/// inverse RoPE.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn store(args: &Attend, task: Task, arrays: Arrays, (eight, values): (u32, Half)) {
    let (row, pair) = (first_row(), 2 * (thread::lane_id() % 4));
    let is_rotary = task.has_rotary();
    let (first, heads) = (task.heads.row(args), task.heads.count(args));
    // A word has two channels.
    let out = args.out.cast::<u32>();
    let to = (first + u64::from(row)) * u64::from(HEAD_DIM / 2);
    unroll::<4>(|n| {
        let channel = 8 * (eight + n as u32) + pair;
        // SAFETY: by this function's own contract.
        unsafe {
            let [mut low, mut high] = [0, 2].map(|i| [values[n][i], values[n][i + 1]]);
            if is_rotary {
                let rotation = arrays.rotation.load_u32x2(channel).map(f32::from_bits);
                (low, high) = (inverse_rope(low, rotation), inverse_rope(high, rotation));
            }
            let to = to + u64::from((CHANNELS * task.rank + channel) / 2);
            if row < heads {
                out.store(to, bf16x2_from_f32(low[0], low[1]));
            }
            if row + 8 < heads {
                out.store(to + u64::from(8 * HEAD_DIM / 2), bf16x2_from_f32(high[0], high[1]));
            }
        }
    });
}

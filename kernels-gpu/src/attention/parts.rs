//! The parts of a query's keys: what heads get of each lies in global memory, and the block that is last with its share of
//! the heads adds up the parts, in their order.

use kv_layout::geometry::HEAD_DIM;
use simt::atomic::{DeviceAtomicU32, fence_device};
use simt::cluster::block_rank;
use simt::math::approx::{ex2, lg2};
use simt::math::max;
use simt::thread;

use super::memory::{HEADS, PART_WRITTEN, Small, THREADS};
use super::output::{CHANNELS, QUARTERS, last_turn, store_head};
use super::softmax::finite;
use super::source::{Place, Which};
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// Element of the parts' sums where those of head `head` of part `part` start for the lane.
#[inline(always)]
fn sums_of(args: &Attend, at: Place, part: u32, head: u32) -> u64 {
    let row = at.part(args, part) * u64::from(HEADS) + u64::from(head);
    row * u64::from(HEAD_DIM) + u64::from(4 * thread::lane_id())
}

/// Leaves what head `head` gets of the block's part, four channels of each 128 a lane.
///
/// # Safety
/// As [`super::merge::write`], in a launch with several parts.
#[inline(always)]
pub unsafe fn store(args: &Attend, at: Place, head: u32, values: [[f32; 4]; QUARTERS]) {
    let to = sums_of(args, at, at.part, head);
    unroll::<QUARTERS>(|n| {
        let words = values[n].map(f32::to_bits);
        // SAFETY: by this function's own contract.
        unsafe { args.part_sums.store_u32x4(to + u64::from(CHANNELS * n as u32), words) }
    });
}

/// Adds up the parts of the block's share of the heads if all others have left theirs.
///
/// # Safety
/// As [`super::merge::write`], whose threads call it when they have left theirs and nobody reads the block's shared memory
/// any more.
#[inline(always)]
pub unsafe fn finish<W: Which>(args: &Attend, small: Small, at: Place) {
    const WARPS: u32 = THREADS / 32;
    let rank = block_rank();
    // SAFETY: between two barriers one thread fences what the block has stored, arrives, and fences what others stored
    // before they arrived.
    unsafe {
        PART_WRITTEN.sync();
        if thread::thread_idx_x() == 0 {
            let counter = at.group(args) * u64::from(W::BLOCKS) + u64::from(rank);
            let arrivals = DeviceAtomicU32::new(args.arrivals, counter);
            fence_device();
            let is_last = arrivals.add(1) == at.parts - 1;
            fence_device();
            if is_last {
                arrivals.store(0);
            }
            small.counts.store(0, u32::from(is_last));
        }
        PART_WRITTEN.sync();
        if small.counts.load(0) == 0 {
            return;
        }
        let turn = last_turn(small);
        let mut head = rank + W::BLOCKS * thread::warp_id();
        while head < HEADS && at.first_head + head < args.params.heads {
            store_head(args, at, head, (add_up(args, at, head), turn));
            head += W::BLOCKS * WARPS;
        }
    }
}

/// A head's result over all parts, four channels of each 128 a lane; its log-sum-exp is written if it is asked for.
///
/// # Safety
/// All parts are left; all lanes of the warp call it together.
#[inline(always)]
unsafe fn add_up(args: &Attend, at: Place, head: u32) -> [[f32; 4]; QUARTERS] {
    let of_head = u64::from(at.first_head + head);
    // SAFETY: by this function's own contract.
    unsafe {
        let lse = |part: u32| {
            let at = at.part(args, part) * u64::from(HEADS) + u64::from(head);
            args.part_lse.load(at)
        };
        let sink = args.sinks.load(of_head) * core::f32::consts::LOG2_E;
        let (mut most, mut part) = (sink, 0);
        while part < at.parts {
            most = max(most, lse(part));
            part += 1;
        }
        let base = finite(most);
        let mut total = ex2(sink - base);
        let mut values = [[0.0_f32; 4]; QUARTERS];
        part = 0;
        while part < at.parts {
            let weight = ex2(lse(part) - base);
            total += weight;
            let from = sums_of(args, at, part, head);
            let sums: [[u32; 4]; QUARTERS] =
                array_from_fn(|n| args.part_sums.load_u32x4(from + u64::from(CHANNELS * n as u32)));
            values = array_from_fn(|n| {
                array_from_fn(|j| values[n][j] + weight * f32::from_bits(sums[n][j]))
            });
            part += 1;
        }
        let scale = if total == 0.0 { 0.0 } else { 1.0 / total };
        if args.params.lse_heads > 0 && thread::lane_id() == 0 {
            let lse = if total == 0.0 { f32::NEG_INFINITY } else { most + lg2(total) };
            args.lse.store(at.row(args) + u64::from(head), lse * core::f32::consts::LN_2);
        }
        values.map(|quarter| quarter.map(|value| value * scale))
    }
}

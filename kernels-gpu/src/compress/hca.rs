//! HCA entries: ratio 128, no overlap. A window is 512 KB, so its channels are split over blocks.

use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use kv_layout::params::CompressParams;
use simt::atomic::{DeviceAtomicU32, fence_device};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::thread;

use super::overlap::{MAIN_WARPS, share_squares, total_squares};
use super::{Closing, Finish, Projections, Quad};
use crate::math::exp_nonpositive;

/// Columns of a token's projections.
pub const COLUMNS: u32 = HEAD_DIM;
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks that share a window, each with its channels.
pub const SPLITS: u32 = 8;
/// Channels of a block, four to a thread.
pub const SPLIT_CHANNELS: u32 = HEAD_DIM / SPLITS;
/// Threads that hold a block's channels once.
pub const QUADS: u32 = SPLIT_CHANNELS / 4;
/// Groups of threads that share the window's tokens, each with consecutive ones.
const GROUPS: u32 = THREADS / QUADS;
/// Tokens of a group.
const GROUP_TOKENS: u32 = HCA_RATIO / GROUPS;

const _: () = assert!(GROUP_TOKENS == 8, "`pool` spells its tokens out");

/// Words of shared memory for one number per group and channel.
const WORDS: usize = (GROUPS * SPLIT_CHANNELS) as usize;

/// Bytes of shared memory that [`pool`] uses.
pub const SHARED_BYTES: u32 = 3 * 4 * WORDS as u32 + 32;

/// Where the blocks of a window meet.
#[derive(Clone, Copy)]
pub struct Meeting {
    /// `[capacity, 512]` f32: the pooled vectors.
    pub pooled: GlobalMut<f32>,
    /// `[capacity]`: blocks that have left theirs. Zero between launches.
    pub arrivals: GlobalMut<u32>,
}

/// Whether this thread holds four channels of a whole vector; the other half only keep step.
#[inline(always)]
#[must_use]
pub fn holds_entry() -> bool {
    thread::thread_idx_x() < HEAD_DIM / 4
}

/// Pools the window that `closing` closes, together with the other blocks of record `record`. In the
/// block that comes last the threads of which [`holds_entry`] is true get four channels each of the
/// whole vector, and all of them its sum of squares; the other blocks get `None`.
///
/// Tokens are added in a fixed tree: eight consecutive ones in order, then the sixteen groups.
///
/// # Safety
/// As [`Projections::load`], for the last 128 tokens; all 256 threads of each of the [`SPLITS`]
/// blocks (`split` 0, 1, ..) of the record call it together.
#[inline(always)]
pub unsafe fn pool(
    projections: Projections<COLUMNS>,
    closing: Closing,
    meeting: Meeting,
    record: u32,
    split: u32,
) -> Option<(Quad, f32)> {
    let (quad, group) = (thread::thread_idx_x() % QUADS, thread::thread_idx_x() / QUADS);
    let channel = split * SPLIT_CHANNELS + 4 * quad;
    // SAFETY: the window's tokens are in the step or the ring, by this function's own contract;
    // shared arrays do not overlap, and each word is written by one thread before a barrier.
    unsafe {
        let mosts = Shared::<f32, WORDS>::at(0);
        let weights = Shared::<f32, WORDS>::at(4 * WORDS as u32);
        let sums = Shared::<f32, WORDS>::at(8 * WORDS as u32);
        let partial = Shared::<f32, MAIN_WARPS>::at(12 * WORDS as u32);
        let last = Shared::<u32, 1>::at(12 * WORDS as u32 + 16);
        let at = group * SPLIT_CHANNELS + 4 * quad;

        // Spelt out: all of a thread's loads are on their way before the first is used.
        let ring_row = closing.position % projections.ring;
        let load = |token: u32| {
            let back = HCA_RATIO - 1 - group * GROUP_TOKENS - token;
            projections.load(closing, ring_row, back, channel)
        };
        let rows = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        mosts.store_u32x4(at, most(rows).map(f32::to_bits));
        thread::sync_threads();
        let most = over_groups(mosts, quad, |a, b| a.max(b));
        let (weight, sum) = weigh(rows, most);
        weights.store_u32x4(at, weight.map(f32::to_bits));
        sums.store_u32x4(at, sum.map(f32::to_bits));
        thread::sync_threads();
        let base = u64::from(record) * u64::from(HEAD_DIM);
        if group == 0 {
            let weight = over_groups(weights, quad, |a, b| a + b);
            let sum = over_groups(sums, quad, |a, b| a + b);
            let pooled: Quad = core::array::from_fn(|c| sum[c] / weight[c]);
            let at = base + u64::from(channel);
            meeting.pooled.store_u32x4(at, pooled.map(f32::to_bits));
            fence_device();
        }
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let arrivals = DeviceAtomicU32::new(meeting.arrivals, u64::from(record));
            let before = arrivals.add(1);
            if before == SPLITS - 1 {
                arrivals.store(0);
            }
            last.store(0, before);
        }
        thread::sync_threads();
        if last.load(0) != SPLITS - 1 {
            return None;
        }
        fence_device();
        let mut pooled = [0.0; 4];
        if holds_entry() {
            let at = base + u64::from(4 * thread::thread_idx_x());
            pooled = meeting.pooled.load_u32x4(at).map(f32::from_bits);
            share_squares(partial, thread::warp_id(), pooled);
        }
        thread::sync_threads();
        Some((pooled, total_squares(partial)))
    }
}

/// Keys and scores of a thread's tokens.
type Rows = [(Quad, Quad); GROUP_TOKENS as usize];

/// The largest score of each channel. Channels are spelt out: an array walked by a loop would live in
/// local memory.
#[inline(always)]
fn most(rows: Rows) -> Quad {
    [most_of::<0>(rows), most_of::<1>(rows), most_of::<2>(rows), most_of::<3>(rows)]
}

#[inline(always)]
fn most_of<const C: usize>(rows: Rows) -> f32 {
    let scores = rows.map(|(_, score)| score[C]);
    scores.iter().fold(f32::NEG_INFINITY, |most, score| most.max(*score))
}

/// Sum of the weights, and of the weighted keys, of each channel.
#[inline(always)]
fn weigh(rows: Rows, [a, b, c, d]: Quad) -> (Quad, Quad) {
    let (a, b) = (weigh_one::<0>(rows, a), weigh_one::<1>(rows, b));
    let (c, d) = (weigh_one::<2>(rows, c), weigh_one::<3>(rows, d));
    ([a.0, b.0, c.0, d.0], [a.1, b.1, c.1, d.1])
}

#[inline(always)]
fn weigh_one<const C: usize>(rows: Rows, most: f32) -> (f32, f32) {
    let weights = rows.map(|(_, score)| exp_nonpositive(score[C] - most));
    let keys = rows.map(|(key, _)| key[C]);
    let sum = weights.iter().zip(&keys).fold(0.0, |sum, (weight, key)| sum + weight * key);
    (weights.iter().fold(0.0, |sum, weight| sum + weight), sum)
}

/// Four channels combined over all groups, in their order.
///
/// # Safety
/// All words of `values` were written, with a barrier since.
#[inline(always)]
unsafe fn over_groups(
    values: Shared<f32, WORDS>,
    quad: u32,
    combine: impl Fn(f32, f32) -> f32,
) -> Quad {
    // SAFETY: by this function's own contract.
    let load = |group: u32| unsafe {
        values.load_u32x4(group * SPLIT_CHANNELS + 4 * quad).map(f32::from_bits)
    };
    let mut total = load(0);
    let mut group = 1;
    while group < GROUPS {
        let part = load(group);
        total = core::array::from_fn(|c| combine(total[c], part[c]));
        group += 1;
    }
    total
}

/// Entries, [`SPLITS`] blocks a record. `entries`: `[capacity, 512]` BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn compress(
    kv: Global<f32>,
    gate: Global<f32>,
    ape: Global<f32>,
    norm: Global<f32>,
    frequencies: Global<f32>,
    plan: Global<i32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    state: Global<f32>,
    pooled: GlobalMut<f32>,
    arrivals: GlobalMut<u32>,
    entries: GlobalMut<u16>,
    params: CompressParams,
) {
    let (record, split) = (thread::block_idx_x(), thread::block_idx_y());
    // SAFETY: the grid has SPLITS blocks a record, which leave or stay together; a listed token's
    // rows are in the step or the ring.
    unsafe {
        let tokens = (token_position, token_slot, token_index);
        let closing = Closing::of_record(plan, record, tokens, params.slots);
        let Some(closing) = closing else { return };
        let projections = Projections { kv, gate, ape, state, ring: params.ring, ratio: HCA_RATIO };
        let meeting = Meeting { pooled, arrivals };
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        let finish = Finish::load::<HEAD_DIM>(norm, frequencies, channel);
        let whole = pool(projections, closing, meeting, record, split);
        let Some((pooled, squares)) = whole else { return };
        let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if holds_entry() {
            entries.store_u32x2(u64::from(record * HEAD_DIM + channel), words);
        }
    }
}

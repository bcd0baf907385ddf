//! HCA entries: ratio 128, no overlap. A window is 512 KB, so its channels are split over blocks.

use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use kv_layout::params::CompressParams;
use simt::atomic::DeviceAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{copy, thread, warp};

use super::overlap::{MAIN_WARPS, share_squares, total_squares};
use super::{Closing, Finish, Projections, Quad, Scores, Window};
use crate::math::exp_nonpositive;
use crate::spell::spell;

/// Columns of a token's projections.
pub const COLUMNS: u32 = HEAD_DIM;
/// Threads of a block.
pub const THREADS: u32 = 256;
/// Blocks that share a window, each with its channels.
pub const SPLITS: u32 = 8;
/// Channels of a block, four to a thread.
const SPLIT_CHANNELS: u32 = HEAD_DIM / SPLITS;
/// Threads that hold a block's channels once.
pub const QUADS: u32 = SPLIT_CHANNELS / 4;
/// Groups of threads that share the window's tokens, each with consecutive ones.
pub const GROUPS: u32 = THREADS / QUADS;
/// Tokens of a group.
const GROUP_TOKENS: u32 = HCA_RATIO / GROUPS;

const _: () = assert!(GROUP_TOKENS == 8 && GROUPS == 16, "they are spelt out");

/// Words of shared memory for one number per group and channel.
const WORDS: usize = (GROUPS * SPLIT_CHANNELS) as usize;
/// The same per warp, of two groups, and channel.
const MOST_WORDS: usize = WORDS / 2;

/// Words of shared memory for the keys of a window.
const KEY_WORDS: usize = (HCA_RATIO * SPLIT_CHANNELS) as usize;

/// Weights of a channel's tokens.
type Weights = [f32; GROUP_TOKENS as usize];

/// Where the arrays of shared memory are, in bytes.
const WEIGHTS: u32 = 0;
const SUMS: u32 = WEIGHTS + 4 * WORDS as u32;
const MOSTS: u32 = SUMS + 4 * WORDS as u32;
const PARTIAL: u32 = MOSTS + 4 * MOST_WORDS as u32;
const LAST: u32 = PARTIAL + 4 * MAIN_WARPS as u32;
const KEYS: u32 = LAST + 16;

/// Bytes of shared memory that a pooling uses.
pub const SHARED_BYTES: u32 = KEYS + 4 * KEY_WORDS as u32;

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

/// Whether this thread's tokens end with the closing one.
#[inline(always)]
#[must_use]
pub fn holds_last() -> bool {
    thread::thread_idx_x() / QUADS == GROUPS - 1
}

/// The columns of block `split` that this thread holds.
#[inline(always)]
#[must_use]
pub fn column(split: u32) -> u32 {
    split * SPLIT_CHANNELS + 4 * (thread::thread_idx_x() % QUADS)
}

/// Leaves the sums of this thread's tokens, weighted by the softmax of the whole window that `closing`
/// closes, in shared memory for [`leave`]. The key and the score of its last token.
///
/// # Safety
/// As [`Window::scores`], for the last 128 tokens; all 256 threads of the block call it together.
#[inline(always)]
pub unsafe fn weigh(
    projections: Projections<COLUMNS>,
    closing: Closing,
    split: u32,
) -> (Quad, Quad) {
    let (quad, group) = (thread::thread_idx_x() % QUADS, thread::thread_idx_x() / QUADS);
    let column = column(split);
    let window = Window::new(projections, closing, HCA_RATIO);
    let token = |i: u32| group * GROUP_TOKENS + i;
    // SAFETY: shared arrays do not overlap, and each word is written by one thread before a barrier, but
    // for the keys, which a thread copies for itself.
    unsafe {
        let score = |i| window.scores(token(i), column);
        let scores =
            [score(0), score(1), score(2), score(3), score(4), score(5), score(6), score(7)]
                .map(Scores::value);
        let mosts = Shared::<f32, MOST_WORDS>::at(MOSTS);
        // A warp's two groups first.
        let most = most(scores).map(|most| most.max(warp::shuffle_xor_f32(most, QUADS)));
        if group.is_multiple_of(2) {
            let at = group / 2 * SPLIT_CHANNELS + 4 * quad;
            mosts.store_u32x4(at, most.map(f32::to_bits));
        }
        // Not before the scores are there: asked for together, keys would hold up the scores of others.
        let keys = Keys::copy(|i| window.keys_at(token(i), column));
        thread::sync_threads();
        let weights = weights(scores, most_of_all(mosts, quad));
        let at = group * SPLIT_CHANNELS + 4 * quad;
        let weight = weights.map(|weights| weights.iter().fold(0.0, |sum, weight| sum + weight));
        // Stored before the keys are waited for, so that the exponentials are taken by then.
        Shared::<f32, WORDS>::at(WEIGHTS).store_u32x4(at, weight.map(f32::to_bits));
        let keys = keys.wait();
        let sum = weighted(weights, keys);
        Shared::<f32, WORDS>::at(SUMS).store_u32x4(at, sum.map(f32::to_bits));
        let ([.., key], [.., score]) = (keys, scores);
        (key, score)
    }
}

/// The keys of a thread's tokens, on their way to shared memory: registers are full of scores.
#[derive(Clone, Copy)]
struct Keys {
    words: Shared<u32, KEY_WORDS>,
    /// Where those of the first token go.
    first: u32,
}

impl Keys {
    /// Starts to copy four channels of each token, which are where `at` says.
    ///
    /// # Safety
    /// They are there; nobody else uses the thread's part of the shared memory.
    #[inline(always)]
    unsafe fn copy(at: impl Fn(u32) -> (Global<f32>, u64)) -> Self {
        let (quad, group) = (thread::thread_idx_x() % QUADS, thread::thread_idx_x() / QUADS);
        // SAFETY: inside the block's memory.
        let words = unsafe { Shared::at(KEYS) };
        let keys = Self { words, first: group * GROUP_TOKENS * SPLIT_CHANNELS + 4 * quad };
        let copy = |i: u32| {
            let (tensor, at) = at(i);
            // SAFETY: by this function's own contract.
            unsafe { words.copy_from(keys.place(i), tensor, at) }
        };
        spell::<(), { GROUP_TOKENS as usize }>(|i| copy(i as u32));
        copy::close_group();
        keys
    }

    /// The keys, once they are there.
    ///
    /// # Safety
    /// As [`Self::copy`].
    #[inline(always)]
    unsafe fn wait(self) -> [Quad; GROUP_TOKENS as usize] {
        copy::wait_for_groups::<0>();
        // SAFETY: what this thread has copied and waited for.
        let key = |i| unsafe { self.words.load_u32x4(self.place(i)) }.map(f32::from_bits);
        [key(0), key(1), key(2), key(3), key(4), key(5), key(6), key(7)]
    }

    #[inline(always)]
    fn place(self, token: u32) -> u32 {
        self.first + SPLIT_CHANNELS * token
    }
}

/// Leaves a block's part of the pooled vector of record `record` where its blocks meet; [`join`] must
/// follow.
///
/// Tokens are added in a fixed tree: eight consecutive ones in order, then the sixteen groups.
///
/// # Safety
/// `meeting` has a place for the record; all threads of block `split` call it together, after
/// [`weigh`].
#[inline(always)]
pub unsafe fn leave(meeting: Meeting, record: u32, split: u32) {
    let channel = thread::thread_idx_x();
    // SAFETY: by this function's own contract; the barrier makes the sums of all threads seen.
    unsafe {
        thread::sync_threads();
        if channel < SPLIT_CHANNELS {
            let weight = over_groups(Shared::at(WEIGHTS), channel);
            let sum = over_groups(Shared::at(SUMS), channel);
            let at = pooled_at(record) + u64::from(split * SPLIT_CHANNELS + channel);
            meeting.pooled.store(at, sum / weight);
        }
    }
}

/// Ends the pooling of record `record`. In the last of its [`SPLITS`] blocks to come the threads of
/// which [`holds_entry`] is true get four channels each of the whole vector, and all of them its sum of
/// squares and what `meanwhile` gave; the other blocks get `None`. `meanwhile` is done while the blocks
/// meet.
///
/// # Safety
/// As [`leave`], which the block has called.
#[inline(always)]
#[must_use]
pub unsafe fn join<T>(
    meeting: Meeting,
    record: u32,
    meanwhile: impl FnOnce() -> T,
) -> Option<(Quad, f32, T)> {
    // SAFETY: by this function's own contract; each shared word is written by one thread before a
    // barrier.
    unsafe {
        let partial = Shared::<f32, MAIN_WARPS>::at(PARTIAL);
        let last = Shared::<u32, 1>::at(LAST);
        let arrivals = DeviceAtomicU32::new(meeting.arrivals, u64::from(record));
        let is_first_thread = thread::thread_idx_x() == 0;
        thread::sync_threads();
        // Ordered: it leaves what the block pooled before the barrier, and takes what others left.
        let before = if is_first_thread { arrivals.add_acq_rel(1) } else { 0 };
        let done = meanwhile();
        if is_first_thread {
            if before == SPLITS - 1 {
                arrivals.store(0);
            }
            last.store(0, before);
        }
        thread::sync_threads();
        if last.load(0) != SPLITS - 1 {
            return None;
        }
        let mut pooled = [0.0; 4];
        if holds_entry() {
            let at = pooled_at(record) + u64::from(4 * thread::thread_idx_x());
            pooled = meeting.pooled.load_u32x4(at).map(f32::from_bits);
            share_squares(partial, thread::warp_id(), pooled);
        }
        thread::sync_threads();
        Some((pooled, total_squares(partial), done))
    }
}

#[inline(always)]
fn pooled_at(record: u32) -> u64 {
    u64::from(record) * u64::from(HEAD_DIM)
}

/// The largest score of each channel. Channels are spelt out: an array walked by a loop would live in
/// local memory.
#[inline(always)]
fn most(scores: [Quad; GROUP_TOKENS as usize]) -> Quad {
    [most_of::<0>(scores), most_of::<1>(scores), most_of::<2>(scores), most_of::<3>(scores)]
}

#[inline(always)]
fn most_of<const C: usize>(scores: [Quad; GROUP_TOKENS as usize]) -> f32 {
    scores.iter().fold(f32::NEG_INFINITY, |most, score| most.max(score[C]))
}

/// The largest score of four channels over all groups.
///
/// # Safety
/// All words of `mosts` were written, with a barrier since.
#[inline(always)]
unsafe fn most_of_all(mosts: Shared<f32, MOST_WORDS>, quad: u32) -> Quad {
    // SAFETY: by this function's own contract.
    let load = |pair: u32| unsafe {
        mosts.load_u32x4(pair * SPLIT_CHANNELS + 4 * quad).map(f32::from_bits)
    };
    let pairs = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
    most(pairs)
}

/// The weights of each channel's tokens.
#[inline(always)]
fn weights(scores: [Quad; GROUP_TOKENS as usize], [a, b, c, d]: Quad) -> [Weights; 4] {
    let (a, b) = (weights_of::<0>(scores, a), weights_of::<1>(scores, b));
    [a, b, weights_of::<2>(scores, c), weights_of::<3>(scores, d)]
}

#[inline(always)]
fn weights_of<const C: usize>(scores: [Quad; GROUP_TOKENS as usize], most: f32) -> Weights {
    scores.map(|score| exp_nonpositive(score[C] - most))
}

/// The sum of each channel's weighted keys.
#[inline(always)]
fn weighted([a, b, c, d]: [Weights; 4], keys: [Quad; GROUP_TOKENS as usize]) -> Quad {
    let (a, b) = (weighted_of::<0>(a, keys), weighted_of::<1>(b, keys));
    [a, b, weighted_of::<2>(c, keys), weighted_of::<3>(d, keys)]
}

#[inline(always)]
fn weighted_of<const C: usize>(weights: Weights, keys: [Quad; GROUP_TOKENS as usize]) -> f32 {
    weights.iter().zip(&keys).fold(0.0, |sum, (weight, key)| sum + weight * key[C])
}

/// One channel added up over all groups, in their order.
///
/// # Safety
/// All words of `values` were written, with a barrier since.
#[inline(always)]
unsafe fn over_groups(values: Shared<f32, WORDS>, channel: u32) -> f32 {
    // SAFETY: by this function's own contract.
    let load = |group: u32| unsafe { values.load(group * SPLIT_CHANNELS + channel) };
    // Spelt out, so that all are on their way before the first is added.
    let parts = [
        load(0),
        load(1),
        load(2),
        load(3),
        load(4),
        load(5),
        load(6),
        load(7),
        load(8),
        load(9),
        load(10),
        load(11),
        load(12),
        load(13),
        load(14),
        load(15),
    ];
    parts[1..].iter().fold(parts[0], |total, part| total + part)
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
        weigh(projections, closing, split);
        leave(meeting, record, split);
        let finish = || {
            let finish = Finish::load::<HEAD_DIM>(norm, frequencies, channel);
            (finish, finish.rotation(closing.position + 1 - HCA_RATIO))
        };
        let Some((pooled, squares, (finish, rotation))) = join(meeting, record, finish) else {
            return;
        };
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if holds_entry() {
            entries.store_u32x2(u64::from(record * HEAD_DIM + channel), words);
        }
    }
}

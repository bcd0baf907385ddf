//! HCA entries: ratio 128, no overlap. A window is 512 KB, so its channels are split over blocks.

use crate::args::CompressHca;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use simt::atomic::BlockAtomicU32;
use simt::math::mul_add;
use simt::mem::Global;
use simt::shared::Shared;
use simt::{copy, thread, warp};

use super::overlap::{MAIN_WARPS, share_squares, total_squares};
use super::{Closing, Finish, Meeting, Projections, Quad, Scores, Window};
use crate::math::exp_nonpositive;
use crate::rank;
use crate::unroll::unroll;

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

const _: () = assert!(GROUP_TOKENS == 8 && GROUPS == 16 && QUADS == 16, "they are spelt out");

/// Words of shared memory for one number per group and channel.
const WORDS: usize = (GROUPS * SPLIT_CHANNELS) as usize;
/// Words of shared memory for the largest score of each channel, in two windows.
const MOST_WORDS: usize = 2 * SPLIT_CHANNELS as usize;

/// Words of shared memory for the keys of a window.
const KEY_WORDS: usize = (HCA_RATIO * SPLIT_CHANNELS) as usize;

/// Weights of a channel's tokens.
type Weights = [f32; GROUP_TOKENS as usize];

/// Where the arrays of shared memory are, in bytes.
const WEIGHTS: u32 = 0;
const SUMS: u32 = WEIGHTS + 4 * WORDS as u32;
const MOSTS: u32 = SUMS + 4 * WORDS as u32;
const PARTIAL: u32 = MOSTS + 4 * MOST_WORDS as u32;
const KEYS: u32 = PARTIAL + 4 * MAIN_WARPS as u32;

/// Bytes of shared memory that a pooling uses.
pub const SHARED_BYTES: u32 = KEYS + 4 * KEY_WORDS as u32;

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

/// Which of two arrays the largest scores of a window are in: the other one than those of the window
/// before, which slower threads still read.
#[derive(Clone, Copy)]
pub struct Turn(u32);

impl Turn {
    /// That of the first window, after a barrier: makes room for both.
    ///
    /// # Safety
    /// All threads of the block call it together; nobody uses the arrays before a barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn first() -> Self {
        let word = thread::thread_idx_x();
        if word < MOST_WORDS as u32 {
            // SAFETY: one thread a word.
            unsafe { Self::most(word).store(0) };
        }
        Self(0)
    }

    /// That of the next window.
    #[inline(always)]
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 ^ SPLIT_CHANNELS)
    }

    /// # Safety
    /// `word` is one of the arrays'; other than atomic accesses are separated by barriers.
    #[inline(always)]
    unsafe fn most(word: u32) -> BlockAtomicU32 {
        // SAFETY: by this function's own contract.
        unsafe { BlockAtomicU32::new(Shared::<u32, MOST_WORDS>::at(MOSTS), word) }
    }
}

/// This thread's part of a window, its scores on their way.
#[derive(Clone, Copy)]
pub struct Asked {
    window: Window<COLUMNS>,
    scores: [Scores; GROUP_TOKENS as usize],
}

/// Asks for the scores of the window that `closing` closes, whose row in its ring is `ring_row`.
///
/// # Safety
/// As [`Window::scores`], for the last 128 tokens.
#[inline(always)]
#[must_use]
pub unsafe fn ask(
    projections: Projections<COLUMNS>,
    closing: Closing,
    ring_row: u32,
    split: u32,
) -> Asked {
    let group = thread::thread_idx_x() / QUADS;
    let back = HCA_RATIO - 1 - group * GROUP_TOKENS;
    let window = Window::new(projections, closing, ring_row, back, column(split));
    // SAFETY: by this function's own contract.
    let score = |i| unsafe { window.scores(i) };
    let scores = [score(0), score(1), score(2), score(3), score(4), score(5), score(6), score(7)];
    Asked { window, scores }
}

/// This thread's part of a window, its keys on their way.
#[derive(Clone, Copy)]
pub struct Begun {
    scores: [Quad; GROUP_TOKENS as usize],
    keys: Keys,
}

impl Asked {
    /// Shares the largest scores with the block, and asks for the keys. A barrier must follow.
    ///
    /// # Safety
    /// As [`ask`]; all threads of the block call it together, after the barrier that follows
    /// [`Turn::first`] or [`leave`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn begin(self, turn: Turn) -> Begun {
        let scores = self.scores.map(Scores::value);
        // SAFETY: all lanes are together; words of this window; the tokens are there, and a thread copies
        // for itself.
        unsafe {
            // A warp's two groups first.
            let of_warp = |most: f32| most.max(warp::shuffle_xor_f32(most, QUADS));
            let [a, b, c, d] = most(scores).map(of_warp);
            if thread::lane_id() < QUADS {
                let first = turn.0 + 4 * (thread::thread_idx_x() % QUADS);
                let share = |word, most| Turn::most(word).max(rank::ordered(most));
                share(first, a);
                share(first + 1, b);
                share(first + 2, c);
                share(first + 3, d);
            }
            // Not before the scores are there: asked for together, keys would hold up those of others.
            let keys = Keys::copy(|i| self.window.keys_at(i));
            Begun { scores, keys }
        }
    }
}

impl Begun {
    /// Leaves the sums of this thread's tokens, weighted by the softmax of the whole window, in shared
    /// memory for [`leave`]. The key and the score of its last token.
    ///
    /// # Safety
    /// All threads of the block call it together, after the barrier that follows [`Asked::begin`].
    #[inline(always)]
    pub unsafe fn end(self, turn: Turn) -> (Quad, Quad) {
        let (quad, group) = (thread::thread_idx_x() % QUADS, thread::thread_idx_x() / QUADS);
        let Self { scores, keys } = self;
        // SAFETY: shared arrays do not overlap, and each word is written by one thread before a barrier.
        unsafe {
            let mosts = Shared::<u32, MOST_WORDS>::at(MOSTS);
            let weights = weights(scores, mosts.load_u32x4(turn.0 + 4 * quad).map(rank::score));
            let at = group * SPLIT_CHANNELS + 4 * quad;
            let weight =
                weights.map(|weights| weights.iter().fold(0.0, |sum, weight| sum + weight));
            // Stored before the keys are waited for, so that the exponentials are taken by then.
            Shared::<f32, WORDS>::at(WEIGHTS).store_u32x4(at, weight.map(f32::to_bits));
            let keys = keys.wait();
            let sum = weighted(weights, keys);
            Shared::<f32, WORDS>::at(SUMS).store_u32x4(at, sum.map(f32::to_bits));
            let ([.., key], [.., score]) = (keys, scores);
            (key, score)
        }
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
        unroll::<{ GROUP_TOKENS as usize }>(|i| copy(i as u32));
        copy::commit_group();
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
/// follow in the last.
///
/// Tokens are added in a fixed tree: eight consecutive ones in order, then the sixteen groups.
///
/// # Safety
/// `meeting` has a place for the record; all threads of block `split` call it together, after
/// [`Begun::end`].
#[inline(always)]
pub unsafe fn leave(meeting: Meeting, record: u32, split: u32, turn: Turn) {
    let channel = thread::thread_idx_x();
    // SAFETY: by this function's own contract; the barrier makes the sums of all threads seen.
    unsafe {
        thread::sync_threads();
        if channel < SPLIT_CHANNELS {
            Turn::most(turn.0 + channel).store(0);
            let weight = over_groups(Shared::at(WEIGHTS), channel);
            let sum = over_groups(Shared::at(SUMS), channel);
            meeting.leave(record, split * SPLIT_CHANNELS + channel, sum / weight);
        }
    }
}

/// Whether block `split` is the one that takes what all blocks of a record leave: the last, because a
/// block can wait for earlier ones only.
#[inline(always)]
#[must_use]
pub fn joins(split: u32) -> bool {
    split == SPLITS - 1
}

/// Takes the pooled vector of record `record`: the threads of which [`holds_entry`] is true get four
/// channels each, and all of them its sum of squares.
///
/// # Safety
/// As [`leave`], which the block has called; it is the one that [`joins`].
#[inline(always)]
#[must_use]
pub unsafe fn join(meeting: Meeting, record: u32) -> (Quad, f32) {
    // SAFETY: by this function's own contract; each shared word is written by one thread before a
    // barrier.
    unsafe {
        let partial = Shared::<f32, MAIN_WARPS>::at(PARTIAL);
        // This block's own part is left by other threads of it.
        thread::sync_threads();
        let mut pooled = [0.0; 4];
        if holds_entry() {
            pooled = meeting.take(record, 4 * thread::thread_idx_x());
            share_squares(partial, thread::warp_id(), pooled);
        }
        thread::sync_threads();
        (pooled, total_squares(partial))
    }
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
    weights.iter().zip(&keys).fold(0.0, |sum, (&weight, key)| mul_add(weight, key[C], sum))
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
pub unsafe fn compress(args: CompressHca) {
    let params = args.params;
    let (record, split) = (thread::block_idx_x() / SPLITS, thread::block_idx_x() % SPLITS);
    // SAFETY: the grid has SPLITS blocks a record, which leave or stay together; a listed token's
    // rows are in the step or the ring.
    unsafe {
        let tokens = (args.token_position, args.token_slot, args.token_index);
        let closing = Closing::of_record(args.plan, record, tokens, params.slots);
        let Some(closing) = closing else { return };
        let projections = Projections {
            kv: args.kv,
            gate: args.gate,
            ape: args.ape,
            state: args.state,
            ring: params.ring,
            ratio: HCA_RATIO,
        };
        let meeting = Meeting { pooled: args.pooled };
        let turn = Turn::first();
        let asked = ask(projections, closing, closing.position % params.ring, split);
        thread::sync_threads();
        let begun = asked.begin(turn);
        thread::sync_threads();
        begun.end(turn);
        leave(meeting, record, split, turn);
        if !joins(split) {
            return;
        }
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
        let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
        let (pooled, squares) = join(meeting, record);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if holds_entry() {
            args.entries.store_u32x2(u64::from(record * HEAD_DIM + channel), words);
        }
    }
}

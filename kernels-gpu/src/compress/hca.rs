//! HCA entries: ratio 128, no overlap. A window is 512 KB, so its channels are split over blocks.

use crate::args::CompressHca;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use simt::atomic::BlockAtomicU32;
use simt::math::mul_add;
use simt::mem::Global;
use simt::shared::Shared;
use simt::{copy, thread, warp};

use super::overlap::{MAIN_WARPS, share_squares, total_squares};
use super::{BlockExchange, Closing, ClosingTokens, Finish, Projections, Quad, Scores, Window};
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
/// Groups of threads; each has consecutive tokens of the window.
pub const GROUPS: u32 = THREADS / QUADS;
/// Tokens of a group.
const GROUP_TOKENS: u32 = HCA_RATIO / GROUPS;

const _: () = assert!(
    GROUP_TOKENS == 8 && GROUPS == 16 && QUADS == 16,
    "loops over these are unrolled by hand"
);

/// Words of shared memory for one number per group and channel.
const WORDS: usize = (GROUPS * SPLIT_CHANNELS) as usize;
/// Words of shared memory for the maximum score of each channel, double-buffered.
const MAXIMA_WORDS: usize = 2 * SPLIT_CHANNELS as usize;

/// Words of shared memory for the keys of a window.
const KEY_WORDS: usize = (HCA_RATIO * SPLIT_CHANNELS) as usize;

/// Weights of a channel's tokens.
type Weights = [f32; GROUP_TOKENS as usize];

/// Byte offsets of the arrays in shared memory.
const WEIGHTS: u32 = 0;
const SUMS: u32 = WEIGHTS + 4 * WORDS as u32;
const MAXIMA: u32 = SUMS + 4 * WORDS as u32;
const PARTIAL: u32 = MAXIMA + 4 * MAXIMA_WORDS as u32;
const KEYS: u32 = PARTIAL + 4 * MAIN_WARPS as u32;

/// Bytes of shared memory that a pooling uses.
pub const SHARED_BYTES: u32 = KEYS + 4 * KEY_WORDS as u32;

/// Whether this thread holds four channels of a whole vector. The other half of the threads only take part in
/// the barriers.
#[inline(always)]
#[must_use]
pub fn holds_entry() -> bool {
    thread::thread_idx_x() < HEAD_DIM / 4
}

/// Whether this thread's last token is the closing one.
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

/// Which of the two buffers holds the maxima of a window. Consecutive windows alternate, because slower threads
/// may still read those of the window before.
#[derive(Clone, Copy)]
pub struct BufferParity(u32);

impl BufferParity {
    /// The parity of the first window; clears both buffers. A barrier must follow.
    ///
    /// # Safety
    /// All threads of the block call it together; no thread uses the buffers before the barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn first() -> Self {
        let word = thread::thread_idx_x();
        if word < MAXIMA_WORDS as u32 {
            // SAFETY: one thread a word.
            unsafe { Self::maximum(word).store(0) };
        }
        Self(0)
    }

    /// The parity of the next window.
    #[inline(always)]
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 ^ SPLIT_CHANNELS)
    }

    /// # Safety
    /// `word` is one of the buffers'; barriers separate non-atomic accesses.
    #[inline(always)]
    unsafe fn maximum(word: u32) -> BlockAtomicU32 {
        // SAFETY: by this function's own contract.
        unsafe { BlockAtomicU32::new(Shared::<u32, MAXIMA_WORDS>::at(MAXIMA), word) }
    }
}

/// This thread's part of a window, with loads of its scores in flight.
#[derive(Clone, Copy)]
pub struct PendingScores {
    window: Window<COLUMNS>,
    scores: [Scores; GROUP_TOKENS as usize],
}

/// Loads the scores of the window that `closing` closes, whose row in its ring is `ring_row`.
///
/// # Safety
/// As [`Window::scores`], for the last 128 tokens.
#[inline(always)]
#[must_use]
pub unsafe fn load_scores(
    projections: Projections<COLUMNS>,
    closing: Closing,
    ring_row: u32,
    split: u32,
) -> PendingScores {
    let group = thread::thread_idx_x() / QUADS;
    let back = HCA_RATIO - 1 - group * GROUP_TOKENS;
    let window = Window::new(projections, closing, ring_row, back, column(split));
    // SAFETY: by this function's own contract.
    let score = |i| unsafe { window.scores(i) };
    let scores = [score(0), score(1), score(2), score(3), score(4), score(5), score(6), score(7)];
    PendingScores { window, scores }
}

/// This thread's part of a window, with copies of its keys in flight.
#[derive(Clone, Copy)]
pub struct PendingKeys {
    scores: [Quad; GROUP_TOKENS as usize],
    keys: Keys,
}

impl PendingScores {
    /// Combines the maximum scores with the block's, and starts to copy the keys. A barrier must follow.
    ///
    /// # Safety
    /// As [`load_scores`]; all threads of the block call it together, after the barrier that follows
    /// [`BufferParity::first`] or [`publish`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn load_keys(self, parity: BufferParity) -> PendingKeys {
        let scores = self.scores.map(Scores::value);
        // SAFETY: all lanes are together; words of this window's buffer; the tokens exist, and each thread copies
        // its own keys.
        unsafe {
            // The two groups of a warp first.
            let of_warp = |maximum: f32| maximum.max(warp::shuffle_xor_f32(maximum, QUADS));
            let [a, b, c, d] = maxima_of(scores).map(of_warp);
            if thread::lane_id() < QUADS {
                let first = parity.0 + 4 * (thread::thread_idx_x() % QUADS);
                let share = |word, maximum| BufferParity::maximum(word).max(rank::ordered(maximum));
                share(first, a);
                share(first + 1, b);
                share(first + 2, c);
                share(first + 3, d);
            }
            // Only now that the scores have arrived: loads of keys would delay the scores of other threads.
            let keys = Keys::copy(|i| self.window.keys_at(i));
            PendingKeys { scores, keys }
        }
    }
}

impl PendingKeys {
    /// Sums this thread's tokens, weighted by the softmax of the whole window, into shared memory for
    /// [`publish`]. Returns the key and the score of its last token.
    ///
    /// # Safety
    /// All threads of the block call it together, after the barrier that follows [`PendingScores::load_keys`].
    #[inline(always)]
    pub unsafe fn sum(self, parity: BufferParity) -> (Quad, Quad) {
        let (quad, group) = (thread::thread_idx_x() % QUADS, thread::thread_idx_x() / QUADS);
        let Self { scores, keys } = self;
        // SAFETY: shared arrays do not overlap, and each word is written by one thread before a barrier.
        unsafe {
            let maxima = Shared::<u32, MAXIMA_WORDS>::at(MAXIMA);
            let weights = weights(scores, maxima.load_u32x4(parity.0 + 4 * quad).map(rank::score));
            let at = group * SPLIT_CHANNELS + 4 * quad;
            let weight =
                weights.map(|weights| weights.iter().fold(0.0, |sum, weight| sum + weight));
            // Stored before the wait for the keys, so that the exponentials overlap the copies.
            Shared::<f32, WORDS>::at(WEIGHTS).store_u32x4(at, weight.map(f32::to_bits));
            let keys = keys.wait();
            let sum = weighted(weights, keys);
            Shared::<f32, WORDS>::at(SUMS).store_u32x4(at, sum.map(f32::to_bits));
            let ([.., key], [.., score]) = (keys, scores);
            (key, score)
        }
    }
}

/// The keys of a thread's tokens, copied to shared memory because the scores fill the registers.
#[derive(Clone, Copy)]
struct Keys {
    words: Shared<u32, KEY_WORDS>,
    /// The first word of the first token's keys.
    first: u32,
}

impl Keys {
    /// Starts to copy four channels of each token; `at` gives a token's tensor and element.
    ///
    /// # Safety
    /// The elements exist; no other thread uses this thread's part of the shared memory.
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

    /// Waits for the keys.
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

/// Publishes this block's channels of the pooled vector of `record`; [`collect`] must follow in the last
/// block.
///
/// Tokens are added in a fixed tree: eight consecutive ones in order, then the sixteen groups.
///
/// # Safety
/// `exchange` has a row for the record; all threads of block `split` call it together, after
/// [`PendingKeys::sum`].
#[inline(always)]
pub unsafe fn publish(exchange: BlockExchange, record: u32, split: u32, parity: BufferParity) {
    let channel = thread::thread_idx_x();
    // SAFETY: by this function's own contract; the barrier makes the sums of all threads visible.
    unsafe {
        thread::sync_threads();
        if channel < SPLIT_CHANNELS {
            BufferParity::maximum(parity.0 + channel).store(0);
            let weight = over_groups(Shared::at(WEIGHTS), channel);
            let sum = over_groups(Shared::at(SUMS), channel);
            exchange.publish(record, split * SPLIT_CHANNELS + channel, sum / weight);
        }
    }
}

/// Whether block `split` collects the channels of all blocks of a record: the last one, because a block can
/// only wait for earlier ones.
#[inline(always)]
#[must_use]
pub fn collects(split: u32) -> bool {
    split == SPLITS - 1
}

/// Collects the pooled vector of `record`: threads for which [`holds_entry`] is true get four channels each,
/// and all threads get the sum of squares.
///
/// # Safety
/// As [`publish`], which the block has called; [`collects`] is true for it.
#[inline(always)]
#[must_use]
pub unsafe fn collect(exchange: BlockExchange, record: u32) -> (Quad, f32) {
    // SAFETY: by this function's own contract; each shared word is written by one thread before a
    // barrier.
    unsafe {
        let partial = Shared::<f32, MAIN_WARPS>::at(PARTIAL);
        // Other threads of this block published its own channels.
        thread::sync_threads();
        let mut pooled = [0.0; 4];
        if holds_entry() {
            pooled = exchange.collect(record, 4 * thread::thread_idx_x());
            share_squares(partial, thread::warp_id(), pooled);
        }
        thread::sync_threads();
        (pooled, total_squares(partial))
    }
}

/// The maximum score of each channel. Unrolled by hand: an array indexed by a loop variable would go to local
/// memory.
#[inline(always)]
fn maxima_of(scores: [Quad; GROUP_TOKENS as usize]) -> Quad {
    [
        maximum_of::<0>(scores),
        maximum_of::<1>(scores),
        maximum_of::<2>(scores),
        maximum_of::<3>(scores),
    ]
}

#[inline(always)]
fn maximum_of<const C: usize>(scores: [Quad; GROUP_TOKENS as usize]) -> f32 {
    scores.iter().fold(f32::NEG_INFINITY, |maximum, score| maximum.max(score[C]))
}

/// The weights of each channel's tokens.
#[inline(always)]
fn weights(scores: [Quad; GROUP_TOKENS as usize], [a, b, c, d]: Quad) -> [Weights; 4] {
    let (a, b) = (weights_of::<0>(scores, a), weights_of::<1>(scores, b));
    [a, b, weights_of::<2>(scores, c), weights_of::<3>(scores, d)]
}

#[inline(always)]
fn weights_of<const C: usize>(scores: [Quad; GROUP_TOKENS as usize], maximum: f32) -> Weights {
    scores.map(|score| exp_nonpositive(score[C] - maximum))
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

/// The sum of one channel over all groups, in order.
///
/// # Safety
/// All words of `values` were written, with a barrier since.
#[inline(always)]
unsafe fn over_groups(values: Shared<f32, WORDS>, channel: u32) -> f32 {
    // SAFETY: by this function's own contract.
    let load = |group: u32| unsafe { values.load(group * SPLIT_CHANNELS + channel) };
    // Unrolled by hand, so that all loads are issued before the first result is used.
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
        let tokens = ClosingTokens {
            rows: args.closing,
            position: args.token_position,
            slot: args.token_slot,
            index: args.token_index,
            tokens: params.tokens,
            slots: params.slots,
            ratio: HCA_RATIO,
        };
        let Some(closing) = tokens.get(record) else { return };
        let projections = Projections {
            kv: args.kv,
            gate: args.gate,
            ape: args.ape,
            state: args.state,
            ring: params.ring,
            ratio: HCA_RATIO,
        };
        let exchange = BlockExchange { pooled: args.pooled };
        let parity = BufferParity::first();
        let scores = load_scores(projections, closing, closing.position % params.ring, split);
        thread::sync_threads();
        let keys = scores.load_keys(parity);
        thread::sync_threads();
        keys.sum(parity);
        publish(exchange, record, split, parity);
        if !collects(split) {
            return;
        }
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
        let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
        let (pooled, squares) = collect(exchange, record);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if holds_entry() {
            args.entries.store_u32x2(u64::from(record * HEAD_DIM + channel), words);
        }
    }
}

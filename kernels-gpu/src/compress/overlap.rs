//! CSA, main entries and indexer keys: ratio 4, each window overlapping the one before.

use crate::args::Compress;
use kv_layout::geometry::{CSA_RATIO, CsaCompressor, HEAD_DIM, INDEX_DIM};
use simt::shared::Shared;
use simt::{thread, warp};

use super::{Closing, ClosingTokens, Finish, Projections, Quad, Scores, sum_of_squares};
use crate::math::exp_nonpositive;

/// Columns of a token's projections: the half that the next window pools, then its own window's.
pub const MAIN_COLUMNS: u32 = 2 * HEAD_DIM;
/// As [`MAIN_COLUMNS`], for the indexer's compressor.
pub const INDEX_COLUMNS: u32 = 2 * INDEX_DIM;
/// Channels of a warp: four a lane.
const WARP_CHANNELS: u32 = 128;
/// Warps that hold one main vector.
pub const MAIN_WARPS: usize = (HEAD_DIM / WARP_CHANNELS) as usize;

/// Bytes of shared memory: the warps' sums of squares.
pub const SHARED_BYTES: u32 = Shared::<f32, MAIN_WARPS>::BYTES;

/// Records that a block takes: a main vector is all of its warps', an indexer key one's.
pub const fn records_of_block(compressor: CsaCompressor) -> u32 {
    MAIN_WARPS as u32 * WARP_CHANNELS / compressor.channels()
}

const _: () = assert!(INDEX_DIM == WARP_CHANNELS, "a warp holds one indexer key");

/// Keys and scores of four channels over the tokens of a window and of the one before it, with loads in
/// flight.
pub type Window = [(Quad, Scores); 2 * CSA_RATIO as usize];

/// Loads four channels of the window that `closing` closes, and of the one before it; the first
/// window has no other before it. `last` are those of the closing token itself.
///
/// # Safety
/// As [`Projections::keys`], for the last eight tokens.
#[inline(always)]
#[must_use]
pub unsafe fn load_window<const COLUMNS: u32>(
    projections: Projections<COLUMNS>,
    closing: Closing,
    channel: u32,
    last: (Quad, Scores),
) -> Window {
    let ring_row = closing.position % projections.ring;
    let first = closing.position + 1 < 2 * CSA_RATIO;
    let load = |back: u32, column: u32| {
        // SAFETY: by this function's own contract.
        unsafe {
            let keys = projections.keys(closing, ring_row, back, column);
            (keys, projections.scores(closing, ring_row, back, column))
        }
    };
    let previous = |back: u32| if first { NO_TOKEN } else { load(back, channel) };
    let own = |back: u32| load(back, channel + COLUMNS / 2);
    [previous(7), previous(6), previous(5), previous(4), own(3), own(2), own(1), last]
}

/// Keys and scores of a token that does not exist: its weight is 0.
const NO_TOKEN: (Quad, Scores) = ([0.0; 4], Scores::NONE);

/// Keys and scores of the closing token in its own window, with loads in flight.
///
/// # Safety
/// As [`load_window`].
#[inline(always)]
#[must_use]
pub unsafe fn load_last<const COLUMNS: u32>(
    projections: Projections<COLUMNS>,
    closing: Closing,
    channel: u32,
) -> (Quad, Scores) {
    let column = channel + COLUMNS / 2;
    // SAFETY: by this function's own contract.
    unsafe {
        let (key, gate) = projections.own(closing.token, column);
        (key, Scores::of_gate(gate, projections.bias(closing.position, column)))
    }
}

/// The keys weighted by the softmax of their scores, in the order given, by channel.
#[inline(always)]
#[must_use]
pub fn softmax_sum(rows: Window) -> Quad {
    // Unrolled by hand: an array indexed by a loop variable would go to local memory.
    let rows = rows.map(|(key, scores)| (key, scores.value()));
    [channel::<0>(rows), channel::<1>(rows), channel::<2>(rows), channel::<3>(rows)]
}

#[inline(always)]
fn channel<const C: usize>(rows: [(Quad, Quad); 2 * CSA_RATIO as usize]) -> f32 {
    let scores = rows.map(|(_, score)| score[C]);
    let maximum = scores.iter().fold(f32::NEG_INFINITY, |maximum, score| maximum.max(*score));
    let weights = scores.map(|score| exp_nonpositive(score - maximum));
    let keys = rows.map(|(key, _)| key[C]);
    let sum = weights.iter().zip(&keys).fold(0.0, |sum, (weight, key)| sum + weight * key);
    sum / weights.iter().fold(0.0, |sum, weight| sum + weight)
}

impl Compress {
    /// The token that record `record` lists; `None` for padding.
    ///
    /// # Safety
    /// Pointers and shapes as in the kernel table; `record < capacity`.
    #[inline(always)]
    unsafe fn closing(self, record: u32) -> Option<Closing> {
        let tokens = ClosingTokens {
            rows: self.closing,
            position: self.token_position,
            slot: self.token_slot,
            index: self.token_index,
            tokens: self.params.tokens,
            slots: self.params.slots,
            ratio: CSA_RATIO,
        };
        // SAFETY: by this function's own contract.
        unsafe { tokens.get(record) }
    }

    #[inline(always)]
    fn projections<const COLUMNS: u32>(self) -> Projections<COLUMNS> {
        let Self { kv, gate, ape, state, params, .. } = self;
        Projections { kv, gate, ape, state, ring: params.ring, ratio: CSA_RATIO }
    }
}

/// Main entries: one block of four warps a record. `entries`: `[capacity, 512]` BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn main(args: Compress) {
    let record = thread::block_idx_x();
    let (warp_id, channel) = (thread::warp_id(), 4 * thread::thread_idx_x());
    // SAFETY: the grid has one block a record, so the whole block leaves or stays; channels are
    // below 512.
    unsafe {
        let Some(closing) = args.closing(record) else { return };
        let projections = args.projections::<MAIN_COLUMNS>();
        let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
        let last = load_last(projections, closing, channel);
        let window = load_window(projections, closing, channel, last);
        let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
        let pooled = softmax_sum(window);
        let partial = Shared::<f32, MAIN_WARPS>::at(0);
        share_squares(partial, warp_id, pooled);
        thread::sync_threads();
        let squares = total_squares(partial);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        args.entries.store_u32x2(u64::from(record * HEAD_DIM + channel), words);
    }
}

/// Indexer keys before the Hadamard rotation: one warp a record. `entries`: `[capacity, 128]` BF16.
///
/// # Safety
/// As [`main`].
#[inline(always)]
pub unsafe fn index(args: Compress) {
    let record = thread::block_idx_x() * MAIN_WARPS as u32 + thread::warp_id();
    if record >= args.params.capacity {
        return;
    }
    let channel = 4 * thread::lane_id();
    // SAFETY: a warp has one record, so it leaves or stays together; channels are below 128.
    unsafe {
        let Some(closing) = args.closing(record) else { return };
        let projections = args.projections::<INDEX_COLUMNS>();
        let finish = Finish::load::<INDEX_DIM>(args.norm, args.frequencies, channel);
        let last = load_last(projections, closing, channel);
        let window = load_window(projections, closing, channel, last);
        let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
        let words = index_key(window, finish, rotation);
        args.entries.store_u32x2(u64::from(record * INDEX_DIM + channel), words);
    }
}

/// Four channels of an indexer key, in the warp that holds it.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn index_key(window: Window, finish: Finish, rotation: [(f32, f32); 2]) -> [u32; 2] {
    let pooled = softmax_sum(window);
    // SAFETY: by this function's own contract.
    let squares = unsafe { warp::reduce_add_f32(sum_of_squares(pooled)) };
    finish.apply::<INDEX_DIM>(pooled, squares, rotation)
}

/// Stores a warp's part of the sum of squares in shared memory; a barrier must follow.
///
/// # Safety
/// All lanes of warp `warp_id` call it together.
#[inline(always)]
pub unsafe fn share_squares(partial: Shared<f32, MAIN_WARPS>, warp_id: u32, pooled: Quad) {
    // SAFETY: by this function's own contract; each warp writes its own word.
    unsafe {
        let squares = warp::reduce_add_f32(sum_of_squares(pooled));
        if thread::lane_id() == 0 {
            partial.store(warp_id, squares);
        }
    }
}

/// The sum over all channels of a main vector, in a fixed order.
///
/// # Safety
/// All four words were shared, with a barrier since.
#[inline(always)]
#[must_use]
pub unsafe fn total_squares(partial: Shared<f32, MAIN_WARPS>) -> f32 {
    // SAFETY: by this function's own contract.
    unsafe { ((partial.load(0) + partial.load(1)) + partial.load(2)) + partial.load(3) }
}

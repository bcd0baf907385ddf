//! CSA main entries and indexer keys: ratio 4, where each window overlaps the one before.

use crate::args::Compress;
use kv_layout::geometry::{CSA_RATIO, CsaCompressor, HEAD_DIM, INDEX_DIM};
use simt::mem::Global;
use simt::{thread, warp};

use super::{
    Behind, Closing, ClosingTokens, EntryMemory, Finish, Half, HalfRows, MAIN_WARPS, Projections,
    Quad, Scores, load_quad, sum_of_squares,
};
use crate::math::exp_nonpositive;

/// Columns of a token's projections: the half that the next window pools, then the half that its own window pools.
pub const MAIN_COLUMNS: u32 = 2 * HEAD_DIM;
/// As [`MAIN_COLUMNS`], for the indexer's compressor.
pub const INDEX_COLUMNS: u32 = 2 * INDEX_DIM;
/// Number of channels of a warp: four a lane.
const WARP_CHANNELS: u32 = 128;

/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = EntryMemory::BYTES;

/// Number of records that a block takes: all its warps share a main vector, while each warp has an indexer key.
pub const fn records_of_block(compressor: CsaCompressor) -> u32 {
    MAIN_WARPS as u32 * WARP_CHANNELS / compressor.channels()
}

const _: () = assert!(INDEX_DIM == WARP_CHANNELS, "a warp holds one indexer key");

/// Keys and scores of four channels over the tokens of a window and of the one before it, with loads in
/// flight.
pub type Window = [(Quad, Scores); 2 * CSA_RATIO as usize];

/// The sources of the tokens of windows: the step's projections, and the state rings for older tokens.
#[derive(Clone, Copy)]
pub struct Windows<const COLUMNS: u32> {
    /// The step's projections.
    pub projections: Projections<COLUMNS>,
    /// `[slots, rows of both rings, COLUMNS]` f32.
    pub state: Global<f32>,
    /// The layout of the rings' rows in `state`.
    pub rows: HalfRows<COLUMNS>,
}

impl<const COLUMNS: u32> Windows<COLUMNS> {
    /// Loads four channels of the window that `closing` closes, and of the window before it, which the first window
    /// does not have. `last` is the key and the scores of the closing token itself.
    ///
    /// # Safety
    /// The step has the `index` tokens before the closing one in its request; the state has the slot, and
    /// rows enough for a window's older tokens; `channel` is a multiple of 4 below half the columns.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(self, closing: Closing, channel: u32, last: (Quad, Scores)) -> Window {
        // SAFETY: by this function's own contract.
        let (previous, own) =
            unsafe { (self.previous(closing, channel), self.own(closing, channel)) };
        let ([a, b, c, d], [e, f, g]) = (previous, own);
        [a, b, c, d, e, f, g, last]
    }

    /// As [`Self::load`], in two parts: the bias is added to the scores of the first part before the second is loaded.
    /// For kernels that do not have registers for all biases.
    ///
    /// # Safety
    /// As [`Self::load`]; all lanes of the warp call it together.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load_in_parts(
        self,
        closing: Closing,
        channel: u32,
        last: (Quad, Scores),
    ) -> Window {
        let added = |(key, score): (Quad, Scores)| (key, Scores::stored(score.value()));
        // SAFETY: by this function's own contract.
        unsafe {
            let [a, b, c, d] = self.previous(closing, channel);
            let (a, b, c, d) = (added(a), added(b), added(c), added(d));
            // A barrier above which no load moves.
            warp::sync_warp();
            let [e, f, g] = self.own(closing, channel);
            [a, b, c, d, added(e), added(f), added(g), added(last)]
        }
    }

    /// The previous halves of the tokens of the window before; the first window has no window before it.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn previous(self, closing: Closing, channel: u32) -> [(Quad, Scores); 4] {
        if closing.position + 1 < 2 * CSA_RATIO {
            return [NO_TOKEN; 4];
        }
        let behind = Behind::new(self.rows, closing.slot, closing.position, Half::Previous);
        // SAFETY: by this function's own contract.
        let token = |back| unsafe { self.token(closing, behind, Half::Previous, back, channel) };
        [token(7), token(6), token(5), token(4)]
    }

    /// The own halves of the window's tokens before the closing one.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn own(self, closing: Closing, channel: u32) -> [(Quad, Scores); 3] {
        let behind = Behind::new(self.rows, closing.slot, closing.position, Half::Own);
        // SAFETY: by this function's own contract.
        let token = |back| unsafe { self.token(closing, behind, Half::Own, back, channel) };
        [token(3), token(2), token(1)]
    }

    /// Key and scores of four channels of a half of the token `back` positions before the closing one.
    ///
    /// # Safety
    /// As [`Self::load`]; `behind` is the half's ring, of more than `back` rows.
    #[inline(always)]
    unsafe fn token(
        self,
        closing: Closing,
        behind: Behind<COLUMNS>,
        half: Half,
        back: u32,
        channel: u32,
    ) -> (Quad, Scores) {
        let Self { projections, state, .. } = self;
        // SAFETY: a row of the step (one of the `index` before the closing one in its request), or a row of
        // the slot's ring.
        unsafe {
            if back <= closing.index {
                let column = half.first_column(COLUMNS) + channel;
                let (key, gate) = projections.own(closing.token - back, column);
                (key, Scores::of_gate(gate, projections.bias(closing.position - back, column)))
            } else {
                let at = behind.at(back) + u64::from(channel);
                let scores = load_quad(state, at + u64::from(COLUMNS / 2));
                (load_quad(state, at), Scores::stored(scores))
            }
        }
    }
}

/// Keys and scores of a token that does not exist: its weight is 0.
const NO_TOKEN: (Quad, Scores) = ([0.0; 4], Scores::NONE);

/// Keys and scores of the closing token in its own window, with loads in flight.
///
/// # Safety
/// As [`Windows::load`].
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

/// The sum of the keys, weighted by the softmax of their scores, for each channel; added in the given order.
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
    fn windows<const COLUMNS: u32>(self) -> Windows<COLUMNS> {
        let Self { kv, gate, ape, state, params, .. } = self;
        let projections = Projections { kv, gate, ape, ratio: CSA_RATIO };
        Windows { projections, state, rows: HalfRows { own_ring: params.ring } }
    }
}

/// Computes main entries: one block of four warps a record. `entries`: `[capacity, 512]` BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn entries(args: Compress) {
    let record = thread::block_idx_x();
    let channel = 4 * thread::thread_idx_x();
    // SAFETY: the grid has one block a record, so the whole block leaves or stays; channels are
    // below 512.
    unsafe {
        let Some(closing) = args.closing(record) else { return };
        let windows = args.windows::<MAIN_COLUMNS>();
        let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
        let last = load_last(windows.projections, closing, channel);
        let window = windows.load(closing, channel, last);
        let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
        let pooled = softmax_sum(window);
        let squares = EntryMemory::new().sum_of_squares(pooled);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        let to = u64::from(record) * u64::from(HEAD_DIM) + u64::from(channel);
        args.entries.store_u32x2(to, words);
    }
}

/// Computes indexer keys before the Hadamard transform: one warp a record. `entries`: `[capacity, 128]` BF16.
///
/// # Safety
/// As [`entries`].
#[inline(always)]
pub unsafe fn keys(args: Compress) {
    let record = thread::block_idx_x() * MAIN_WARPS as u32 + thread::warp_id();
    if record >= args.params.capacity {
        return;
    }
    let channel = 4 * thread::lane_id();
    // SAFETY: a warp has one record, so it leaves or stays together; channels are below 128.
    unsafe {
        let Some(closing) = args.closing(record) else { return };
        let windows = args.windows::<INDEX_COLUMNS>();
        let finish = Finish::load::<INDEX_DIM>(args.norm, args.frequencies, channel);
        let last = load_last(windows.projections, closing, channel);
        let window = windows.load(closing, channel, last);
        let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
        let words = index_key(window, finish, rotation);
        let to = u64::from(record) * u64::from(INDEX_DIM) + u64::from(channel);
        args.entries.store_u32x2(to, words);
    }
}

/// Computes four channels of an indexer key in each lane of the warp that holds it.
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

//! One-token decode of a CSA layer: a block for the entry, a block for indexer key and window.

use crate::args::DecodeCsa;
use crate::params::DecodeParams;
use kv_layout::geometry::{CSA_RATIO, HEAD_DIM, INDEX_DIM};
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{thread, warp};

use super::{Appended, Step, entry_row, store_entry};
use crate::compress::overlap::{
    INDEX_COLUMNS, MAIN_COLUMNS, MAIN_WARPS, index_key, load_window, share_squares, softmax_sum,
    total_squares,
};
use crate::compress::state::store;
use crate::compress::{Finish, Projections, Quad, Scores};
use crate::fault;
use crate::index_row::{IndexRowFormat, hadamard, quad_from_bf16};
use crate::row::{ROW_WORDS, RowFormat};

/// The warp of a token's second block that makes the indexer key.
const INDEX_WARP: u32 = 0;
/// The warp of a token's second block that appends to the window.
const WINDOW_WARP: u32 = 1;

/// A CSA layer, two blocks of four warps a token: all of the first for the entry; of the second one
/// for the indexer key, one for the window.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn layer<F: RowFormat, I: IndexRowFormat>(args: DecodeCsa) {
    let params = args.params;
    let step = Step {
        position: args.token_position,
        slot: args.token_slot,
        index: args.token_index,
        ring_row: args.token_ring_row,
    };
    let (row, warp_id) = (thread::block_idx_x(), thread::warp_id());
    // SAFETY: the state rows that are read are of other positions than the one written, so that the
    // reads are of constants; a block or warp has one token and leaves or stays together.
    unsafe {
        if thread::block_idx_y() == 0 {
            let main: Stream<MAIN_COLUMNS> = Stream::new(
                [args.main_kv, args.main_gate, args.main_ape, args.main_norm],
                args.main_state,
                params,
            );
            let place = Place {
                table: args.table,
                data: args.entry_data,
                scale: args.entry_scale,
                faults: args.faults,
                params,
            };
            main.entry::<F>(step, row, args.frequencies, place);
        } else if warp_id == INDEX_WARP {
            let index: Stream<INDEX_COLUMNS> = Stream::new(
                [args.index_kv, args.index_gate, args.index_ape, args.index_norm],
                args.index_state,
                params,
            );
            let place = Place {
                table: args.table,
                data: args.index_code,
                scale: args.index_scale,
                faults: args.faults,
                params,
            };
            index.key::<I>(step, row, args.frequencies, place);
        } else if warp_id == WINDOW_WARP {
            Appended::load(args.window_kv, step, row).store::<F>(
                args.ring_data,
                args.ring_scale,
                params,
            );
        }
    }
}

/// A compressor of the layer.
#[derive(Clone, Copy)]
struct Stream<const COLUMNS: u32> {
    projections: Projections<COLUMNS>,
    norm: Global<f32>,
    state: GlobalMut<f32>,
}

/// Where an entry or a key goes.
#[derive(Clone, Copy)]
struct Place {
    table: Global<i32>,
    data: GlobalMut<u8>,
    scale: GlobalMut<u8>,
    faults: GlobalMut<u32>,
    params: DecodeParams,
}

/// A token's projections in both halves of a thread's columns.
type Halves = [(Quad, Quad); 2];

impl<const COLUMNS: u32> Stream<COLUMNS> {
    const HALF: u32 = COLUMNS / 2;

    /// # Safety
    /// No state row is read that this launch writes.
    #[inline(always)]
    unsafe fn new(
        [kv, gate, ape, norm]: [Global<f32>; 4],
        state: GlobalMut<f32>,
        params: DecodeParams,
    ) -> Self {
        // SAFETY: by this function's own contract.
        let read = unsafe { state.read_only() };
        let ring = params.state_ring;
        let projections = Projections { kv, gate, ape, state: read, ring, ratio: CSA_RATIO };
        Self { projections, norm, state }
    }

    /// Four channels of token `row`, on their way before it is known what is to be done with them.
    ///
    /// # Safety
    /// The step holds the token; `channel` is a multiple of 4 below half the columns.
    #[inline(always)]
    unsafe fn halves(self, row: u32, channel: u32) -> Halves {
        // SAFETY: by this function's own contract.
        unsafe {
            [self.projections.own(row, channel), self.projections.own(row, channel + Self::HALF)]
        }
    }

    /// Writes four channels of the token, in both halves, to its state row.
    ///
    /// # Safety
    /// The ring holds the token's row; `channel` as in [`Self::halves`].
    #[inline(always)]
    unsafe fn store(self, at: (u32, u32), channel: u32, halves: Halves, bias: [Quad; 2]) {
        let ring = self.projections.ring;
        let row = |half: usize| {
            let (key, gate) = halves[half];
            (key, Scores::of_gate(gate, bias[half]).value())
        };
        // SAFETY: by this function's own contract.
        unsafe {
            store::<COLUMNS>(self.state, ring, at, channel, row(0));
            store::<COLUMNS>(self.state, ring, at, channel + Self::HALF, row(1));
        }
    }

    /// Both position biases of four channels of the token at `position`.
    ///
    /// # Safety
    /// `channel` as in [`Self::halves`].
    #[inline(always)]
    unsafe fn bias(self, position: u32, channel: u32) -> [Quad; 2] {
        // SAFETY: by this function's own contract.
        unsafe {
            [
                self.projections.bias(position, channel),
                self.projections.bias(position, channel + Self::HALF),
            ]
        }
    }
}

impl Stream<MAIN_COLUMNS> {
    /// State row and, at the end of a window, entry of token `row`.
    ///
    /// # Safety
    /// Pointers and shapes as in the kernel table; all 128 threads of the block call it.
    #[inline(always)]
    unsafe fn entry<F: RowFormat>(
        self,
        step: Step,
        row: u32,
        frequencies: Global<f32>,
        place: Place,
    ) {
        let Place { table, data, scale, faults, params } = place;
        let (channel, warp_id) = (4 * thread::thread_idx_x(), thread::warp_id());
        // SAFETY: rows come from the table; shared words are written by one thread before a barrier.
        unsafe {
            let partial = Shared::<f32, MAIN_WARPS>::at(0);
            let entry = Shared::<u32, ROW_WORDS>::at(16);
            let token = step.token(row);
            let halves = self.halves(row, channel);
            let finish = Finish::load::<HEAD_DIM>(self.norm, frequencies, channel);
            let Some(closing) = token.live(params.slots) else {
                if warp_id == 0 {
                    let refused = u32::from(token.is_refused(params.slots));
                    fault::count(faults, thread::lane_id(), refused);
                }
                return;
            };
            let at = (closing.position, closing.slot);
            let bias = self.bias(closing.position, channel);
            if !(closing.position + 1).is_multiple_of(CSA_RATIO) {
                self.store(at, channel, halves, bias);
                return;
            }
            let plane_row = entry_row(table, closing, CSA_RATIO, params);
            let last = (halves[1].0, Scores::of_gate(halves[1].1, bias[1]));
            let window = load_window(self.projections, closing, channel, last);
            // No load goes below it: all of the above are on their way while the angles are computed.
            warp::sync_warp();
            let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
            self.store(at, channel, halves, bias);
            let pooled = softmax_sum(window);
            share_squares(partial, warp_id, pooled);
            thread::sync_threads();
            let words = finish.apply::<HEAD_DIM>(pooled, total_squares(partial), rotation);
            entry.store(channel / 2, words[0]);
            entry.store(channel / 2 + 1, words[1]);
            thread::sync_threads();
            if warp_id == 0 {
                store_entry::<F>(entry, data, scale, plane_row, faults);
            }
        }
    }
}

impl Stream<INDEX_COLUMNS> {
    /// State row and, at the end of a window, indexer key of token `row`.
    ///
    /// # Safety
    /// Pointers and shapes as in the kernel table; all lanes of the warp call it together.
    #[inline(always)]
    unsafe fn key<I: IndexRowFormat>(
        self,
        step: Step,
        row: u32,
        frequencies: Global<f32>,
        place: Place,
    ) {
        let Place { table, data, scale, params, .. } = place;
        let (lane, channel) = (thread::lane_id(), 4 * thread::lane_id());
        // SAFETY: rows come from the table.
        unsafe {
            let token = step.token(row);
            let halves = self.halves(row, channel);
            let finish = Finish::load::<INDEX_DIM>(self.norm, frequencies, channel);
            let Some(closing) = token.live(params.slots) else { return };
            let at = (closing.position, closing.slot);
            let bias = self.bias(closing.position, channel);
            if !(closing.position + 1).is_multiple_of(CSA_RATIO) {
                self.store(at, channel, halves, bias);
                return;
            }
            let plane_row = entry_row(table, closing, CSA_RATIO, params);
            let last = (halves[1].0, Scores::of_gate(halves[1].1, bias[1]));
            let window = load_window(self.projections, closing, channel, last);
            // No load goes below it: all of the above are on their way while the angles are computed.
            warp::sync_warp();
            let rotation = finish.rotation(closing.position + 1 - CSA_RATIO);
            self.store(at, channel, halves, bias);
            let words = index_key(window, finish, rotation);
            let key = hadamard(quad_from_bf16(words), lane);
            if let Some(row) = plane_row {
                I::store(data, scale, row, lane, key);
            }
        }
    }
}

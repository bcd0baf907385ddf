//! Decode of a CSA layer: for each token, one block for the entry, and one for the indexer key and the window.

use core::marker::PhantomData;

use crate::args::DecodeCsa;
use crate::params::DecodeParams;
use kv_layout::geometry::{CSA_RATIO, HEAD_DIM, INDEX_DIM, csa_decode_tokens};
use simt::mem::{Global, GlobalMut};
use simt::{thread, warp};

use super::{Appended, Step, entry_row};
use crate::compress::csa::{INDEX_COLUMNS, MAIN_COLUMNS, Window, Windows, index_key, softmax_sum};
use crate::compress::{Closing, EntryMemory, Finish, Half, HalfRows, Projections, Quad, Scores};
use crate::fault;
use crate::index_row::{IndexRowFormat, Lanes, WholeWarp, quad_from_bf16};
use crate::row::RowFormat;

/// The warp of a token's second block that computes the indexer key.
const INDEX_WARP: u32 = 0;
/// The warp of a token's second block that appends to the window.
const WINDOW_WARP: u32 = 1;

/// Blocks of a token: for the entry, and for indexer key and window.
pub const PARTS: u32 = 2;

/// Bytes of shared memory of a block.
pub const SHARED_BYTES: u32 = EntryMemory::BYTES;

/// Writes the cache of a CSA layer, with two blocks of four warps a token: all warps of the first block compute the
/// entry; in the second block one warp computes the indexer key, and one appends to the window.
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
        remaining: args.token_remaining,
        ring_row: args.token_ring_row,
        tokens: params.tokens,
        slots: params.slots,
        most: csa_decode_tokens(params.state_ring),
    };
    let (row, warp_id) = (thread::block_idx_x(), thread::warp_id());
    // SAFETY: the state rows that are read are of other positions than those written, so that the
    // reads are of constants; a block or warp has one token and leaves or stays together.
    unsafe {
        if thread::block_idx_y() == 0 {
            let main: Compressor<MAIN_COLUMNS> = Compressor::new(
                [args.main_kv, args.main_gate, args.main_ape, args.main_norm],
                args.main_state,
                params,
            );
            let destination = Destination {
                frequencies: args.frequencies,
                table: args.table,
                data: args.entry_data,
                scale: args.entry_scale,
                faults: args.faults,
                params,
            };
            main.update(step, row, Entry::<F>(destination, PhantomData));
        } else if warp_id == INDEX_WARP {
            let index: Compressor<INDEX_COLUMNS> = Compressor::new(
                [args.index_kv, args.index_gate, args.index_ape, args.index_norm],
                args.index_state,
                params,
            );
            let destination = Destination {
                frequencies: args.frequencies,
                table: args.table,
                data: args.index_code,
                scale: args.index_scale,
                faults: args.faults,
                params,
            };
            index.update(step, row, Key::<I>(destination, PhantomData));
        } else if warp_id == WINDOW_WARP {
            let planes = [args.ring_data, args.ring_scale];
            Appended::load(args.window_kv, step, row).store::<F>(planes, args.faults, params);
        }
    }
}

/// A compressor of the layer.
#[derive(Clone, Copy)]
struct Compressor<const COLUMNS: u32> {
    windows: Windows<COLUMNS>,
    norm: Global<f32>,
    state: GlobalMut<f32>,
}

/// The destination of an entry or a key, and the inputs to compute it.
#[derive(Clone, Copy)]
struct Destination {
    /// `[32]`, the rotary frequencies.
    frequencies: Global<f32>,
    table: Global<i32>,
    data: GlobalMut<u8>,
    scale: GlobalMut<u8>,
    faults: GlobalMut<u32>,
    params: DecodeParams,
}

/// A token's projections in both halves of a thread's columns.
type Halves = [(Quad, Quad); 2];

impl<const COLUMNS: u32> Compressor<COLUMNS> {
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
        let projections = Projections { kv, gate, ape, ratio: CSA_RATIO };
        let rows = HalfRows { own_ring: params.state_ring };
        Self { windows: Windows { projections, state: read, rows }, norm, state }
    }

    /// Starts the loads of four channels of token `row`, before it is known whether it closes a window.
    ///
    /// # Safety
    /// The step holds the token; `channel` is a multiple of 4 below half the columns.
    #[inline(always)]
    unsafe fn halves(self, row: u32, channel: u32) -> Halves {
        let projections = self.windows.projections;
        // SAFETY: by this function's own contract.
        unsafe { [projections.own(row, channel), projections.own(row, channel + Self::HALF)] }
    }

    /// Writes four channels of the token's halves to their state rows, if a later step needs them.
    ///
    /// # Safety
    /// The state has the slot; `channel` as in [`Self::halves`].
    #[inline(always)]
    unsafe fn store(self, at: (u32, u32), channel: u32, halves: Halves, bias: [Quad; 2]) {
        let row = |half: usize| {
            let (key, gate) = halves[half];
            (key, Scores::of_gate(gate, bias[half]).value())
        };
        let rows = self.windows.rows;
        // SAFETY: by this function's own contract.
        unsafe {
            rows.store(self.state, at, Half::Previous, channel, row(0));
            if Half::Own.is_kept(at.0) {
                rows.store(self.state, at, Half::Own, channel, row(1));
            }
        }
    }

    /// Both position biases of four channels of the token at `position`.
    ///
    /// # Safety
    /// `channel` as in [`Self::halves`].
    #[inline(always)]
    unsafe fn bias(self, position: u32, channel: u32) -> [Quad; 2] {
        let projections = self.windows.projections;
        // SAFETY: by this function's own contract.
        unsafe {
            [projections.bias(position, channel), projections.bias(position, channel + Self::HALF)]
        }
    }
}

/// The product of a compressor from a window: an entry or an indexer key.
trait Product {
    /// Channels of the vector.
    const DIM: u32;

    /// The destination.
    fn destination(&self) -> Destination;

    /// The first of the thread's four channels.
    fn channel(&self) -> u32;

    /// Whether the warp counts refused tokens: one of a token's warps does.
    fn counts(&self) -> bool;

    /// Computes it from a window, with the inputs of its norm and rotation, and stores it in row `row` of the planes,
    /// if the request has a block for it.
    ///
    /// # Safety
    /// All threads that have the vector's channels call it together.
    unsafe fn make(
        self,
        window: Window,
        finish: Finish,
        rotation: [(f32, f32); 2],
        row: Option<u64>,
    );
}

impl<const COLUMNS: u32> Compressor<COLUMNS> {
    /// Writes four channels of token `row` to its state row. If the token closes a window, computes the product of that
    /// window.
    ///
    /// # Safety
    /// Pointers and shapes as in the kernel table; all threads that have the product's channels call it
    /// together.
    #[inline(always)]
    unsafe fn update<P: Product>(self, step: Step, row: u32, product: P) {
        let Destination { frequencies, table, faults, params, .. } = product.destination();
        let channel = product.channel();
        // SAFETY: by this function's own contract; a live token has its rows in the ring.
        unsafe {
            let token = step.token(row);
            let halves = self.halves(row, channel);
            let finish = match P::DIM {
                HEAD_DIM => Finish::load::<HEAD_DIM>(self.norm, frequencies, channel),
                _ => Finish::load::<INDEX_DIM>(self.norm, frequencies, channel),
            };
            if !step.is_live(token) {
                if product.counts() {
                    let refused = u32::from(step.is_refused(token));
                    fault::count(faults, thread::lane_id(), refused);
                }
                return;
            }
            let at @ (position, slot) = (token.position, token.slot.cast_unsigned());
            let bias = self.bias(position, channel);
            if !(position + 1).is_multiple_of(CSA_RATIO) {
                self.store(at, channel, halves, bias);
                return;
            }
            let plane_row = entry_row(table, at, CSA_RATIO, params);
            let closing = Closing { token: row, position, index: token.index, slot };
            let (window, rotation) = self.close(closing, channel, finish, (halves, bias));
            product.make(window, finish, rotation, plane_row);
        }
    }

    /// Loads the window that a token closes, and writes the token's own halves to the state.
    ///
    /// # Safety
    /// As [`Self::update`].
    #[inline(always)]
    unsafe fn close(
        self,
        closing: Closing,
        channel: u32,
        finish: Finish,
        (halves, bias): (Halves, [Quad; 2]),
    ) -> (Window, [(f32, f32); 2]) {
        let at = (closing.position, closing.slot);
        let position = closing.position + 1 - CSA_RATIO;
        let last = (halves[1].0, Scores::of_gate(halves[1].1, bias[1]));
        // SAFETY: by this function's own contract.
        unsafe {
            let has_drafts = closing.index > 0;
            let window = if has_drafts {
                // Store first, so that the registers of the token's halves are free for biases.
                self.store(at, channel, halves, bias);
                self.windows.load_in_parts(closing, channel, last)
            } else {
                // All older tokens are in the rings, where scores have their bias.
                let closing = Closing { index: 0, ..closing };
                let window = self.windows.load(closing, channel, last);
                // A barrier below which no load moves: all loads above are in flight while the angles are computed.
                warp::sync_warp();
                window
            };
            let rotation = finish.rotation(position);
            if !has_drafts {
                self.store(at, channel, halves, bias);
            }
            (window, rotation)
        }
    }
}

/// The entry, by all 128 threads of a block.
struct Entry<F>(Destination, PhantomData<F>);

impl<F: RowFormat> Product for Entry<F> {
    const DIM: u32 = HEAD_DIM;

    #[inline(always)]
    fn destination(&self) -> Destination {
        self.0
    }

    #[inline(always)]
    fn channel(&self) -> u32 {
        4 * thread::thread_idx_x()
    }

    #[inline(always)]
    fn counts(&self) -> bool {
        thread::warp_id() == 0
    }

    #[inline(always)]
    unsafe fn make(
        self,
        window: Window,
        finish: Finish,
        rotation: [(f32, f32); 2],
        row: Option<u64>,
    ) {
        let Destination { data, scale, faults, .. } = self.0;
        // SAFETY: rows come from the table; the block's shared memory is the entry's.
        unsafe {
            let pooled = softmax_sum(window);
            EntryMemory::new().store::<F>(pooled, (finish, rotation), [data, scale], row, faults);
        }
    }
}

/// The indexer key, by one warp.
struct Key<I>(Destination, PhantomData<I>);

impl<I: IndexRowFormat> Product for Key<I> {
    const DIM: u32 = INDEX_DIM;

    #[inline(always)]
    fn destination(&self) -> Destination {
        self.0
    }

    #[inline(always)]
    fn channel(&self) -> u32 {
        4 * thread::lane_id()
    }

    #[inline(always)]
    fn counts(&self) -> bool {
        false
    }

    #[inline(always)]
    unsafe fn make(
        self,
        window: Window,
        finish: Finish,
        rotation: [(f32, f32); 2],
        row: Option<u64>,
    ) {
        // SAFETY: the lanes are together; rows come from the table.
        unsafe {
            let lane = thread::lane_id();
            let key = quad_from_bf16(index_key(window, finish, rotation));
            let [key] = WholeWarp::hadamard([key]);
            if let Some(row) = row {
                I::store(self.0.data, self.0.scale, row, lane, key);
            }
        }
    }
}

//! One-token decode: everything that a layer's cache does for a token in one launch. Window row,
//! state rows and, when the token closes a window, the entry and the indexer key.
//!
//! The pieces are those of the separate kernels, so the bytes are theirs too. With one token a
//! request, no ring row that is written is one that is read.
//!
//! A decode step moves little and waits much, so every stage has its loads on their way together, in
//! order: what a token is, then what it needs, then nothing more.

pub mod csa;
pub mod hca;

use crate::params::DecodeParams;
use kv_layout::geometry::BLOCK_TOKENS;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{grid, thread};

use crate::block_table::TableRow;
use crate::compress::Closing;
use crate::fault;
use crate::row::{Bf16Lane, ROW_WORDS, RowFormat};

/// StepMeta's arrays, one element a token.
#[derive(Clone, Copy)]
struct Step {
    position: Global<i32>,
    slot: Global<i32>,
    index: Global<i32>,
    ring_row: Global<i32>,
}

/// What StepMeta says of a token.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Token {
    /// Its row in the step.
    row: u32,
    position: u32,
    /// Its request's slot; -1 for padding.
    slot: i32,
    /// Tokens of its request that precede it in the step.
    index: u32,
}

impl Step {
    /// Token `row` as it may have been before this launch's [`grid::wait_for_dependencies`] returns.
    ///
    /// # Safety
    /// The arrays have room for the token.
    #[inline(always)]
    unsafe fn peek(self, row: u32) -> Token {
        let at = u64::from(row);
        // SAFETY: by this function's own contract.
        unsafe {
            let slot = grid::peek(self.slot, at).cast_signed();
            let index = grid::peek(self.index, at);
            Token { row, position: grid::peek(self.position, at), slot, index }
        }
    }

    /// Loads token `row`.
    ///
    /// # Safety
    /// The arrays hold the token.
    #[inline(always)]
    unsafe fn token(self, row: u32) -> Token {
        let at = u64::from(row);
        // SAFETY: by this function's own contract.
        unsafe {
            let slot = self.slot.load_u32_in_order(at).cast_signed();
            let index = self.index.load_u32_in_order(at);
            Token { row, position: self.position.load_u32_in_order(at), slot, index }
        }
    }
}

impl Token {
    /// Whether there is something to do: no padding, a slot and a position that exist, one token of its
    /// request.
    #[inline(always)]
    fn is_live(self, slots: u32) -> bool {
        let exists = self.slot >= 0 && self.slot.cast_unsigned() < slots;
        exists && self.index == 0 && self.position.cast_signed() >= 0
    }

    /// Whether it is one that must not be: neither padding nor live.
    #[inline(always)]
    fn is_refused(self, slots: u32) -> bool {
        self.slot >= 0 && !self.is_live(slots)
    }

    /// The token as one that may close a window, if it is live.
    #[inline(always)]
    fn live(self, slots: u32) -> Option<Closing> {
        let Self { row, position, slot, .. } = self;
        let closing = Closing { token: row, position, index: 0, slot: slot.cast_unsigned() };
        self.is_live(slots).then_some(closing)
    }
}

/// A token and its window row, on their way.
#[derive(Clone, Copy)]
struct Appended {
    token: Token,
    values: Bf16Lane,
    ring_row: u32,
}

impl Appended {
    /// Loads token `row` of the step and its row of `kv`.
    ///
    /// # Safety
    /// `kv` and the arrays hold the token.
    #[inline(always)]
    unsafe fn load(kv: Global<u16>, step: Step, row: u32) -> Self {
        // SAFETY: by this function's own contract.
        unsafe {
            let token = step.token(row);
            let ring_row = step.ring_row.load_u32_in_order(u64::from(row));
            Self { token, values: Bf16Lane::load(kv, u64::from(row), thread::lane_id()), ring_row }
        }
    }

    /// Appends a live token to the window.
    ///
    /// # Safety
    /// The planes have the rows that `params` says; all lanes of the warp call it together, with the
    /// same token.
    #[inline(always)]
    unsafe fn store<F: RowFormat>(
        self,
        data: GlobalMut<u8>,
        scale: GlobalMut<u8>,
        params: DecodeParams,
    ) {
        let Self { token, values, ring_row } = self;
        let wanted = token.is_live(params.slots) && ring_row < params.window_rows;
        let row = wanted.then_some(u64::from(ring_row));
        // SAFETY: the row exists, and the lanes are together.
        unsafe { values.store_quantised::<F>(data, scale, row, thread::lane_id()) }
    }
}

/// The plane row of the entry that `closing` closes.
///
/// # Safety
/// `table` holds the slot's row.
#[inline(always)]
unsafe fn entry_row(
    table: Global<i32>,
    closing: Closing,
    ratio: u32,
    params: DecodeParams,
) -> Option<u64> {
    let row = TableRow {
        table,
        start: u64::from(closing.slot) * u64::from(params.max_blocks),
        max_blocks: params.max_blocks,
        num_blocks: params.num_blocks,
        block_shift: (BLOCK_TOKENS / ratio).trailing_zeros(),
    };
    // SAFETY: by this function's own contract.
    unsafe { row.plane_row(closing.position / ratio, true) }
}

/// Quantises the entry that lies in shared memory into its plane row; without one it is refused.
///
/// # Safety
/// The entry was written, with a barrier since; all lanes of the warp call it together.
#[inline(always)]
unsafe fn store_entry<F: RowFormat>(
    entry: Shared<u32, ROW_WORDS>,
    data: GlobalMut<u8>,
    scale: GlobalMut<u8>,
    row: Option<u64>,
    faults: GlobalMut<u32>,
) {
    let lane = thread::lane_id();
    // SAFETY: by this function's own contract; rows come from the table.
    unsafe {
        Bf16Lane::from_shared(entry, lane).store_quantised::<F>(data, scale, row, lane);
        fault::count(faults, lane, u32::from(row.is_none()));
    }
}

//! One-token decode: all writes of a layer's cache for a token in one launch. These are the row of the sliding
//! window, the state rows and, if the token closes a window, the entry and the indexer key.
//!
//! The code is shared with the separate kernels, so the bytes are the same. With one token a request, no
//! ring row is both written and read.
//!
//! A decode step is bound by latency, not bandwidth. So each stage issues all of its loads together: first
//! the token's metadata, then everything that depends on it.

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

/// A token as StepMeta describes it.
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
    /// A speculative load of token `row`, before [`grid::wait_for_dependencies`]; see [`grid::peek`].
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
    /// Whether the token is processed: it is no padding, its slot and position are valid, and it is the first of
    /// its request in the step.
    #[inline(always)]
    fn is_live(self, slots: u32) -> bool {
        let exists = self.slot >= 0 && self.slot.cast_unsigned() < slots;
        exists && self.index == 0 && self.position.cast_signed() >= 0
    }

    /// Whether the token is invalid: neither padding nor live.
    #[inline(always)]
    fn is_refused(self, slots: u32) -> bool {
        self.slot >= 0 && !self.is_live(slots)
    }

    /// The token as a closing token, if it is live.
    #[inline(always)]
    fn live(self, slots: u32) -> Option<Closing> {
        let Self { row, position, slot, .. } = self;
        let closing = Closing { token: row, position, index: 0, slot: slot.cast_unsigned() };
        self.is_live(slots).then_some(closing)
    }
}

/// A token and its row for the sliding window, with loads in flight.
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

    /// Writes a live token's row to the sliding window's ring.
    ///
    /// # Safety
    /// The planes have `params.window_rows` rows; all lanes of the warp call it together, with the
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

/// The plane row of the entry of the window that `closing` closes; `None` if it has no block.
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

/// Quantises the entry in shared memory into its plane row; without a row it is counted as a fault.
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

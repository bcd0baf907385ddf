//! Decode: all writes of a layer's cache for a step in one launch. These are the rows of the sliding window, the state
//! rows and, for tokens that close a window, the entry and the indexer key.
//!
//! A request has one token, or a token and drafts, at most as many drafts as the rings allow to be rejected. So no ring
//! row that a step needs is among those that it writes. The code is shared with the separate kernels, so the bytes are
//! the same.
//!
//! A decode step is bound by latency, not bandwidth. So each stage issues all of its loads together: first
//! the token's metadata, then everything that depends on it.

pub mod csa;
pub mod hca;

use crate::params::DecodeParams;
use kv_layout::geometry::BLOCK_TOKENS;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::block_table::TableRow;
use crate::fault;
use crate::row::{Bf16Lane, RowFormat};

/// StepMeta's arrays, one element a token.
#[derive(Clone, Copy)]
struct Step {
    position: Global<i32>,
    slot: Global<i32>,
    index: Global<i32>,
    remaining: Global<i32>,
    ring_row: Global<i32>,
    /// Tokens of the step.
    tokens: u32,
    /// Request slots.
    slots: u32,
    /// Most tokens of a request.
    most: u32,
}

/// A token as StepMeta describes it.
#[derive(Clone, Copy)]
struct Token {
    /// Row of the token in the step.
    row: u32,
    position: u32,
    /// Slot of the token's request; -1 for padding.
    slot: i32,
    /// Number of tokens of its request that precede it in the step.
    index: u32,
    /// Number of tokens of its request that follow it in the step.
    remaining: u32,
}

impl Step {
    /// Loads token `row`.
    ///
    /// # Safety
    /// The arrays hold the token.
    #[inline(always)]
    unsafe fn token(self, row: u32) -> Token {
        let at = u64::from(row);
        // SAFETY: by this function's own contract.
        unsafe {
            let slot = self.slot.load_u32_volatile(at).cast_signed();
            let index = self.index.load_u32_volatile(at);
            let remaining = self.remaining.load_u32_volatile(at);
            let position = self.position.load_u32_volatile(at);
            Token { row, position, slot, index, remaining }
        }
    }

    /// Whether a token is processed: it is not padding, its slot and position are valid, the step has the tokens before
    /// and after it in its request, and the request has at most `most` tokens.
    #[inline(always)]
    fn is_live(self, token: Token) -> bool {
        let Token { row, position, slot, index, remaining } = token;
        let exists = slot >= 0 && slot.cast_unsigned() < self.slots && position.cast_signed() >= 0;
        let others = index <= row && remaining < self.tokens - row;
        exists && others && index.saturating_add(remaining) < self.most
    }

    /// Whether a token is invalid: neither padding nor live.
    #[inline(always)]
    fn is_refused(self, token: Token) -> bool {
        token.slot >= 0 && !self.is_live(token)
    }
}

/// A token and its row for the sliding window, with loads in flight.
#[derive(Clone, Copy)]
struct Appended {
    is_live: bool,
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
            let ring_row = step.ring_row.load_u32_volatile(u64::from(row));
            let values = Bf16Lane::load(kv, u64::from(row), thread::lane_id());
            Self { is_live: step.is_live(token), values, ring_row }
        }
    }

    /// Writes a live token's row to the sliding window's ring. Counts a row that the planes do not have.
    ///
    /// # Safety
    /// The planes have `params.window_rows` rows; all lanes of the warp call it together, with the
    /// same token.
    #[inline(always)]
    unsafe fn store<F: RowFormat>(
        self,
        [data, scale]: [GlobalMut<u8>; 2],
        faults: GlobalMut<u32>,
        params: DecodeParams,
    ) {
        let (Self { is_live, values, ring_row }, lane) = (self, thread::lane_id());
        let wanted = is_live && ring_row < params.window_rows;
        let row = wanted.then_some(u64::from(ring_row));
        // SAFETY: the row exists, and the lanes are together.
        unsafe {
            fault::count(faults, lane, u32::from(is_live && !wanted));
            values.store_quantised::<F>(data, scale, row, lane);
        }
    }
}

/// The plane row of the entry of the window that the token at `position` of the request in `slot` closes;
/// `None` if it has no block.
///
/// # Safety
/// `table` holds the slot's row.
#[inline(always)]
unsafe fn entry_row(
    table: Global<i32>,
    (position, slot): (u32, u32),
    ratio: u32,
    params: DecodeParams,
) -> Option<u64> {
    let DecodeParams { max_blocks, num_blocks, .. } = params;
    let block_shift = (BLOCK_TOKENS / ratio).trailing_zeros();
    let row = TableRow::of_slot(table, slot, max_blocks, num_blocks, block_shift);
    // SAFETY: by this function's own contract.
    unsafe { row.plane_row(position / ratio, true) }
}

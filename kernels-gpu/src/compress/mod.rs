//! The compressors: the projections of a window's tokens become one entry. Source: spec section 2.
//!
//! FP32 from the projections through pooling, norm and rotary embedding, then one rounding to BF16
//! (decision D7). Orders of addition are fixed by the row, so a result does not depend on how the
//! tokens were cut into steps.

pub mod hca;
mod norm;
pub mod overlap;
pub mod state;

use simt::mem::Global;

pub use norm::{Finish, rotate, sum_of_squares};

/// Four channels in a thread's registers.
pub type Quad = [f32; 4];

/// Where a window's projections are: the step's own rows, or the state ring for older tokens.
///
/// A token has `COLUMNS` columns of keys and as many of gates. In the ring a row is
/// `[keys | scores]`, a score being the gate with the position bias `ape` already added.
#[derive(Clone, Copy)]
pub struct Projections<const COLUMNS: u32> {
    /// `[step, COLUMNS]` f32.
    pub kv: Global<f32>,
    /// `[step, COLUMNS]` f32, without `ape`.
    pub gate: Global<f32>,
    /// `[ratio, COLUMNS]` f32.
    pub ape: Global<f32>,
    /// `[slots * ring, 2 * COLUMNS]` f32.
    pub state: Global<f32>,
    /// Rows of one request's ring.
    pub ring: u32,
    /// Tokens of a window.
    pub ratio: u32,
}

/// The token that closes a window.
#[derive(Clone, Copy)]
pub struct Closing {
    /// Its row in the step.
    pub token: u32,
    /// Its position.
    pub position: u32,
    /// Tokens of its request that precede it in the step.
    pub index: u32,
    /// Its request's slot.
    pub slot: u32,
}

impl Closing {
    /// The closing token that a work list names; `None` for padding, or a slot that does not exist.
    ///
    /// # Safety
    /// `plan` holds `record`, the token arrays hold every token that it lists.
    #[inline(always)]
    pub unsafe fn of_record(
        plan: Global<i32>,
        record: u32,
        (token_position, token_slot, token_index): (Global<i32>, Global<i32>, Global<i32>),
        slots: u32,
    ) -> Option<Self> {
        // SAFETY: by this function's own contract.
        unsafe {
            let token = plan.load(u64::from(record));
            if token < 0 {
                return None;
            }
            let at = token as u64;
            let closing = Self {
                token: token as u32,
                position: token_position.load(at) as u32,
                index: token_index.load(at) as u32,
                slot: token_slot.load(at) as u32,
            };
            (closing.slot < slots).then_some(closing)
        }
    }
}

impl<const COLUMNS: u32> Projections<COLUMNS> {
    /// Keys and scores of columns `column..column + 4` of the token `back` positions before the
    /// closing one. `ring_row` is the closing token's row in its ring.
    ///
    /// # Safety
    /// The token is in the step or in the ring, `back` is below `ring`; `column` is a multiple of 4
    /// below `COLUMNS`.
    #[inline(always)]
    pub unsafe fn load(
        self,
        closing: Closing,
        ring_row: u32,
        back: u32,
        column: u32,
    ) -> (Quad, Quad) {
        // SAFETY: a row of the step (the closing token's own or one of the `index` before it in its
        // request), or a row of the slot's ring.
        unsafe {
            if back <= closing.index {
                let at = u64::from(closing.token - back) * u64::from(COLUMNS) + u64::from(column);
                let score = self.score(at, closing.position - back, column);
                (load_quad(self.kv, at), score)
            } else {
                let row =
                    if back <= ring_row { ring_row - back } else { ring_row + self.ring - back };
                let row = u64::from(closing.slot) * u64::from(self.ring) + u64::from(row);
                let at = row * u64::from(2 * COLUMNS) + u64::from(column);
                (load_quad(self.state, at), load_quad(self.state, at + u64::from(COLUMNS)))
            }
        }
    }

    /// Gate plus position bias of four columns of the step's token whose gate is at `at`.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    pub unsafe fn score(self, at: u64, position: u32, column: u32) -> Quad {
        let bias = u64::from(position % self.ratio * COLUMNS + column);
        // SAFETY: by this function's own contract.
        let (gate, ape) = unsafe { (load_quad(self.gate, at), load_quad(self.ape, bias)) };
        [gate[0] + ape[0], gate[1] + ape[1], gate[2] + ape[2], gate[3] + ape[3]]
    }
}

/// Elements `at..at + 4`.
///
/// # Safety
/// They exist, and their address is a multiple of 16.
#[inline(always)]
pub unsafe fn load_quad(tensor: Global<f32>, at: u64) -> Quad {
    // SAFETY: by this function's own contract.
    unsafe { tensor.load_u32x4(at) }.map(f32::from_bits)
}

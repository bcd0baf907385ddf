//! The compressors: they pool the projections of a window's tokens into one entry. See docs/specification.md, section
//! 5.
//!
//! All values are FP32 from the projections through pooling, norm and rotary embedding; then they are rounded once to
//! BF16 (decision D7). The position in a row fixes the order of additions, so a result does not depend on how the
//! tokens were cut into steps.

pub mod csa;
mod csa_halves;
mod entry;
pub mod hca;
mod norm;
pub mod state;
pub mod sums;

use simt::mem::Global;

pub use csa_halves::{Behind, Half, HalfRows};
pub use entry::{EntryMemory, MAIN_WARPS};
pub use norm::{Finish, sum_of_squares};

/// Four channels in a thread's registers.
pub type Quad = [f32; 4];

/// The step's projections for a compressor: a token has `COLUMNS` columns of keys and as many of gates.
#[derive(Clone, Copy)]
pub struct Projections<const COLUMNS: u32> {
    /// `[step, COLUMNS]` f32.
    pub kv: Global<f32>,
    /// `[step, COLUMNS]` f32, without `ape`.
    pub gate: Global<f32>,
    /// `[ratio, COLUMNS]` f32.
    pub ape: Global<f32>,
    /// Tokens of a window.
    pub ratio: u32,
}

/// A token that closes a window.
#[derive(Clone, Copy)]
pub struct Closing {
    /// Row of the token in the step.
    pub token: u32,
    /// Position of the token in its request.
    pub position: u32,
    /// Number of tokens of its request that precede it in the step.
    pub index: u32,
    /// Slot of its request.
    pub slot: u32,
}

/// The step's closing tokens, and its data on all tokens.
#[derive(Clone, Copy)]
pub struct ClosingTokens {
    /// `[capacity]` row of each closing token in the step; -1 = padding.
    pub rows: Global<i32>,
    /// `[step]` absolute position of each token.
    pub position: Global<i32>,
    /// `[step]` slot of each token's request; -1 = padding.
    pub slot: Global<i32>,
    /// `[step]` tokens of the same request that precede the token in the step.
    pub index: Global<i32>,
    /// Tokens of the step.
    pub tokens: u32,
    /// Request slots.
    pub slots: u32,
    /// Tokens of a window.
    pub ratio: u32,
}

impl ClosingTokens {
    /// Closing token `record`. `None` for padding, and for a record or a token that is invalid: a row that the step
    /// does not have, a number of earlier tokens that is larger than the row, a slot that does not exist, or a position
    /// that closes no window.
    ///
    /// # Safety
    /// `rows` holds `record`, the other arrays `tokens` tokens.
    #[inline(always)]
    #[must_use]
    pub unsafe fn get(self, record: u32) -> Option<Closing> {
        // SAFETY: by this function's own contract; a token is one of the step.
        unsafe {
            // Padding, -1, is larger than any number of tokens.
            let token = self.rows.load(u64::from(record)) as u32;
            if token >= self.tokens {
                return None;
            }
            let at = u64::from(token);
            let position = self.position.load(at) as u32;
            let index = self.index.load(at) as u32;
            let slot = self.slot.load(at) as u32;
            let closes =
                position.wrapping_add(1).is_multiple_of(self.ratio) && position.cast_signed() > 0;
            let exists = index <= token && slot < self.slots;
            (closes && exists).then_some(Closing { token, position, index, slot })
        }
    }
}

/// Scores of four columns of a token, with loads in flight.
#[derive(Clone, Copy)]
pub struct Scores {
    /// The score, or the gate of a token of the step.
    stored: Quad,
    /// The position bias that a gate still needs.
    bias: Option<Quad>,
}

impl Scores {
    /// The scores of a token that does not exist.
    pub const NONE: Self = Self { stored: [f32::NEG_INFINITY; 4], bias: None };

    /// Scores from the state ring.
    #[inline(always)]
    #[must_use]
    pub fn stored(stored: Quad) -> Self {
        Self { stored, bias: None }
    }

    /// The scores of a token of the step.
    #[inline(always)]
    #[must_use]
    pub fn of_gate(gate: Quad, bias: Quad) -> Self {
        Self { stored: gate, bias: Some(bias) }
    }

    /// The scores; waits for the loads.
    #[inline(always)]
    #[must_use]
    pub fn value(self) -> Quad {
        let Self { stored: [a, b, c, d], bias } = self;
        match bias {
            Some(bias) => [a + bias[0], b + bias[1], c + bias[2], d + bias[3]],
            None => [a, b, c, d],
        }
    }
}

impl<const COLUMNS: u32> Projections<COLUMNS> {
    /// Key and gate of four columns of row `token` of the step.
    ///
    /// # Safety
    /// The step holds the token; `column` is a multiple of 4 below `COLUMNS`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn own(self, token: u32, column: u32) -> (Quad, Quad) {
        let at = self.step_at(token, column);
        // SAFETY: by this function's own contract.
        unsafe { (load_quad(self.kv, at), load_quad(self.gate, at)) }
    }

    /// Position bias of four columns of the token at `position`.
    ///
    /// # Safety
    /// `column` as in [`Self::own`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn bias(self, position: u32, column: u32) -> Quad {
        // SAFETY: by this function's own contract.
        unsafe { load_quad(self.ape, u64::from(position % self.ratio * COLUMNS + column)) }
    }

    /// Element of a column of row `token` of the step.
    #[inline(always)]
    #[must_use]
    pub fn step_at(self, token: u32, column: u32) -> u64 {
        u64::from(token) * u64::from(COLUMNS) + u64::from(column)
    }
}

/// Loads elements `at..at + 4` by a volatile load: several consecutive ones are in flight together, whatever is
/// computed in between.
///
/// # Safety
/// They exist, and their address is a multiple of 16.
#[inline(always)]
pub unsafe fn load_quad(tensor: Global<f32>, at: u64) -> Quad {
    // SAFETY: by this function's own contract.
    unsafe { tensor.load_u32x4_volatile(at) }.map(f32::from_bits)
}

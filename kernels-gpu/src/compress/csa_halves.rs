//! The state rows of a CSA compressor, which later windows need. See docs/specification.md, section 6.
//!
//! A token's own half is needed until its own window closes, and its previous half until the next window closes. So
//! each half has a ring of its own; the ring of previous halves is four rows longer.

use kv_layout::geometry::{CSA_RATIO, csa_previous_rows, csa_state_rows};
use simt::mem::GlobalMut;

use super::Quad;

/// One half of a token's columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The half that the next window pools: the first half of the columns.
    Previous,
    /// The half that the token's own window pools: the second half of the columns.
    Own,
}

impl Half {
    /// The first column of this half, of `columns` in all.
    #[inline(always)]
    #[must_use]
    pub const fn first_column(self, columns: u32) -> u32 {
        match self {
            Self::Previous => 0,
            Self::Own => columns / 2,
        }
    }

    /// Whether a later step needs this half of the token at `position`. Only the own half of a token that closes its
    /// window is not needed.
    #[inline(always)]
    #[must_use]
    pub const fn is_kept(self, position: u32) -> bool {
        match self {
            Self::Previous => true,
            Self::Own => !position.wrapping_add(1).is_multiple_of(CSA_RATIO),
        }
    }
}

/// The state rows of a compressor whose tokens have `COLUMNS` columns: for each slot the ring of own halves, then the
/// ring of previous halves. A row is `[keys | scores]`, half the columns each.
#[derive(Clone, Copy)]
pub struct HalfRows<const COLUMNS: u32> {
    /// Rows of the ring of own halves.
    pub own_ring: u32,
}

impl<const COLUMNS: u32> HalfRows<COLUMNS> {
    /// Rows of a half's ring.
    #[inline(always)]
    #[must_use]
    pub const fn ring(self, half: Half) -> u32 {
        match half {
            Half::Previous => csa_previous_rows(self.own_ring),
            Half::Own => self.own_ring,
        }
    }

    /// The first element of row `row` of a half's ring in `slot`; the scores follow `COLUMNS / 2` elements later.
    #[inline(always)]
    #[must_use]
    pub fn at(self, slot: u32, half: Half, row: u32) -> u64 {
        let before = if half == Half::Previous { self.own_ring } else { 0 };
        let slot = u64::from(slot) * u64::from(csa_state_rows(self.own_ring));
        (slot + u64::from(before) + u64::from(row)) * u64::from(COLUMNS)
    }

    /// Writes four channels of a half of the token at `position` of the request in `slot`.
    ///
    /// # Safety
    /// `state` has the slot; `channel` is a multiple of 4 below `COLUMNS / 2`.
    #[inline(always)]
    pub unsafe fn store(
        self,
        state: GlobalMut<f32>,
        (position, slot): (u32, u32),
        half: Half,
        channel: u32,
        (key, score): (Quad, Quad),
    ) {
        let to = self.at(slot, half, position % self.ring(half)) + u64::from(channel);
        // SAFETY: by this function's own contract.
        unsafe {
            state.store_u32x4(to, key.map(f32::to_bits));
            state.store_u32x4(to + u64::from(COLUMNS / 2), score.map(f32::to_bits));
        }
    }
}

/// A half's ring, with rows counted back from the closing token of a window.
#[derive(Clone, Copy)]
pub struct Behind<const COLUMNS: u32> {
    rows: HalfRows<COLUMNS>,
    slot: u32,
    half: Half,
    /// Row of the closing token.
    row: u32,
}

impl<const COLUMNS: u32> Behind<COLUMNS> {
    /// The ring of `half` in `slot`, with rows counted back from `position`.
    #[inline(always)]
    #[must_use]
    pub fn new(rows: HalfRows<COLUMNS>, slot: u32, position: u32, half: Half) -> Self {
        Self { rows, slot, half, row: position % rows.ring(half) }
    }

    /// The first element of the row of the token `back` positions before the closing one; `back` is below the ring's
    /// length.
    #[inline(always)]
    #[must_use]
    pub fn at(self, back: u32) -> u64 {
        let Self { rows, slot, half, row } = self;
        let row = if back <= row { row - back } else { row + rows.ring(half) - back };
        rows.at(slot, half, row)
    }
}

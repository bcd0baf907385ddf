//! Addresses of the rows of a window: computed once for a thread's first row, then by addition.

use simt::mem::Global;

use super::{Closing, Projections, Scores, load_quad};

/// Four columns of consecutive tokens of a window, as one thread reads them.
#[derive(Clone, Copy)]
pub struct Window<const COLUMNS: u32> {
    projections: Projections<COLUMNS>,
    closing: Closing,
    column: u32,
    /// Distance from the first token to the closing one, in tokens.
    back: u32,
    /// Tokens before the ring wraps around to its first row.
    wrap: u32,
    /// Element of the first token's keys in the ring.
    start: u64,
    /// The same, one ring earlier: the base of tokens after the wrap.
    start_behind_wrap: u64,
}

impl<const COLUMNS: u32> Window<COLUMNS> {
    /// Columns `column..column + 4`, starting `back` tokens before the closing one; `back` is below the ring's
    /// length. `ring_row` is the closing token's row in its ring.
    #[inline(always)]
    #[must_use]
    pub fn new(
        projections: Projections<COLUMNS>,
        closing: Closing,
        ring_row: u32,
        back: u32,
        column: u32,
    ) -> Self {
        let ring = projections.ring;
        let row = if ring_row >= back { ring_row - back } else { ring_row + ring - back };
        let rows = u64::from(closing.slot) * u64::from(ring) + u64::from(row);
        let start = rows * u64::from(2 * COLUMNS) + u64::from(column);
        let start_behind_wrap = start.wrapping_sub(u64::from(ring) * u64::from(2 * COLUMNS));
        Self { projections, closing, column, back, wrap: ring - row, start, start_behind_wrap }
    }

    /// Tensor and element of the keys of token `i`.
    #[inline(always)]
    #[must_use]
    pub fn keys_at(self, i: u32) -> (Global<f32>, u64) {
        match self.row_of_step(i) {
            Some(row) => (self.projections.kv, self.projections.step_at(row, self.column)),
            None => (self.projections.state, self.ring_at(i)),
        }
    }

    /// Scores of the same columns and token.
    ///
    /// # Safety
    /// The token is in the step or in the ring; the first column is a multiple of 4 below `COLUMNS`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn scores(self, i: u32) -> Scores {
        let Self { projections, closing, column, back, .. } = self;
        // SAFETY: a row of the step (the closing token's own or one of the `index` before it in its
        // request), or the scores of a row of the slot's ring, which follow the keys.
        unsafe {
            match self.row_of_step(i) {
                Some(row) => {
                    let gate = load_quad(projections.gate, projections.step_at(row, column));
                    Scores::of_gate(gate, projections.bias(closing.position - back + i, column))
                }
                None => {
                    let at = self.ring_at(i) + u64::from(COLUMNS);
                    Scores::stored(load_quad(projections.state, at))
                }
            }
        }
    }

    /// Prefetches `columns` scores of the first token from the ring into the L2 cache.
    ///
    /// # Safety
    /// The slot and the columns exist; `columns` is a multiple of 4.
    #[inline(always)]
    pub unsafe fn prefetch_scores(self, columns: u32) {
        let at = self.start + u64::from(COLUMNS);
        // SAFETY: in a row of the slot's ring.
        unsafe { self.projections.state.prefetch_l2(at, 4 * columns) }
    }

    /// [`Self::prefetch_scores`] for the keys.
    ///
    /// # Safety
    /// As [`Self::prefetch_scores`].
    #[inline(always)]
    pub unsafe fn prefetch_keys(self, columns: u32) {
        // SAFETY: in a row of the slot's ring.
        unsafe { self.projections.state.prefetch_l2(self.start, 4 * columns) }
    }

    /// Row of token `i` in the step, if it is in the step.
    #[inline(always)]
    fn row_of_step(self, i: u32) -> Option<u32> {
        let back = self.back - i;
        (back <= self.closing.index).then(|| self.closing.token - back)
    }

    #[inline(always)]
    fn ring_at(self, i: u32) -> u64 {
        let start = if i < self.wrap { self.start } else { self.start_behind_wrap };
        start.wrapping_add(u64::from(i * 2 * COLUMNS))
    }
}

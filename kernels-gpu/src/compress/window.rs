//! Where the rows of a window are, with little to compute for each: its first row is found once.

use simt::mem::Global;

use super::{Closing, Projections, Scores, load_quad};

/// The tokens that one entry is made of, the closing one last.
#[derive(Clone, Copy)]
pub struct Window<const COLUMNS: u32> {
    projections: Projections<COLUMNS>,
    closing: Closing,
    /// How many they are.
    tokens: u32,
    /// The row of the first token in its request's ring.
    first_row: u32,
    /// Where that ring starts.
    ring_start: u64,
}

impl<const COLUMNS: u32> Window<COLUMNS> {
    /// The last `tokens` tokens up to the closing one; a ring has room for them.
    #[inline(always)]
    #[must_use]
    pub fn new(projections: Projections<COLUMNS>, closing: Closing, tokens: u32) -> Self {
        let ring = projections.ring;
        let behind = closing.position % ring + 1;
        let first_row = if behind >= tokens { behind - tokens } else { behind + ring - tokens };
        let rows = u64::from(closing.slot) * u64::from(ring);
        let ring_start = rows * u64::from(2 * COLUMNS);
        Self { projections, closing, tokens, first_row, ring_start }
    }

    /// Where columns `column..column + 4` of the keys of `token` are: tensor and element.
    #[inline(always)]
    #[must_use]
    pub fn keys_at(self, token: u32, column: u32) -> (Global<f32>, u64) {
        match self.row_of_step(token) {
            Some(row) => (self.projections.kv, self.projections.step_at(row, column)),
            None => (self.projections.state, self.ring_at(token, column)),
        }
    }

    /// Scores of the same columns and token.
    ///
    /// # Safety
    /// The token is in the step or in the ring; `column` is a multiple of 4 below `COLUMNS`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn scores(self, token: u32, column: u32) -> Scores {
        let Self { projections, closing, tokens, .. } = self;
        // SAFETY: a row of the step (the closing token's own or one of the `index` before it in its
        // request), or the scores of a row of the slot's ring, which follow the keys.
        unsafe {
            match self.row_of_step(token) {
                Some(row) => {
                    let gate = load_quad(projections.gate, projections.step_at(row, column));
                    let position = closing.position + 1 - tokens + token;
                    Scores::of_gate(gate, projections.bias(position, column))
                }
                None => {
                    let at = self.ring_at(token, column) + u64::from(COLUMNS);
                    Scores::stored(load_quad(projections.state, at))
                }
            }
        }
    }

    /// The token's row in the step, if it is there.
    #[inline(always)]
    fn row_of_step(self, token: u32) -> Option<u32> {
        let back = self.tokens - 1 - token;
        (back <= self.closing.index).then(|| self.closing.token - back)
    }

    #[inline(always)]
    fn ring_at(self, token: u32, column: u32) -> u64 {
        let (row, ring) = (self.first_row + token, self.projections.ring);
        let row = if row < ring { row } else { row - ring };
        self.ring_start + u64::from(row) * u64::from(2 * COLUMNS) + u64::from(column)
    }
}

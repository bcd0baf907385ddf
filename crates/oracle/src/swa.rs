//! The sliding window: the positions that a query sees, the contents of a ring, and the gathered tile.

use std::ops::Range;

use crate::row::{CHANNELS, RowFormat};

/// Number of tokens that a query sees, including its own.
pub const WINDOW: usize = 128;

/// The positions that the query at `position` sees, oldest first.
#[must_use]
pub fn window(position: usize) -> Range<usize> {
    (position + 1).saturating_sub(WINDOW)..position + 1
}

/// The ring of one request: the position of the row in each ring slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    slots: Vec<Option<usize>>,
}

impl Ring {
    /// An empty ring of `rows` slots.
    #[must_use]
    pub fn new(rows: usize) -> Self {
        Self { slots: vec![None; rows] }
    }

    /// Writes the tokens of a step, one by one in the order of their positions.
    ///
    /// A later token replaces an earlier one in the same ring slot. After a step that is longer than the ring, only the
    /// last tokens are left.
    ///
    /// # Panics
    /// If the ring has no slots.
    pub fn write(&mut self, positions: Range<usize>) {
        for position in positions {
            let slot = self.slot(position);
            self.slots[slot] = Some(position);
        }
    }

    /// The ring slot of a position.
    #[must_use]
    pub fn slot(&self, position: usize) -> usize {
        position % self.slots.len()
    }

    /// The position in each ring slot; `None` if the slot was never written.
    #[must_use]
    pub fn slots(&self) -> &[Option<usize>] {
        &self.slots
    }

    /// Whether the row of `position` is still there.
    #[must_use]
    pub fn holds(&self, position: usize) -> bool {
        self.slots[self.slot(position)] == Some(position)
    }
}

/// The result of `gather_swa` for the query at `position`, computed from the token history alone: the tile `[128, 512]`
/// BF16 bits, oldest key first, with unused rows zero; and the number of rows in use.
///
/// `history[p]` is the row of position `p`, `[512]` BF16 bits. Every key goes through the cache's quantisation, whether
/// it comes from the ring or from the step itself.
///
/// # Panics
/// If the history does not reach `position`.
#[must_use]
pub fn gather(format: RowFormat, history: &[Vec<u16>], position: usize) -> (Vec<u16>, usize) {
    let keys = window(position);
    let length = keys.len();
    let mut tile: Vec<u16> =
        history[keys].iter().flat_map(|row| format.decode(&format.encode(row))).collect();
    tile.resize(WINDOW * CHANNELS, 0);
    (tile, length)
}

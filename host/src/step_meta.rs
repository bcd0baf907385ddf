//! StepMeta: what the kernels of one step must know, as one array of `i32` that one copy sends to
//! the device (decision D5).
//!
//! Five sections have one entry a token, tokens of a request adjacent and in order; entries past the
//! step's tokens are padding: slot -1, row -1. Two more have one entry a block that the step was given.
//! Sections follow each other without a gap, so that the array is as long as the step needs: a
//! [`StepLayout`] for its tokens, or for those of its bucket, and its new blocks.

use std::ops::Range;

use kv_layout::geometry::BLOCK_TOKENS;
use kv_layout::main_row::ring_row;
use serde::Serialize;

use crate::ids::SlotId;

/// Padding, and "nothing to write".
pub const NONE: i32 = -1;

/// A section of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Absolute position of the token.
    Position,
    /// Slot of its request.
    Slot,
    /// Tokens of the same request that precede it in the step.
    Index,
    /// Tokens of the same request that follow it in the step.
    Remaining,
    /// Row of the sliding-window ring planes it is written to.
    RingRow,
    /// Element of the block table that a new block goes to.
    TableIndex,
    /// The new block.
    TableBlock,
}

/// Where the sections of one step are. Token sections come first, so that where they are depends on the
/// number of tokens alone: a captured graph finds them in every step of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepLayout {
    tokens: u32,
    updates: u32,
}

impl StepLayout {
    /// Sections with one entry a token; they come first.
    const TOKEN_SECTIONS: usize = Section::RingRow as usize + 1;
    /// Sections with one entry a new block.
    const UPDATE_SECTIONS: usize = 2;

    /// The layout of a step of `tokens` tokens, padding included, that is given `new_blocks` blocks; sections
    /// are aligned to 16 bytes.
    #[must_use]
    pub const fn new(tokens: u32, new_blocks: u32) -> Self {
        Self { tokens: tokens.next_multiple_of(4), updates: new_blocks.next_multiple_of(4) }
    }

    /// The largest layout of steps of up to `tokens` tokens of up to `requests` requests.
    #[must_use]
    pub const fn largest(tokens: u32, requests: u32) -> Self {
        // A request of n tokens needs at most one block more than n / 128.
        Self::new(tokens, tokens / BLOCK_TOKENS + requests)
    }

    /// Entries of a section, padding included.
    #[must_use]
    pub const fn capacity(self, section: Section) -> u32 {
        if (section as usize) < Self::TOKEN_SECTIONS { self.tokens } else { self.updates }
    }

    /// Elements of the whole array.
    #[must_use]
    pub const fn elements(self) -> usize {
        Self::TOKEN_SECTIONS * self.tokens as usize + Self::UPDATE_SECTIONS * self.updates as usize
    }

    /// A section's elements.
    #[must_use]
    pub const fn range(self, section: Section) -> Range<usize> {
        let index = section as usize;
        let (start, len) = if index < Self::TOKEN_SECTIONS {
            (index * self.tokens as usize, self.tokens)
        } else {
            let before = (index - Self::TOKEN_SECTIONS) * self.updates as usize;
            (Self::TOKEN_SECTIONS * self.tokens as usize + before, self.updates)
        };
        start..start + len as usize
    }
}

/// The tokens that one request adds in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The request's slot.
    pub slot: SlotId,
    /// Positions of its tokens, `start..end`.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
}

/// Writes the token sections of `layout` for `chunks`, padding included; returns the number of tokens.
/// The rest of `array` is left as it is.
///
/// `ring` is the rows of a slot's ring. Of a chunk longer than that only the last `ring` tokens are
/// written: earlier ones would share a row with later ones.
///
/// # Panics
/// If `array` is shorter than the layout, or the chunks have more tokens than its capacity.
pub fn fill(
    array: &mut [i32],
    layout: StepLayout,
    ring: u32,
    chunks: impl Iterator<Item = Chunk>,
) -> u32 {
    let mut sections = array.chunks_exact_mut(layout.tokens.max(1) as usize);
    let mut next = || sections.next().unwrap_or_default();
    let (position, slot, index) = (next(), next(), next());
    let (remaining, row) = (next(), next());
    let mut token = 0;
    for chunk in chunks {
        let tokens = (chunk.end - chunk.start) as usize;
        let span: Range<usize> = token..token + tokens;
        slot[span.clone()].fill(chunk.slot.0 as i32);
        for (i, at) in span.enumerate() {
            let p = chunk.start + i as u32;
            position[at] = p as i32;
            index[at] = i as i32;
            remaining[at] = (chunk.end - 1 - p) as i32;
            row[at] =
                if chunk.end - p <= ring { ring_row(chunk.slot.0, ring, p) as i32 } else { NONE };
        }
        token += tokens;
    }
    position[token..].fill(0);
    slot[token..].fill(NONE);
    index[token..].fill(0);
    remaining[token..].fill(0);
    row[token..].fill(NONE);
    token as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(array: &[i32], layout: StepLayout, section: Section) -> &[i32] {
        &array[layout.range(section)]
    }

    #[test]
    fn chunks_are_laid_out_in_order_and_padded() {
        let layout = StepLayout::new(6, 2);
        assert_eq!(layout.capacity(Section::Slot), 8);
        assert_eq!(layout.elements(), 48);
        assert_eq!(layout.range(Section::TableIndex), 40..44);
        let mut array = vec![7; layout.elements()];
        let chunks = [
            Chunk { slot: SlotId(2), start: 127, end: 130 },
            Chunk { slot: SlotId(0), start: 5, end: 6 },
        ];
        assert_eq!(fill(&mut array, layout, 128, chunks.into_iter()), 4);
        assert_eq!(section(&array, layout, Section::Position), [127, 128, 129, 5, 0, 0, 0, 0]);
        assert_eq!(section(&array, layout, Section::Slot), [2, 2, 2, 0, -1, -1, -1, -1]);
        assert_eq!(section(&array, layout, Section::Index), [0, 1, 2, 0, 0, 0, 0, 0]);
        assert_eq!(section(&array, layout, Section::Remaining), [2, 1, 0, 0, 0, 0, 0, 0]);
        let rows = [256 + 127, 256, 257, 5, -1, -1, -1, -1];
        assert_eq!(section(&array, layout, Section::RingRow), rows);
    }

    /// A layout is as long as its step, and the largest has room for every step.
    #[test]
    fn a_layout_is_as_long_as_its_step() {
        assert_eq!(StepLayout::new(0, 0).elements(), 0);
        assert_eq!(StepLayout::new(32, 0).elements(), 5 * 32);
        assert_eq!(StepLayout::new(33, 3).elements(), 5 * 36 + 2 * 4);
        let largest = StepLayout::largest(8192, 256);
        assert_eq!(largest, StepLayout::new(8192, 64 + 256));
        for (tokens, new_blocks) in [(1, 1), (256, 256), (8192, 64 + 256)] {
            assert!(StepLayout::new(tokens, new_blocks).elements() <= largest.elements());
        }
    }

    /// What lies behind the token sections belongs to others.
    #[test]
    fn nothing_behind_the_sections_is_written() {
        let layout = StepLayout::new(1, 0);
        let mut array = vec![7; 100];
        let chunk = Chunk { slot: SlotId(0), start: 0, end: 1 };
        fill(&mut array, layout, 128, [chunk].into_iter());
        assert!(array[layout.elements()..].iter().all(|&word| word == 7));
    }

    #[test]
    fn only_the_last_ring_of_a_chunk_is_written() {
        let layout = StepLayout::new(300, 1);
        let mut array = vec![0; layout.elements()];
        let chunk = Chunk { slot: SlotId(0), start: 10, end: 310 };
        fill(&mut array, layout, 128, [chunk].into_iter());
        let rows = section(&array, layout, Section::RingRow);
        assert!(rows[..172].iter().all(|&row| row == NONE));
        let mut kept = rows[172..300].to_vec();
        kept.sort_unstable();
        assert!(kept.into_iter().eq(0..128), "each row of the ring exactly once");
    }
}

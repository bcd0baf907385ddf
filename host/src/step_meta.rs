//! StepMeta: the metadata that the kernels of one step need, as one array of `i32` that one copy
//! sends to the device (decision D5).
//!
//! | section | elements |
//! |---|---|
//! | position, slot, index, remaining, ring row; with checkpoints also checkpoint row | tokens of the step, or of its bucket |
//! | table index, table block | new blocks of the step |
//! | copies, with checkpoints | four for each copy from a ring to a checkpoint |
//!
//! The tokens of a request are adjacent and in order. Elements after the step's tokens are padding: slot -1, row -1.
//! Each section is padded to 16 bytes. [`StepLayout`] gives the offsets.

use std::ops::Range;

use kernels_gpu::params::CopyStateParams;
use kv_layout::geometry::BLOCK_TOKENS;
use serde::Serialize;

use crate::ids::SlotId;
use crate::ops::JobWords;

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
    /// Row that it has in a checkpoint: `128 * checkpoint + row`, with `row` 0 to 127; -1 = none. Only of steps that may save.
    CheckpointRow,
    /// Element of the block table that a new block goes to.
    TableIndex,
    /// The new block.
    TableBlock,
    /// Rows that go from rings to checkpoints before the step overwrites them: four numbers each, as
    /// [`crate::ops::CheckpointCopy::words`].
    Copies,
}

impl Section {
    /// All sections, in the order of the array.
    pub const ALL: [Self; 9] = [
        Self::Position,
        Self::Slot,
        Self::Index,
        Self::Remaining,
        Self::RingRow,
        Self::CheckpointRow,
        Self::TableIndex,
        Self::TableBlock,
        Self::Copies,
    ];
}

/// The layout of the sections of one step. Token sections come first, so that their places depend only
/// on the number of tokens: a captured graph finds them in every step of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepLayout {
    tokens: u32,
    updates: u32,
    /// Whether tokens may have rows in checkpoints.
    saves: bool,
    /// Number of copies before the step.
    copies: u32,
}

impl StepLayout {
    /// Number of sections with one element per new block.
    const UPDATE_SECTIONS: usize = 2;

    /// The layout of a step of `tokens` tokens, padding included, that is given `new_blocks` blocks; sections
    /// are aligned to 16 bytes.
    ///
    /// # Panics
    /// Above `u32::MAX - 3` of either, in a build that checks for overflow.
    #[must_use]
    pub const fn new(tokens: u32, new_blocks: u32) -> Self {
        let (tokens, updates) = (tokens.next_multiple_of(4), new_blocks.next_multiple_of(4));
        Self { tokens, updates, saves: false, copies: 0 }
    }

    /// The same layout for a step that may write checkpoints, with `copies` copies before it.
    #[must_use]
    pub const fn saving(self, copies: u32) -> Self {
        Self { saves: true, copies, ..self }
    }

    /// Number of sections with one element per token; they come first.
    const fn token_sections(self) -> usize {
        Section::RingRow as usize + 1 + self.saves as usize
    }

    /// The largest layout of steps of up to `tokens` tokens of up to `requests` requests.
    #[must_use]
    pub const fn largest(tokens: u32, requests: u32) -> Self {
        // A request of n tokens needs at most one block more than n / 128.
        Self::new(tokens, tokens / BLOCK_TOKENS + requests)
    }

    /// Elements of a section, padding included.
    #[must_use]
    pub const fn capacity(self, section: Section) -> u32 {
        match section {
            Section::CheckpointRow if !self.saves => 0,
            Section::TableIndex | Section::TableBlock => self.updates,
            Section::Copies => CopyStateParams::JOB * self.copies,
            _ => self.tokens,
        }
    }

    /// Elements of the whole array.
    #[must_use]
    pub const fn elements(self) -> usize {
        self.range(Section::Copies).end
    }

    /// A section's elements.
    #[must_use]
    pub const fn range(self, section: Section) -> Range<usize> {
        let updates = self.token_sections() * self.tokens as usize;
        let start = match section {
            Section::TableIndex => updates,
            Section::TableBlock => updates + self.updates as usize,
            Section::Copies => updates + Self::UPDATE_SECTIONS * self.updates as usize,
            of_tokens => of_tokens as usize * self.tokens as usize,
        };
        start..start + self.capacity(section) as usize
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

/// Rows of a checkpoint that a step writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedRows {
    /// The step's token that has the first of them; the others follow.
    pub token: u32,
    /// The first row: `128 * checkpoint + row`, with `row` 0 to 127.
    pub row: u32,
    /// Number of rows.
    pub rows: u32,
}

/// Writes the checkpoint rows of tokens (-1 for tokens without one), and the copies before the step, if `layout` has
/// these sections.
///
/// # Panics
/// If `array` is shorter than the layout, or if the layout has too few tokens.
pub fn fill_saves(
    array: &mut [i32],
    layout: StepLayout,
    saved: impl Iterator<Item = SavedRows>,
    copies: impl Iterator<Item = JobWords>,
) {
    let rows = &mut array[layout.range(Section::CheckpointRow)];
    rows.fill(NONE);
    for SavedRows { token, row, rows: count } in saved {
        let tokens = &mut rows[token as usize..][..count as usize];
        tokens.iter_mut().zip(row..).for_each(|(word, row)| *word = row as i32);
    }
    let words = array[layout.range(Section::Copies)].as_chunks_mut().0;
    words.iter_mut().zip(copies).for_each(|(words, copy)| *words = copy);
}

/// Writes the token sections of `layout` for `chunks`, padding included, except for rows in checkpoints; returns the
/// number of tokens. The rest of `array` is left as it is.
///
/// `ring` is the rows of a slot's ring. Of a chunk longer than that only the last `ring` tokens are
/// written: earlier ones would share a row with later ones.
///
/// # Panics
/// If `array` is shorter than the layout, the chunks have more tokens than its capacity or end before they start, or `ring` is 0.
pub fn fill(
    array: &mut [i32],
    layout: StepLayout,
    ring: u32,
    chunks: impl Iterator<Item = Chunk>,
) -> u32 {
    let (mut sections, ring) = (TokenSections::of(array, layout), Ring::new(ring));
    let (mut token, mut single) = (0, 0);
    for chunk in chunks {
        let tokens = (chunk.end - chunk.start) as usize;
        if tokens == 1 {
            sections.fill_single(token, ring, chunk);
        } else {
            sections.nothing_around(single..token);
            single = token + tokens;
            if tokens <= SHORT {
                sections.fill_short(token, ring, chunk);
            } else {
                sections.fill_long(token, ring, chunk);
            }
        }
        token += tokens;
    }
    sections.nothing_around(single..token);
    sections.pad(token);
    token as u32
}

/// Most tokens of a chunk that is written token by token. A longer chunk is written section by section,
/// each in one run of vector stores.
const SHORT: usize = 8;

/// The rows of the rings of all slots.
#[derive(Clone, Copy)]
struct Ring {
    /// Rows of one slot's ring.
    rows: u32,
    /// 2^64 / `rows`, rounded up.
    reciprocal: u64,
}

impl Ring {
    const fn new(rows: u32) -> Self {
        Self { rows, reciprocal: (u64::MAX / rows as u64).wrapping_add(1) }
    }

    /// [`kv_layout::main_row::ring_row`] by multiplications: one division per request would take a fifth of the
    /// time for the StepMeta of a decode step. The remainder is exact for all 32-bit numbers (D. Lemire, O. Kaser,
    /// N. Kurz, "Faster remainder by direct computation", 2019).
    const fn row(self, slot: u32, position: u32) -> u32 {
        let fraction = self.reciprocal.wrapping_mul(position as u64);
        slot * self.rows + ((fraction as u128 * self.rows as u128) >> u64::BITS) as u32
    }
}

/// The token sections, of equal length.
struct TokenSections<'a> {
    position: &'a mut [i32],
    slot: &'a mut [i32],
    index: &'a mut [i32],
    remaining: &'a mut [i32],
    row: &'a mut [i32],
}

impl<'a> TokenSections<'a> {
    fn of(array: &'a mut [i32], layout: StepLayout) -> Self {
        let mut rest = array;
        let mut next = || {
            let (section, behind) = std::mem::take(&mut rest).split_at_mut(layout.tokens as usize);
            rest = behind;
            section
        };
        let (position, slot, index) = (next(), next(), next());
        let (remaining, row) = (next(), next());
        Self { position, slot, index, remaining, row }
    }

    /// Writes a chunk of one token to token `at`, except for its index and remaining tokens, which
    /// [`Self::nothing_around`] writes.
    #[inline]
    fn fill_single(&mut self, at: usize, ring: Ring, chunk: Chunk) {
        let Chunk { slot: SlotId(slot), start, .. } = chunk;
        self.position[at] = start as i32;
        self.slot[at] = slot as i32;
        self.row[at] = ring.row(slot, start) as i32;
    }

    /// Writes index and remaining tokens, both 0, of the tokens in `span`, each of which is the only token of
    /// its request. One call does so for all tokens of a decode step.
    fn nothing_around(&mut self, span: Range<usize>) {
        self.index[span.clone()].fill(0);
        self.remaining[span].fill(0);
    }

    /// Writes a chunk to tokens `first..`.
    #[inline]
    fn fill_short(&mut self, first: usize, ring: Ring, chunk: Chunk) {
        let Chunk { slot: SlotId(slot), start, end } = chunk;
        let Self { position, slot: slots, index, remaining, row } = self;
        let len = position.len();
        // Equal lengths, checked once here, so that the stores need no bounds checks.
        let (slots, index) = (&mut slots[..len], &mut index[..len]);
        let (remaining, row) = (&mut remaining[..len], &mut row[..len]);
        let mut place = ring.row(slot, start);
        let (first_row, behind) = (slot * ring.rows, (slot + 1) * ring.rows);
        for (at, p) in (first..len).zip(start..end) {
            position[at] = p as i32;
            slots[at] = slot as i32;
            index[at] = (p - start) as i32;
            remaining[at] = (end - 1 - p) as i32;
            row[at] = if end - p <= ring.rows { place as i32 } else { NONE };
            place = if place + 1 == behind { first_row } else { place + 1 };
        }
    }

    /// As [`Self::fill_short`].
    fn fill_long(&mut self, first: usize, ring: Ring, chunk: Chunk) {
        let Chunk { slot: SlotId(slot), start, end } = chunk;
        let span = first..first + (end - start) as usize;
        let upwards = |section: &mut [i32], from: u32| {
            section.iter_mut().zip(from..).for_each(|(word, value)| *word = value as i32);
        };
        upwards(&mut self.position[span.clone()], start);
        self.slot[span.clone()].fill(slot as i32);
        upwards(&mut self.index[span.clone()], 0);
        let downwards = self.remaining[span.clone()].iter_mut().zip((0..end - start).rev());
        downwards.for_each(|(word, value)| *word = value as i32);
        let written = (end - start).min(ring.rows);
        let (lost, kept) = self.row[span].split_at_mut((end - start - written) as usize);
        lost.fill(NONE);
        // The rows wrap at most once: to the end of the ring, then from its beginning.
        let place = ring.row(slot, end - written);
        let (to_end, wrapped) =
            kept.split_at_mut(written.min((slot + 1) * ring.rows - place) as usize);
        upwards(to_end, place);
        upwards(wrapped, slot * ring.rows);
    }

    /// Marks the tokens from `first` on as padding.
    fn pad(&mut self, first: usize) {
        let Self { position, slot, index, remaining, row } = self;
        for section in [position, index, remaining] {
            section[first..].fill(0);
        }
        slot[first..].fill(NONE);
        row[first..].fill(NONE);
    }
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

    /// A step that may write checkpoints has one more section, and its copies after all others.
    #[test]
    fn a_step_that_saves_names_rows_and_copies() {
        let layout = StepLayout::new(6, 2).saving(2);
        assert_eq!(layout.range(Section::RingRow), StepLayout::new(6, 2).range(Section::RingRow));
        assert_eq!(layout.range(Section::CheckpointRow), 40..48);
        assert_eq!(layout.range(Section::TableIndex), 48..52);
        assert_eq!(layout.range(Section::Copies), 56..64);
        assert_eq!(layout.elements(), 64);
        let mut array = vec![7; 64];
        let saved = SavedRows { token: 1, row: 3 * 128 + 126, rows: 2 };
        fill_saves(&mut array, layout, [saved].into_iter(), [[1, 2, 3, 4], [5; 4]].into_iter());
        let rows = section(&array, layout, Section::CheckpointRow);
        assert_eq!(rows, [-1, 510, 511, -1, -1, -1, -1, -1]);
        assert_eq!(section(&array, layout, Section::Copies), [1, 2, 3, 4, 5, 5, 5, 5]);
        assert!(array[..40].iter().chain(&array[48..56]).all(|&word| word == 7));
    }

    /// Elements after the token sections belong to other writers.
    #[test]
    fn nothing_behind_the_sections_is_written() {
        let layout = StepLayout::new(1, 0);
        let mut array = vec![7; 100];
        let chunk = Chunk { slot: SlotId(0), start: 0, end: 1 };
        fill(&mut array, layout, 128, [chunk].into_iter());
        assert!(array[layout.elements()..].iter().all(|&word| word == 7));
    }

    #[test]
    fn rows_are_those_of_the_layout() {
        for rows in (1..=255).chain([1023, 65_535]) {
            let ring = Ring::new(rows);
            let near = |multiple: u32| (multiple.saturating_sub(2)..).take(5);
            let positions = (0..1000).flat_map(|n| near((1_u32 << 20) / 1000 * n / rows * rows));
            for position in positions.chain((u32::MAX - 1000)..=u32::MAX) {
                let want = kv_layout::main_row::ring_row(3, rows, position);
                assert_eq!(u64::from(ring.row(3, position)), want, "{position} in {rows} rows");
            }
        }
    }

    /// Chunks of every length give each token the values that follow from its position and its request.
    #[test]
    fn short_and_long_chunks_say_the_same() {
        for ring in [128, 132] {
            for (start, tokens) in (0..300).map(|n| (7 * n, 1 + n)) {
                let chunks = [
                    Chunk { slot: SlotId(3), start: 5, end: 7 },
                    Chunk { slot: SlotId(1), start, end: start + tokens },
                ];
                let layout = StepLayout::new(tokens + 2, 0);
                let mut array = vec![7; layout.elements()];
                assert_eq!(fill(&mut array, layout, ring, chunks.into_iter()), tokens + 2);
                for at in 0..tokens {
                    let (p, after) = (start + at, tokens - 1 - at);
                    let row = if after < ring { (ring + p % ring) as i32 } else { NONE };
                    let want = [p as i32, 1, at as i32, after as i32, row];
                    let got = array.chunks(layout.capacity(Section::Slot) as usize);
                    let got: Vec<_> = got.map(|section| section[at as usize + 2]).collect();
                    assert_eq!(
                        got, want,
                        "token {at} of {tokens} from {start} in a ring of {ring}"
                    );
                }
            }
        }
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

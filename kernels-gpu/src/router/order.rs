//! The order in which the products of a logit are added. It is the same in all kernels, so that a token's logits have
//! the same bits in every batch.
//!
//! The hidden state is cut into chunks of `DEPTH` elements. Consecutive chunks form eight slices, and the chunks of
//! each slice eight consecutive parts. A tensor core adds the products of a part to 0, chunk after chunk. Then the
//! parts of a slice are added to 0 in order. Then the first four slices are added to 0 in order, and likewise the last
//! four, and these two sums are added. A part without a chunk is 0, which changes no sum.

use kv_layout::router::DECODE_SLICES;

use crate::fragment::DEPTH;

/// Number of parts of a slice.
pub const PARTS: u32 = 8;

/// The chunks of a slice: from the first to one past the last.
#[derive(Clone, Copy)]
pub struct Slice {
    /// The first chunk.
    pub from: u32,
    /// One past the last chunk.
    pub to: u32,
}

impl Slice {
    /// Slice `rank` of a hidden state of `hidden` elements, a multiple of `DEPTH`.
    #[inline(always)]
    #[must_use]
    pub fn of(rank: u32, hidden: u32) -> Self {
        let chunks = hidden / DEPTH;
        Self { from: rank * chunks / DECODE_SLICES, to: (rank + 1) * chunks / DECODE_SLICES }
    }

    /// The first chunk of part `part`; of part [`PARTS`], one past the last chunk.
    #[inline(always)]
    #[must_use]
    pub fn part(self, part: u32) -> u32 {
        self.from + part * (self.to - self.from) / PARTS
    }
}

/// The sum over all slices, where `of` gives the sum of a slice.
#[inline(always)]
#[must_use]
pub fn add_slices(of: impl Fn(u32) -> f32) -> f32 {
    let half = |a, b, c, d| (((0.0 + of(a)) + of(b)) + of(c)) + of(d);
    half(0, 1, 2, 3) + half(4, 5, 6, 7)
}

const _: () = assert!(DECODE_SLICES == 8);

#[cfg(test)]
mod tests {
    use super::*;

    /// The slices of a hidden state, and the parts of a slice, follow each other without a gap.
    #[test]
    fn slices_and_parts_are_the_whole() {
        for chunks in 0..300 {
            let mut next = 0;
            for slice in (0..DECODE_SLICES).map(|rank| Slice::of(rank, chunks * DEPTH)) {
                assert_eq!((slice.from, slice.part(0), slice.part(PARTS)), (next, next, slice.to));
                assert!((0..PARTS).all(|part| slice.part(part) <= slice.part(part + 1)));
                next = slice.to;
            }
            assert_eq!(next, chunks);
        }
    }
}

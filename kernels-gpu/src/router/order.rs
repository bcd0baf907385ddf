//! The order in which the products of a logit are added. It is one for all kernels, so that a token's logits
//! have the same bits in every batch.
//!
//! The hidden state is cut into chunks of [`DEPTH`] elements, and the chunks into eight slices. The chunks of a
//! slice go to eight parts by turns: part `i` has chunks `i`, `i + 8`, .. of the slice. A tensor core adds the
//! products of a part, chunk after chunk, to 0. Then the parts of a slice are added in order to 0, and then the
//! slices. A part without a chunk is 0, which changes no sum.

use kv_layout::router::DECODE_SLICES;

use crate::fragment::DEPTH;

/// Parts of a slice.
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
    /// Slice `rank` of a hidden state of `hidden` elements, a multiple of [`DEPTH`].
    #[inline(always)]
    #[must_use]
    pub fn of(rank: u32, hidden: u32) -> Self {
        let chunks = hidden / DEPTH;
        Self { from: rank * chunks / DECODE_SLICES, to: (rank + 1) * chunks / DECODE_SLICES }
    }
}

/// The chunks of a slice one by one: those of its first part, then those of the second, ..
#[derive(Clone, Copy)]
pub struct Walk {
    slice: Slice,
    part: u32,
    /// The chunk, or `slice.to` past the last.
    pub chunk: u32,
}

impl Walk {
    /// At the first chunk.
    #[inline(always)]
    #[must_use]
    pub fn new(slice: Slice) -> Self {
        Self { slice, part: 0, chunk: slice.from }
    }

    /// Whether there is a chunk here.
    #[inline(always)]
    #[must_use]
    pub fn exists(self) -> bool {
        self.chunk < self.slice.to
    }

    /// Whether this chunk is the last one of its part.
    #[inline(always)]
    #[must_use]
    pub fn ends_part(self) -> bool {
        self.chunk + PARTS >= self.slice.to
    }

    /// At the next chunk.
    #[inline(always)]
    #[must_use]
    pub fn next(self) -> Self {
        let Self { slice, part, chunk } = self;
        if !self.ends_part() {
            return Self { chunk: chunk + PARTS, ..self };
        }
        let part = part + 1;
        let first = if part < PARTS { slice.from + part } else { slice.to };
        Self { slice, part, chunk: first.min(slice.to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every chunk of every width comes once, and the parts one after the other.
    #[test]
    fn a_walk_takes_every_chunk_part_by_part() {
        for chunks in 0..300 {
            let mut next = 0;
            for rank in 0..DECODE_SLICES {
                let slice = Slice::of(rank, chunks * DEPTH);
                assert_eq!(slice.from, next);
                next = slice.to;
                let mut walk = Walk::new(slice);
                for part in 0..PARTS {
                    for chunk in (slice.from + part..slice.to).step_by(PARTS as usize) {
                        assert!(walk.exists());
                        assert_eq!(walk.chunk, chunk);
                        assert_eq!(walk.ends_part(), chunk + PARTS >= slice.to);
                        walk = walk.next();
                    }
                }
                assert!(!walk.exists() && !walk.next().exists());
            }
            assert_eq!(next, chunks);
        }
    }
}

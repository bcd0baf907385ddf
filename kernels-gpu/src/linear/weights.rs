//! Weights as a lane of a product takes them.

use kv_layout::linear::GROUP;
use simt::mem::Global;

use crate::convert::{E2M1_BITS_LOG2, bf16x8_from_e2m1, f32x4_from_e4m3};
use crate::fragment::Piece;

/// Elements of a row that a lane takes at once: four pieces of eight.
pub const RUN: u32 = 32;
/// Pieces of a row that the four lanes of a row of a fragment take together.
pub const CHUNK_PIECES: u32 = 16;

/// A weight, `[columns, inner]`: a row a column of the product.
pub trait Weights: Copy {
    /// The lane's elements of one row and chunk.
    type Run: Copy;
    /// What sums are still to be multiplied by.
    const UNIT: f32;

    /// The lane's elements of chunk `chunk` of row `row`; zeros where the row has ended. Lane `t` of four.
    ///
    /// # Safety
    /// The row exists.
    unsafe fn load(self, row: u32, chunk: u32, t: u32) -> Self::Run;

    /// Prefetches `rows` rows from row `first` on, a multiple of 64.
    ///
    /// # Safety
    /// The rows exist.
    unsafe fn prefetch(self, first: u32, rows: u32);

    /// Piece `PIECE` of four as BF16 pairs.
    fn piece<const PIECE: usize>(run: Self::Run) -> Piece;

    /// The lane and the piece of its run that take piece `piece` of a chunk.
    fn place(piece: u32) -> (u32, u32);
}

/// BF16.
#[derive(Clone, Copy)]
pub struct Bf16Weights {
    /// `[columns, inner]`.
    pub values: Global<u16>,
    /// Elements of a row, a multiple of [`RUN`].
    pub inner: u32,
}

impl Weights for Bf16Weights {
    type Run = [Piece; 4];
    const UNIT: f32 = 1.0;

    #[inline(always)]
    unsafe fn load(self, row: u32, chunk: u32, t: u32) -> [Piece; 4] {
        [0, 1, 2, 3].map(|piece| {
            let k = 8 * (chunk * CHUNK_PIECES + 4 * piece + t);
            if k >= self.inner {
                return [0; 4];
            }
            let at = u64::from(row) * u64::from(self.inner) + u64::from(k);
            // SAFETY: eight elements of the row, at a multiple of eight.
            unsafe { self.values.load_u32x4(at) }
        })
    }

    #[inline(always)]
    unsafe fn prefetch(self, first: u32, rows: u32) {
        // SAFETY: rows of a multiple of 64 bytes.
        unsafe {
            self.values.prefetch_l2(u64::from(first) * u64::from(self.inner), 2 * rows * self.inner)
        }
    }

    #[inline(always)]
    fn piece<const PIECE: usize>(run: [Piece; 4]) -> Piece {
        run[PIECE]
    }

    /// Lanes take pieces by turns, so that their loads touch whole sectors.
    #[inline(always)]
    fn place(piece: u32) -> (u32, u32) {
        (piece % 4, piece / 4)
    }
}

/// NVFP4: E2M1 codes in the order of `kv_layout::linear::device_nibble`, and an E4M3 scale for each 16.
#[derive(Clone, Copy)]
pub struct Nvfp4Weights {
    /// `[columns, inner / 2]`.
    pub codes: Global<u8>,
    /// `[columns, inner / 16]`.
    pub scales: Global<u8>,
    /// Elements of a row, a multiple of [`RUN`].
    pub inner: u32,
}

/// The lane's codes, and two scales in the lowest bytes.
#[derive(Clone, Copy)]
pub struct Nvfp4Run {
    codes: Piece,
    scales: u32,
}

/// log2 of the factor by which values are too small: with all of [`E2M1_BITS_LOG2`] a large scale would overflow.
const SMALLER_LOG2: u32 = 8;

impl Weights for Nvfp4Weights {
    type Run = Nvfp4Run;
    const UNIT: f32 = (1 << SMALLER_LOG2) as f32;

    #[inline(always)]
    unsafe fn load(self, row: u32, chunk: u32, t: u32) -> Nvfp4Run {
        let k = chunk * 8 * CHUNK_PIECES + RUN * t;
        if k >= self.inner {
            return Nvfp4Run { codes: [0; 4], scales: 0 };
        }
        let at = u64::from(row) * u64::from(self.inner) + u64::from(k);
        // SAFETY: 32 codes of the row, which are 16 bytes at a multiple of 16, and their two scales.
        unsafe {
            Nvfp4Run {
                codes: self.codes.load_u32x4(at / 2),
                scales: self.scales.cast::<u16>().load(at / u64::from(2 * GROUP)).into(),
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(self, first: u32, rows: u32) {
        let at = u64::from(first) * u64::from(self.inner);
        let scales = rows * self.inner / GROUP / 16 * 16;
        // SAFETY: rows of a multiple of 16 bytes of codes; scales from a multiple of 128 bytes on.
        unsafe {
            self.codes.prefetch_l2(at / 2, rows * self.inner / 2);
            if scales > 0 {
                self.scales.prefetch_l2(at / u64::from(GROUP), scales);
            }
        }
    }

    /// E2M1 times E4M3 has six significant bits, so that BF16 holds the product exactly.
    #[inline(always)]
    fn piece<const PIECE: usize>(run: Nvfp4Run) -> Piece {
        const UNIT: f32 = f32::from_bits((E2M1_BITS_LOG2 - SMALLER_LOG2 + 127) << 23);
        let scale = f32x4_from_e4m3(run.scales)[PIECE / 2] * UNIT;
        let high = scale.to_bits() & 0xFFFF_0000;
        bf16x8_from_e2m1(run.codes[PIECE], high | high >> 16)
    }

    /// A lane takes four pieces in a row: one load.
    #[inline(always)]
    fn place(piece: u32) -> (u32, u32) {
        (piece / 4, piece % 4)
    }
}

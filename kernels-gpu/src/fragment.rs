//! Fragments of matrix products loaded directly from global memory. Both matrices are row-major, with the inner
//! index contiguous.
//!
//! With `g = lane / 4` and `t = lane % 4`, a lane loads the 8 elements from `8 t` on of row `g` of a
//! tile 32 elements wide, in one vector. Two products consume them: the first takes elements 0, 1 of
//! each lane as the fragment's columns `2 t`, `2 t + 1` and elements 2, 3 as its columns `2 t + 8`,
//! `2 t + 9`; the second takes elements 4 to 7 in the same way. This permutes the inner index, equally for both
//! matrices, which does not change the product.

use simt::mem::Global;
use simt::mma::bf16_m16n8k16;

use crate::unroll::array_from_fn;

/// Elements of the inner index in a tile: the four lanes of a row load 8 each.
pub const DEPTH: u32 = 32;

/// A vector of 8 BF16 of a row.
pub type Piece = [u32; 4];

/// The row and the columns of a lane in a tile.
#[derive(Clone, Copy)]
pub struct LanePlace {
    /// Row of the tile: 0..8.
    pub row: u32,
    /// The lane's first column of a result is `2 * pair`; its first element of a row is `8 * pair`.
    pub pair: u32,
}

impl LanePlace {
    /// The place of lane `lane`.
    #[inline(always)]
    #[must_use]
    pub fn of(lane: u32) -> Self {
        Self { row: lane / 4, pair: lane % 4 }
    }

    /// The lane's piece of row `row` of `matrix` (`[.., width]` BF16) at inner index `depth`.
    ///
    /// # Safety
    /// The row exists, and so do [`DEPTH`] elements of it from `depth` on; `width` and `depth` are
    /// multiples of 8.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load(self, matrix: Global<u16>, width: u32, row: u32, depth: u32) -> Piece {
        let at = u64::from(row) * u64::from(width) + u64::from(depth + 8 * self.pair);
        // SAFETY: by this function's own contract.
        unsafe { matrix.load_u32x4(at) }
    }
}

/// Adds to `sum` (16 x 8) the product of 16 rows, of which the lane has pieces of `low` (row g) and
/// `high` (row g + 8), with 8 rows, of which it has `other`, over [`DEPTH`] elements.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn multiply(low: Piece, high: Piece, other: Piece, sum: [f32; 4]) -> [f32; 4] {
    // SAFETY: by this function's own contract.
    unsafe {
        let first = [low[0], high[0], low[1], high[1]];
        let sum = bf16_m16n8k16(first, [other[0], other[1]], sum);
        let second = [low[2], high[2], low[3], high[3]];
        bf16_m16n8k16(second, [other[2], other[3]], sum)
    }
}

/// The sums of two lists of fragments, element by element.
#[inline(always)]
#[must_use]
pub fn add<const N: usize>(a: [[f32; 4]; N], b: [[f32; 4]; N]) -> [[f32; 4]; N] {
    let four = |a: [f32; 4], b: [f32; 4]| [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]];
    array_from_fn(|n| four(a[n], b[n]))
}

/// Where the `eight`-th 8 bytes of [`DEPTH`] elements of a row go in shared memory, from which a product takes 32 bytes
/// of each row at a step: the 16 bytes, and the word of these. [`multiply`] takes the first halves of each 16 bytes
/// first, then the second ones; this place gives the same order.
#[inline(always)]
#[must_use]
pub const fn stage_place(eight: u32) -> (u32, u32) {
    let (sixteen, half) = (eight / 2, eight % 2);
    (2 * half + sixteen / 2, sixteen % 2 * 2)
}

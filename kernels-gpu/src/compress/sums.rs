//! Running sums: all the state that an HCA window needs of its tokens so far. See docs/specification.md, sections 5 and
//! 6.

use simt::math::mul_add;

use super::{Quad, load_quad};
use crate::math::exp_nonpositive;
use kv_layout::geometry::HEAD_DIM;
use simt::mem::{Global, GlobalMut};

/// The softmax-weighted mean of one channel of a window's tokens so far, as three numbers.
#[derive(Clone, Copy)]
pub struct Sums {
    /// The largest score.
    pub maximum: f32,
    /// The sum of the weights `exp(score - maximum)`.
    pub sum: f32,
    /// The sum of the weighted keys.
    pub weighted: f32,
}

impl Sums {
    /// The sums of no tokens.
    pub const EMPTY: Self = Self { maximum: f32::NEG_INFINITY, sum: 0.0, weighted: 0.0 };

    /// The sums with one more token.
    ///
    /// Either the sums so far or the new token keep their weight, and the other is scaled. This takes one exponential,
    /// and one rounding a sum. A NaN stays in the sums until the window ends.
    #[inline(always)]
    #[must_use]
    pub fn fold(self, score: f32, key: f32) -> Self {
        let Self { maximum, sum, weighted } = self;
        let is_larger = score > maximum;
        // The distance of equal infinities is 0, where the difference would be NaN.
        let distance = if score == maximum { 0.0 } else { (score - maximum).abs() };
        let factor = exp_nonpositive(-distance);
        let (scaled_sum, kept_sum) = if is_larger { (sum, 1.0) } else { (1.0, sum) };
        let (scaled, kept) = if is_larger { (weighted, key) } else { (key, weighted) };
        Self {
            maximum: if is_larger { score } else { maximum },
            sum: mul_add(scaled_sum, factor, kept_sum),
            weighted: mul_add(scaled, factor, kept),
        }
    }

    /// The weighted mean of the keys.
    #[inline(always)]
    #[must_use]
    pub fn mean(self) -> f32 {
        self.weighted / self.sum
    }
}

/// The sums of four channels.
pub type QuadSums = [Sums; 4];

/// The sums of four channels with one more token.
#[inline(always)]
#[must_use]
pub fn fold_quad(sums: QuadSums, score: Quad, key: Quad) -> QuadSums {
    let fold = |c: usize| sums[c].fold(score[c], key[c]);
    [fold(0), fold(1), fold(2), fold(3)]
}

/// Floats of a state row: `[maximum | sum | weighted]`, 512 channels each.
pub const ROW: u32 = 3 * HEAD_DIM;

/// The rows of running sums: one ring per request slot; the row of position `p` is `p mod ring`.
#[derive(Clone, Copy)]
pub struct SumRows {
    /// Rows of one request's ring.
    pub ring: u32,
}

impl SumRows {
    /// The first element of the row of `position` of the request in `slot`.
    #[inline(always)]
    #[must_use]
    pub fn at(self, slot: u32, position: u32) -> u64 {
        let row = u64::from(slot) * u64::from(self.ring) + u64::from(position % self.ring);
        row * u64::from(ROW)
    }
}

/// Loads the sums of channels `channel..channel + 4` of the row at element `row`.
///
/// # Safety
/// The row exists; `channel` is a multiple of 4 below 512.
#[inline(always)]
#[must_use]
pub unsafe fn load_sums(state: Global<f32>, row: u64, channel: u32) -> QuadSums {
    let at = row + u64::from(channel);
    // SAFETY: by this function's own contract.
    let part = |i: u32| unsafe { load_quad(state, at + u64::from(i * HEAD_DIM)) };
    let (maximum, sum, weighted) = (part(0), part(1), part(2));
    let sums = |c: usize| Sums { maximum: maximum[c], sum: sum[c], weighted: weighted[c] };
    [sums(0), sums(1), sums(2), sums(3)]
}

/// Stores the sums of channels `channel..channel + 4` in the row at element `row`.
///
/// # Safety
/// As [`load_sums`].
#[inline(always)]
pub unsafe fn store_sums(state: GlobalMut<f32>, row: u64, channel: u32, sums: QuadSums) {
    let at = row + u64::from(channel);
    // SAFETY: by this function's own contract.
    unsafe {
        state.store_u32x4(at, sums.map(|sums| sums.maximum.to_bits()));
        state.store_u32x4(at + u64::from(HEAD_DIM), sums.map(|sums| sums.sum.to_bits()));
        state.store_u32x4(at + u64::from(2 * HEAD_DIM), sums.map(|sums| sums.weighted.to_bits()));
    }
}

/// Prefetches the row at element `row` into the L2 cache.
///
/// # Safety
/// The row exists.
#[inline(always)]
pub unsafe fn prefetch_sums(state: Global<f32>, row: u64) {
    // SAFETY: by this function's own contract.
    unsafe { state.prefetch_l2(row, 4 * ROW) }
}

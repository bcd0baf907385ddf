//! Maps a score to a bin: bins have equal width over a range of scores.

use simt::math::{self, approx};

use crate::unroll::unroll;

/// Number of bins.
pub const BINS: u32 = 2048;

/// The range of finite scores; the lowest is above the highest if there are none.
#[derive(Clone, Copy)]
pub struct ScoreRange {
    /// The lowest.
    pub(super) low: f32,
    /// The highest.
    pub(super) high: f32,
}

impl ScoreRange {
    /// The range of no scores.
    pub const NONE: Self = Self { low: f32::INFINITY, high: f32::NEG_INFINITY };

    /// The range of `scores`.
    #[inline(always)]
    #[must_use]
    pub fn of<const N: usize>(scores: [f32; N]) -> Self {
        let mut extents: [Self; 2] = [Self::NONE; 2];
        unroll::<N>(|i| extents[i % 2] = extents[i % 2].with(scores[i]));
        let [a, b] = extents;
        Self { low: math::min(a.low, b.low), high: math::max(a.high, b.high) }
    }

    /// The part of the range from `bound` up.
    #[inline(always)]
    #[must_use]
    pub fn above(self, bound: f32) -> Self {
        Self { low: math::max(self.low, bound), ..self }
    }

    /// The range extended by a score.
    #[inline(always)]
    #[must_use]
    pub fn with(self, score: f32) -> Self {
        // Infinity times 0 is NaN, which `min` and `max` ignore.
        let finite = math::mul_add(score, 0.0, score);
        Self { low: math::min(self.low, finite), high: math::max(self.high, finite) }
    }
}

/// Bins of equal width from the highest score of a range down to the lowest. Scores above the range belong to
/// the first bin; scores below, and NaN, to the last.
#[derive(Clone, Copy)]
pub struct BinMap {
    high: f32,
    /// Bins in a distance of 1, times [`WIDTH`].
    scale: f32,
    /// The value to which a score of 0 is mapped.
    zero: f32,
    /// An upper bound on the width of a bin.
    bin: f32,
}

/// The value to which the highest score is mapped. From here on floats are one [`WIDTH`] apart, so that the bin is the
/// bits of the mapped score minus the bits of this value.
pub(super) const FIRST: f32 = 2.0;
/// The width of a bin after mapping.
const WIDTH: f32 = FIRST * f32::EPSILON;
/// The value to which the last bin is mapped.
const LAST: f32 = FIRST + (BINS - 1) as f32 * WIDTH;

impl BinMap {
    /// The bins of a range. If the range is empty, the last bin takes all scores but infinity.
    #[inline(always)]
    #[must_use]
    pub fn new(extent: ScoreRange) -> Self {
        // At least the distance of neighbouring floats at the highest score, so that `zero` stays finite.
        let apart = extent.high.abs() * (f32::EPSILON / 2.0);
        let width = math::max(extent.high - extent.low, apart);
        // A quarter of any finite width has a finite reciprocal. An approximation is enough: the list does not
        // depend on the borders of bins.
        let scale = BINS as f32 * WIDTH / 4.0 * approx::rcp_ftz(width / 4.0);
        // The scale is neither 0 nor infinite, so that no product with it is NaN.
        let scale = math::min(math::max(scale, f32::MIN_POSITIVE), f32::MAX);
        let zero = math::mul_add(extent.high, scale, FIRST);
        let bin = math::max(width / BINS as f32, f32::from_bits(1));
        Self { high: extent.high, scale, zero, bin }
    }

    /// The bin of a score. It never increases with the score: every rounding is monotonic.
    #[inline(always)]
    #[must_use]
    pub fn bin(self, score: f32) -> u32 {
        self.bits(score) - FIRST.to_bits()
    }

    /// The bits of the mapped score: those of [`FIRST`] plus the bin.
    #[inline(always)]
    pub(super) fn bits(self, score: f32) -> u32 {
        let at = math::mul_add(score, -self.scale, self.zero);
        // `min` and `max` ignore NaN.
        math::max(math::min(at, LAST), FIRST).to_bits()
    }

    /// A lower bound on the scores of bins up to `bin`.
    #[inline(always)]
    #[must_use]
    pub fn lower_bound(self, bin: u32) -> f32 {
        if bin == BINS - 1 {
            return f32::NEG_INFINITY;
        }
        // A score is rounded to the nearest bin, at most half a width away. The rounding of `zero` shifts all
        // scores by half a width, or by the rounding error of the highest score. The rest covers rounding here.
        let distance = (bin as f32 + 1.5) * self.bin;
        self.high - self.high.abs() * (2.0 * f32::EPSILON) - distance
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use super::*;

    /// Ranges: wide and narrow; far from 0; with a width that overflows; of one score; of no score.
    const EXTENTS: [(f32, f32); 10] = [
        (-3.0, 4.5),
        (0.0, 1e-3),
        (1e6, 1e6 + 8.0),
        (-1e30, 1e-30),
        (f32::MIN, f32::MAX),
        (0.0, 1e-44),
        (-1e-40, 3e-39),
        (2.5, 2.5),
        (-2.5, -2.5),
        (f32::INFINITY, f32::NEG_INFINITY),
    ];

    /// Scores in and around a range, ascending.
    fn scores((low, high): (f32, f32)) -> Vec<f32> {
        let mut scores = vec![f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, 1e-45, 1.0, f32::MAX];
        scores.push(f32::INFINITY);
        if low <= high {
            let parts = (0..=50_000).map(|part| f64::from(part) / 50_000.0);
            let (low, width) = (f64::from(low), f64::from(high) - f64::from(low));
            scores.extend(parts.map(|part| (low + part * width) as f32));
            scores.extend([high.next_up(), high, high.next_down()]);
        }
        scores.sort_by(f32::total_cmp);
        scores
    }

    #[test]
    fn bins_have_the_order_of_the_scores() {
        for extent in EXTENTS {
            let map = BinMap::new(ScoreRange { low: extent.0, high: extent.1 });
            let bins: Vec<_> = scores(extent).into_iter().map(|score| map.bin(score)).collect();
            assert!(bins.is_sorted_by(|a, b| a >= b), "{extent:?}");
            assert!(bins[0] < BINS && map.bin(f32::NAN) == BINS - 1, "{extent:?}");
        }
    }

    #[test]
    fn no_score_is_below_the_lower_bound_of_its_bin() {
        for extent in EXTENTS {
            let map = BinMap::new(ScoreRange { low: extent.0, high: extent.1 });
            for score in scores(extent) {
                let bound = map.lower_bound(map.bin(score));
                assert!(score >= bound, "{score:?} of {extent:?}: {bound:?}");
            }
        }
        // The bound is tight.
        let map = BinMap::new(ScoreRange { low: 0.0, high: 2048.0 });
        assert!(map.lower_bound(7) > 2039.0 && map.lower_bound(7) < 2040.0 && map.bin(2039.0) == 9);
    }

    #[test]
    fn a_range_is_of_finite_scores() {
        let ScoreRange { low, high } = ScoreRange::of([f32::INFINITY, 2.0, f32::NAN, -3.0]);
        assert_eq!((low, high), (-3.0, 2.0));
        let none = ScoreRange::of([f32::NAN, f32::NEG_INFINITY]);
        assert_eq!((none.low, none.high), (ScoreRange::NONE.low, ScoreRange::NONE.high));
    }
}

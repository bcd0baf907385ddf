//! Which bin a score falls into: bins of equal width over a range of scores.

use simt::math::{self, approx};

use crate::unroll::unroll;

/// Bins.
pub const BINS: u32 = 2048;

/// The finite scores between which scores lie; the least is above the largest if there are none.
#[derive(Clone, Copy)]
pub struct ScoreRange {
    /// The lowest.
    pub(super) low: f32,
    /// The highest.
    pub(super) high: f32,
}

impl ScoreRange {
    /// That of no score.
    pub const NONE: Self = Self { low: f32::INFINITY, high: f32::NEG_INFINITY };

    /// That of some scores.
    #[inline(always)]
    #[must_use]
    pub fn of<const N: usize>(scores: [f32; N]) -> Self {
        let mut extents: [Self; 2] = [Self::NONE; 2];
        unroll::<N>(|i| extents[i % 2] = extents[i % 2].with(scores[i]));
        let [a, b] = extents;
        Self { low: math::min(a.low, b.low), high: math::max(a.high, b.high) }
    }

    /// Without what is below `least`.
    #[inline(always)]
    #[must_use]
    pub fn above(self, least: f32) -> Self {
        Self { low: math::max(self.low, least), ..self }
    }

    /// With one more score.
    #[inline(always)]
    #[must_use]
    pub fn with(self, score: f32) -> Self {
        // Infinity times zero is NaN, which loses to any number.
        let finite = math::mul_add(score, 0.0, score);
        Self { low: math::min(self.low, finite), high: math::max(self.high, finite) }
    }
}

/// Bins of equal width from the largest score down to the least. What is above belongs to the first; what
/// is below, and NaN, to the last.
#[derive(Clone, Copy)]
pub struct BinMap {
    high: f32,
    /// Of a distance of one, how many times [`WIDTH`] its bins are.
    scale: f32,
    /// What a score of zero becomes.
    zero: f32,
    /// How wide a bin is, or more.
    bin: f32,
}

/// What the largest score becomes: numbers from here on are one [`WIDTH`] apart, so that bits tell bins.
pub(super) const FIRST: f32 = 2.0;
/// What a bin is wide then.
const WIDTH: f32 = FIRST * f32::EPSILON;
/// The last bin.
const LAST: f32 = FIRST + (BINS - 1) as f32 * WIDTH;

impl BinMap {
    /// From the largest score down to the least. If there are none, the last bin has all but infinity.
    #[inline(always)]
    #[must_use]
    pub fn new(extent: ScoreRange) -> Self {
        // As wide as numbers there are apart, at least: `zero` stays finite.
        let apart = extent.high.abs() * (f32::EPSILON / 2.0);
        let width = math::max(extent.high - extent.low, apart);
        // A quarter of any width that is a number has an inverse that is one. An approximation does: lists
        // do not depend on where bins end.
        let scale = BINS as f32 * WIDTH / 4.0 * approx::rcp_ftz(width / 4.0);
        // Neither zero nor infinite, so that products with it are no NaN.
        let scale = math::min(math::max(scale, f32::MIN_POSITIVE), f32::MAX);
        let zero = math::mul_add(extent.high, scale, FIRST);
        let bin = math::max(width / BINS as f32, f32::from_bits(1));
        Self { high: extent.high, scale, zero, bin }
    }

    /// The bin of a score. Never rises as the score rises: each step is rounded, which keeps the order.
    #[inline(always)]
    #[must_use]
    pub fn bin(self, score: f32) -> u32 {
        self.bits(score) - FIRST.to_bits()
    }

    /// The bits of what the score becomes: those of [`FIRST`], and the bin.
    #[inline(always)]
    pub(super) fn bits(self, score: f32) -> u32 {
        let at = math::mul_add(score, -self.scale, self.zero);
        // NaN loses to any number.
        math::max(math::min(at, LAST), FIRST).to_bits()
    }

    /// A number that no score of the bins up to `bin` is below.
    #[inline(always)]
    #[must_use]
    pub fn least(self, bin: u32) -> f32 {
        if bin == BINS - 1 {
            return f32::NEG_INFINITY;
        }
        // Scores are rounded to the nearest bin, half a width away at most; rounding `zero` moves all of
        // them by half a width, or by what rounding takes from the largest score. The rest is for the
        // rounding here.
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

    /// Extents: wide and narrow, far from zero, too wide for their width to be a number, of one score, of
    /// none.
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

    /// Numbers in and around an extent, ascending.
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
    fn no_score_is_below_the_least_of_its_bin() {
        for extent in EXTENTS {
            let map = BinMap::new(ScoreRange { low: extent.0, high: extent.1 });
            for score in scores(extent) {
                let least = map.least(map.bin(score));
                assert!(score >= least, "{score:?} of {extent:?}: {least:?}");
            }
        }
        // Few more than those of the bins are not below it.
        let map = BinMap::new(ScoreRange { low: 0.0, high: 2048.0 });
        assert!(map.least(7) > 2039.0 && map.least(7) < 2040.0 && map.bin(2039.0) == 9);
    }

    #[test]
    fn an_extent_is_of_finite_scores() {
        let ScoreRange { low, high } = ScoreRange::of([f32::INFINITY, 2.0, f32::NAN, -3.0]);
        assert_eq!((low, high), (-3.0, 2.0));
        let none = ScoreRange::of([f32::NAN, f32::NEG_INFINITY]);
        assert_eq!((none.low, none.high), (ScoreRange::NONE.low, ScoreRange::NONE.high));
    }
}

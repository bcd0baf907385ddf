//! sqrt(softplus(x)) in plain IEEE operations, without branches. A lane has many experts; the branches inside
//! the device's exact division and square root would serialise them.

use simt::math::mul_add;

use crate::math::exp_nonpositive;

/// sqrt(ln(1 + e^x)) with a relative error below 4e-7 over [-80, 80]. Infinity is replaced by the
/// largest f32; NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn activation(logit: f32) -> f32 {
    square_root(softplus(logit))
}

/// ln(1 + e^x) as max(x, 0) + ln(1 + e^-|x|), which neither overflows nor loses small results.
#[inline(always)]
fn softplus(logit: f32) -> f32 {
    let logit = if logit > f32::MAX { f32::MAX } else { logit };
    let positive = if logit > 0.0 { logit } else { 0.0 };
    positive + ln_1p(exp_nonpositive(-logit.abs()))
}

/// ln(1 + e) for e in [0, 1]: with s = e / (2 + e) it is 2 s (1 + s^2 / 3 + s^4 / 5 + .. + s^14 / 15),
/// whose remainder is below 2^-29.
#[inline(always)]
fn ln_1p(e: f32) -> f32 {
    let s = quotient(e);
    let z = s * s;
    let mut p = 1.0 / 15.0;
    p = mul_add(p, z, 1.0 / 13.0);
    p = mul_add(p, z, 1.0 / 11.0);
    p = mul_add(p, z, 1.0 / 9.0);
    p = mul_add(p, z, 1.0 / 7.0);
    p = mul_add(p, z, 1.0 / 5.0);
    p = mul_add(p, z, 1.0 / 3.0);
    let twice = 2.0 * s;
    mul_add(twice, z * p, twice)
}

/// e / (2 + e) for e in [0, 1], within one and a half units in the last place: the parabola through 1 / (2 + e) at
/// 0, 1/2 and 1, two Newton steps, and a correction by the quotient's remainder.
#[inline(always)]
fn quotient(e: f32) -> f32 {
    let d = 2.0 + e;
    let r = mul_add(mul_add(1.0 / 15.0, e, -7.0 / 30.0), e, 0.5);
    let r = mul_add(r, mul_add(-d, r, 1.0), r);
    let r = mul_add(r, mul_add(-d, r, 1.0), r);
    let q = e * r;
    mul_add(mul_add(-q, d, e), r, q)
}

/// Square root of a finite number that is not negative, within one unit in the last place: halving
/// the exponent gives the reciprocal root to 4 %, two Newton steps to 5e-6, and the root's remainder
/// the rest.
#[inline(always)]
fn square_root(x: f32) -> f32 {
    /// Below this the remainder would be subnormal.
    const TINY: f32 = f32::from_bits((127 - 100) << 23);
    const UP: f32 = (1_u128 << 64) as f32;
    const DOWN: f32 = 1.0 / (1_u64 << 32) as f32;
    let tiny = x < TINY;
    let v = if tiny { x * UP } else { x };
    let half = -0.5 * v;
    let y = f32::from_bits(0x5F37_59DF_u32.wrapping_sub(v.to_bits() >> 1));
    let y = y * mul_add(half * y, y, 1.5);
    let y = y * mul_add(half * y, y, 1.5);
    let root = v * y;
    let root = mul_add(mul_add(-root, root, v), 0.5 * y, root);
    if tiny { root * DOWN } else { root }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    fn units(got: f32, want: f64) -> f64 {
        let unit = f64::from((want as f32).next_up() - want as f32);
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn quotients_and_roots_are_within_their_bounds() {
        for bits in (0..=1_f32.to_bits()).step_by(1013) {
            let e = f32::from_bits(bits);
            let error = units(quotient(e), f64::from(e) / (2.0 + f64::from(e)));
            assert!(error <= 1.5, "quotient of {e} is {error} units off");
        }
        for bits in (0..f32::MAX.to_bits()).step_by(1013).chain([f32::MAX.to_bits()]) {
            let x = f32::from_bits(bits);
            let error = units(square_root(x), f64::from(x).sqrt());
            assert!(error <= 1.0, "root of {x} is {error} units off");
        }
    }

    #[test]
    fn activations_are_within_the_stated_error() {
        let exact = |x: f32| {
            let x = f64::from(x);
            (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
        };
        let mut worst = 0.0_f64;
        for bits in (0..=80_f32.to_bits()).step_by(1013) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let softplus_error = (f64::from(softplus(x)) / exact(x).powi(2) - 1.0).abs();
                let error = (f64::from(activation(x)) / exact(x) - 1.0).abs();
                worst = worst.max(softplus_error).max(error);
            }
        }
        assert!(worst <= 4e-7, "{worst}");
    }

    #[test]
    fn the_ends_are_as_stated() {
        assert_eq!(activation(f32::NEG_INFINITY), 0.0);
        assert_eq!(activation(-200.0), 0.0);
        assert_eq!(activation(f32::INFINITY), f32::MAX.sqrt());
        assert!(activation(f32::NAN).is_nan());
        assert_eq!(activation(120.0), 120_f32.sqrt());
    }
}

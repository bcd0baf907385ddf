//! exp, sine, cosine, RMS norm and rotation in plain IEEE operations: equal bits on the GPU and on the CPU (decision
//! D7). No `.approx`, no library, no table.

use core::f64::consts::{FRAC_2_PI, FRAC_PI_2};

use kv_layout::geometry::NORM_EPSILON;
use simt::math::{max_or_nan, mul_add, sqrt};

/// e^x for x <= 0, with a relative error below 2^-22, or an error below 2^-149 where the result is subnormal; 0 below
/// -104, where the result rounds to 0. NaN stays NaN.
///
/// The argument is reduced to |r| <= ln 2 / 2 with a two-part ln 2. The result is 1 + r + a minimax polynomial of the
/// terms r^2..r^6, whose error is below 2^-28 of the result, scaled by 2^n in two steps so that subnormals round once.
/// Conversions between integers and floats use additions and shifts: a GPU converts at a sixteenth of their speed.
#[inline(always)]
#[must_use]
pub fn exp_nonpositive(x: f32) -> f32 {
    /// The head has nine bits, so that its product with a multiple up to 150 is exact.
    const LN2_HEAD: f32 = 355.0 / 512.0;
    const LN2_TAIL: f32 = (core::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    /// 1.5 * 2^23: adding it rounds to the nearest integer, which its last bits then hold.
    const ROUND: f32 = 12_582_912.0;
    /// 2^-64, and 2^64 as the bits of an exponent: 2^(n + 64) is a normal number for n in -150..=0.
    const DOWN: f32 = f32::from_bits((127 - 64) << 23);
    const UP_BITS: u32 = (127 + 64) << 23;
    let x = max_or_nan(x, -104.0);
    let rounded = mul_add(x, core::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = mul_add(n, -LN2_TAIL, mul_add(n, -LN2_HEAD, x));
    let mut p = 0.001_381_459_4;
    p = mul_add(p, r, 0.008_368_719);
    p = mul_add(p, r, 0.041_668_39);
    p = mul_add(p, r, 0.166_665_2);
    p = mul_add(p, r, 0.499_999_94);
    p = mul_add(p, r, 1.0);
    p = mul_add(p, r, 1.0);
    // The shift leaves only n of the bits of `rounded`.
    p * f32::from_bits((rounded.to_bits() << 23).wrapping_add(UP_BITS)) * DOWN
}

/// (cos, sin) of an angle of magnitude up to 2^20, each within one unit in the last place of f32.
///
/// Computed in f64. The angle is reduced to |r| <= pi / 4 with a two-part pi / 2, whose head has 32 bits, so that its
/// product with a multiple up to 2^20 is exact. Then follow Taylor polynomials (remainders below 2^-53), and one
/// rounding.
#[inline(always)]
#[must_use]
pub fn cos_sin(angle: f32) -> (f32, f32) {
    const HEAD: f64 = f64::from_bits(FRAC_PI_2.to_bits() & !0x1F_FFFF);
    /// pi / 2 to 107 bits is `FRAC_PI_2` plus this.
    const BEYOND: f64 = 6.123_233_995_736_766e-17;
    const TAIL: f64 = (FRAC_PI_2 - HEAD) + BEYOND;
    // Adding 1.5 * 2^52 rounds to the nearest integer, which the last bits then hold.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(angle);
    let rounded = x * FRAC_2_PI + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * HEAD) - n * TAIL;
    let (sine, cosine) = (sine_near_zero(r) as f32, cosine_near_zero(r) as f32);
    let quadrant = rounded.to_bits() & 3;
    let (cosine, sine) = if quadrant & 1 == 0 { (cosine, sine) } else { (sine, cosine) };
    let cosine = if quadrant == 1 || quadrant == 2 { -cosine } else { cosine };
    (cosine, if quadrant & 2 == 0 { sine } else { -sine })
}

/// The factor by which an RMS norm multiplies a vector of `DIM` channels, from the sum of their squares. The epsilon is
/// `rms_norm_eps` of every released checkpoint.
#[inline(always)]
#[must_use]
pub fn rms_scale<const DIM: u32>(squares: f32) -> f32 {
    1.0 / sqrt(squares / DIM as f32 + NORM_EPSILON as f32)
}

/// A pair of channels rotated by an angle, given as (cos, sin).
#[inline(always)]
#[must_use]
pub fn rotate(even: f32, odd: f32, (cos, sin): (f32, f32)) -> [f32; 2] {
    [even * cos - odd * sin, even * sin + odd * cos]
}

#[inline(always)]
fn sine_near_zero(r: f64) -> f64 {
    let z = r * r;
    let mut p = -1.0 / 1_307_674_368_000.0;
    p = p * z + 1.0 / 6_227_020_800.0;
    p = p * z - 1.0 / 39_916_800.0;
    p = p * z + 1.0 / 362_880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    r + r * z * p
}

#[inline(always)]
fn cosine_near_zero(r: f64) -> f64 {
    let z = r * r;
    let mut p = 1.0 / 20_922_789_888_000.0;
    p = p * z - 1.0 / 87_178_291_200.0;
    p = p * z + 1.0 / 479_001_600.0;
    p = p * z - 1.0 / 3_628_800.0;
    p = p * z + 1.0 / 40_320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 0.5;
    1.0 + z * p
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn exp_is_within_two_units_everywhere() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-1e9), 0.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert!(exp_nonpositive(f32::NAN).is_nan());
        for bits in ((-0.0_f32).to_bits()..(-105.0_f32).to_bits()).step_by(997) {
            let x = f32::from_bits(bits);
            let want = f64::from(x).exp();
            let unit = f64::from((want as f32).next_up() - want as f32);
            let error = (f64::from(exp_nonpositive(x)) - want).abs() / unit;
            assert!(error <= 2.0, "exp({x}) is {error} units off");
        }
    }

    #[test]
    fn cos_and_sin_are_within_one_unit_up_to_two_to_the_twenty() {
        for bits in (0..1_048_576_f32.to_bits()).step_by(1009) {
            let x = f32::from_bits(bits);
            let (want_cos, want_sin) = (f64::from(x).cos() as f32, f64::from(x).sin() as f32);
            let (cos, sin) = cos_sin(x);
            for (got, want) in [(cos, want_cos), (sin, want_sin)] {
                assert!((want.next_down()..=want.next_up()).contains(&got), "{x}: {got} {want}");
            }
            let (back_cos, back_sin) = cos_sin(-x);
            assert_eq!((back_cos, back_sin), (cos, -sin));
        }
    }
}

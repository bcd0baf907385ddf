//! exp, sine and cosine in plain IEEE operations: equal bits on the GPU and on the CPU (decision
//! D7). No `.approx`, no library, no table.

use simt::math::{mul_add, round_ties_even};

/// e^x for x <= 0, with a relative error below 2^-23; 0 below -103.97, where the result would round
/// to 0.
///
/// Reduced to |r| <= ln 2 / 2 by Cody and Waite's two-part ln 2, then a Taylor polynomial of degree 7
/// (its remainder is below 2^-27), scaled by 2^n in two steps so that subnormals round once.
#[inline(always)]
#[must_use]
pub fn exp_nonpositive(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512, exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Everything below rounds to 0 anyway; the bound keeps `n` in the range of the exponents.
    let x = simt::math::max(x, -104.0);
    let n = round_ties_even(x * core::f32::consts::LOG2_E);
    let r = mul_add(n, -LN2_LOW, mul_add(n, -LN2_HIGH, x));
    let mut p = 1.0 / 5040.0;
    p = mul_add(p, r, 1.0 / 720.0);
    p = mul_add(p, r, 1.0 / 120.0);
    p = mul_add(p, r, 1.0 / 24.0);
    p = mul_add(p, r, 1.0 / 6.0);
    p = mul_add(p, r, 0.5);
    p = mul_add(p, r, 1.0);
    p = mul_add(p, r, 1.0);
    // n is -150..=0: two factors of at least 2^-75 each are normal numbers.
    let n = n as i32;
    let half = n / 2;
    p * power_of_two(half) * power_of_two(n - half)
}

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// (cos, sin) of an angle of magnitude up to 2^20, each within one unit in the last place of f32.
///
/// In f64: reduced to |r| <= pi / 4 by a two-part pi / 2 whose head has 33 bits, so that its product
/// with a multiple up to 2^20 is exact; then the polynomials of degree 13 and 14 that fdlibm's
/// `k_sin.c` and `k_cos.c` derive (minimax, error below 2^-57), rounded once.
#[inline(always)]
#[must_use]
pub fn cos_sin(angle: f32) -> (f32, f32) {
    const TWO_OVER_PI: f64 = core::f64::consts::FRAC_2_PI;
    const PI_OVER_2_HEAD: f64 = f64::from_bits(0x3FF9_21FB_5440_0000);
    const PI_OVER_2_TAIL: f64 = f64::from_bits(0x3DD0_B461_1A62_6331);
    // Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(angle);
    let n = (x * TWO_OVER_PI + ROUND) - ROUND;
    let r = (x - n * PI_OVER_2_HEAD) - n * PI_OVER_2_TAIL;
    let quadrant = n as i32 & 3;
    let (sine, cosine) = (sine_near_zero(r) as f32, cosine_near_zero(r) as f32);
    let (cosine, sine) = if quadrant & 1 == 0 { (cosine, sine) } else { (sine, cosine) };
    let cosine = if quadrant == 1 || quadrant == 2 { -cosine } else { cosine };
    (cosine, if quadrant & 2 == 0 { sine } else { -sine })
}

#[inline(always)]
fn sine_near_zero(r: f64) -> f64 {
    let z = r * r;
    let mut p = 1.589_690_995_211_55e-10;
    p = p * z - 2.505_076_025_340_686_3e-8;
    p = p * z + 2.755_731_370_707_006_8e-6;
    p = p * z - 1.984_126_982_985_795e-4;
    p = p * z + 8.333_333_333_322_489e-3;
    p = p * z - 1.666_666_666_666_663_2e-1;
    r + r * z * p
}

#[inline(always)]
fn cosine_near_zero(r: f64) -> f64 {
    let z = r * r;
    let mut p = -1.135_964_755_778_819_5e-11;
    p = p * z + 2.087_572_321_298_175e-9;
    p = p * z - 2.755_731_435_139_066_3e-7;
    p = p * z + 2.480_158_728_947_673e-5;
    p = p * z - 1.388_888_888_887_411e-3;
    p = p * z + 4.166_666_666_666_66e-2;
    1.0 - 0.5 * z + z * z * p
}

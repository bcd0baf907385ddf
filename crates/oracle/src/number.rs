//! Number formats by definition: the value of each code in f64, and encoding as a search for the nearest value.
//!
//! Every f32 and every value of these formats is exact in f64, and so are the two distances that are compared in a tie.
//! Ties go to the even code.

/// E4M3FN (1-4-3, bias 7, no infinity): the value of a code; NaN for `0x7F` and `0xFF`.
#[must_use]
pub fn e4m3_value(code: u8) -> f64 {
    let exponent = i32::from(code >> 3 & 0xF);
    let mantissa = f64::from(code & 7);
    if code & 0x7F == 0x7F {
        return f64::NAN;
    }
    let magnitude = if exponent == 0 {
        mantissa * two_to(-9)
    } else {
        (8.0 + mantissa) * two_to(exponent - 10)
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

/// The nearest E4M3FN code. Values beyond the range, infinities included, saturate to ±448. Every NaN gives `0x7F`.
#[must_use]
pub fn e4m3_nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let code = nearest(f64::from(x.abs()), 0x7E, |code| e4m3_value(code as u8)) as u8;
    code | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// E2M1 (1-2-1, bias 1): the value of the low four bits of `code`.
#[must_use]
pub fn e2m1_value(code: u8) -> f64 {
    let exponent = i32::from(code >> 1 & 3);
    let mantissa = f64::from(code & 1);
    let magnitude =
        if exponent == 0 { mantissa * 0.5 } else { (2.0 + mantissa) * two_to(exponent - 2) };
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// The nearest E2M1 code. Values beyond the range saturate to ±6. The sign of zero is kept. Every NaN gives `7` (+6).
#[must_use]
pub fn e2m1_nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let code = nearest(f64::from(x.abs()), 7, |code| e2m1_value(code as u8)) as u8;
    code | if x.is_sign_negative() { 8 } else { 0 }
}

/// UE8M0: the value of a byte, 2^(byte - 127). Byte 255 is NaN.
#[must_use]
pub fn ue8m0_value(byte: u8) -> f64 {
    if byte == 255 { f64::NAN } else { two_to(i32::from(byte) - 127) }
}

/// The smallest UE8M0 byte in 1..=254 whose value is at least `scale`; 254 if there is none.
#[must_use]
pub fn ue8m0_round_up(scale: f32) -> u8 {
    (1..254).find(|&byte| ue8m0_value(byte) >= f64::from(scale)).unwrap_or(254)
}

/// BF16: the value of sixteen bits, infinities and NaN included.
#[must_use]
pub fn bf16_value(bits: u16) -> f64 {
    let exponent = i32::from(bits >> 7 & 0xFF);
    let mantissa = f64::from(bits & 0x7F);
    let magnitude = match exponent {
        255 if mantissa != 0.0 => return f64::NAN,
        255 => f64::INFINITY,
        0 => mantissa * two_to(-133),
        _ => (128.0 + mantissa) * two_to(exponent - 134),
    };
    if bits >= 0x8000 { -magnitude } else { magnitude }
}

/// The nearest BF16 value. A value half a step or more above the largest finite value rounds to infinity, as in IEEE
/// 754. Every NaN gives `0x7FFF`.
#[must_use]
pub fn bf16_nearest(x: f32) -> u16 {
    bf16_nearest_f64(x.into())
}

/// As [`bf16_nearest`], for an f64. It rounds once; a conversion to f32 first could round twice.
#[must_use]
pub fn bf16_nearest_f64(x: f64) -> u16 {
    const INFINITY: u16 = 0x7F80;
    if x.is_nan() {
        return 0x7FFF;
    }
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    // For rounding, infinity counts as the value one step above the largest finite value.
    let value = |bits: u16| if bits == INFINITY { two_to(128) } else { bf16_value(bits) };
    sign | nearest(x.abs(), INFINITY, value)
}

/// The code in `0..=last` whose value is nearest to `a >= 0`. Ties go to the even code; a number larger than all values
/// gets the last code. Values increase with their codes.
fn nearest(a: f64, last: u16, value: impl Fn(u16) -> f64) -> u16 {
    // Bisects the range down to two neighbours.
    let (mut below, mut above) = (0, last);
    if a >= value(last) {
        return last;
    }
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if value(middle) <= a { below = middle } else { above = middle }
    }
    let (down, up) = (a - value(below), value(above) - a);
    let to_below = down < up || (down == up && below % 2 == 0);
    if to_below { below } else { above }
}

/// 2^`exponent`, where the result is a normal f64.
fn two_to(exponent: i32) -> f64 {
    assert!((-1022..=1023).contains(&exponent), "2^{exponent} is no normal f64");
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

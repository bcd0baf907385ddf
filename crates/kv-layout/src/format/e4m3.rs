//! E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN = `S.1111.111`.

use bytemuck::{Pod, Zeroable};

/// An 8-bit float with 4 exponent and 3 mantissa bits ("FN": finite, with NaN).
///
/// Largest value 448, least normal 2^-6, subnormal step 2^-9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

impl E4m3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;
    /// The positive NaN, to which every NaN input is encoded.
    pub const NAN: Self = Self(0x7F);

    /// Rounds to nearest, ties to even; saturates to ±448 (infinities too); NaN becomes `0x7F`.
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = ((bits >> 24) & 0x80) as u8;
        let magnitude = bits & 0x7FFF_FFFF;
        if magnitude > 0x7F80_0000 {
            return Self::NAN;
        }
        // 464 is the midpoint between 448 and the next value, 480, if there were one: from there on, and for the tie
        // itself, the result saturates.
        if magnitude >= 0x43E8_0000 {
            return Self(sign | 0x7E);
        }
        let exponent = (magnitude >> 23) as i32 - 127;
        let code = if exponent >= -6 {
            // Normal: keep 3 of 23 mantissa bits. A carry moves into the exponent by itself.
            round_shift(magnitude - (120 << 23), 20)
        } else if exponent < -11 {
            0
        } else {
            // Subnormal: the value in units of 2^-9.
            let significand = (magnitude & 0x007F_FFFF) | 0x0080_0000;
            round_shift(significand, (14 - exponent) as u32)
        };
        Self(sign | code as u8)
    }

    /// The exact value.
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        let sign = ((self.0 & 0x80) as u32) << 24;
        let exponent = (self.0 >> 3) & 0x0F;
        let mantissa = (self.0 & 0x07) as u32;
        if self.0 & 0x7F == 0x7F {
            return f32::from_bits(sign | 0x7FC0_0000);
        }
        if exponent != 0 {
            return f32::from_bits(sign | ((exponent as u32 + 120) << 23) | (mantissa << 20));
        }
        let magnitude = mantissa as f32 * (1.0 / 512.0);
        f32::from_bits(sign | magnitude.to_bits())
    }
}

/// `value / 2^shift`, rounded to nearest, ties to even. `shift` is 1..=31.
const fn round_shift(value: u32, shift: u32) -> u32 {
    let half = 1 << (shift - 1);
    let odd = (value >> shift) & 1;
    (value + (half - 1) + odd) >> shift
}

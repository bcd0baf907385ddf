//! E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit; no infinity, no NaN.

/// A 4-bit float: codes 0..=7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
///
/// Two codes share a byte: element `2k` in the low nibble, `2k + 1` in the high nibble.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E2m1(pub u8);

impl E2m1 {
    /// The largest value.
    pub const MAX: f32 = 6.0;

    /// Rounds to nearest, ties to the even code; saturates to ±6; keeps the sign of zero.
    ///
    /// NaN becomes +6, as `cvt.rn.satfinite.e2m1x2` does (PTX ISA: the positive MAX_NORM).
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return Self(0x7);
        }
        let sign = ((value.to_bits() >> 28) & 0x8) as u8;
        let a = f32::from_bits(value.to_bits() & 0x7FFF_FFFF);
        let code = (a > 0.25) as u8
            + (a >= 0.75) as u8
            + (a > 1.25) as u8
            + (a >= 1.75) as u8
            + (a > 2.5) as u8
            + (a >= 3.5) as u8
            + (a > 5.0) as u8;
        Self(sign | code)
    }

    /// The exact value of the low four bits.
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let magnitude = MAGNITUDES[(self.0 & 0x7) as usize];
        f32::from_bits(magnitude.to_bits() | (((self.0 & 0x8) as u32) << 28))
    }

    /// Two codes in one byte, `low` in the low nibble.
    #[must_use]
    pub const fn pack(low: Self, high: Self) -> u8 {
        (low.0 & 0x0F) | (high.0 << 4)
    }

    /// The two codes of a byte: (low nibble, high nibble).
    #[must_use]
    pub const fn unpack(byte: u8) -> (Self, Self) {
        (Self(byte & 0x0F), Self(byte >> 4))
    }
}

//! Number conversions of packed registers. They use the hardware on the GPU (for E2M1 only `sm_100a` has an
//! instruction), else the codecs of `kv-layout`. The two give equal bits for every input (tested over all codes and
//! ties).

use kv_layout::format::E2m1;
use simt::math::{min, mul_bf16x2};

/// Four E4M3 codes, the first value in the lowest byte. Nearest even, saturating, NaN -> `0x7F`.
#[inline(always)]
#[must_use]
pub fn e4m3x4_from_f32(values: [f32; 4]) -> u32 {
    u32::from(e4m3x2_from_f32(values[0], values[1]))
        | u32::from(e4m3x2_from_f32(values[2], values[3])) << 16
}

/// The exact values of four E4M3 codes, lowest byte first.
#[inline(always)]
#[must_use]
pub fn f32x4_from_e4m3(codes: u32) -> [f32; 4] {
    let [a, b] = f32x2_from_e4m3x2(codes as u16);
    let [c, d] = f32x2_from_e4m3x2((codes >> 16) as u16);
    [a, b, c, d]
}

/// The exact values of two BF16, low half first.
#[inline(always)]
#[must_use]
pub fn f32x2_from_bf16(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xFFFF_0000)]
}

/// log2 of the factor by which an E2M1 code must be multiplied after its bits are placed in a BF16: sign, lowest two
/// exponent bits, highest mantissa bit.
pub const E2M1_BITS_LOG2: u32 = 126;

/// Eight E2M1 codes as BF16 pairs (0, 4), (1, 5), (2, 6), (3, 7): each is 2^-126 times the value of the code,
/// multiplied by the BF16 pair `scale` and rounded.
#[inline(always)]
#[must_use]
pub fn bf16x8_from_e2m1(codes: u32, scale: u32) -> [u32; 4] {
    /// Codes 0 and 4 of a word, then 1 and 5.
    const FIRST: u32 = 0x000F_000F;
    const SECOND: u32 = FIRST << 4;
    const BITS: u32 = 0x81C0_81C0;
    // One multiplication shifts the magnitude to bit 6 and the sign to bit 15; the mask removes the rest.
    let pair =
        |code: u32, at: u32| mul_bf16x2((code * (1 << (12 - at) | 1 << (6 - at))) & BITS, scale);
    let upper = codes >> 8;
    [
        pair(codes & FIRST, 0),
        pair(codes & SECOND, 4),
        pair(upper & FIRST, 0),
        pair(upper & SECOND, 4),
    ]
}

/// The value of the E2M1 code of `value`: nearest even, saturating, NaN -> +6.
///
/// A sum with 1.5 times 2^22 times a power of two rounds the number to the distance of the E2M1 values around it.
#[inline(always)]
#[must_use]
pub fn e2m1_rounded(value: f32) -> f32 {
    const EXPONENT: u32 = 0xFF << 23;
    /// Added to the bits of the power of two below a value, this gives the bits of the number whose sum rounds the
    /// value.
    const ROUND: u32 = 22 << 23 | 1 << 22;
    let magnitude = min(value.abs(), E2m1::MAX);
    let below = magnitude.to_bits().max(1.0_f32.to_bits()) & EXPONENT;
    let round = f32::from_bits(below + ROUND);
    let rounded = (magnitude + round) - round;
    let sign = if value.is_nan() { 0 } else { value.to_bits() & 1 << 31 };
    f32::from_bits(rounded.to_bits() | sign)
}

/// Two E2M1 codes in one byte, `low` in the low four bits. Nearest even, saturating, NaN -> +6.
#[cfg(target_feature = "sm_100a")]
#[inline(always)]
#[must_use]
pub fn e2m1x2_from_f32(low: f32, high: f32) -> u8 {
    simt::convert::e2m1x2_from_f32(high, low)
}

/// Two E2M1 codes in one byte, `low` in the low four bits. Nearest even, saturating, NaN -> +6.
#[cfg(not(target_feature = "sm_100a"))]
#[inline(always)]
#[must_use]
pub fn e2m1x2_from_f32(low: f32, high: f32) -> u8 {
    E2m1::pack(E2m1::from_f32(low), E2m1::from_f32(high))
}

#[cfg(target_arch = "nvptx64")]
mod hardware {
    #[inline(always)]
    pub fn e4m3x2_from_f32(low: f32, high: f32) -> u16 {
        simt::convert::e4m3x2_from_f32(high, low)
    }

    #[inline(always)]
    pub fn f32x2_from_e4m3x2(codes: u16) -> [f32; 2] {
        simt::convert::f32x2_from_e4m3x2(codes)
    }

    /// Two BF16, `low` in the low half. Nearest even, NaN -> `0x7FFF`.
    #[inline(always)]
    #[must_use]
    pub fn bf16x2_from_f32(low: f32, high: f32) -> u32 {
        simt::convert::bf16x2_from_f32(high, low)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod software {
    use kv_layout::format::{E4m3, bf16_from_f32};

    #[inline(always)]
    pub fn e4m3x2_from_f32(low: f32, high: f32) -> u16 {
        u16::from_le_bytes([E4m3::from_f32(low).0, E4m3::from_f32(high).0])
    }

    #[inline(always)]
    pub fn f32x2_from_e4m3x2(codes: u16) -> [f32; 2] {
        codes.to_le_bytes().map(|code| E4m3(code).to_f32())
    }

    /// Two BF16, `low` in the low half. Nearest even, NaN -> `0x7FFF`.
    #[inline(always)]
    #[must_use]
    pub fn bf16x2_from_f32(low: f32, high: f32) -> u32 {
        u32::from(bf16_from_f32(low)) | u32::from(bf16_from_f32(high)) << 16
    }
}

#[cfg(target_arch = "nvptx64")]
pub use hardware::bf16x2_from_f32;
#[cfg(target_arch = "nvptx64")]
use hardware::{e4m3x2_from_f32, f32x2_from_e4m3x2};
#[cfg(not(target_arch = "nvptx64"))]
pub use software::bf16x2_from_f32;
#[cfg(not(target_arch = "nvptx64"))]
use software::{e4m3x2_from_f32, f32x2_from_e4m3x2};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_values_are_those_of_the_codes() {
        let check = |bits: u32| {
            for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let wanted = E2m1::from_f32(value).to_f32();
                assert_eq!(e2m1_rounded(value).to_bits(), wanted.to_bits(), "{value}");
            }
        };
        (0..=f32::NAN.to_bits()).step_by(997).for_each(check);
        // Ties, and the values next to them.
        for eighth in 0..64 {
            let bits = (eighth as f32 / 8.0).to_bits();
            (bits.saturating_sub(2)..=bits + 2).for_each(check);
        }
    }
}

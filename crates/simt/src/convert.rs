//! Number conversions in hardware (PTX ISA 9.7.9 `cvt`). Device only: on the CPU, use a software codec
//! with the same rounding. All round to nearest, ties to even.

use crate::imp::convert;

/// Two E4M3 codes, `high` in the upper byte; saturates to ±448, NaN becomes `0x7F`
/// (`cvt.rn.satfinite.e4m3x2.f32`, sm_89).
#[inline(always)]
#[must_use]
pub fn e4m3x2_from_f32(high: f32, low: f32) -> u16 {
    convert::e4m3x2_from_f32(high, low)
}

/// The exact values of two E4M3 codes as two `f16`, the lower byte in the lower half
/// (`cvt.rn.f16x2.e4m3x2`, sm_89).
#[inline(always)]
#[must_use]
pub fn f16x2_from_e4m3x2(codes: u16) -> u32 {
    convert::f16x2_from_e4m3x2(codes)
}

/// The exact values of two E4M3 codes: `[low, high]`.
#[inline(always)]
#[must_use]
pub fn f32x2_from_e4m3x2(codes: u16) -> [f32; 2] {
    let halves = f16x2_from_e4m3x2(codes);
    [convert::f32_from_f16(halves as u16), convert::f32_from_f16((halves >> 16) as u16)]
}

/// Two BF16, `high` in the upper half; NaN becomes `0x7FFF` (`cvt.rn.bf16x2.f32`, sm_80).
#[inline(always)]
#[must_use]
pub fn bf16x2_from_f32(high: f32, low: f32) -> u32 {
    convert::bf16x2_from_f32(high, low)
}

/// Two E2M1 codes, `high` in the upper four bits; saturates to ±6, NaN becomes `0x7`
/// (`cvt.rn.satfinite.e2m1x2.f32`, sm_100a and its family only).
#[cfg(target_feature = "sm_100a")]
#[inline(always)]
#[must_use]
pub fn e2m1x2_from_f32(high: f32, low: f32) -> u8 {
    convert::e2m1x2_from_f32(high, low)
}

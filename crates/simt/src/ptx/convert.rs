//! [`crate::convert`]: `cvt` by inline asm. The results depend on the operands alone.

use core::arch::asm;

#[inline(always)]
pub fn e4m3x2_from_f32(high: f32, low: f32) -> u16 {
    let codes: u16;
    // SAFETY: a function of its operands alone, without memory or lanes.
    unsafe {
        asm!(
            "cvt.rn.satfinite.e4m3x2.f32 {codes}, {high}, {low};",
            codes = out(reg16) codes,
            high = in(reg32) high,
            low = in(reg32) low,
            options(pure, nomem, nostack),
        );
    }
    codes
}

#[inline(always)]
pub fn f16x2_from_e4m3x2(codes: u16) -> u32 {
    let halves: u32;
    // SAFETY: a function of its operand alone, without memory or lanes.
    unsafe {
        asm!(
            "cvt.rn.f16x2.e4m3x2 {halves}, {codes};",
            halves = out(reg32) halves,
            codes = in(reg16) codes,
            options(pure, nomem, nostack),
        );
    }
    halves
}

/// The exact value of an `f16`.
#[inline(always)]
pub fn f32_from_f16(half: u16) -> f32 {
    let value: f32;
    // SAFETY: a function of its operand alone, without memory or lanes.
    unsafe {
        asm!(
            "cvt.f32.f16 {value}, {half};",
            value = out(reg32) value,
            half = in(reg16) half,
            options(pure, nomem, nostack),
        );
    }
    value
}

#[inline(always)]
pub fn bf16x2_from_f32(high: f32, low: f32) -> u32 {
    let pair: u32;
    // SAFETY: a function of its operands alone, without memory or lanes.
    unsafe {
        asm!(
            "cvt.rn.bf16x2.f32 {pair}, {high}, {low};",
            pair = out(reg32) pair,
            high = in(reg32) high,
            low = in(reg32) low,
            options(pure, nomem, nostack),
        );
    }
    pair
}

#[cfg(target_feature = "sm_100a")]
#[inline(always)]
pub fn e2m1x2_from_f32(high: f32, low: f32) -> u8 {
    let codes: u16;
    // SAFETY: a function of its operands alone, without memory or lanes.
    unsafe {
        asm!(
            // The result is a `.b8` register, which Rust has no class for.
            "{{ .reg .b8 codes; cvt.rn.satfinite.e2m1x2.f32 codes, {high}, {low}; \
             cvt.u16.u8 {codes}, codes; }}",
            codes = out(reg16) codes,
            high = in(reg32) high,
            low = in(reg32) low,
            options(pure, nomem, nostack),
        );
    }
    codes as u8
}

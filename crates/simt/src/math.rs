//! Float operations with the same bits on both backends.
//!
//! Plain `+ - * /` on `f32` have the same bits too: the device build neither fuses them nor flushes subnormals
//! (`add.rn`, `mul.rn`, `div.rn`). The bits of a NaN result are not fixed: compare NaN by
//! `is_nan`.

use crate::imp;

/// `a * b + c` with one rounding (`fma.rn.f32`, PTX ISA 9.7.3).
#[inline(always)]
#[must_use]
pub fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    imp::math::mul_add(a, b, c)
}

/// Square root, rounded to nearest even (`sqrt.rn.f32`).
#[inline(always)]
#[must_use]
pub fn sqrt(value: f32) -> f32 {
    imp::math::sqrt(value)
}

/// The larger value. NaN next to a number is ignored; `+0.0` is larger than `-0.0` (`max.f32`), whereas `f32::max`
/// leaves the sign of zero unspecified.
#[inline(always)]
#[must_use]
pub fn max(a: f32, b: f32) -> f32 {
    imp::math::max(a, b)
}

/// The smaller value. NaN next to a number is ignored; `-0.0` is smaller than `+0.0` (`min.f32`).
#[inline(always)]
#[must_use]
pub fn min(a: f32, b: f32) -> f32 {
    imp::math::min(a, b)
}

/// The larger value; NaN if either is NaN (`max.NaN.f32`, sm_80).
#[inline(always)]
#[must_use]
pub fn max_or_nan(a: f32, b: f32) -> f32 {
    imp::math::max_or_nan(a, b)
}

/// The products of two pairs of BF16, low with low and high with high, each rounded to nearest even
/// (`mul.rn.bf16x2`, sm_90).
#[inline(always)]
#[must_use]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    imp::math::mul_bf16x2(a, b)
}

/// `a * b` rounded to nearest even and clamped to `0.0..=1.0`; NaN becomes `+0.0` (`mul.sat.f32`).
/// Subnormal operands are not flushed.
#[inline(always)]
#[must_use]
pub fn mul_saturated(a: f32, b: f32) -> f32 {
    imp::math::mul_saturated(a, b)
}

/// The larger of the low halves and the larger of the high halves, as unsigned integers of 16 bits
/// (`max.u16x2`, sm_90).
#[inline(always)]
#[must_use]
pub fn max_u16x2(a: u32, b: u32) -> u32 {
    imp::math::max_u16x2(a, b)
}

/// Four bytes selected from the eight of `a` (0 to 3) and `b` (4 to 7). Each hexadecimal digit of
/// `selectors`, the lowest for the lowest byte, selects one by its low three bits; if its top bit is set, the
/// result is the sign bit of that byte in all eight bits (`prmt.b32`).
#[inline(always)]
#[must_use]
pub fn permute_bytes(a: u32, b: u32, selectors: u32) -> u32 {
    imp::math::permute_bytes(a, b, selectors)
}

/// One-instruction approximations. NOT bit-equal between backends: the emulator rounds the `f64`
/// result to `f32`. The error bounds are those of the PTX ISA, section 9.7.3. Subnormals are flushed only
/// where the name says `ftz`.
pub mod approx {
    use crate::imp;

    /// `2^value`, relative error at most 2^-22 (`ex2.approx.f32`).
    #[inline(always)]
    #[must_use]
    pub fn ex2(value: f32) -> f32 {
        imp::math::ex2(value)
    }

    /// [`ex2`] that flushes subnormal operands and results to zero: fewer instructions (`ex2.approx.ftz.f32`).
    #[inline(always)]
    #[must_use]
    pub fn ex2_ftz(value: f32) -> f32 {
        imp::math::ex2_ftz(value)
    }

    /// `log2(value)`, absolute error at most 2^-22 for values in (0.5, 2), relative error at most
    /// 2^-22 elsewhere (`lg2.approx.f32`).
    #[inline(always)]
    #[must_use]
    pub fn lg2(value: f32) -> f32 {
        imp::math::lg2(value)
    }

    /// `1 / value`, error at most 1 ulp, 2^-23 relative; flushes subnormal operands and results to zero
    /// (`rcp.approx.ftz.f32`).
    #[inline(always)]
    #[must_use]
    pub fn rcp_ftz(value: f32) -> f32 {
        imp::math::rcp_ftz(value)
    }
}

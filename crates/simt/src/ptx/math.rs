//! [`crate::math`] on the device.

use core::arch::asm;
use core::f32::math;

use super::intrinsics;

#[inline(always)]
pub fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    math::mul_add(a, b, c)
}

#[inline(always)]
pub fn sqrt(value: f32) -> f32 {
    math::sqrt(value)
}

#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    // SAFETY: a function of its operands alone.
    unsafe { intrinsics::fmax(a, b) }
}

#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    // SAFETY: a function of its operands alone.
    unsafe { intrinsics::fmin(a, b) }
}

#[inline(always)]
pub fn max_or_nan(a: f32, b: f32) -> f32 {
    // SAFETY: a function of its operands alone.
    unsafe { intrinsics::fmax_nan(a, b) }
}

#[inline(always)]
pub fn permute_bytes(a: u32, b: u32, selectors: u32) -> u32 {
    let [a, b, selectors] = [a, b, selectors].map(u32::cast_signed);
    // SAFETY: a function of its operands alone.
    unsafe { intrinsics::prmt(a, b, selectors) }.cast_unsigned()
}

macro_rules! of_two {
    ($($name:ident($type:ty): $instruction:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(a: $type, b: $type) -> $type {
            let result: $type;
            // SAFETY: a function of its operands alone, without memory or lanes.
            unsafe {
                asm!(
                    concat!($instruction, " {result}, {a}, {b};"),
                    result = out(reg32) result,
                    a = in(reg32) a,
                    b = in(reg32) b,
                    options(pure, nomem, nostack),
                );
            }
            result
        }
    )* };
}

of_two! {
    mul_bf16x2(u32): "mul.rn.bf16x2";
    mul_saturated(f32): "mul.sat.f32";
    max_u16x2(u32): "max.u16x2";
}

macro_rules! approximations {
    ($($name:ident: $instruction:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(value: f32) -> f32 {
            let result: f32;
            // SAFETY: a function of its operand alone, without memory or lanes.
            unsafe {
                asm!(
                    concat!($instruction, " {result}, {value};"),
                    result = out(reg32) result,
                    value = in(reg32) value,
                    options(pure, nomem, nostack),
                );
            }
            result
        }
    )* };
}

approximations! {
    ex2: "ex2.approx.f32";
    ex2_ftz: "ex2.approx.ftz.f32";
    lg2: "lg2.approx.f32";
    rcp_ftz: "rcp.approx.ftz.f32";
}

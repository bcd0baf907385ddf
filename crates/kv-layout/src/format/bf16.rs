//! BF16 as its bits in a `u16`, the way the cache stores it.

use half::bf16;

/// Rounds to nearest, ties to even. NaN becomes `0x7FFF`, as `cvt.rn.bf16.f32` does (PTX ISA).
#[must_use]
pub const fn bf16_from_f32(value: f32) -> u16 {
    if value.is_nan() { 0x7FFF } else { bf16::from_f32_const(value).to_bits() }
}

/// The exact value; the sixteen bits are the upper half of an f32's, NaN payloads included.
#[must_use]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

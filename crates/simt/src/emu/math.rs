//! [`crate::math`] on the CPU.

pub fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

pub fn sqrt(value: f32) -> f32 {
    value.sqrt()
}

pub fn max(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        // Equal values differ in bits only for zeros: +0.0 has the sign bit clear.
        _ if a == b => f32::from_bits(a.to_bits() & b.to_bits()),
        _ if a > b => a,
        _ => b,
    }
}

pub fn min(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() | b.to_bits()),
        _ if a < b => a,
        _ => b,
    }
}

pub fn max_or_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { max(a, b) }
}

pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let product = |a: u32, b: u32| bf16_from_f32(f32::from_bits(a) * f32::from_bits(b));
    product(a << 16, b << 16) | product(a & 0xFFFF_0000, b & 0xFFFF_0000) << 16
}

pub fn mul_saturated(a: f32, b: f32) -> f32 {
    min(max(a * b, 0.0), 1.0)
}

pub fn max_u16x2(a: u32, b: u32) -> u32 {
    let larger = |shift: u32| (a >> shift & 0xFFFF).max(b >> shift & 0xFFFF) << shift;
    larger(0) | larger(16)
}

pub fn permute_bytes(a: u32, b: u32, selectors: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    u32::from_le_bytes([0, 4, 8, 12].map(|shift| {
        let selector = selectors >> shift;
        let byte = bytes[(selector & 7) as usize];
        if selector & 8 == 0 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
    }))
}

/// The nearest BF16, ties to even; NaN becomes `0x7FFF`.
fn bf16_from_f32(value: f32) -> u32 {
    if value.is_nan() {
        return 0x7FFF;
    }
    let bits = value.to_bits();
    (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
}

pub fn ex2(value: f32) -> f32 {
    f64::from(value).exp2() as f32
}

pub fn ex2_ftz(value: f32) -> f32 {
    flushed(ex2(flushed(value)))
}

pub fn lg2(value: f32) -> f32 {
    f64::from(value).log2() as f32
}

pub fn rcp_ftz(value: f32) -> f32 {
    flushed(f64::from(flushed(value)).recip() as f32)
}

/// Zero, with the sign, for a subnormal.
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

//! [`crate::mma`] on the device.

use super::intrinsics;

#[inline(always)]
pub unsafe fn bf16_m16n8k16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    let [a0, a1, a2, a3] = a.map(u32::cast_signed);
    let [b0, b1] = b.map(u32::cast_signed);
    let [c0, c1, c2, c3] = c;
    // SAFETY: the caller brings all 32 lanes.
    let d = unsafe { intrinsics::mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) };
    [d.0, d.1, d.2, d.3]
}

#[inline(always)]
pub unsafe fn s8_m16n8k32(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    let [a0, a1, a2, a3] = a.map(u32::cast_signed);
    let [b0, b1] = b.map(u32::cast_signed);
    let [c0, c1, c2, c3] = c;
    // SAFETY: the caller brings all 32 lanes.
    let d = unsafe { intrinsics::mma_m16n8k32_s8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) };
    [d.0, d.1, d.2, d.3]
}

//! [`crate::mma`] on the CPU.

use super::block::wait_product;
use super::collective::Operation;
use super::matrix::Fragments;

#[track_caller]
pub unsafe fn bf16_m16n8k16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    wait_product(Operation::MmaBf16, Fragments { a, b, c: c.map(f32::to_bits) }).map(f32::from_bits)
}

#[track_caller]
pub unsafe fn s8_m16n8k32(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    let c = c.map(i32::cast_unsigned);
    wait_product(Operation::MmaS8, Fragments { a, b, c }).map(u32::cast_signed)
}

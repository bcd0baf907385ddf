//! Matrix products of a full warp on the tensor cores, operands in registers.
//!
//! A warp multiplies a 16 x 16 matrix A by a 16 x 8 matrix B and adds a 16 x 8 matrix C. With
//! `g = lane_id() / 4` and `t = lane_id() % 4`, a lane holds these elements (PTX ISA 9.7.14.5.8,
//! "Matrix Fragments for mma.m16n8k16 with floating point type"), the lower half of a register
//! first:
//!
//! | register | elements |
//! |---|---|
//! | `a[0]` | row `g`, columns `2 t`, `2 t + 1` |
//! | `a[1]` | row `g + 8`, columns `2 t`, `2 t + 1` |
//! | `a[2]` | row `g`, columns `2 t + 8`, `2 t + 9` |
//! | `a[3]` | row `g + 8`, columns `2 t + 8`, `2 t + 9` |
//! | `b[0]` | rows `2 t`, `2 t + 1` of column `g` |
//! | `b[1]` | rows `2 t + 8`, `2 t + 9` of column `g` |
//! | `c[0]`, `c[1]` | row `g`, columns `2 t`, `2 t + 1` |
//! | `c[2]`, `c[3]` | row `g + 8`, columns `2 t`, `2 t + 1` |
//!
//! With 8-bit integers the inner dimension is 32: a register holds four elements, columns `4 t` to `4 t + 3`
//! in place of `2 t` and `2 t + 1`, and `a[2]`, `a[3]` and `b[1]` start 16 columns later instead of 8 (PTX ISA
//! 9.7.14.5.10, "Matrix Fragments for mma.m16n8k32").
//!
//! The inner index is only summed over: a kernel may permute the columns of A, if it permutes the rows of B
//! in the same way.
//!
//! There is no FP8 form: for sm_90 `ptxas` turns `mma.sync` with E4M3 operands into conversions to
//! F16 and two F16 products, so BF16 operands are as fast, and exact for more values.

use crate::imp;

/// `A B + C` of BF16 matrices A and B in f32 (`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`,
/// PTX ISA 9.7.14.5.14, sm_80).
///
/// Products of BF16 are exact in f32. The emulator adds them to C one by one, in the order of the inner
/// index. A tensor core aligns several products to the largest and may truncate. So the bits are equal only
/// where every partial sum is exact in f32; elsewhere results differ by a few 2^-24 of the sum of magnitudes.
///
/// # Safety
/// - All 32 lanes make this call together, from the same place in the source.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m16n8k16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::mma::bf16_m16n8k16(a, b, c) }
}

/// `A B + C` of matrices A and B of signed 8-bit integers, in 32-bit integers that wrap around
/// (`mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32`, PTX ISA 9.7.14.5.14, sm_80).
///
/// # Safety
/// - As [`bf16_m16n8k16`].
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn s8_m16n8k32(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    // SAFETY: the caller brings all 32 lanes.
    unsafe { imp::mma::s8_m16n8k32(a, b, c) }
}

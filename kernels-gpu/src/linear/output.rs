//! `bf16_linear_*` and `nvfp4_linear_*`: products that are stored as they are.

use simt::mem::GlobalMut;
use simt::shared::Shared;
use simt::thread;

use super::product::{Block, COLUMNS};
use super::weights::{BF16_FRAGMENTS, Bf16Weights, NVFP4_FRAGMENTS, Nvfp4Weights, Weights};
use crate::args::{Bf16Linear, Nvfp4Linear};
use crate::convert::bf16x2_from_f32;
use crate::unroll::unroll;

/// An element type of a product.
pub trait Output {
    /// Stores `value` as element `at`.
    ///
    /// # Safety
    /// The element exists, and no other thread touches it.
    unsafe fn store(to: GlobalMut<u8>, at: u64, value: f32);

    /// Stores elements `at` to `at + 3`.
    ///
    /// # Safety
    /// As [`Self::store`] for each; `at` is a multiple of four.
    unsafe fn store_four(to: GlobalMut<u8>, at: u64, values: [f32; 4]);
}

/// `LinearOutput::F32`.
pub struct F32;

impl Output for F32 {
    #[inline(always)]
    unsafe fn store(to: GlobalMut<u8>, at: u64, value: f32) {
        // SAFETY: by this function's own contract.
        unsafe { to.cast::<f32>().store(at, value) }
    }

    #[inline(always)]
    unsafe fn store_four(to: GlobalMut<u8>, at: u64, values: [f32; 4]) {
        // SAFETY: by this function's own contract.
        unsafe { to.cast::<f32>().store_u32x4(at, values.map(f32::to_bits)) }
    }
}

/// `LinearOutput::Bf16`.
pub struct Bf16;

impl Output for Bf16 {
    #[inline(always)]
    unsafe fn store(to: GlobalMut<u8>, at: u64, value: f32) {
        // SAFETY: by this function's own contract.
        unsafe { to.cast::<u16>().store(at, bf16x2_from_f32(value, 0.0) as u16) }
    }

    #[inline(always)]
    unsafe fn store_four(to: GlobalMut<u8>, at: u64, [a, b, c, d]: [f32; 4]) {
        let pairs = [bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)];
        // SAFETY: by this function's own contract.
        unsafe { to.cast::<u16>().store_u32x2(at, pairs) }
    }
}

/// Multiplies by a weight in BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 64, tokens / 8 N)`,
/// rounded up, call it.
#[inline(always)]
pub unsafe fn bf16<const N: usize, const M: usize>(args: Bf16Linear) {
    let params = args.params;
    let block = Block::<_, BF16_FRAGMENTS, N, M> {
        weights: Bf16Weights { values: args.weight, columns: params.columns, inner: params.inner },
        input: args.input,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
        first_token: thread::block_idx_y() * 8 * N as u32,
        first_column: thread::block_idx_x() * COLUMNS,
    };
    // SAFETY: by this function's own contract.
    unsafe { store::<_, F32, _, N, M>(block, args.output.cast(), 1.0) }
}

/// Multiplies by a weight in NVFP4.
///
/// # Safety
/// As [`bf16`].
#[inline(always)]
pub unsafe fn nvfp4<O: Output, const N: usize, const M: usize>(args: Nvfp4Linear) {
    let params = args.params;
    let block = Block::<_, NVFP4_FRAGMENTS, N, M> {
        weights: Nvfp4Weights::new(args.codes, args.scales, params.inner),
        input: args.input,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
        first_token: thread::block_idx_y() * 8 * N as u32,
        first_column: thread::block_idx_x() * COLUMNS,
    };
    // SAFETY: by this function's own contract.
    unsafe { store::<_, O, _, N, M>(block, args.output, f32::from_bits(params.scale_bits)) }
}

/// Stores a block's product times `scale`.
///
/// # Safety
/// As [`bf16`].
#[inline(always)]
unsafe fn store<W: Weights, O: Output, const F: usize, const N: usize, const M: usize>(
    block: Block<W, F, N, M>,
    output: GlobalMut<u8>,
    scale: f32,
) {
    let Block { first_token, first_column, columns, .. } = block;
    // SAFETY: by this function's own contract; shared memory is the block's.
    unsafe {
        let ahead = block.wait();
        block.sums(Shared::at(0), ahead, |token, column, sums| {
            let column = first_column + column;
            let at = u64::from(first_token + token) * u64::from(columns) + u64::from(column);
            let values = sums.map(|sum| sum * scale);
            if columns.is_multiple_of(4) && column < columns {
                O::store_four(output, at, values);
            } else {
                unroll::<4>(|i| {
                    if column + (i as u32) < columns {
                        O::store(output, at + i as u64, values[i]);
                    }
                });
            }
        });
    }
}

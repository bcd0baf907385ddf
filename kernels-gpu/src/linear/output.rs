//! `linear_bf16_*` and `linear_nvfp4_*`: products that are stored.

use simt::mem::GlobalMut;
use simt::shared::Shared;
use simt::thread;

use super::product::{Block, COLUMNS};
use super::weights::{Bf16Weights, Nvfp4Weights, Weights};
use crate::args::{Bf16Linear, Nvfp4Linear};
use crate::convert::bf16x2_from_f32;

/// An element type of a product.
pub trait Output {
    /// Stores `value` as element `at`.
    ///
    /// # Safety
    /// The element exists, and no other thread touches it.
    unsafe fn store(to: GlobalMut<u8>, at: u64, value: f32);
}

/// `LinearOutput::F32`.
pub struct F32;

impl Output for F32 {
    #[inline(always)]
    unsafe fn store(to: GlobalMut<u8>, at: u64, value: f32) {
        // SAFETY: by this function's own contract.
        unsafe { to.cast::<f32>().store(at, value) }
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
}

/// Multiplies by a weight in BF16.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(columns / 64, tokens / 8 N)`,
/// rounded up, call it.
#[inline(always)]
pub unsafe fn bf16<const N: usize, const M: usize>(args: Bf16Linear) {
    let params = args.params;
    let block = Block::<_, N, M> {
        weights: Bf16Weights { values: args.weight, inner: params.inner },
        input: args.input,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
        first_token: thread::block_idx_y() * Block::<Bf16Weights, N, M>::TOKENS,
        first_column: thread::block_idx_x() * COLUMNS,
    };
    // SAFETY: by this function's own contract.
    unsafe { store::<_, F32, N, M>(block, args.output.cast(), 1.0) }
}

/// Multiplies by a weight in NVFP4.
///
/// # Safety
/// As [`bf16`].
#[inline(always)]
pub unsafe fn nvfp4<O: Output, const N: usize, const M: usize>(args: Nvfp4Linear) {
    let params = args.params;
    let block = Block::<_, N, M> {
        weights: Nvfp4Weights { codes: args.codes, scales: args.scales, inner: params.inner },
        input: args.input,
        tokens: params.tokens,
        columns: params.columns,
        inner: params.inner,
        first_token: thread::block_idx_y() * Block::<Nvfp4Weights, N, M>::TOKENS,
        first_column: thread::block_idx_x() * COLUMNS,
    };
    // SAFETY: by this function's own contract.
    unsafe { store::<_, O, N, M>(block, args.output, f32::from_bits(params.scale_bits)) }
}

/// Stores a block's product times `scale`.
///
/// # Safety
/// As [`bf16`].
#[inline(always)]
unsafe fn store<W: Weights, O: Output, const N: usize, const M: usize>(
    block: Block<W, N, M>,
    output: GlobalMut<u8>,
    scale: f32,
) {
    let Block { first_token, first_column, columns, .. } = block;
    // SAFETY: by this function's own contract; shared memory is the block's.
    unsafe {
        block.wait();
        block.sums(Shared::at(0), |token, column, sum| {
            let row = u64::from(first_token + token) * u64::from(columns);
            O::store(output, row + u64::from(first_column + column), sum * scale);
        });
    }
}

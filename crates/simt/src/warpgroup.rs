//! Matrix products of a warpgroup, four consecutive warps, on the tensor cores: A in registers or in shared
//! memory, B in shared memory.
//!
//! The warps multiply a matrix A of 64 rows by a matrix B of 64, 128 or 256 columns. Warp `w` holds rows `16 w` to
//! `16 w + 15` of A and of the product. Within a warp the fragments are those of [`crate::mma`]: of the
//! product, 8, 16 or 32 fragments of 8 columns; of A, one fragment for each step of 32 bytes of a row, which is 16
//! columns of BF16, or 32 columns of 8-bit integers or E4M3.
//!
//! An operand in shared memory has one of two layouts (PTX ISA 9.7.15.5.1, "Shared Memory Matrix Layout"):
//!
//! - without swizzling, as the indexer's keys: bytes `16 e` to `16 e + 15` of column `n` of B are the four words from
//!   [`right_word`]`(e, n)` on, in core matrices of 8 columns by 16 bytes, columns first;
//! - with a swizzle of 128 bytes, as attention's: [`Rows`] and [`Panels`].
//!
//! `sm_90a` has the instruction `wgmma` for this. Other targets and the emulator use `mma` warp by warp;
//! only the order of the sums differs.

pub(crate) mod in_flight;
pub(crate) mod layout;

pub use in_flight::{FragmentsInFlight, InFlight, InFlightN256};
pub use layout::{
    Fragments, FragmentsN128, FragmentsN256, IntegerFragments, Panels, Rows, right_word,
};

use crate::shared::Shared;

#[cfg(not(target_feature = "sm_90a"))]
mod by_warp;
#[cfg(target_feature = "sm_90a")]
use crate::ptx::warpgroup as form;
#[cfg(not(target_feature = "sm_90a"))]
use by_warp as form;

/// Makes writes to shared memory visible to products, which read through the async proxy: this thread's own earlier
/// writes, if a barrier follows before the product, and writes of other threads that a barrier has made visible to this
/// thread (`fence.proxy.async.shared::cta`, PTX ISA 9.7.13.4, `sm_90a`).
///
/// On the emulator it is a fault if a product reads a store that no such fence has made visible.
#[inline(always)]
pub fn fence_proxy_async() {
    form::fence_proxy_async();
}

/// Raises the number of registers of each thread of the warpgroup to `REGISTERS`. Waits until the block's other
/// warpgroups have given up enough registers ([`setmaxnreg_dec`]; `setmaxnreg.inc.sync.aligned.u32`, PTX ISA 9.7.19,
/// `sm_90a`). Does nothing on other targets.
///
/// # Safety
/// - All threads of four warps, the first of which is a multiple of four, make this call together, once, from the same
///   place in the source (*unchecked*); other warpgroups of the block give up registers ([`setmaxnreg_dec`]), so
///   that the block uses no more than it started with (*unchecked*): else the wait never ends.
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const REGISTERS: u32>() {
    // SAFETY: the caller's duty is this callee's.
    unsafe { form::setmaxnreg_inc::<REGISTERS>() }
}

/// Lowers the number of registers of each thread of the warpgroup to `REGISTERS`
/// (`setmaxnreg.dec.sync.aligned.u32`, PTX ISA 9.7.19, `sm_90a`). Does nothing on other targets.
///
/// # Safety
/// - All threads of four warps, the first of which is a multiple of four, make this call together, once, from the same
///   place in the source (*unchecked*).
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const REGISTERS: u32>() {
    // SAFETY: the caller's duty is this callee's.
    unsafe { form::setmaxnreg_dec::<REGISTERS>() }
}

/// `A B` of BF16 matrices in f32: A of 64 x 128, of which `left` has one fragment per step, and B of 128 x 64
/// (`wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16`, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::bf16_m16n8k16`]).
///
/// Products of BF16 are exact in f32; sums as in [`crate::mma`].
///
/// # Safety
/// - All threads of four warps, the first of which is a multiple of four, make this call together,
///   from the same place in the source.
/// - B is the same in all threads. It is written, a barrier lies between, and no thread writes it without a barrier
///   between; its address is a multiple of 16 bytes.
/// - The writers of B called [`fence_proxy_async`] before that barrier, or this thread called it after the barrier.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m64n64k128<const N: usize>(
    left: [[u32; 4]; 8],
    right: Shared<u32, N>,
) -> Fragments {
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe { form::bf16_m64n64k128(left, right) }
}

/// `sum + A B`, or `A B` if not `adds`, of BF16 matrices in f32, over an inner dimension of 32 (two steps): A of 64
/// rows and B of 128 columns, both in shared memory ([`Rows`]; a column of B is a row there)
/// (`wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16`, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::bf16_m16n8k16`]).
///
/// # Safety
/// - As [`bf16_m64n64k128`], for both operands; `adds` is the same in all threads.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m64n128k32<const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    adds: bool,
    sum: FragmentsN128,
) -> FragmentsN128 {
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe { form::bf16_m64n128k32(left, right, adds, sum) }
}

/// `sum + A B` of BF16 matrices in f32, over an inner dimension of 64 (four steps, the whole of [`Rows`]). Otherwise as
/// [`bf16_m64n128k32`], two calls of which give equal bits. Also returns the result of `meanwhile`, which with `wgmma`
/// runs while the product is in flight.
///
/// # Safety
/// - As [`bf16_m64n64k128`], for both operands; they are not written by `meanwhile` either.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m64n128k64<T, const N: usize>(
    left: Rows<N>,
    right: Rows<N>,
    sum: FragmentsN128,
    meanwhile: impl FnOnce() -> T,
) -> (FragmentsN128, T) {
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe { form::bf16_m64n128k64(left, right, sum, meanwhile) }
}

/// `A B` of E4M3 matrices in f32, over two steps: those of A in `left`, and steps `step` and `step + 1` of B
/// (`wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3`, PTX ISA 9.7.15.5.2; elsewhere as BF16).
///
/// A tensor core may accumulate with fewer bits than f32: Hopper keeps about 14 bits below the largest
/// product of a sum. Sums of products of E2M1 values stay exact.
///
/// # Safety
/// - As [`bf16_m64n64k128`].
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn e4m3_m64n64k64<const N: usize>(
    left: [[u32; 4]; 2],
    right: Shared<u32, N>,
    step: u32,
) -> Fragments {
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe { form::e4m3_m64n64k64(left, right, step) }
}

/// `A B` of matrices of signed 8-bit integers, in 32-bit integers, over an inner dimension of 128 (four steps). Also
/// returns the result of `meanwhile`, which with `wgmma` runs while the product is in flight
/// (`wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8`, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::s8_m16n8k32`]).
///
/// # Safety
/// - As [`bf16_m64n64k128`]; B is not written by `meanwhile` either.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn s8_m64n64k128<T, const N: usize>(
    left: [[u32; 4]; 4],
    right: Shared<u32, N>,
    meanwhile: impl FnOnce() -> T,
) -> (IntegerFragments, T) {
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe { form::s8_m64n64k128(left, right, meanwhile) }
}

/// Starts `A B` of BF16 matrices in f32, A of 64 rows and B of 64 columns, over an inner dimension of 512. Each lies in
/// eight panels in shared memory; a column of B is a row there
/// (`wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16`, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::bf16_m16n8k16`]).
///
/// # Safety
/// - As [`bf16_m64n64k128`], for both operands. No thread writes B before all four warps have waited for the product. A
///   warp reads only its own 16 rows of A: no thread writes them before that warp has waited for the product, and a
///   lane of that warp only after [`crate::warp::sync_warp`] too.
#[inline(always)]
#[track_caller]
pub unsafe fn start_bf16_m64n64k512<const N: usize>(
    left: Panels<N>,
    right: Panels<N>,
) -> FragmentsInFlight<N> {
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe { form::start_bf16_m64n64k512(left, right) }
}

/// Starts `sum + A B` of BF16 matrices in f32, A of 64 rows and B of 256 columns, over an inner dimension of 32. Both
/// lie in shared memory: A in [`Rows`], B *transposed* in four panels, whose columns are its columns and of whose rows
/// 32 are its inner dimension. The sum may still be in flight
/// (`wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16`, B transposed, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::bf16_m16n8k16`]).
///
/// # Safety
/// - As [`start_bf16_m64n64k512`]. So a warp which has written its own rows of A itself needs no barrier of more warps:
///   [`crate::warp::sync_warp`] after its stores, and then [`fence_proxy_async`] in all lanes, are enough.
#[inline(always)]
#[track_caller]
pub unsafe fn start_bf16_m64n256k32<const N: usize>(
    left: Rows<N>,
    right: Panels<N>,
    sum: InFlightN256<N>,
) -> InFlightN256<N> {
    // SAFETY: the caller brings all threads of the four warps, and both operands.
    unsafe { form::start_bf16_m64n256k32(left, right, sum) }
}

/// `sum + A B` of BF16 matrices in f32, over an inner dimension of 64: A of 64 rows in registers, one fragment per
/// step, and B *transposed* in a panel in shared memory, whose 64 columns are its columns and whose rows are its inner
/// dimension. Also returns the result of `meanwhile`, which with `wgmma` runs while the product is in flight
/// (`wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16`, B transposed, PTX ISA 9.7.15.5.2; elsewhere
/// [`crate::mma::bf16_m16n8k16`]).
///
/// # Safety
/// - As [`bf16_m64n64k128`]; B is not written by `meanwhile` either.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m64n64k64<T, const N: usize>(
    left: [[u32; 4]; 4],
    right: Panels<N>,
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe { form::bf16_m64n64k64(left, right, sum, meanwhile) }
}

/// [`bf16_m64n64k64`] of `left[0]` and `right[0]`, and then of `left[1]` and `right[1]`, added to the same sum. There
/// is no wait between the two products.
///
/// The two products must differ in A or in B: ptxas (CUDA 13) merges neighbouring equal `wgmma` of one sum into one.
///
/// # Safety
/// - As [`bf16_m64n64k64`].
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn bf16_m64n64k64_twice<T, const N: usize>(
    left: [[[u32; 4]; 4]; 2],
    right: [Panels<N>; 2],
    sum: Fragments,
    meanwhile: impl FnOnce() -> T,
) -> (Fragments, T) {
    // SAFETY: the caller brings all threads of the four warps, and B.
    unsafe { form::bf16_m64n64k64_twice(left, right, sum, meanwhile) }
}

/// Waits until at most the last `PENDING` products that the warpgroup started are in flight. The earlier ones no longer
/// read their operands (`wgmma.wait_group.sync.aligned`, PTX ISA 9.7.15.7.1).
///
/// # Safety
/// - All threads of the warpgroup call it together.
/// - A thread waits for all of its products before it returns.
#[inline(always)]
#[track_caller]
pub unsafe fn wait_for_products<const PENDING: u32>() {
    // SAFETY: the caller brings all threads of the four warps.
    unsafe { form::wait_for_products::<PENDING>() }
}

impl<const N: usize> FragmentsInFlight<N> {
    /// Waits until at most the last `PENDING` products that the warpgroup started are in flight, and returns this
    /// product (`wgmma.wait_group.sync.aligned`, PTX ISA 9.7.15.7.1).
    ///
    /// # Safety
    /// - All threads of the warpgroup call it together, and started at most `PENDING` products after this one.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait<const PENDING: u32>(self) -> Fragments {
        // SAFETY: the caller's duty is this callee's.
        unsafe { self.finish::<PENDING>() }
    }
}

impl<const N: usize> InFlightN256<N> {
    /// As [`FragmentsInFlight::wait`].
    ///
    /// # Safety
    /// - As there.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait<const PENDING: u32>(self) -> FragmentsN256 {
        // SAFETY: the caller's duty is this callee's.
        unsafe { self.finish::<PENDING>() }
    }
}

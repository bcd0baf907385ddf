//! Matrix products of a warpgroup, four warps side by side, on the tensor cores: the left side in
//! registers, the right side in shared memory. A product is started, and waited for later.
//!
//! The warps multiply a 64 x 64 matrix A by a 64 x 64 matrix B. Warp `w` holds rows `16 w` to
//! `16 w + 15` of A and of the product, as in [`crate::mma`]: of A four times 16 columns, of the
//! product eight times 8 columns. B lies in shared memory by column: elements `8 e` to `8 e + 7` of
//! column `n` are the four words from [`right_word`]`(e, n)` on (PTX ISA 9.7.15.5.1, "Shared Memory
//! Matrix Layout" without swizzling: core matrices of 8 columns by 16 bytes, columns first).
//!
//! `sm_90a` has an instruction for it, `wgmma`; everything else multiplies warp by warp at once, with
//! the same result but for the order of sums.

use crate::shared::Shared;

#[cfg(not(target_feature = "sm_90a"))]
mod by_warp;
#[cfg(target_feature = "sm_90a")]
use crate::ptx::warpgroup as form;
#[cfg(not(target_feature = "sm_90a"))]
use by_warp as form;

/// A lane's part of the left side: by 16 columns, as `a` in [`crate::mma`].
pub type Left = [[u32; 4]; 4];
/// A lane's part of the product: by eight columns, as `c` in [`crate::mma`].
pub type Fragments = [[f32; 4]; 8];

/// Words of eight rows of B.
pub const EIGHTH: u32 = 4 * 64;

/// Where B's rows `8 eighth` to `8 eighth + 7` of a column lie.
#[inline(always)]
#[must_use]
pub const fn right_word(eighth: u32, column: u32) -> u32 {
    EIGHTH * eighth + 4 * column
}

/// Lets the products of other threads see what this thread wrote to shared memory; to be followed by a
/// barrier (`fence.proxy.async.shared::cta`, PTX ISA 9.7.13.4, `sm_90a`).
#[inline(always)]
pub fn fence_shared() {
    form::fence_shared();
}

/// A sum of products that may still be computed.
#[must_use]
pub struct Pending(form::Pending);

impl Pending {
    /// Starts `A B` of BF16 matrices in f32; B begins at word `first` of `right` (`wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16`, PTX ISA 9.7.15.5.2; elsewhere
    /// [`crate::mma::bf16_m16n8k16`]).
    ///
    /// Products of BF16 are exact in f32; sums as in [`crate::mma`].
    ///
    /// # Safety
    /// - All threads of four warps, the first of which is a multiple of four, make this call together,
    ///   from the same place in the source (*unchecked*).
    /// - B is written, the writers called [`fence_shared`], a barrier followed, and no thread writes it
    ///   before [`Self::wait`] and a barrier; its address is a multiple of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn start<const N: usize>(left: Left, right: Shared<u32, N>, first: u32) -> Self {
        // SAFETY: the caller brings all threads of the four warps, and B.
        Self(unsafe { form::Pending::start(left, right, first) })
    }

    /// Starts a further product, to be added.
    ///
    /// # Safety
    /// - As [`Self::start`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn add<const N: usize>(self, left: Left, right: Shared<u32, N>, first: u32) -> Self {
        // SAFETY: the caller brings all threads of the four warps, and B.
        Self(unsafe { self.0.add(left, right, first) })
    }

    /// The sum, once it is there; waits for all products of the thread that were started.
    ///
    /// # Safety
    /// - All threads that started it make this call together.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn wait(self) -> Fragments {
        // SAFETY: the caller brings all threads of the four warps.
        unsafe { self.0.wait() }
    }
}

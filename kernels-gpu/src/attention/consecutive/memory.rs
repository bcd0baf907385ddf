//! The shared memory of a block, which has as many threads and bytes as one of [`super::super::attend`], and its barriers.

use kv_layout::attention::MAX_CONSECUTIVE;
use simt::shared::Shared;
use simt::thread::NamedBarrier;

use super::super::memory::{Arrays as CommonArrays, BLOCK_THREADS, HEADS, SHARED_BYTES, WARPGROUP};

/// Slot, position and index of each of the block's queries, `[32, 4]`, as [`super::super::keys::Token::store`] stores
/// them.
pub type Tokens = Shared<u32, { 4 * MAX_CONSECUTIVE as usize }>;
/// For each query, `[32, 4]`: flags, position, and the location of its own row ([`super::queries`]).
pub type Known = Shared<u32, { 4 * MAX_CONSECUTIVE as usize }>;
/// `[64]` the factor by which a head's sums of values are multiplied.
pub type OutputScales = Shared<f32, { HEADS as usize }>;

/// The small arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub struct Arrays {
    /// The arrays of [`super::super::attend`].
    pub common: CommonArrays,
    /// Slot, position and index of each query.
    pub tokens: Tokens,
    /// Flags, position and row location of each query.
    pub known: Known,
    /// The factors by which the sums of values are multiplied.
    pub output_scales: OutputScales,
}

impl Arrays {
    /// # Safety
    /// As [`CommonArrays::new`].
    #[inline(always)]
    pub unsafe fn new() -> Self {
        const TOKENS: u32 = CommonArrays::FOUND_AT;
        const KNOWN: u32 = TOKENS + Tokens::BYTES;
        const OUTPUT_SCALES: u32 = KNOWN + Known::BYTES;
        // SAFETY: by this function's own contract. The last three lie where other kernels say where rows lie.
        unsafe {
            Self {
                common: CommonArrays::new(),
                tokens: Shared::at(TOKENS),
                known: Shared::at(KNOWN),
                output_scales: Shared::at(OUTPUT_SCALES),
            }
        }
    }
}

const _: () = assert!(
    Tokens::BYTES + Known::BYTES + OutputScales::BYTES <= SHARED_BYTES - CommonArrays::FOUND_AT
);

/// The queries are copied, and the keys are in shared memory. All threads of the first warpgroup wait, each after
/// `wait_for_groups` and `fence_proxy_async`.
pub const READY: NamedBarrier = NamedBarrier::new(1, WARPGROUP);
/// All keys were loaded anew. The second and third warpgroups arrive, the first waits.
pub const LOADED: NamedBarrier = NamedBarrier::new(2, BLOCK_THREADS);
/// The weights of a tile are in shared memory, and for the second tile also the factors. The first warpgroup arrives,
/// the others wait.
pub const WEIGHED: [NamedBarrier; 2] =
    [NamedBarrier::new(3, BLOCK_THREADS), NamedBarrier::new(4, BLOCK_THREADS)];
/// The output scales of the heads are in shared memory, and the second and third warpgroups have finished their
/// products, so that keys may be replaced. The first warpgroup arrives; the others wait, each after its last product.
pub const SCALED: NamedBarrier = NamedBarrier::new(6, BLOCK_THREADS);
/// Weights, keys, factors and output scales are no longer read. The second and third warpgroups arrive, the first
/// waits.
pub const MULTIPLIED: NamedBarrier = NamedBarrier::new(5, BLOCK_THREADS);

//! The block of a launch: its threads, its shared memory, which is that of [`super::super::attend`], and its barriers.

use kv_layout::attention::MOST_CONSECUTIVE;
use simt::shared::Shared;
use simt::thread::NamedBarrier;

pub use super::super::memory::SHARED_BYTES;
use super::super::memory::{Arrays as CommonArrays, HEADS, WARPGROUP};

/// Threads of a block.
pub const BLOCK_THREADS: u32 = 3 * WARPGROUP;

/// Slot, position and index of each of the block's queries, `[32, 4]`, as [`super::super::keys::Token::store`] puts it.
pub type Tokens = Shared<u32, { 4 * MOST_CONSECUTIVE as usize }>;
/// Of each query, `[32, 4]`: flags, position, and the location of its own row ([`super::queries`]).
pub type Known = Shared<u32, { 4 * MOST_CONSECUTIVE as usize }>;
/// `[64]` what a head's sums of values are multiplied by.
pub type OutputScales = Shared<f32, { HEADS as usize }>;

/// The small arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub struct Arrays {
    /// Those of [`super::super::attend`].
    pub common: CommonArrays,
    /// What the step says of each query.
    pub tokens: Tokens,
    /// What was worked out of it.
    pub known: Known,
    /// What results are multiplied by.
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

/// The queries are copied and the keys there. All threads of the first warpgroup wait, each behind `wait_for_groups`
/// and `fence_shared`.
pub const READY: NamedBarrier = NamedBarrier::new(1, WARPGROUP);
/// All keys are loaded again. The second and third warpgroup arrive, the first waits.
pub const LOADED: NamedBarrier = NamedBarrier::new(2, BLOCK_THREADS);
/// The weights of a tile are there, with those of the second the factors. The first warpgroup arrives, the others wait.
pub const WEIGHED: [NamedBarrier; 2] =
    [NamedBarrier::new(3, BLOCK_THREADS), NamedBarrier::new(4, BLOCK_THREADS)];
/// The output scales of the heads are in shared memory, and both warpgroups that wait have finished their products, so that keys may be
/// replaced. The first warpgroup arrives, the others wait, each behind its last product.
pub const SCALED: NamedBarrier = NamedBarrier::new(6, BLOCK_THREADS);
/// Weights and keys are not read any more, nor what belongs to them. The second and third warpgroup arrive, the first
/// waits.
pub const MULTIPLIED: NamedBarrier = NamedBarrier::new(5, BLOCK_THREADS);

//! The block of a launch: its threads, its shared memory, which is that of [`super::super::attend`], and its barriers.

use kv_layout::attention::MOST_CONSECUTIVE;
use simt::shared::Shared;
use simt::thread::NamedBarrier;

pub use super::super::memory::SHARED_BYTES;
use super::super::memory::{GROUP, HEADS, Small};

/// Threads of a block.
pub const BLOCK: u32 = 3 * GROUP;

/// What the step says of the block's queries, `[32, 4]`, as [`super::super::keys::Token::store`] puts it.
pub type Tokens = Shared<u32, { 4 * MOST_CONSECUTIVE as usize }>;
/// What is known of each, `[32, 4]`: flags, position, and where its own row lies.
pub type Known = Shared<u32, { 4 * MOST_CONSECUTIVE as usize }>;
/// `[64]` what a head's sums of values are multiplied by.
pub type Shares = Shared<f32, { HEADS as usize }>;

/// The small arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub struct Arrays {
    pub small: Small,
    pub tokens: Tokens,
    pub known: Known,
    pub shares: Shares,
}

impl Arrays {
    /// # Safety
    /// As [`Small::new`].
    #[inline(always)]
    pub unsafe fn new() -> Self {
        const TOKENS: u32 = Small::FOUND_AT;
        const KNOWN: u32 = TOKENS + Tokens::BYTES;
        const SHARES: u32 = KNOWN + Known::BYTES;
        // SAFETY: by this function's own contract. The last three lie where other kernels say where rows lie.
        unsafe {
            Self {
                small: Small::new(),
                tokens: Shared::at(TOKENS),
                known: Shared::at(KNOWN),
                shares: Shared::at(SHARES),
            }
        }
    }
}

const _: () =
    assert!(Tokens::BYTES + Known::BYTES + Shares::BYTES <= SHARED_BYTES - Small::FOUND_AT);

/// The queries are copied and the keys there. All threads of the first warpgroup wait, each behind `wait_for_groups`
/// and `fence_shared`.
pub const READY: NamedBarrier = NamedBarrier::new(1, GROUP);
/// All keys are loaded again. The second and third warpgroup arrive, the first waits.
pub const LOADED: NamedBarrier = NamedBarrier::new(2, BLOCK);
/// The weights of a tile are there, with those of the second the factors. The first warpgroup arrives, the others wait.
pub const WEIGHED: [NamedBarrier; 2] = [NamedBarrier::new(3, BLOCK), NamedBarrier::new(4, BLOCK)];
/// What sums are multiplied by is there, and neither of those who wait reads keys any more. The first warpgroup
/// arrives, the others wait, each behind its last product.
pub const SHARED: NamedBarrier = NamedBarrier::new(6, BLOCK);
/// Weights and keys are not read any more, nor what belongs to them. The second and third warpgroup arrive, the first
/// waits.
pub const MULTIPLIED: NamedBarrier = NamedBarrier::new(5, BLOCK);

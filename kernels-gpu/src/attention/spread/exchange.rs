//! The global memory through which the blocks of a cluster exchange weights: each block stores those of its tiles, and
//! reads all.

use simt::mem::GlobalMut;
use simt::thread;

use super::super::memory::HEADS;
use super::memory::{PANEL, TILES, WARPGROUP};
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// Words of a tile of keys: its weights, then each thread's two sums of them.
const TILE_WORDS: u32 = PANEL + 2 * WARPGROUP;
/// Words of exchange memory of a cluster.
pub const CLUSTER_WORDS: u32 = TILES * TILE_WORDS;

/// A thread's weights of a tile and their sums, for two heads. A step has the weights of 16 keys, in the order of the
/// operand of a product.
#[derive(Clone, Copy, Default)]
pub struct Weights {
    /// The weights, as pairs of BF16, for each of four steps.
    pub words: [[u32; 4]; 4],
    /// Bits of the f32 sums.
    pub sums: [u32; 2],
}

/// The cluster's exchange memory, from the thread's first words of weights and of sums on.
#[derive(Clone, Copy)]
pub struct Exchange {
    weights: GlobalMut<u32>,
    sums: GlobalMut<u32>,
}

impl Exchange {
    /// The memory of the block's cluster, whose index is `cluster` among the clusters with the same heads. The pointers
    /// are behind an optimisation barrier: otherwise the compiler would compute their addresses again for each tile.
    #[inline(always)]
    pub fn of(args: &Attend, cluster: u32) -> Self {
        let groups = args.params.heads.div_ceil(HEADS);
        let cluster = u64::from(cluster) * u64::from(groups) + u64::from(thread::block_idx_y());
        let cluster = args.exchange.skip(cluster * u64::from(CLUSTER_WORDS));
        let thread = thread::thread_idx_x() % WARPGROUP;
        Self {
            weights: cluster.skip(u64::from(4 * thread)).opt_barrier(),
            sums: cluster.skip(u64::from(PANEL + 2 * thread)).opt_barrier(),
        }
    }

    /// Stores the thread's weights and sums of tile `tile`.
    ///
    /// # Safety
    /// A barrier of the cluster comes before others read them, or others are stored.
    #[inline(always)]
    pub unsafe fn store(self, tile: u32, weights: Weights) {
        let from = TILE_WORDS * tile;
        // SAFETY: by this function's own contract; words by one thread each.
        unsafe {
            unroll::<4>(|step| {
                let at = u64::from(from + 4 * WARPGROUP * step as u32);
                self.weights.store_u32x4(at, weights.words[step]);
            });
            self.sums.store_u32x2(u64::from(from), weights.sums);
        }
    }

    /// Starts the loads of the thread's weights and sums of tile `tile`; zeros if `tile` is `end` or more.
    ///
    /// # Safety
    /// They are stored, and a barrier of the cluster has passed.
    #[inline(always)]
    pub unsafe fn load(self, (tile, end): (u32, u32)) -> Weights {
        if tile >= end {
            return Weights::default();
        }
        let from = TILE_WORDS * tile;
        // SAFETY: by this function's own contract.
        unsafe {
            Weights {
                words: array_from_fn(|step| {
                    self.weights.load_u32x4(u64::from(from + 4 * WARPGROUP * step as u32))
                }),
                sums: self.sums.load_u32x2(u64::from(from)),
            }
        }
    }
}

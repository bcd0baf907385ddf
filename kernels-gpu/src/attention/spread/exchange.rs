//! The memory through which the blocks of a cluster exchange weights: each stores those of its tiles, and reads all.

use simt::mem::GlobalMut;
use simt::thread;

use super::super::memory::HEADS;
use super::memory::{PANEL, TILES, WARPGROUP};
use crate::args::Attend;
use crate::unroll::{array_from_fn, unroll};

/// Words of a tile of keys: its weights, then each thread's sums of them.
const TILE_WORDS: u32 = PANEL + 2 * WARPGROUP;
/// Words of a cluster.
pub const CLUSTER_WORDS: u32 = TILES * TILE_WORDS;

/// A thread's weights of a tile, 16 keys a step as products read them, and their sums, of two heads.
#[derive(Clone, Copy, Default)]
pub struct Weights {
    /// Pairs of BF16.
    pub words: [[u32; 4]; 4],
    /// Bits of the f32 sums.
    pub sums: [u32; 2],
}

/// The cluster's memory as the thread uses it: from its first words of weights on, and of sums.
#[derive(Clone, Copy)]
pub struct Exchange {
    weights: GlobalMut<u32>,
    sums: GlobalMut<u32>,
}

impl Exchange {
    /// That of the block's cluster, which is number `cluster` of those with the same heads. Held: its addresses would
    /// be computed for each tile.
    #[inline(always)]
    pub fn of(args: &Attend, cluster: u32) -> Self {
        let groups = args.params.heads.div_ceil(HEADS);
        let cluster = u64::from(cluster) * u64::from(groups) + u64::from(thread::block_idx_y());
        let cluster = args.exchange.skip(cluster * u64::from(CLUSTER_WORDS));
        let thread = thread::thread_idx_x() % WARPGROUP;
        Self {
            weights: cluster.skip(u64::from(4 * thread)).held(),
            sums: cluster.skip(u64::from(PANEL + 2 * thread)).held(),
        }
    }

    /// Stores those of tile `tile`.
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

    /// Starts the loads of those of tile `tile`, if it is before tile `end`.
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

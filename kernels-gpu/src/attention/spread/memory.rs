//! The layout of a block: its threads, its shared memory and its barriers.

use kv_layout::attention::{SHORT_SPREAD_TILES, SPREAD_BLOCKS, SPREAD_TILES};
use kv_layout::geometry::{HEAD_DIM, ROPE_DIM};
use simt::cluster::cluster_wait;
use simt::shared::Shared;
use simt::thread::NamedBarrier;
use simt::warpgroup::Panels;

use super::super::keys::KeySet;
use super::super::memory::MATRIX;
pub(super) use super::super::memory::{PANEL, TILE, WARPGROUP};

/// Threads of a block: two warpgroups that multiply, and two that unpack values.
pub const BLOCK_THREADS: u32 = 4 * WARPGROUP;
/// Warps that multiply.
pub const WARPS: u32 = 2 * WARPGROUP / 32;
/// Blocks of a cluster.
pub const CLUSTER_BLOCKS: u32 = SPREAD_BLOCKS;
/// Most tiles of keys of a cluster.
pub const TILES: u32 = SPREAD_TILES;

/// Whether the keys of a query may be divided among several clusters.
#[inline(always)]
pub const fn may_have_clusters<W: KeySet>() -> bool {
    W::SPREAD_TILES > SHORT_SPREAD_TILES
}

/// Whether a block may have three tiles of keys to score, instead of at most two.
#[inline(always)]
pub const fn may_score_three<W: KeySet>() -> bool {
    W::SPREAD_TILES > 2 * CLUSTER_BLOCKS
}

/// First word of the queries, which follow two tiles of keys.
pub const QUERIES: u32 = 2 * MATRIX;
/// Words of three matrices: two tiles of keys, and the queries. The tiles' values replace them.
pub const WORDS: usize = 3 * MATRIX as usize;
/// Number of tiles whose values lie where the second tile of keys is. That place is free from the start in a block that
/// scores fewer than two tiles.
pub const FREE: u32 = MATRIX / PANEL;
/// Number of places for a tile's values.
pub const PLACES: u32 = WORDS as u32 / PANEL;
/// Channels of values that a block has: a panel.
pub const CHANNELS: u32 = HEAD_DIM / CLUSTER_BLOCKS;
const _: () = assert!(TILES * PANEL <= WORDS as u32);
const _: () = assert!(2 * PANEL == TILE * CHANNELS);

pub type Memory = Shared<u32, WORDS>;

/// The addresses of each key's row, `[tiles, 64, 4]`; at the end, the bases of both sums and then their sums of
/// weights, `[2, 2, 64]`.
pub type Found = Shared<u32, { (TILES * TILE * 4) as usize }>;
/// Mask of the keys that are missing, one bit each: `[tiles, 2]`.
pub type Missing = Shared<u32, { (TILES * TILE / 32) as usize }>;
/// The largest score of each tile and head, times log2 e: `[tiles, 64]`.
pub type RowMax = Shared<f32, { (TILES * TILE) as usize }>;
/// Flag of each multiplying warp of each block: it may have weights whose base is not 0. `[8, 8]`.
pub type RescaleFlags = Shared<u32, { (CLUSTER_BLOCKS * WARPS) as usize }>;
/// Cosine and sine of each rotary pair's angle, `[32, 2]`.
pub type Rotation = Shared<f32, { ROPE_DIM as usize }>;

const FOUND: u32 = 4 * WORDS as u32;
const MISSING: u32 = FOUND + Found::BYTES;
const ROW_MAX: u32 = MISSING + Missing::BYTES;
const RESCALE_FLAGS: u32 = ROW_MAX + RowMax::BYTES;
const ROTATION: u32 = RESCALE_FLAGS + RescaleFlags::BYTES;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = ROTATION + Rotation::BYTES;

/// The arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub struct Arrays {
    /// Keys and queries, then values.
    pub memory: Memory,
    /// Addresses of rows.
    pub found: Found,
    /// Keys that do not count.
    pub missing: Missing,
    /// `[2, 64]` base of each sum's weights, then `[2, 64]` their sums; replaces `found`.
    pub bases_and_sums: Shared<f32, { (4 * TILE) as usize }>,
    /// Largest scores.
    pub row_max: RowMax,
    /// Flags of warps that may have weights whose base is not 0.
    pub rescale_flags: RescaleFlags,
    /// Cosines and sines.
    pub rotation: Rotation,
}

impl Arrays {
    /// # Safety
    /// The block has [`SHARED_BYTES`] and uses them for nothing else.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: by this function's own contract; the arrays lie behind each other, `bases_and_sums` in the place of
        // `found`.
        unsafe {
            Self {
                memory: Shared::at(0),
                found: Shared::at(FOUND),
                missing: Shared::at(MISSING),
                bases_and_sums: Shared::at(FOUND),
                row_max: Shared::at(ROW_MAX),
                rescale_flags: Shared::at(RESCALE_FLAGS),
                rotation: Shared::at(ROTATION),
            }
        }
    }

    /// The panels at word `first`.
    #[inline(always)]
    pub fn panels(self, first: u32) -> Panels<WORDS> {
        // SAFETY: the whole shared memory of the block; matrices lie at multiples of 1,024 bytes.
        unsafe { Panels::at(self.memory, first) }
    }

    /// The keys of the block's tile `tile`, 0 to 2. The third replaces the first.
    #[inline(always)]
    pub fn keys(self, tile: u32) -> Panels<WORDS> {
        self.panels(tile % 2 * MATRIX)
    }

    /// The block's channels of the values of tile `tile`. Those of the first [`FREE`] tiles replace the second tile of
    /// keys.
    #[inline(always)]
    pub fn values(self, tile: u32) -> Panels<WORDS> {
        self.panels((tile + FREE) % PLACES * PANEL)
    }
}

/// First word of the sums that the multiplying warpgroups exchange at the end, where values were.
pub const EXCHANGED: u32 = 0;

/// The first two tiles of keys that a block scores are unpacked, and its queries are copied. The unpacking warpgroups
/// arrive, the others wait.
pub const UNPACKED: NamedBarrier = NamedBarrier::new(1, BLOCK_THREADS);
/// The first of three tiles of keys is no longer read. The first warpgroup arrives, the unpacking ones wait.
pub const FIRST_SCORED: NamedBarrier = NamedBarrier::new(5, 3 * WARPGROUP);
/// The third tile of keys is unpacked. The unpacking warpgroups arrive, the first waits.
pub const THIRD_UNPACKED: NamedBarrier = NamedBarrier::new(6, 3 * WARPGROUP);
/// The block's keys and queries are no longer read. The multiplying warpgroups arrive, the others wait.
pub const SCORED: NamedBarrier = NamedBarrier::new(2, BLOCK_THREADS);
/// All values are unpacked. The unpacking warpgroups arrive, the others wait.
pub const VALUES_UNPACKED: NamedBarrier = NamedBarrier::new(3, BLOCK_THREADS);
/// The data that the multiplying warpgroups exchange are in shared memory. Both arrive and wait.
pub const MULTIPLIED: NamedBarrier = NamedBarrier::new(4, 2 * WARPGROUP);

/// Waits until all threads of the cluster have arrived at its barrier. The calling thread has arrived already.
///
/// # Safety
/// As [`cluster_wait`]: every thread calls it, those of a warp from the same place.
#[inline(always)]
pub unsafe fn wait_for_cluster() {
    // SAFETY: the caller's duty is this callee's: warps may wait at different instructions for the barrier.
    unsafe { cluster_wait() }
}

//! The block of a launch: its threads, what lies where in its shared memory, and its barriers.

use kv_layout::attention::{AttendedKeys, TILE_KEYS};
use kv_layout::geometry::{HEAD_DIM, ROPE_DIM};
use simt::shared::Shared;
use simt::thread::{self, NamedBarrier};
use simt::warpgroup::{Panels, Rows};

/// Most heads of a work item.
pub const HEADS: u32 = 64;
/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// Threads that multiply: the first two warpgroups.
pub(super) const MULTIPLYING_THREADS: u32 = 2 * WARPGROUP;
/// Threads of a block. Those of the third warpgroup unpack keys, four a key, two keys one after the other.
pub const BLOCK_THREADS: u32 = 3 * WARPGROUP;
/// Most blocks of a cluster.
pub(super) const CLUSTER_BLOCKS: u32 = AttendedKeys::All.blocks();
/// Keys of a tile, and eights of them.
pub(super) const TILE: u32 = TILE_KEYS;
pub(super) const EIGHTS: u32 = TILE / 8;
/// Words of a matrix of 64 rows of BF16.
pub(super) const MATRIX: u32 = HEADS * HEAD_DIM / 2;
/// Words of a panel of it.
pub(super) const PANEL: u32 = Panels::<0>::WORDS;
const _: () = assert!(TILE == HEADS && MATRIX == 8 * PANEL);

/// First words of what lies in a block's shared memory: two tiles of keys, two of weights, and queries.
pub(super) const KEYS: u32 = 0;
pub(super) const WEIGHTS: u32 = 2 * MATRIX;
pub(super) const QUERIES: u32 = WEIGHTS + 2 * PANEL;
pub(super) const WORDS: usize = (QUERIES + MATRIX) as usize;
/// Bytes from which on the small arrays lie.
pub(super) const ARRAYS: u32 = 4 * WORDS as u32;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = ARRAYS + Arrays::BYTES;

pub(super) type Memory = Shared<u32, WORDS>;

/// Tiles whose row locations are in shared memory at a time, and words of those.
pub(super) const FOUND_TILES: u32 = 4;
const FOUND: usize = (FOUND_TILES * TILE * 2) as usize;

/// The small arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub(super) struct Arrays {
    /// `[2, 8]` of both tiles: which keys count, bit `4 i` of word `n` for key `8 n + i`.
    pub mask: Shared<u32, { 2 * EIGHTS as usize }>,
    /// `[2, 64]` of both tiles: what a head's sums of values before it are multiplied by.
    pub factor: Shared<f32, { 2 * HEADS as usize }>,
    /// `[32, 2]` cosine and sine of each rotary pair's angle.
    pub rotation: Shared<f32, { ROPE_DIM as usize }>,
    /// `[4, 64, 2]` of four tiles: where a key's row lies, as [`super::keys::Keys::row`] says it.
    pub found: Shared<u32, FOUND>,
    /// `[64]` what a head's weights are relative to. This and what follows take the place of the queries, in the end.
    pub base: Shared<f32, { HEADS as usize }>,
    /// `[64]` a head's sum of weights.
    pub sum: Shared<f32, { HEADS as usize }>,
    /// `[64, blocks]` what a head's results of each block are multiplied by.
    pub output_scales: Shared<f32, { (HEADS * CLUSTER_BLOCKS) as usize }>,
}

impl Arrays {
    const BYTES: u32 = 4 * (2 * EIGHTS + 2 * HEADS + ROPE_DIM + FOUND as u32);
    /// Where `found` lies.
    pub(super) const FOUND_AT: u32 = ARRAYS + Self::BYTES - 4 * FOUND as u32;

    /// # Safety
    /// The block has [`SHARED_BYTES`] and uses them for nothing else.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: by this function's own contract; the arrays lie behind each other, in two places.
        unsafe {
            Self {
                mask: Shared::at(ARRAYS),
                factor: Shared::at(ARRAYS + 4 * 2 * EIGHTS),
                rotation: Shared::at(ARRAYS + 4 * (2 * EIGHTS + 2 * HEADS)),
                found: Shared::at(Self::FOUND_AT),
                base: Shared::at(4 * QUERIES),
                sum: Shared::at(4 * (QUERIES + HEADS)),
                output_scales: Shared::at(4 * (QUERIES + 2 * HEADS)),
            }
        }
    }
}

/// The panels at word `first` of the block's shared memory.
#[inline(always)]
pub(super) fn panels(first: u32) -> Panels<WORDS> {
    // SAFETY: the whole shared memory of the block; matrices lie at multiples of 1,024 bytes.
    unsafe { Panels::at(Memory::at(0), first) }
}

/// The tile of keys that tile `tile` of a block goes to.
#[inline(always)]
pub(super) fn keys_of(tile: u32) -> Panels<WORDS> {
    panels(KEYS + tile % 2 * MATRIX)
}

/// The weights of tile `tile` of a block, a row a head.
#[inline(always)]
pub(super) fn weights_of(tile: u32) -> Rows<WORDS> {
    panels(WEIGHTS + tile % 2 * PANEL).panel(0)
}

/// The queries are in shared memory. The second warpgroup arrives, at once unless it writes a part of raw queries; the first
/// waits. It also orders what the four warps of the first have copied or written, each behind `wait_for_groups`: they write
/// rows of other warps, and a warp's product reads its own 16 rows of the queries, behind the fence for the first tile's keys.
pub(super) const QUERIES_READY: NamedBarrier = NamedBarrier::new(1, 2 * WARPGROUP);

/// The cosines and sines of the query's position are in shared memory. The first two warpgroups wait, if queries are
/// raw; else the block's barrier in `merge::write` orders them.
pub(super) const ROTATION: NamedBarrier = NamedBarrier::new(10, 2 * WARPGROUP);

/// The multiplying warpgroups have stored their partial outputs of a part, and then whether the block is the last to do so.
pub(super) const PART_WRITTEN: NamedBarrier = NamedBarrier::new(11, 2 * WARPGROUP);

/// The row locations of two tiles are in shared memory. The second warpgroup arrives, the third waits.
#[inline(always)]
pub(super) const fn found(pair: u32) -> NamedBarrier {
    NamedBarrier::new(12 + pair % 2, 2 * WARPGROUP)
}

/// The keys of a tile, and which of them count, are in shared memory. The third warpgroup arrives, the first waits.
/// The first may then write weights and factors in the place of those two tiles before: the third has waited for
/// [`multiplied`].
#[inline(always)]
pub(super) const fn unpacked(tile: u32) -> NamedBarrier {
    NamedBarrier::new(2 + tile % 2, 2 * WARPGROUP)
}

/// The weights and factors of a tile are in shared memory. The first warpgroup arrives, the second waits. It orders
/// the tile's keys for the second too: the first has waited for [`unpacked`] and has called `fence_shared`.
#[inline(always)]
pub(super) const fn weighed(tile: u32) -> NamedBarrier {
    NamedBarrier::new(4 + tile % 2, 2 * WARPGROUP)
}

/// The first (0) or second (1) half of a tile's keys is not read any more; nor, with the second, its weights. The first two
/// warpgroups arrive, the third waits before it writes the tile after the next.
#[inline(always)]
pub(super) const fn multiplied(tile: u32, half: u32) -> NamedBarrier {
    NamedBarrier::new(6 + 2 * half + tile % 2, 3 * WARPGROUP)
}

/// Waits for all threads of the block, wherever they call this.
///
/// # Safety
/// Every thread of the block calls it; those of a warp from the same place.
#[inline(always)]
pub(super) unsafe fn barrier() {
    // SAFETY: the caller's duty is this callee's: warps may wait at different instructions for one barrier.
    unsafe { thread::sync_threads() }
}

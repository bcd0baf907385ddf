//! The layout of a block: its threads, its shared memory and its barriers.

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
/// Threads of a block. In the third warpgroup, four threads unpack a key, and each thread unpacks two keys of a tile in
/// turn.
pub const BLOCK_THREADS: u32 = 3 * WARPGROUP;
/// Most blocks of a cluster.
pub(super) const CLUSTER_BLOCKS: u32 = AttendedKeys::All.blocks();
/// Keys of a tile, and groups of eight keys in it.
pub(super) const TILE: u32 = TILE_KEYS;
pub(super) const KEY_GROUPS: u32 = TILE / 8;
/// 16-byte vectors of a head in BF16.
pub(super) const HEAD_VECTORS: u32 = HEAD_DIM / 8;
/// Words of a matrix of 64 rows of BF16.
pub(super) const MATRIX: u32 = HEADS * HEAD_DIM / 2;
/// Words of a panel (64 columns) of such a matrix.
pub(super) const PANEL: u32 = Panels::<0>::WORDS;
const _: () = assert!(TILE == HEADS && MATRIX == 8 * PANEL);

/// First words of the large arrays in a block's shared memory: two tiles of keys, two of weights, and the queries.
pub(super) const KEYS: u32 = 0;
pub(super) const WEIGHTS: u32 = 2 * MATRIX;
pub(super) const QUERIES: u32 = WEIGHTS + 2 * PANEL;
pub(super) const WORDS: usize = (QUERIES + MATRIX) as usize;
/// Byte at which the small arrays start.
pub(super) const ARRAYS: u32 = 4 * WORDS as u32;
/// Bytes of shared memory.
pub const SHARED_BYTES: u32 = ARRAYS + Arrays::BYTES;

pub(super) type Memory = Shared<u32, WORDS>;

/// Number of tiles whose row locations are in shared memory at a time, and words of these.
pub(super) const FOUND_TILES: u32 = 4;
const FOUND: usize = (FOUND_TILES * TILE * 2) as usize;

/// The small arrays in a block's shared memory.
#[derive(Clone, Copy)]
pub(super) struct Arrays {
    /// `[2, 8]`, for both tiles: which keys count, as bit `4 i` of word `n` for key `8 n + i`.
    pub mask: Shared<u32, { 2 * KEY_GROUPS as usize }>,
    /// `[2, 64]`, for both tiles: the factor by which a head's sums of values of earlier tiles are multiplied.
    pub factor: Shared<f32, { 2 * HEADS as usize }>,
    /// `[32, 2]` cosine and sine of each rotary pair's angle.
    pub rotation: Shared<f32, { ROPE_DIM as usize }>,
    /// `[4, 64, 2]`, for four tiles: the location of each key's row, in the format of [`super::keys::Keys::row`].
    pub found: Shared<u32, FOUND>,
    /// `[64]` the base of each head's weights. This array and the next ones replace the queries at the end.
    pub base: Shared<f32, { HEADS as usize }>,
    /// `[64]` the sum of each head's weights.
    pub sum: Shared<f32, { HEADS as usize }>,
    /// `[64, blocks]` the factor by which each block's sums of values of a head are multiplied.
    pub output_scales: Shared<f32, { (HEADS * CLUSTER_BLOCKS) as usize }>,
}

impl Arrays {
    const BYTES: u32 = 4 * (2 * KEY_GROUPS + 2 * HEADS + ROPE_DIM + FOUND as u32);
    /// Byte at which `found` starts.
    pub(super) const FOUND_AT: u32 = ARRAYS + Self::BYTES - 4 * FOUND as u32;

    /// # Safety
    /// The block has [`SHARED_BYTES`] and uses them for nothing else.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: by this function's own contract; the arrays lie behind each other, in two places.
        unsafe {
            Self {
                mask: Shared::at(ARRAYS),
                factor: Shared::at(ARRAYS + 4 * 2 * KEY_GROUPS),
                rotation: Shared::at(ARRAYS + 4 * (2 * KEY_GROUPS + 2 * HEADS)),
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

/// The keys of tile `tile` of a block. Tiles use two places in turn.
#[inline(always)]
pub(super) fn keys_of(tile: u32) -> Panels<WORDS> {
    panels(KEYS + tile % 2 * MATRIX)
}

/// The weights of tile `tile` of a block, one row a head. Tiles use two places in turn.
#[inline(always)]
pub(super) fn weights_of(tile: u32) -> Rows<WORDS> {
    panels(WEIGHTS + tile % 2 * PANEL).panel(0)
}

// Named barriers, in the order of their ids. Barrier 0 is that of the block.
//
// | id | barrier | arrives | waits |
// |---|---|---|---|
// | 1 | `QUERIES_FULL` | second warpgroup | first |
// | 2, 3 | `keys_full` | third | first |
// | 4, 5 | `weights_full` | first | second |
// | 6 to 9 | `keys_empty` | first and second | third |
// | 10 | `ROTATION_FULL` | first and second | first and second |
// | 11 | `SPLIT_WRITTEN` | first and second | first and second |
// | 12, 13 | `rows_full` | second | third |

/// The queries are in shared memory. The second warpgroup arrives: at once, unless it writes some of the queries
/// because they are raw. The first warpgroup waits. The barrier also orders what the four warps of the first have
/// copied (each after `wait_for_groups`) or written, since they write rows of other warps. A warp's product reads its
/// own 16 rows of the queries, after the fence for the keys of the first tile.
pub(super) const QUERIES_FULL: NamedBarrier = NamedBarrier::new(1, 2 * WARPGROUP);

/// The keys of a tile, and the mask of those that count, are in shared memory. The third warpgroup arrives, the first
/// waits. The first may then write weights and factors in the place of those of the tile two before: the third has
/// waited for [`keys_empty`].
#[inline(always)]
pub(super) const fn keys_full(tile: u32) -> NamedBarrier {
    NamedBarrier::new(2 + tile % 2, 2 * WARPGROUP)
}

/// The weights and factors of a tile are in shared memory. The first warpgroup arrives, the second waits. The barrier
/// also orders the tile's keys for the second: the first has waited for [`keys_full`] and has called `fence_proxy_async`.
#[inline(always)]
pub(super) const fn weights_full(tile: u32) -> NamedBarrier {
    NamedBarrier::new(4 + tile % 2, 2 * WARPGROUP)
}

/// The first (0) or second (1) half of a tile's keys is no longer read; after the second half, nor are its weights. The
/// first two warpgroups arrive; the third waits before it writes the tile two after this one, which has the same place.
#[inline(always)]
pub(super) const fn keys_empty(tile: u32, half: u32) -> NamedBarrier {
    NamedBarrier::new(6 + 2 * half + tile % 2, 3 * WARPGROUP)
}

/// The cosines and sines of the query's position are in shared memory. The first two warpgroups wait if queries are
/// raw; otherwise the block's barrier in `combine_cluster::write` orders them.
pub(super) const ROTATION_FULL: NamedBarrier = NamedBarrier::new(10, 2 * WARPGROUP);

/// Used twice by the multiplying warpgroups: after they have stored their partial outputs of a split, and after one
/// thread has stored whether the block is the last to do so.
pub(super) const SPLIT_WRITTEN: NamedBarrier = NamedBarrier::new(11, 2 * WARPGROUP);

/// The row locations of two tiles are in shared memory. The second warpgroup arrives, the third waits.
#[inline(always)]
pub(super) const fn rows_full(pair: u32) -> NamedBarrier {
    NamedBarrier::new(12 + pair % 2, 2 * WARPGROUP)
}

/// Waits for all threads of the block. Warps may call it at different places.
///
/// # Safety
/// Every thread of the block calls it; those of a warp from the same place.
#[inline(always)]
pub(super) unsafe fn barrier() {
    // SAFETY: the caller's duty is this callee's: warps may wait at different instructions for one barrier.
    unsafe { thread::sync_threads() }
}

//! Attention over the rows of the cache where they lie: window, list and sink in one softmax.
//! See docs/specification.md, section 13.
//!
//! A cluster of blocks has 64 heads of one query. Its keys, 64 a tile, are dealt to the blocks by their number alone;
//! each block runs through its tiles by online softmax, and then each sums up all blocks' results for its share of the
//! heads, in the order of the blocks. So the bits of a query depend on nothing but its request: not on what else is in
//! the step.
//!
//! Two warpgroups multiply: of a tile, each the queries by half of the keys, and the weights by half of the channels. The
//! third unpacks the next tile meanwhile.

mod memory;
mod merge;
mod softmax;
mod source;
mod unpack;

use kv_layout::geometry::HEAD_DIM;
use simt::cluster::block_rank;
use simt::warpgroup::{
    TallFragments, bf16_m64n32k512, bf16_m64n256k64, fence_shared, fewer_registers, more_registers,
};
use simt::{copy, thread, warp};

use crate::args::Attend;
use crate::fault;
pub use memory::{BLOCK, HEADS, SHARED_BYTES};
use memory::{Memory, QUERIES, Small, THREADS, TILE, UNPACKERS, barrier, keys_of, panels, weights};
use merge::Partial;
use softmax::Softmax;
pub use source::{All, List, Which, Window};
use source::{Keys, Listed, Located, Place, Source, tiles_of};
pub use unpack::KeyFormat;
use unpack::RawKeys;

/// Registers of a thread of either.
const REGISTERS: u32 = 192;
const UNPACKER_REGISTERS: u32 = 120;
/// A block starts with as many registers a thread as 65,536 are enough for, in units of 8: no more are dealt.
const _: () = assert!(
    THREADS * REGISTERS + UNPACKERS * UNPACKER_REGISTERS <= BLOCK * (65_536 / BLOCK / 8 * 8)
);

/// Attention of 64 heads of a query.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(blocks * tokens, heads / 64)`, rounded
/// up, with 384 threads a block and `blocks` blocks a cluster call it.
#[inline(always)]
pub unsafe fn attend<F: KeyFormat, W: Which>(args: Attend) {
    let query = thread::block_idx_x() / W::BLOCKS;
    let first_head = thread::block_idx_y() * HEADS;
    // SAFETY: the query is one of the launch's. What branches on it is the same in all threads of the cluster; what
    // branches on the warpgroup has the same barriers in the same order.
    unsafe {
        let keys = Keys::of::<W>(&args, query);
        let is_first = thread::block_idx_x().is_multiple_of(W::BLOCKS)
            && thread::block_idx_y() == 0
            && thread::warp_id() == 0;
        fault::count(args.faults, thread::lane_id(), u32::from(is_first && keys.is_refused));
        if !keys.is_live {
            return;
        }
        let (small, at) = (Small::new(), Place { query, first_head });
        // The same in all lanes, which the compiler sees by this: descriptors stay in uniform registers.
        let group = warp::shuffle_idx_u32(thread::warp_id() / 4, 0);
        if group == THREADS / 128 {
            fewer_registers::<UNPACKER_REGISTERS>();
            unpack_tiles::<F, W>(Source(&args), keys, small, first_head == 0);
            merge::wait::<W>();
        } else {
            more_registers::<REGISTERS>();
            let sink = merge::start(&args, keys, small, at);
            start_query(&args, at);
            let partial = multiply_tiles::<W>(keys, small, group);
            merge::write::<W>(&args, keys, small, (partial, sink), at);
        }
    }
}

/// Starts copies of the heads' queries, as a group; heads past the last are zero.
///
/// # Safety
/// The heads exist; all threads of the block call it together.
#[inline(always)]
unsafe fn start_query(args: &Attend, at: Place) {
    const SIXTEENS: u32 = HEAD_DIM / 8;
    const HEADS_AT_ONCE: u32 = THREADS / SIXTEENS;
    let (row, heads) = (at.row(args), args.params.heads - at.first_head);
    // SAFETY: the whole shared memory of the block, 16 bytes of a matrix once.
    let memory = unsafe { Memory::at(0) };
    let (mut head, sixteen) =
        (thread::thread_idx_x() / SIXTEENS, thread::thread_idx_x() % SIXTEENS);
    let panel = panels(QUERIES).panel(sixteen / 8);
    let mut from = (row + u64::from(head)) * u64::from(HEAD_DIM) + u64::from(8 * sixteen);
    while head < HEADS {
        let to = panel.word(sixteen % 8, head);
        // SAFETY: by this function's own contract.
        unsafe {
            if head < heads {
                memory.copy_from(to, args.query, from);
            } else {
                memory.store_u32x4(to, [0; 4]);
            }
        }
        head += HEADS_AT_ONCE;
        from += u64::from(HEADS_AT_ONCE * HEAD_DIM);
    }
    copy::commit_group();
}

/// The block's first tile, and one past its last.
#[inline(always)]
fn own_tiles<W: Which>(keys: Keys) -> (u32, u32) {
    tiles_of::<W>(keys.tiles(), if W::BLOCKS > 1 { block_rank() } else { 0 })
}

/// Runs through the block's tiles, which other threads unpack: what the block has of the query.
///
/// # Safety
/// `keys` are a live query's, whose copy is under way; all threads of warpgroup `group` call it together, and all other
/// threads of the block this or [`unpack_tiles`].
#[inline(always)]
unsafe fn multiply_tiles<W: Which>(keys: Keys, small: Small, group: u32) -> Partial {
    let (first, end) = own_tiles::<W>(keys);
    let mut values: TallFragments = [[[0.0; 4]; 16]; 2];
    let mut softmax = Softmax::new();
    copy::wait_for_groups::<0>();
    fence_shared();
    // SAFETY: words of shared memory are written before a barrier that their readers come after; tiles change places.
    unsafe {
        barrier();
        let mut tile = 0;
        while first + tile < end {
            let scores = bf16_m64n32k512(panels(QUERIES), keys_of(tile).from(0, 32 * group));
            values = softmax.weigh(scores, (small, tile, group), values);
            fence_shared();
            barrier();
            values = bf16_m64n256k64(weights(), keys_of(tile).from(4 * group, 0), values);
            barrier();
            tile += 1;
        }
    }
    Partial { values, softmax }
}

/// Unpacks the block's tiles, each while the one before it is multiplied; counts the entries that are refused if
/// `counts`.
///
/// # Safety
/// As [`multiply_tiles`], for the last warpgroup.
#[inline(always)]
unsafe fn unpack_tiles<F: KeyFormat, W: Which>(
    source: Source<'_>,
    keys: Keys,
    small: Small,
    counts: bool,
) {
    let (first, end) = own_tiles::<W>(keys);
    let row = (thread::thread_idx_x() - THREADS) / 4;
    let rows = [row, row + TILE / 2];
    let mut refused = 0;
    // SAFETY: as in `multiply_tiles`: nobody reads the tile that is unpacked until the last of three barriers.
    unsafe {
        let list = |tile: u32| {
            let list = |row| keys.list::<W>(source, (first + tile, row), end);
            [list(rows[0]), list(rows[1])]
        };
        let locate =
            |[a, b]: [Listed; 2]| [keys.locate::<W>(source, a), keys.locate::<W>(source, b)];
        let mut load = |located: Located| {
            refused += u32::from(keys.is_refused::<W>(source, located));
            RawKeys::load::<F>(keys.row::<W>(source, located))
        };
        let (listed, next_listed, mut listed_ahead) = (list(0), list(1), list(2));
        let (mut located_ahead, located) = (locate(next_listed), locate(listed));
        let mut raw = [load(located[0]), load(located[1])];
        let mut tile = 0;
        loop {
            let (low, high) = ((small, tile, rows[0]), (small, tile, rows[1]));
            let keys_of_tile = keys_of(tile);
            // In each phase of the other threads' tile as much as takes as long; loads as early as there are registers.
            raw[0].unpack::<F, 0, 8>(keys_of_tile, low);
            raw[0] = load(located_ahead[0]);
            raw[1].unpack::<F, 0, 1>(keys_of_tile, high);
            if tile > 0 {
                barrier();
            }
            raw[1].unpack::<F, 1, 3>(keys_of_tile, high);
            if tile > 0 {
                barrier();
            }
            raw[1].unpack::<F, 3, 8>(keys_of_tile, high);
            // Before further loads: it would wait for them.
            fence_shared();
            raw[1] = load(located_ahead[1]);
            located_ahead = locate(listed_ahead);
            listed_ahead = list(tile + 3);
            barrier();
            if first + tile >= end {
                break;
            }
            tile += 1;
        }
        if W::HAS_ENTRIES && counts {
            let is_first = thread::lane_id().is_multiple_of(4);
            let refused = warp::reduce_add_u32(if is_first { refused } else { 0 });
            fault::count(source.0.faults, thread::lane_id(), refused);
        }
    }
}

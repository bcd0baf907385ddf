//! Attention in place, over the stored rows of the cache: window and entries in one softmax, with a sink.
//! See docs/specification.md, section 13.
//!
//! A *work item* is a query, a split of its keys, and up to 64 of its heads. docs/architecture.md, D33 says how many
//! blocks share a work item, and which kernel (form) runs it. All forms give the same bits for a query. These depend
//! only on its request, and on the length of its list where the list is padded; never on the other queries of the step.
//!
//! Terms, with the symbols of the FlashAttention papers: *scores* are `S = Q K^T`, *weights* are `P`, *values* are `V`,
//! and the *sums of values* are the accumulator `O`. The *base* of the weights is the running maximum `m`, raised only
//! where necessary. The *sum of weights* is `l`. The *factor* of a raised base rescales `O`.
//!
//! The kernels of this module ([`attend`]) use a cluster of two blocks for a work item with entries, and one block for
//! a work item with a window alone. The two blocks share the keys, in tiles of 64: which block has which tile follows
//! from the number of tiles alone. Each block runs through its tiles by online softmax; then each combines the results
//! of both blocks for half of the heads, in the order of the blocks. With
//! [`kv_layout::attention::KeyCluster::OneBlock`] a work item has one block, which runs through all tiles; the blocks
//! of a cluster then have different work items.
//!
//! A large number of keys is divided into several splits (split-KV, as in Flash-Decoding). Each work item stores its
//! partial result and log-sum-exp in global memory. The last block to finish for a group of heads combines the splits,
//! in their order. So there are three levels at which partial results are combined: the blocks of a cluster
//! (`combine_cluster`), the splits of a query (`combine_splits`), and the clusters of a spread query
//! (`spread::combine_clusters`).
//!
//! With few queries, two clusters (with one block for each split: two blocks) have the same keys. Both compute all
//! weights; each accumulates half of the channels of the values (`work_item::Channels`). With fewer queries still,
//! [`spread`] uses eight blocks for a work item. For windows in chunks of prompts there is [`consecutive`]: a block
//! takes several queries in turn, and keeps the rows that they share.
//!
//! A block has 384 threads, three warpgroups, and 211 KiB of shared memory, so one block runs on a multiprocessor:
//!
//! ```text
//! shared memory   keys 2 x 64 KiB | weights 2 x 8 KiB | queries 64 KiB | masks, factors, row locations 3 KiB
//!
//! first   S = Q K^T (m64n64k512), softmax, weights -> shared memory, O[:, ..256] += P V    216 registers a thread
//! second  O[:, 256..] += P V; row locations of later tiles -> shared memory                160
//! third   global memory -> registers -> BF16 keys in shared memory (unpack)                128
//!
//! tile t  third: unpack t        -> keys_full(t)    -> first: S(t), while P V(t - 1) runs; softmax
//!                                -> weights_full(t) -> first, second: P V(t)
//!                                -> keys_empty(t)   -> third: unpack t + 2 in the same place
//! ```
//!
//! If the block has only half of the channels, the second warpgroup multiplies all of these.

mod combine_cluster;
mod combine_splits;
pub mod consecutive;
mod find;
mod keys;
mod memory;
mod output;
mod query;
mod rows;
mod softmax;
pub mod spread;
mod unpack;
mod work_item;

use kv_layout::main_row::MainFormat;
use simt::warpgroup::{
    FragmentsN256, InFlight, InFlightN256, fence_proxy_async, setmaxnreg_dec, setmaxnreg_inc,
    start_bf16_m64n64k512, start_bf16_m64n256k32, wait_for_products,
};
use simt::{copy, thread, warp};

use crate::args::Attend;
use crate::fault;
use find::{Finder, FirstKeys};
pub use keys::{All, KeySet, List, Short, Window};
use keys::{Keys, Token};
use memory::{
    Arrays, KEY_GROUPS, MULTIPLYING_THREADS, QUERIES, QUERIES_FULL, ROTATION_FULL, TILE, WARPGROUP,
    WORDS, keys_empty, keys_full, keys_of, panels, weights_full, weights_of,
};
pub use memory::{BLOCK_THREADS, HEADS, SHARED_BYTES};
use rows::{Row, Source};
use softmax::{KeyMask, Softmax, first_row, rescale};
pub use unpack::KeyFormat;
use unpack::RawKeys;
use work_item::{Channels, Heads, SplitBlocks, Task};

/// Registers of a thread of the first (scorer), second (multiplier) and third (unpacker) warpgroup. Rows with F32
/// scales need more registers to unpack, so there the first warpgroup leaves some to the third.
const SCORER: u32 = 216;
const SCORER_F32: u32 = 208;
const MULTIPLIER: u32 = 160;
const UNPACKER: u32 = 128;
const UNPACKER_F32: u32 = 136;
/// Registers of a thread when a block starts: the register file of 65,536 divided by the threads, rounded down to a
/// multiple of 8.
const AT_START: u32 = 65_536 / BLOCK_THREADS / 8 * 8;
const _: () = assert!(can_be_set(SCORER, UNPACKER) && can_be_set(SCORER_F32, UNPACKER_F32));

/// Whether `setmaxnreg` can set these counts: the total is at most what the block started with, the first warpgroup
/// gets at least its initial count, and the others at most theirs. `setmaxnreg.inc` to fewer registers, or
/// `setmaxnreg.dec` to more, is an illegal instruction.
const fn can_be_set(scorer: u32, unpacker: u32) -> bool {
    (scorer + MULTIPLIER + unpacker) * WARPGROUP <= BLOCK_THREADS * AT_START
        && scorer >= AT_START
        && MULTIPLIER <= AT_START
        && unpacker <= AT_START
}

/// Computes attention for one work item: up to 64 heads of a query, and a split of its keys.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `blocks_per_split * groups *
/// channel_halves * num_splits * tokens`, rounded up, of `heads / 64` groups, rounded up, with 384 threads a block and
/// `W::CLUSTER_BLOCKS` blocks a cluster call it.
#[inline(always)]
pub unsafe fn attend<F: KeyFormat, W: KeySet>(args: Attend) {
    let blocks = SplitBlocks::of::<W>(&args);
    let (first_head, cluster) = Heads::of_cluster(&args, thread::block_idx_x() / blocks.count);
    let (channels, work_item) = Channels::of_cluster(&args, cluster);
    let max_splits = if W::HAS_SPLITS { args.params.num_splits.max(1) } else { 1 };
    // First the first splits of all queries, then the second ones: in a graph for longer requests, blocks without a
    // split come last.
    let tokens = args.params.tokens;
    let (query, split) =
        if W::HAS_SPLITS { (work_item % tokens, work_item / tokens) } else { (work_item, 0) };
    // Where a split has one block, the grid is rounded up to whole clusters: the last block may have no work item.
    if query >= tokens || split >= max_splits {
        return;
    }
    // SAFETY: the query is one of the launch's. What branches on it is the same in all threads of the blocks that share
    // its keys, which are the cluster where there is a barrier of the cluster: where a split has one block there is
    // none, and a block reads its own memory. What branches on the warpgroup has the same barriers in the same order.
    unsafe {
        let keys = Keys::of::<W>(&args, query, Token::load(&args, query));
        let is_first = blocks.rank == 0
            && channels.is_first()
            && split == 0
            && first_head == 0
            && thread::warp_id() == 0;
        fault::count(args.faults, thread::lane_id(), u32::from(is_first && keys.is_refused));
        let num_splits = keys.num_splits::<W>(&args);
        if !keys.is_live || split >= num_splits {
            return;
        }
        let keys = if W::HAS_SPLITS { keys.of_split(split, num_splits) } else { keys };
        let heads = Heads { query, first: first_head, split, num_splits };
        let task = Task { heads, blocks, channels };
        let arrays = Arrays::new();
        // The shuffle shows the compiler that the value is the same in all lanes, so that descriptors stay in uniform
        // registers.
        let group = warp::shuffle_idx_u32(thread::warp_id() / 4, 0);
        let block = Block { args: &args, arrays, keys, task, tiles: own_tiles(keys, blocks) };
        if group == 2 {
            unpack_role::<F>(block);
        } else if group == 1 {
            multiply_role::<W>(block);
        } else {
            score_role::<F, W>(block);
        }
    }
}

/// What a block computes, and where.
#[derive(Clone, Copy)]
struct Block<'a> {
    args: &'a Attend,
    arrays: Arrays,
    keys: Keys,
    task: Task,
    /// The range of the block's tiles: the first, and one past the last.
    tiles: (u32, u32),
}

/// The first warpgroup: scores, weights, and the sums of values of the first half of the channels.
///
/// # Safety
/// As [`attend`]: all threads of the warpgroup call it together, those of the second [`multiply_role`], those of the
/// third [`unpack_role`].
#[inline(always)]
unsafe fn score_role<F: KeyFormat, W: KeySet>(block: Block<'_>) {
    let Block { args, arrays, keys, task, tiles } = block;
    let is_raw = args.params.raw_queries != 0;
    // SAFETY: by this function's own contract; the launch's threads all see the same parameters.
    unsafe {
        if is_f32::<F>() {
            setmaxnreg_inc::<SCORER_F32>();
        } else {
            setmaxnreg_inc::<SCORER>();
        }
        if !is_raw {
            query::start_copies(args, task);
        }
        let sink = combine_cluster::load_early(args, keys, arrays, task);
        if is_raw {
            ROTATION_FULL.sync();
            query::norm_and_rotate(args, arrays, task);
        }
        copy::commit_group();
        let softmax = if task.channels.halves == 1 {
            let (values, softmax) = score_tiles(tiles, arrays);
            combine_cluster::store(values);
            softmax
        } else {
            let softmax = score_tiles_alone(tiles, arrays);
            combine_cluster::store_none();
            softmax
        };
        softmax.store(arrays);
        combine_cluster::write::<W>(args, keys, arrays, sink, task);
    }
}

/// The second warpgroup: the sums of values of the second half of the channels, or of all channels of a block that has
/// half of them; meanwhile the row locations of later tiles.
///
/// # Safety
/// As [`score_role`].
#[inline(always)]
unsafe fn multiply_role<W: KeySet>(block: Block<'_>) {
    let Block { args, arrays, keys, task, tiles } = block;
    let channels = task.channels;
    let is_raw = args.params.raw_queries != 0;
    // SAFETY: as in `score_role`.
    unsafe {
        setmaxnreg_dec::<MULTIPLIER>();
        let first = FirstKeys::start::<W>(Source(args), keys, tiles);
        if !is_raw {
            QUERIES_FULL.arrive();
        }
        let found = first.locate::<W>();
        if is_raw {
            ROTATION_FULL.sync();
        }
        let finder = found.publish::<W>(arrays);
        if is_raw {
            query::norm_and_rotate(args, arrays, task);
            QUERIES_FULL.arrive();
        }
        let reports_refused = task.heads.first == 0 && channels.is_first();
        let finder = (finder, reports_refused);
        let values = if channels.halves == 2 && channels.half == 0 {
            multiply_tiles::<W, 0>(tiles, arrays, finder)
        } else {
            multiply_tiles::<W, HALF>(tiles, arrays, finder)
        };
        combine_cluster::store(values);
        combine_cluster::write::<W>(args, keys, arrays, 0.0, task);
    }
}

/// The third warpgroup: loads rows and unpacks them.
///
/// # Safety
/// As [`score_role`].
#[inline(always)]
unsafe fn unpack_role<F: KeyFormat>(block: Block<'_>) {
    // SAFETY: as in `score_role`.
    unsafe {
        if is_f32::<F>() {
            setmaxnreg_dec::<UNPACKER_F32>();
        } else {
            setmaxnreg_dec::<UNPACKER>();
        }
        unpack_tiles::<F>(Source(block.args), block.tiles, block.arrays);
        combine_cluster::wait(block.task.blocks);
    }
}

/// The first panel (of 64 channels) of the second half of the channels.
const HALF: u32 = 4;

/// Whether rows have F32 scales.
#[inline(always)]
const fn is_f32<F: KeyFormat>() -> bool {
    matches!(F::FORMAT, MainFormat::F32)
}

/// The range of the block's tiles: the first, and one past the last.
#[inline(always)]
fn own_tiles(keys: Keys, blocks: SplitBlocks) -> (u32, u32) {
    let (first, end) = blocks.tiles_of(keys.tiles, blocks.rank);
    (keys.first_tile + first, keys.first_tile + end)
}

/// Starts the product of a tile's weights by 256 channels of its values, from panel `panel` on, for the first (`half`
/// 0) or second (`half` 1) half of the tile's keys; adds it to `sum`.
///
/// # Safety
/// All threads of the warpgroup call it together; weights and keys are there.
#[inline(always)]
unsafe fn start_values(
    (tile, half): (u32, u32),
    panel: u32,
    sum: InFlightN256<WORDS>,
) -> InFlightN256<WORDS> {
    let (weights, keys) = (weights_of(tile).from(4 * half, 0), keys_of(tile));
    // SAFETY: by this function's own contract.
    unsafe { start_bf16_m64n256k32(weights, keys.from(panel, TILE / 2 * half), sum) }
}

/// Runs through the block's tiles, which the third warpgroup unpacks: computes scores, weights, and the sums of values
/// of the first half of the channels. While the products with a tile's values run, it waits for the next tile. It
/// releases the shared memory of a tile in two halves.
///
/// # Safety
/// Tiles `first..end` are the block's, the copy of the queries is under way; all threads of the first warpgroup call it
/// together, those of the second [`multiply_tiles`], those of the third [`unpack_tiles`].
#[inline(always)]
unsafe fn score_tiles((first, end): (u32, u32), arrays: Arrays) -> (FragmentsN256, Softmax) {
    let tiles = end - first;
    let mut values: FragmentsN256 = [[[0.0; 4]; 16]; 2];
    let mut softmax = Softmax::new();
    copy::wait_for_groups::<0>();
    // SAFETY: words of shared memory are written before a barrier that their readers come after; tiles change places.
    unsafe {
        QUERIES_FULL.sync();
        if tiles > 0 {
            keys_full(0).sync();
            // Products read, by the async proxy, what other threads stored: the third warpgroup, and all threads that
            // copied queries. The reader fences, for both multiplying warpgroups: a fence in the third would make it
            // wait for its loads.
            fence_proxy_async();
            let scores = start_bf16_m64n64k512(panels(QUERIES), keys_of(0));
            let mask = KeyMask::load(arrays, 0);
            softmax.weigh_first(mask.apply(scores.wait::<0>()), arrays);
            // Makes the weights visible to the async proxy. `sync_warp` in `softmax` orders them for the warp's own
            // products, and the barrier for the second warpgroup's.
            fence_proxy_async();
            weights_full(0).arrive();
            let mut tile = 0;
            while tile + 1 < tiles {
                let low = start_values((tile, 0), 0, InFlight::idle(values));
                let both = start_values((tile, 1), 0, low);
                keys_full(tile + 1).sync();
                fence_proxy_async();
                let scores = start_bf16_m64n64k512(panels(QUERIES), keys_of(tile + 1));
                if tile + 2 < tiles {
                    wait_for_products::<2>();
                    keys_empty(tile, 0).arrive();
                }
                values = both.wait::<1>();
                if tile + 2 < tiles {
                    keys_empty(tile, 1).arrive();
                }
                let mask = KeyMask::load(arrays, tile + 1);
                let scores = scores.wait::<0>();
                let factor = softmax.weigh(mask.apply(scores), arrays, tile + 1);
                fence_proxy_async();
                weights_full(tile + 1).arrive();
                values = rescale(values, factor);
                tile += 1;
            }
            let low = start_values((tile, 0), 0, InFlight::idle(values));
            values = start_values((tile, 1), 0, low).wait::<0>();
        }
    }
    (values, softmax)
}

/// As [`score_tiles`] without values, in a block that has half of the channels: the second warpgroup multiplies all of
/// these. Releases the keys of a tile as soon as its scores are complete.
///
/// # Safety
/// As [`score_tiles`].
#[inline(always)]
unsafe fn score_tiles_alone((first, end): (u32, u32), arrays: Arrays) -> Softmax {
    let tiles = end - first;
    let mut softmax = Softmax::new();
    copy::wait_for_groups::<0>();
    // SAFETY: as in `score_tiles`.
    unsafe {
        QUERIES_FULL.sync();
        let mut tile = 0;
        while tile < tiles {
            keys_full(tile).sync();
            fence_proxy_async();
            let scores = start_bf16_m64n64k512(panels(QUERIES), keys_of(tile));
            let mask = KeyMask::load(arrays, tile);
            let scores = scores.wait::<0>();
            if tile + 2 < tiles {
                keys_empty(tile, 0).arrive();
                keys_empty(tile, 1).arrive();
            }
            let scores = mask.apply(scores);
            if tile == 0 {
                softmax.weigh_first(scores, arrays);
            } else {
                softmax.weigh(scores, arrays, tile);
            }
            fence_proxy_async();
            weights_full(tile).arrive();
            tile += 1;
        }
    }
    softmax
}

/// Runs through the block's tiles, each once its weights are stored: computes the sums of values of half of the
/// channels, from panel `PANEL` on. Meanwhile it finds the rows of later tiles, and counts refused entries if
/// `reports_refused`.
///
/// # Safety
/// As [`score_tiles`], for the second warpgroup.
#[inline(always)]
unsafe fn multiply_tiles<W: KeySet, const PANEL: u32>(
    (first, end): (u32, u32),
    arrays: Arrays,
    (mut finder, reports_refused): (Finder<'_>, bool),
) -> FragmentsN256 {
    let tiles = end - first;
    let mut values: FragmentsN256 = [[[0.0; 4]; 16]; 2];
    // SAFETY: as in `score_tiles`.
    unsafe {
        let mut tile = 0;
        while tile < tiles {
            weights_full(tile).sync();
            let row = tile % 2 * HEADS + first_row();
            let factor = [arrays.factor.load(row), arrays.factor.load(row + 8)];
            values = rescale(values, factor);
            let low = start_values((tile, 0), PANEL, InFlight::idle(values));
            let both = start_values((tile, 1), PANEL, low);
            if tile + 2 < tiles {
                wait_for_products::<1>();
                keys_empty(tile, 0).arrive();
            }
            values = both.wait::<0>();
            if tile + 2 < tiles {
                keys_empty(tile, 1).arrive();
            }
            finder.advance::<W>(arrays, tile);
            tile += 1;
        }
        if W::HAS_ENTRIES && reports_refused {
            finder.count();
        }
    }
    values
}

/// Unpacks the block's tiles, each half as soon as the tile two before it, which has the same place, is no longer read
/// there. The loads of a row begin before the thread unpacks the row that is half a tile earlier.
///
/// # Safety
/// As [`score_tiles`], for the last warpgroup.
#[inline(always)]
unsafe fn unpack_tiles<F: KeyFormat>(source: Source<'_>, (first, end): (u32, u32), arrays: Arrays) {
    let tiles = end - first;
    let row = (thread::thread_idx_x() - MULTIPLYING_THREADS) / 4;
    if tiles == 0 {
        return;
    }
    // SAFETY: as in `score_tiles`.
    unsafe {
        find::wait_for(0);
        let mut raw = RawKeys::load::<F>(find::row_of(source, arrays, (0, row)));
        let mut tile = 0;
        while tile < tiles {
            let second = (tile, row + TILE / 2);
            raw = unpack_half::<F>(raw, arrays, (tile, 0), find::row_of(source, arrays, second));
            let next = tile + 1;
            if find::is_first_of_pair(next) && next < tiles {
                find::wait_for(next);
            }
            // After the last tile any row serves: its load is not used.
            let first = if next < tiles { (next, row) } else { second };
            raw = unpack_half::<F>(raw, arrays, (tile, 1), find::row_of(source, arrays, first));
            keys_full(tile).arrive();
            tile = next;
        }
    }
}

/// Unpacks the lane's channels of a row of half a tile, once its place in shared memory is free. The loads of the
/// lane's channels of the next row begin before that; they are returned.
///
/// # Safety
/// As [`unpack_tiles`].
#[inline(always)]
unsafe fn unpack_half<F: KeyFormat>(
    raw: RawKeys,
    arrays: Arrays,
    (tile, half): (u32, u32),
    next: Row,
) -> RawKeys {
    let row = (thread::thread_idx_x() - MULTIPLYING_THREADS) / 4;
    // SAFETY: by this function's own contract.
    unsafe {
        // Waits for the loads. A wait for one load also waits for all later ones, which share its scoreboard: so the
        // next loads begin after it.
        let is_nan = raw.has_nan::<F>();
        let next = RawKeys::load::<F>(next);
        if tile >= 2 {
            keys_empty(tile, half).sync();
        }
        raw.unpack::<F>(is_nan, tile, row + TILE / 2 * half);
        // Four lanes, and so four bits of the mask, belong to one key.
        let mask = warp::ballot(raw.is_there());
        if thread::lane_id() == 0 {
            let group = KEY_GROUPS / 2 * half + thread::warp_id() - MULTIPLYING_THREADS / 32;
            arrays.mask.store(tile % 2 * KEY_GROUPS + group, mask);
        }
        next
    }
}

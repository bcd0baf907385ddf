//! Attention of few queries, each spread over a cluster of eight blocks. The results have the same bits as those of
//! [`super::attend`]; it takes less time and less code.
//!
//! A cluster has 64 heads of a query, and all of their keys or a piece of them: a split, or half of one. First, each
//! block multiplies the queries by the keys of its own tiles, and stores the weights, with base 0, in global memory for
//! all blocks. Then each block multiplies all weights by 64 channels of the values of all keys, and writes these
//! channels of all heads.
//!
//! Scores are seldom too far from 0 for base 0. If they are, the blocks exchange the largest scores of the tiles. From
//! these each block computes the base of every tile (the running maximum), in the order of the tiles, and stores its
//! weights again.
//!
//! Only two kinds of sums are combined: splits, and the two sums of a split, one for each half of its keys. A split has
//! two sums where [`super::attend`] has two blocks for it ([`kv_layout::attention::KeyCluster::TwoBlocks`]), since all
//! forms give the same bits. A cluster that has a whole split computes both sums, one in each of two warpgroups; where
//! there are enough clusters, each of two clusters has the keys of one sum. If a query has several clusters, the last
//! block to store its partial output adds up all partial outputs of its 64 channels.
//!
//! In a model, other kernels run between two launches of this one, and their data evict its code from L2. So each
//! launch fetches its code from device memory, which takes as long as a large part of the work. Hence this module has
//! loops where [`super::attend`] has none, and the same code for all warps wherever possible.

mod combine_clusters;
mod exchange;
mod memory;
mod scores;
mod sums;
mod task;
mod unpack;

use simt::cluster::{block_rank, cluster_arrive, cluster_arrive_release};
use simt::{copy, thread, warp};

use super::keys::{KeySet, Keys, Token};
use super::memory::HEADS;
use super::output::load_sinks;
use super::query::copy_ready;
use super::rows::Source;
use super::unpack::KeyFormat;
use super::work_item::Heads;
use crate::args::Attend;
use crate::fault;
pub use exchange::CLUSTER_WORDS;
use exchange::Exchange;
use memory::{Arrays, CLUSTER_BLOCKS, QUERIES, UNPACKED, wait_for_cluster};
pub use memory::{BLOCK_THREADS, SHARED_BYTES};
use task::{ClusterWork, Task};

/// Computes attention of up to 64 heads of a query, which is normed and rotated. Each split of its keys, or half of
/// one, is at most [`KeySet::SPREAD_TILES`] tiles. If `key_halves` is 2, for splits that have two sums, each of two
/// clusters has half of the keys of a split, and computes one of the two sums.
///
/// # Safety
/// Pointers and shapes as in the kernel table; splits of a window and `entry_rows`, or their halves if
/// `key_halves` is 2, are no more tiles than that; all threads of a launch of grid `(8 * pieces * tokens, heads
/// / 64)`, rounded up, with 512 threads a block and eight blocks a cluster call it.
#[inline(always)]
pub unsafe fn attend<F: KeyFormat, W: KeySet>(args: Attend) {
    let (cluster, rank) = (thread::block_idx_x() / CLUSTER_BLOCKS, block_rank());
    let work = ClusterWork::of::<W>(&args, cluster);
    let first = thread::block_idx_y() * HEADS;
    // SAFETY: the query is one of the launch's. What branches on it is the same in all threads of the cluster; what
    // branches on the warpgroup has the same barriers in the same order.
    unsafe {
        let (arrays, source) = (Arrays::new(), Source(&args));
        // The copies begin before anything waits for a load, so queries of padding are copied too.
        let token = Token::load(&args, work.query);
        let heads = Heads { query: work.query, first, split: work.split, num_splits: 1 };
        let rows = (heads.row(&args), heads.count(&args));
        copy_ready::<BLOCK_THREADS, _>(&args, rows, (arrays.memory, arrays.panels(QUERIES)));
        copy::commit_group();
        let keys = Keys::of::<W>(&args, work.query, token);
        let reports = rank == 0 && first == 0;
        let is_first = reports && work.piece == 0 && thread::warp_id() == 0;
        fault::count(args.faults, thread::lane_id(), u32::from(is_first && keys.is_refused));
        let Some((keys, task)) = work.of_block::<W>(&args, (heads, keys), rank) else {
            copy::wait_for_groups::<0>();
            return;
        };
        // All blocks must have started before any of them writes into another's shared memory; `wait_for_cluster`
        // completes this.
        cluster_arrive();
        let refused = unpack::find::<F, W>(source, keys, task, arrays);
        fault::count(args.faults, thread::lane_id(), if reports { refused } else { 0 });
        thread::sync_threads();
        // The shuffle shows the compiler that the value is the same in all lanes, so that descriptors stay in uniform
        // registers.
        let group = warp::shuffle_idx_u32(thread::warp_id() / 4, 0);
        unpack::unpack::<F, W>(source, task, group, arrays);
        if group >= 2 {
            unpack::unpack_values::<F, W>(source, keys.position, task, arrays);
            return;
        }
        score_and_sum::<W>(&args, cluster, task, (arrays, group));
    }
}

/// Computes the weights of the block's tiles and the sums of values of its channels, and writes them, in multiplying
/// warpgroup `group` of cluster `cluster`.
///
/// # Safety
/// As [`attend`]: all threads of the multiplying warpgroups call it together, after [`unpack::unpack`], the other ones
/// [`unpack::unpack_values`].
#[inline(always)]
unsafe fn score_and_sum<W: KeySet>(
    args: &Attend,
    cluster: u32,
    task: Task,
    (arrays, group): (Arrays, u32),
) {
    // SAFETY: by this function's own contract; what branches is the same in all threads of the cluster.
    unsafe {
        UNPACKED.sync();
        wait_for_cluster();
        let (scores, (exchange, sinks)) = scores::multiply::<W, _>(task, arrays, group, || {
            (Exchange::of(args, cluster), load_sinks(args, task.heads))
        });
        cluster_arrive_release();
        wait_for_cluster();
        let task = Task { needs_rescale: scores::needs_rescale(arrays), ..task };
        if task.needs_rescale {
            scores::weigh_again::<W>(exchange, task, arrays, (scores, group));
        }
        let sum = sums::multiply(exchange, task, arrays, group);
        sums::write::<W>(args, task, arrays, (sum, group, sinks));
    }
}

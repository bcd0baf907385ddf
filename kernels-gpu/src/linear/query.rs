//! `nvfp4_index_query_*`: queries of the indexer, from activations to the layout that the score kernels read, in one
//! launch.
//!
//! A head is 128 columns: two blocks of a cluster have 64 columns each. The blocks exchange their sums, and each
//! finishes the head's queries of every other token, as `index_query` does.

use simt::cluster::{block_rank, cluster_arrive, cluster_wait, sync_cluster};
use simt::shared::Shared;
use simt::thread;

use super::product::{Block, COLUMNS, SUM_ROW, sums_at, threads};
use super::weights::{NVFP4_FRAGMENTS, Nvfp4Weights};
use crate::args::Nvfp4IndexQuery;
use crate::index_row::IndexRowFormat;
use crate::indexer::CHANNELS;
use crate::indexer::score::query::queries;
use crate::params::Nvfp4IndexQueryParams;

/// Blocks of a head.
pub const HEAD_BLOCKS: u32 = CHANNELS / COLUMNS;
/// Warps of a block.
const WARPS: u32 = threads(NVFP4_FRAGMENTS) / 32;

/// Computes the queries of each token's heads, and their weights.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(2 * 64, tokens / 8 N)`, rounded
/// up, call it.
#[inline(always)]
pub unsafe fn query<F: IndexRowFormat, const N: usize, const M: usize>(args: Nvfp4IndexQuery) {
    let Nvfp4IndexQueryParams { tokens, heads, inner, scale_bits, .. } = args.params;
    let block = Block::<_, NVFP4_FRAGMENTS, N, M> {
        weights: Nvfp4Weights::new(args.codes, args.scales, inner),
        input: args.input,
        tokens,
        columns: heads * CHANNELS,
        inner,
        first_token: thread::block_idx_y() * 8 * N as u32,
        first_column: thread::block_idx_x() * COLUMNS,
    };
    let queries = queries!(args);
    let head = thread::block_idx_x() / HEAD_BLOCKS;
    // SAFETY: by this function's own contract; the branches with barriers are the cluster's, the others the warp's.
    unsafe {
        let ahead = block.wait();
        if head >= heads {
            finish(block.first_token, block.rows(), |_, row| {
                if !queries.is_padding(row) {
                    queries.store_zeros::<F>(row, head);
                }
            });
            return;
        }
        let memory = Shared::<u32, M>::at(0);
        let sums = sums_at(8 * N as u32);
        let scale = f32::from_bits(scale_bits);
        block.sums(memory, ahead, |token, column, values| {
            let values = values.map(|sum| (sum * scale).to_bits());
            memory.store_u32x4(sums + token * SUM_ROW + column, values);
        });
        sync_cluster();
        let channel = 4 * thread::lane_id();
        finish(block.first_token, block.rows(), |token, row| {
            if queries.is_padding(row) {
                return;
            }
            let at = sums + token * SUM_ROW + channel % COLUMNS;
            let load = |i: u32| f32::from_bits(memory.load_from(channel / COLUMNS, at + i));
            let projected = [load(0), load(1), load(2), load(3)];
            queries.store::<F>(row, head, projected, queries.rotation(row));
        });
        cluster_arrive();
        cluster_wait();
    }
}

/// Calls `finish` for each token that the warp finishes, of the `tokens` tokens of the cluster: with the token, and
/// with its row in the launch. The rows of the cluster start at `first`.
#[inline(always)]
fn finish(first: u32, tokens: u32, mut finish: impl FnMut(u32, u32)) {
    let mut token = thread::warp_id() * HEAD_BLOCKS + block_rank();
    while token < tokens {
        finish(token, first + token);
        token += WARPS * HEAD_BLOCKS;
    }
}

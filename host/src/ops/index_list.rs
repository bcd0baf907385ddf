//! The indexer's scores and lists in one launch.

use std::ops::RangeInclusive;

use kernels_gpu::params::IndexScoreTopkParams;
use kv_layout::index_row::IndexFormat;

use super::indexer::{check_selected, shared_keys_are_faster, tiles_per_block};
use super::{BlockTable, IndexKeys, IndexQueries, StepQueries, check_argument, check_equal};
use crate::device::{Backend, Buffer, DeviceError, Stream};
use kernels_gpu::indexer::TILE;
use kernels_gpu::indexer::score::keys::WARPS;
use kernels_gpu::indexer::select::row::SHORT_COLUMNS;
use kernels_gpu::launch::IndexScoreTopk;
use kernels_gpu::table::MULTIPROCESSORS;

/// Whether [`index_score_topk`] takes less time on an H200 than [`super::index_score`] or [`super::index_score_chunk`], and
/// [`super::index_topk`], as measured with 67 to 396 queries, of which `each` of one request stand beside each other
/// (docs/experiments.md). It does if a multiprocessor has no more rounds of tiles to score. Blocks of `index_score` share
/// the tiles of a query; in `index_score_topk` a multiprocessor has one or two queries at a time, each with eight warps.
/// Where [`shared_keys_are_faster`], it does only with one short query a multiprocessor.
#[must_use]
pub fn one_launch_is_faster(format: IndexFormat, columns: u32, queries: u32, each: u32) -> bool {
    const MEASURED: RangeInclusive<u32> = 67..=396;
    /// Most columns that are faster than queries that share keys.
    const SHORTER: u32 = 1024;
    /// Warps that run on a multiprocessor at a time; `OF_QUERY`, those of one query.
    const AT_ONCE: u32 = 16;
    const OF_QUERY: u32 = 8;
    let measured =
        format == IndexFormat::Mxfp4 && columns <= SHORT_COLUMNS && MEASURED.contains(&queries);
    if !measured {
        return false;
    }
    let is_small = columns <= SHORTER && queries <= MULTIPROCESSORS;
    if !is_small && shared_keys_are_faster(format, columns, queries, each) {
        return false;
    }
    let rounds_of_query = (columns / TILE).div_ceil(OF_QUERY);
    let one = queries.div_ceil(MULTIPROCESSORS) * rounds_of_query;
    let two = tiles_per_block(columns, queries) / WARPS;
    OF_QUERY * one <= AT_ONCE * two
}

/// Arguments of [`index_score_topk`].
pub struct ScoreSelection<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// The queries as scores take them.
    pub from: &'a IndexQueries<'a, B>,
    /// The blocks of their requests.
    pub table: &'a BlockTable<'a, B>,
    /// The layer's keys, MXFP4.
    pub keys: &'a IndexKeys<'a, B>,
    /// Most entries of a query, at most 2048.
    pub columns: u32,
    /// Entries of a list.
    pub k: u32,
    /// `[queries, k]`, -1 after the last entry and for a slot outside the table.
    pub selected: &'a Buffer<B, i32>,
    /// `[1]` count of what is refused.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `index_score_topk`: the same lists over MXFP4 keys that [`super::index_score`], with a `skip`
/// of `k`, and [`super::index_topk`] make for slots in the table, in one launch and without scores in memory.
///
/// A query that sees more than `columns` entries is counted in the fault word, and its list is made of the
/// first `columns`; an entry whose block is missing comes last and is counted too.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads, columns or entries of a list, no blocks, or keys of another
/// format, or queries past `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the slots and positions of the queries: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn index_score_topk<B: Backend>(
    stream: &Stream<B>,
    selection: &ScoreSelection<'_, B>,
) -> Result<(), DeviceError> {
    let ScoreSelection { queries, from, table, keys, columns, k, selected, faults } = *selection;
    let IndexKeys { code, scale, num_blocks, .. } = *keys;
    let count = queries.count;
    if count == 0 {
        return Ok(());
    }
    queries.check()?;
    from.check()?;
    check_argument("columns of scores in one launch", columns, TILE, SHORT_COLUMNS)?;
    check_selected(k)?;
    let needed = IndexFormat::Mxfp4.row_bytes();
    check_equal("bytes of an indexer key", keys.format.row_bytes(), needed)?;
    keys.check_blocks()?;
    let operation = IndexScoreTopk {
        query: from.query.ptr(),
        weight: from.weight.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        table: table.table.ptr(),
        index_code: code.ptr(),
        index_scale: scale.ptr(),
        selected: selected.ptr_mut(),
        faults: faults.ptr_mut(),
        params: IndexScoreTopkParams {
            first: queries.first,
            heads: from.heads,
            k,
            columns,
            slots: table.slots,
            max_blocks: table.max_blocks,
            num_blocks,
            tokens: count,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe { stream.launch((), &operation) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns and queries where one launch took less time, or the same, and where it took more.
    #[test]
    fn the_faster_way_is_taken() {
        const ONE: [(u32, u32); 15] = [
            (2048, 96),
            (2048, 128),
            (2048, 132),
            (2048, 192),
            (2048, 256),
            (2048, 264),
            (2048, 272),
            (2048, 320),
            (2048, 384),
            (1024, 72),
            (1024, 96),
            (1024, 128),
            (1024, 256),
            (768, 128),
            (768, 256),
        ];
        const TWO: [(u32, u32); 10] = [
            (2048, 8),
            (2048, 32),
            (2048, 64),
            (2048, 67),
            (2048, 72),
            (2048, 80),
            (2048, 160),
            (2048, 512),
            (1024, 512),
            (2080, 128),
        ];
        let in_one = |&(columns, queries): &(u32, u32)| {
            one_launch_is_faster(IndexFormat::Mxfp4, columns, queries, 1)
        };
        for size in &ONE {
            assert!(in_one(size), "{size:?}");
        }
        for size in &TWO {
            assert!(!in_one(size), "{size:?}");
        }
        assert!(!one_launch_is_faster(IndexFormat::Fp8, 2048, 128, 1));
        for (columns, queries) in [(2048, 0), (0, 0), (u32::MAX, u32::MAX)] {
            assert!(!one_launch_is_faster(IndexFormat::Mxfp4, columns, queries, 1));
        }
        // Drafts share keys.
        for (columns, queries, each, expected) in [
            (1024, 128, 4, true),
            (1024, 192, 3, false),
            (2048, 128, 2, false),
            (2048, 96, 96, true),
        ] {
            let found = one_launch_is_faster(IndexFormat::Mxfp4, columns, queries, each);
            assert_eq!(found, expected, "{columns} x {queries}, {each} each");
        }
    }
}

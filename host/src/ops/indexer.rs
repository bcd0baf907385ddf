//! The indexer: queries, scores, and the largest of them.

use kernels_gpu::indexer::TILE;
use kernels_gpu::indexer::score::chunk;
use kernels_gpu::indexer::score::keys::WARPS;
use kernels_gpu::indexer::select::row::{MAX_HELD, MAX_K, MAX_ROW_GROUPS, SHORT_COLUMNS};
use kernels_gpu::params::{
    IndexQueryParams, IndexScoreChunkParams, IndexScoreParams, IndexTopkParams, ScoreMaximaParams,
    TopkSelectParams,
};
use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};

use super::{BlockTable, IndexKeys, StepQueries, check_argument};
use crate::device::{Backend, Buffer, DeviceError, Stream, View};
use kernels_gpu::launch::{
    IndexQuery, IndexScore, IndexScoreChunk, IndexTopkLong, IndexTopkMany, IndexTopkShort,
    ScoreMaxima, TopkSelectLong, TopkSelectShort,
};

/// Most scores of a row: the entries of the longest context.
const MAX_COLUMNS: u32 = 1 << 18;
/// Most queries that `index_topk_long` lists. For more, multiprocessors take several rows one after another, and
/// `index_topk_many`, with two rows at a time on each, takes less time: measured with 2,048 queries (docs/experiments.md).
const MAX_LONG_QUERIES: u32 = 2 * MULTIPROCESSORS;

/// The queries of an indexer, in the form that its scores take.
pub struct IndexQueries<'a, B: Backend> {
    /// `[queries, 16384]` u8: values at [`IndexFormat::query_byte`]; against MXFP4 keys also exponent gaps,
    /// at [`IndexFormat::query_exponent_gap_byte`].
    pub query: &'a Buffer<B, u8>,
    /// `[queries, heads]` f32, constants and the scales of the heads' values included.
    pub weight: &'a Buffer<B, f32>,
    /// Heads, at most 64.
    pub heads: u32,
}

impl<B: Backend> IndexQueries<'_, B> {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        check_argument("indexer heads", self.heads, 1, QUERY_HEADS)
    }
}

/// Rows of scores, and the largest of each group of them.
pub struct Scores<'a, B: Backend> {
    /// `[rows, columns]` f32.
    pub scores: &'a Buffer<B, f32>,
    /// `[rows, maxima_len(columns)]` f32.
    pub maxima: &'a Buffer<B, f32>,
    /// Scores of a row, a multiple of 32, at most 262,144.
    pub columns: u32,
}

impl<B: Backend> Scores<'_, B> {
    fn check(&self) -> Result<(), DeviceError> {
        check_argument("columns of scores", self.columns, TILE, MAX_COLUMNS)
    }
}

/// Maxima of a row of `columns` scores: one for each 8, or for each 32 in long rows.
#[must_use]
pub fn maxima_len(columns: u32) -> u64 {
    u64::from(columns >> group_log2(columns))
}

/// Most maxima of any row of up to `columns` scores. Long rows have larger groups, and so fewer maxima
/// than some shorter rows.
#[must_use]
pub fn most_maxima(columns: u32) -> u64 {
    maxima_len(columns).max(maxima_len(columns.min(8 * MAX_ROW_GROUPS)))
}

fn group_log2(columns: u32) -> u32 {
    if columns >> 3 <= MAX_ROW_GROUPS { 3 } else { 5 }
}

/// Arguments of [`index_query`]: projected queries, and where they go in the form that scores take.
pub struct QueryQuantisation<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// `[queries, heads * 128]` f32.
    pub projected: &'a View<B, f32>,
    /// `[queries, heads]` f32.
    pub projected_weight: &'a View<B, f32>,
    /// `[32]` f32, the rotary frequencies of compressed layers.
    pub frequencies: &'a View<B, f32>,
    /// The format of the keys.
    pub format: IndexFormat,
    /// The resulting queries.
    pub to: &'a IndexQueries<'a, B>,
}

/// Queues `index_query_*`: rotates and transforms the projected queries, rounds them in the format of the
/// keys, and scales the projected weights of the heads. Padding stays untouched.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads, or queries past
/// `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than
/// its shape; as [`Stream::launch`].
pub fn index_query<B: Backend>(
    stream: &Stream<B>,
    quantisation: &QueryQuantisation<'_, B>,
) -> Result<(), DeviceError> {
    let QueryQuantisation { queries, projected, projected_weight, frequencies, format, to } =
        *quantisation;
    let (first, tokens, heads) = (queries.first, queries.count, to.heads);
    if tokens == 0 {
        return Ok(());
    }
    queries.check()?;
    to.check()?;
    let operation = IndexQuery {
        projected: projected.ptr(),
        projected_weight: projected_weight.ptr(),
        frequencies: frequencies.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        query: to.query.ptr_mut(),
        weight: to.weight.ptr_mut(),
        params: IndexQueryParams { first, tokens, heads },
    };
    // SAFETY: the launch checks every buffer; of what lies in them nothing is an index but the query's own place.
    unsafe { stream.launch(format, &operation) }
}

/// Arguments of [`index_score`].
pub struct KeyScores<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// The queries as scores take them.
    pub from: &'a IndexQueries<'a, B>,
    /// The blocks of their requests.
    pub table: &'a BlockTable<'a, B>,
    /// The layer's keys.
    pub keys: &'a IndexKeys<'a, B>,
    /// Queries that see at most this many entries are left out.
    pub skip: u32,
    /// A row for each query.
    pub to: &'a Scores<'a, B>,
    /// `[1]` count of what is refused.
    pub faults: &'a Buffer<B, u32>,
}

/// The launch of `$operation` for `$scores`, with the scalars of `$params` that [`KeyScores`] does not give.
macro_rules! operation {
    ($operation:ident, $scores:ident, $params:ident { $($scalar:ident),+ }) => {{
        let KeyScores { queries, from, table, keys, skip, to, faults } = *$scores;
        $operation {
            query: from.query.ptr(),
            weight: from.weight.ptr(),
            token_position: queries.position.ptr(),
            token_slot: queries.slot.ptr(),
            table: table.table.ptr(),
            index_code: keys.code.ptr(),
            index_scale: keys.scale.ptr(),
            scores: to.scores.ptr_mut(),
            maxima: to.maxima.ptr_mut(),
            faults: faults.ptr_mut(),
            params: $params {
                first: queries.first,
                heads: from.heads,
                skip,
                columns: to.columns,
                group_log2: group_log2(to.columns),
                slots: table.slots,
                max_blocks: table.max_blocks,
                num_blocks: keys.num_blocks,
                tokens: queries.count,
                $($scalar),+
            },
        }
    }};
}

/// Queues `index_score_*`: the score of every entry that each query sees, and the largest of each
/// group, into the query's row. Queries that see no more than `skip` entries are left out, and so is
/// padding.
///
/// A query that sees more entries than a row has columns is counted in the fault word, and only its first
/// `columns` entries are scored; an entry whose block is missing scores NaN and is counted too.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads or columns, or no blocks, or queries past
/// `u32::MAX`; [`DeviceError::TooShort`] for
/// a buffer shorter than its shape; [`DeviceError::BadGrid`] for more than 65,535 queries; as
/// [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the slots and positions of the queries: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn index_score<B: Backend>(
    stream: &Stream<B>,
    scores: &KeyScores<'_, B>,
) -> Result<(), DeviceError> {
    if !scores.check()? {
        return Ok(());
    }
    let tiles = tiles_per_block(scores.to.columns, scores.queries.count);
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe {
        stream
            .launch(scores.keys.format, &operation!(IndexScore, scores, IndexScoreParams { tiles }))
    }
}

/// Whether [`index_score_chunk`] takes less time on an H200 than [`index_score`] for rows of `columns` scores of `queries`
/// queries, of which `each` of one request stand beside each other, as measured (docs/experiments.md). It does if enough
/// warps have a tile of keys that they share: FP8 keys hardly cost more to unpack again.
#[must_use]
pub fn shared_keys_are_faster(format: IndexFormat, columns: u32, queries: u32, each: u32) -> bool {
    let block_queries = queries_per_block(format, each);
    let tiles = u64::from(columns / TILE) * u64::from(queries.div_ceil(block_queries));
    let (fewest_queries, fewest_tiles) = match format {
        IndexFormat::Mxfp4 | IndexFormat::Nvfp4 => (2, 1024),
        IndexFormat::Fp8 => (3, 4096),
    };
    block_queries >= fewest_queries && tiles >= fewest_tiles
}

/// [`index_score`] by another kernel, `index_score_chunk_*`, with the same scores, maxima and faults, bit by bit but for the
/// bits of a NaN. It takes less time where most queries stand beside others of their request, as in a chunk of a prompt or
/// with drafts: a warp unpacks a key once for up to ten of them.
///
/// `each` is how many queries of a request stand beside each other. Where it is another number for some requests, only
/// time is lost.
///
/// # Errors
/// As [`index_score`].
///
/// # Safety
/// As [`index_score`].
pub unsafe fn index_score_chunk<B: Backend>(
    stream: &Stream<B>,
    scores: &KeyScores<'_, B>,
    each: u32,
) -> Result<(), DeviceError> {
    if !scores.check()? {
        return Ok(());
    }
    let block_queries = queries_per_block(scores.keys.format, each);
    let tiles = tiles_per_chunk(scores.to.columns, scores.queries.count.div_ceil(block_queries));
    let operation =
        operation!(IndexScoreChunk, scores, IndexScoreChunkParams { tiles, block_queries });
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe { stream.launch(scores.keys.format, &operation) }
}

impl<B: Backend> KeyScores<'_, B> {
    /// Checks the arguments. Whether there are queries.
    fn check(&self) -> Result<bool, DeviceError> {
        if self.queries.count == 0 {
            return Ok(false);
        }
        self.queries.check()?;
        self.from.check()?;
        self.to.check()?;
        self.keys.check_blocks()?;
        Ok(true)
    }
}

/// Tiles per block of `index_score`: a number for which the blocks fill an H200 a whole number of
/// times, and large enough to hide the load of the query.
pub(super) fn tiles_per_block(columns: u32, queries: u32) -> u32 {
    /// Blocks that run at once: four on each multiprocessor.
    const AT_ONCE: u32 = 4 * MULTIPROCESSORS;
    /// A warp holds the block numbers of 32 tiles, one per lane.
    const MAX_TILES: u32 = 32 * WARPS;
    let tiles = columns / TILE;
    let of_waves = |waves: u32| tiles.div_ceil((waves * AT_ONCE / queries).max(1));
    let fitting = (1..MAX_COLUMNS / TILE).map(of_waves).find(|&tiles| tiles <= MAX_TILES);
    fitting.unwrap_or(MAX_TILES).next_multiple_of(WARPS)
}

/// Queries of a block of `index_score_chunk` where `each` of one request stand beside each other: all of them, or as many
/// in each of the fewest blocks that have room for them.
fn queries_per_block(format: IndexFormat, each: u32) -> u32 {
    let each = each.max(1);
    each.div_ceil(each.div_ceil(chunk::queries(format)))
}

/// Tiles per block of `index_score_chunk` with blocks for `blocks` times all columns: those with which the blocks take the
/// least time, if a block takes a round of tiles longer than its tiles.
fn tiles_per_chunk(columns: u32, blocks: u32) -> u32 {
    const AT_ONCE: u32 = chunk::BLOCKS * MULTIPROCESSORS;
    /// A warp holds the block numbers of 32 tiles, one per lane.
    const MAX_ROUNDS: u32 = 32;
    let time = |rounds: &u32| {
        let parts = (columns / TILE).div_ceil(chunk::STRIDE * rounds);
        u64::from(blocks.saturating_mul(parts).div_ceil(AT_ONCE)) * u64::from(rounds + 1)
    };
    chunk::STRIDE * (1..=MAX_ROUNDS).min_by_key(time).unwrap_or(MAX_ROUNDS)
}

/// Refuses a length of lists that no selection makes.
pub(crate) fn check_selected(k: u32) -> Result<(), DeviceError> {
    check_argument("indices of a list", k, 1, MAX_K)
}

/// Arguments of [`index_topk`].
pub struct EntrySelection<'a, B: Backend> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// A row of scores for each query.
    pub from: &'a Scores<'a, B>,
    /// Entries of a list, at most 2048.
    pub k: u32,
    /// `[queries, k]`, -1 after the last entry.
    pub selected: &'a Buffer<B, i32>,
}

/// Queues `index_topk`: for each query the `k` entries of the largest scores, largest first, the lower
/// entry first among equal ones, NaN last; or all entries, oldest first, if it sees no more than `k`.
///
/// # Errors
/// [`DeviceError::Argument`] for `k` of 0 or above 2048, or too many columns, or queries past
/// `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
///
/// # Safety
/// Until the launch is done nothing writes the slots and positions of the queries, or the scores: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn index_topk<B: Backend>(
    stream: &Stream<B>,
    selection: &EntrySelection<'_, B>,
) -> Result<(), DeviceError> {
    let EntrySelection { queries, from, k, selected } = *selection;
    let count = queries.count;
    if count == 0 {
        return Ok(());
    }
    queries.check()?;
    from.check()?;
    check_selected(k)?;
    let (scores, maxima) = (from.scores.ptr(), from.maxima.ptr());
    let (token_position, token_slot) = (queries.position.ptr(), queries.slot.ptr());
    let (first, columns, selected) = (queries.first, from.columns, selected.ptr_mut());
    let params =
        IndexTopkParams { first, columns, group_log2: group_log2(columns), k, tokens: count };
    // SAFETY: the launch checks every buffer; a query sees no more entries than a row has columns, whatever its position.
    unsafe {
        if columns <= SHORT_COLUMNS {
            let short = IndexTopkShort { scores, token_position, token_slot, selected, params };
            stream.launch((), &short)
        } else if count > MAX_LONG_QUERIES {
            let many =
                IndexTopkMany { scores, maxima, token_position, token_slot, selected, params };
            stream.launch((), &many)
        } else {
            let long =
                IndexTopkLong { scores, maxima, token_position, token_slot, selected, params };
            stream.launch((), &long)
        }
    }
}

/// Arguments of [`topk_select`].
pub struct RowSelection<'a, B: Backend> {
    /// The scores.
    pub from: &'a Scores<'a, B>,
    /// `[rows]` i32: number of scores to consider in each row, clamped to 0 to `columns`.
    pub lengths: &'a View<B, i32>,
    /// Rows.
    pub rows: u32,
    /// Scores of a list, at most 2048.
    pub k: u32,
    /// `[rows, k]`, -1 after the last index.
    pub selected: &'a Buffer<B, i32>,
}

/// Queues `topk_select`, after `score_maxima` where rows are long: for each row the indices of the `k` largest
/// of its scores, largest first, the lower index first among equal ones, NaN last.
///
/// # Errors
/// As [`index_topk`]; [`DeviceError::BadGrid`] for more than 65,535 rows of more than 4096 scores.
///
/// # Safety
/// Until the launch is done nothing writes the lengths, or the scores: each thread of a block
/// reads them for itself, and which barriers it waits at follows from them.
pub unsafe fn topk_select<B: Backend>(
    stream: &Stream<B>,
    selection: &RowSelection<'_, B>,
) -> Result<(), DeviceError> {
    let RowSelection { from, lengths, rows, k, selected } = *selection;
    if rows == 0 {
        return Ok(());
    }
    from.check()?;
    check_selected(k)?;
    let (columns, group_log2) = (from.columns, group_log2(from.columns));
    let (scores, maxima) = (from.scores.ptr(), from.maxima.ptr());
    let (lengths, selected) = (lengths.ptr(), selected.ptr_mut());
    let params = TopkSelectParams { columns, group_log2, k, rows };
    // SAFETY: the launch checks every buffer; the kernel takes lengths as 0 to `columns`.
    unsafe {
        if columns <= SHORT_COLUMNS {
            let short = TopkSelectShort { scores, lengths, selected, params };
            return stream.launch((), &short);
        }
        let long = TopkSelectLong { scores, maxima, lengths, selected, params };
        if columns > MAX_HELD {
            // Checked first, so that both launches are queued or none.
            stream.check((), &long)?;
            let params = ScoreMaximaParams { columns, group_log2, rows };
            let maxima = from.maxima.ptr_mut();
            stream.launch((), &ScoreMaxima { scores, lengths, maxima, params })?;
        }
        stream.launch((), &long)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As measured: chunks, drafts of many requests or over many entries; not one token of each request, nor few tiles.
    #[test]
    fn the_faster_scores_are_taken() {
        use IndexFormat::{Fp8, Mxfp4, Nvfp4};
        for (format, columns, queries, each, expected) in [
            (Mxfp4, 2048, 2048, 2048, true),
            (Fp8, 2048, 2048, 2048, true),
            (Mxfp4, 2048, 40, 5, false),
            (Mxfp4, 2048, 64, 2, true),
            (Nvfp4, 8192, 16, 16, true),
            (Mxfp4, 8192, 5, 5, false),
            (Mxfp4, 32_768, 2, 2, true),
            (Mxfp4, 32_768, 64, 1, false),
            (Fp8, 32_768, 128, 2, false),
            (Fp8, 32_768, 96, 3, true),
            (Fp8, 2048, 320, 5, true),
            (Fp8, 8192, 64, 64, false),
            (Fp8, 32_768, 5, 5, false),
            (Fp8, 32_768, 40, 5, true),
            (Fp8, MAX_COLUMNS, 5, 5, true),
            (Mxfp4, MAX_COLUMNS, u32::MAX, u32::MAX, true),
            (Mxfp4, 0, 0, 0, false),
        ] {
            let found = shared_keys_are_faster(format, columns, queries, each);
            assert_eq!(found, expected, "{format:?}: {columns} x {queries}, {each} each");
        }
    }

    /// Queries of one request are divided evenly, and no block has more than it has room for.
    #[test]
    fn blocks_share_the_queries_of_a_request() {
        for (each, expected) in [(0, 1), (1, 1), (5, 5), (10, 10), (16, 8), (21, 7), (2048, 10)] {
            assert_eq!(queries_per_block(IndexFormat::Mxfp4, each), expected);
        }
        for format in IndexFormat::ALL {
            assert_eq!(queries_per_block(format, u32::MAX), chunk::queries(format));
        }
    }

    /// A warp of `index_score_chunk` has at most 32 rounds, and blocks cover all columns.
    #[test]
    fn chunks_have_tiles_for_all_columns() {
        for columns in [TILE, 96, 8192, MAX_COLUMNS] {
            for blocks in [1, 10, 2048, u32::MAX] {
                let tiles = tiles_per_chunk(columns, blocks);
                let rounds = tiles / chunk::STRIDE;
                assert!(tiles.is_multiple_of(chunk::STRIDE) && (1..=32).contains(&rounds));
            }
        }
    }

    /// Memory for [`most_maxima`] has room for the maxima of every shorter row.
    #[test]
    fn no_shorter_row_has_more_maxima() {
        let mut most = 0;
        for columns in (TILE..=MAX_COLUMNS).step_by(TILE as usize) {
            most = most.max(maxima_len(columns));
            assert_eq!(most_maxima(columns), most, "{columns} columns");
        }
        assert!(most_maxima(131_072) > maxima_len(131_072), "rows of 65,536 scores have more");
    }
}

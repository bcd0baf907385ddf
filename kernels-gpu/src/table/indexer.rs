//! The indexer: queries, scores, and the largest of them.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! indexer_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            IndexQuery<IndexFormat> |p, f|
            "Rotates each head's query, multiplies it by the Hadamard matrix and quantises it \
             to the format of the keys; scales the heads' weights."
            (
                /// `[tokens, heads, 128]` f32, projected.
                projected: const f32 align 16 [p.tokens, p.heads, INDEX_DIM],
                /// `[tokens, heads]` f32, projected.
                projected_weight: const f32 [p.tokens, p.heads],
                /// `[32]` radians per token of each rotated pair.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, which stays untouched.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, 16384]` u8: BF16, integers or E4M3 values at `IndexFormat::query_byte`, and
                /// of MXFP4 exponent gaps at `IndexFormat::query_exponent_gap_byte`; zero for heads from `heads` on.
                query: mut u8 align 4 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32: weight times `1 / sqrt(128 heads)` and the scale of the
                /// head's values.
                weight: mut f32 [p.tokens, p.heads];
                IndexQueryParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens, QUERY_HEADS / (indexer::score::query::WARPS * indexer::score::query::heads_of_warp(p.tokens))] }
            bodies {
                [IndexFormat::Nvfp4] => index_query_nvfp4: indexer::score::query::query::<index_row::Nvfp4Row>,
                [IndexFormat::Mxfp4] => index_query_mxfp4: indexer::score::query::query::<index_row::Mxfp4Row>,
                [IndexFormat::Fp8] => index_query_fp8: indexer::score::query::query::<index_row::Fp8Row>,
            }

            IndexScore<IndexFormat> |p, f|
            "Scores the entries that each query sees: the sum over heads of weight times the \
             positive part of query times key."
            (
                /// `[tokens, 16384]` u8, of `index_query`.
                query: const u8 align 16 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32, of `index_query`.
                weight: const f32 [p.tokens, p.heads],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane.
                index_code: const u8 align 16 [p.num_blocks, indexer::TILE, f.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, the scale plane.
                index_scale: const u8 align 16 [p.num_blocks, indexer::TILE, f.scale_bytes() as u32],
                /// `[tokens, columns]` f32; NaN for an entry without a block, the rest of a row
                /// untouched.
                scores: mut f32 [p.tokens, p.columns],
                /// `[tokens, columns >> group_log2]` f32, the largest score of each group; NaN if it
                /// has none.
                maxima: mut f32 [p.tokens, p.columns >> p.group_log2],
                /// `[1]` count of slots out of range, of queries that see more than `columns` entries,
                /// and of tiles whose block is missing or out of range.
                faults: mut u32 [1];
                IndexScoreParams
            )
            { block: 128, min_blocks: 4, shared: indexer::score::rows::SHARED_BYTES, min_sm: 90,
              grid: [(p.columns / indexer::TILE).div_ceil(p.tiles), p.tokens] }
            bodies {
                [IndexFormat::Nvfp4] => index_score_nvfp4: indexer::score::rows::score::<indexer::score::keys::bf16::Nvfp4Keys>,
                [IndexFormat::Mxfp4] => index_score_mxfp4: indexer::score::rows::score::<indexer::score::keys::s8::Mxfp4Keys>,
                [IndexFormat::Fp8] => index_score_fp8: indexer::score::rows::score::<indexer::score::keys::e4m3::Fp8Keys>,
            }

            IndexScoreChunk<IndexFormat> |p, f|
            "As `index_score`, with the same scores bit by bit, NaN aside, for launches in which most queries are adjacent to others \
             of their request: these share the keys that a warp unpacks."
            (
                /// `[tokens, 16384]` u8, of `index_query`.
                query: const u8 align 16 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32, of `index_query`.
                weight: const f32 [p.tokens, p.heads],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane.
                index_code: const u8 align 16 [p.num_blocks, indexer::TILE, f.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, the scale plane.
                index_scale: const u8 align 16 [p.num_blocks, indexer::TILE, f.scale_bytes() as u32],
                /// `[tokens, columns]` f32; NaN for an entry without a block, the rest of a row
                /// untouched.
                scores: mut f32 [p.tokens, p.columns],
                /// `[tokens, columns >> group_log2]` f32, the largest score of each group; NaN if it
                /// has none.
                maxima: mut f32 [p.tokens, p.columns >> p.group_log2],
                /// `[1]` count of slots out of range, of queries that see more than `columns` entries,
                /// and of tiles whose block is missing or out of range.
                faults: mut u32 [1];
                IndexScoreChunkParams
            )
            { block: indexer::score::chunk::THREADS, min_blocks: 2, shared: indexer::score::chunk::shared_bytes(f), min_sm: 90,
              grid: [(p.columns / indexer::TILE).div_ceil(p.tiles), p.tokens.div_ceil(p.block_queries)] }
            bodies {
                [IndexFormat::Nvfp4] => index_score_chunk_nvfp4: indexer::score::chunk::score::<indexer::score::keys::bf16::Nvfp4Keys>,
                [IndexFormat::Mxfp4] => index_score_chunk_mxfp4: indexer::score::chunk::score::<indexer::score::keys::s8::Mxfp4Keys>,
                [IndexFormat::Fp8] => index_score_chunk_fp8: indexer::score::chunk::score::<indexer::score::keys::e4m3::Fp8Keys>,
            }

            ScoreMaxima<()> |p, f|
            "Writes the largest score of each group."
            (
                /// `[rows, columns]` f32.
                scores: const f32 align 16 [p.rows, p.columns],
                /// `[rows]` scores of each row in use.
                lengths: const i32 [p.rows],
                /// `[rows, columns >> group_log2]` f32; NaN for a group without a number.
                maxima: mut f32 [p.rows, p.columns >> p.group_log2];
                ScoreMaximaParams
            )
            { block: 256, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.columns.div_ceil(indexer::select::maxima::BLOCK_SCORES), p.rows] }
            bodies {
                [()] => score_maxima: indexer::select::maxima::maxima,
            }

            TopkSelectShort<()> |p, f|
            "Lists the largest scores of each row, largest first, the lower index first among \
             equal ones, NaN last. For rows of at most 2048 columns."
            (
                /// `[rows, columns]` f32.
                scores: const f32 align 16 [p.rows, p.columns],
                /// `[rows]` scores of each row in use.
                lengths: const i32 [p.rows],
                /// `[rows, k]` index of each score; -1 behind the last.
                selected: mut i32 [p.rows, p.k];
                TopkSelectParams
            )
            { block: indexer::select::row::SHORT_THREADS, min_blocks: 2, shared: indexer::select::topk::SHORT_SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [p.rows, 1] }
            bodies {
                [()] => topk_select_short: indexer::select::topk::select_short,
            }

            TopkSelectLong<()> |p, f|
            "As `topk_select_short`, for rows of any length."
            (
                /// `[rows, columns]` f32.
                scores: const f32 align 16 [p.rows, p.columns],
                /// `[rows, columns >> group_log2]` f32, of `score_maxima`; used where a row has more
                /// than 4096 scores.
                maxima: const f32 [p.rows, p.columns >> p.group_log2],
                /// `[rows]` scores of each row in use.
                lengths: const i32 [p.rows],
                /// `[rows, k]` index of each score; -1 behind the last.
                selected: mut i32 [p.rows, p.k];
                TopkSelectParams
            )
            { block: indexer::select::row::LONG_THREADS, min_blocks: 1, shared: indexer::select::topk::LONG_SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [p.rows, 1] }
            bodies {
                [()] => topk_select_long: indexer::select::topk::select_long,
            }

            IndexTopkShort<()> |p, f|
            "Lists the entries of the largest scores of each query, as `topk_select_short`; all \
             that it sees, oldest first, where those are no more than k. For rows of at most 2048 \
             columns."
            (
                /// `[tokens, columns]` f32, of `index_score`.
                scores: const f32 align 16 [p.tokens, p.columns],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, whose list is all -1.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, k]` entry of the query's request; -1 behind the last.
                selected: mut i32 [p.tokens, p.k];
                IndexTopkParams
            )
            { block: indexer::select::row::SHORT_THREADS, min_blocks: 2, shared: indexer::select::topk::SHORT_SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [p.tokens, 1] }
            bodies {
                [()] => index_topk_short: indexer::select::topk::select_entries_short,
            }

            IndexTopkLong<()> |p, f|
            "As `index_topk_short`, for rows of any length."
            (
                /// `[tokens, columns]` f32, of `index_score`.
                scores: const f32 align 16 [p.tokens, p.columns],
                /// `[tokens, columns >> group_log2]` f32, of `index_score`.
                maxima: const f32 [p.tokens, p.columns >> p.group_log2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, whose list is all -1.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, k]` entry of the query's request; -1 behind the last.
                selected: mut i32 [p.tokens, p.k];
                IndexTopkParams
            )
            { block: indexer::select::row::LONG_THREADS, min_blocks: 1, shared: indexer::select::topk::LONG_SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [p.tokens, 1] }
            bodies {
                [()] => index_topk_long: indexer::select::topk::select_entries_long,
            }

            IndexTopkMany<()> |p, f|
            "As `index_topk_long`, for launches of so many queries that multiprocessors take several."
            (
                /// `[tokens, columns]` f32, of `index_score`.
                scores: const f32 align 16 [p.tokens, p.columns],
                /// `[tokens, columns >> group_log2]` f32, of `index_score`.
                maxima: const f32 [p.tokens, p.columns >> p.group_log2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, whose list is all -1.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, k]` entry of the query's request; -1 behind the last.
                selected: mut i32 [p.tokens, p.k];
                IndexTopkParams
            )
            { block: indexer::select::row::MANY_THREADS, min_blocks: 2, shared: indexer::select::topk::MANY_SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [p.tokens, 1] }
            bodies {
                [()] => index_topk_many: indexer::select::topk::select_entries_many,
            }
        } }
    };
}

//! The indexer's scores and lists in one launch.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! index_list_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            IndexScoreTopk<()> |p, f|
            "Scores the MXFP4 keys that each query sees, as `index_score`, and lists the largest, \
             as `index_topk`, with scores in shared memory alone. For rows of at most 2048 \
             columns."
            (
                /// `[tokens, 16384]` u8, of `index_query`.
                query: const u8 align 16 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32, of `index_query`.
                weight: const f32 [p.tokens, p.heads],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, whose list is all -1.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane.
                index_code: const u8 align 16 [p.num_blocks, indexer::TILE, IndexFormat::Mxfp4.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, the scale plane.
                index_scale: const u8 align 16 [p.num_blocks, indexer::TILE, IndexFormat::Mxfp4.scale_bytes() as u32],
                /// `[tokens, k]` entry of the query's request; -1 behind the last, and for a slot out of
                /// range.
                selected: mut i32 [p.tokens, p.k],
                /// `[1]` count as of `index_score`.
                faults: mut u32 [1];
                IndexScoreTopkParams
            )
            { block: indexer::score_topk::THREADS, min_blocks: 2, shared: indexer::score_topk::SHARED_BYTES, min_sm: 90,
              grid: [p.tokens, 1] }
            bodies {
                [()] => index_score_topk: indexer::score_topk::list,
            }
        } }
    };
}

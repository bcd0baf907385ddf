//! Pooling: windows of projections are pooled into entries.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! compress_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            Compress<CsaCompressor> |p, f|
            "Pools, norms and rotates the CSA entries (512 channels of 1024 columns) or indexer \
             keys (128 of 256) that the step closes."
            (
                /// `[step, columns]` f32, the step's key projections.
                kv: const f32 align 16 [p.tokens, 2 * f.channels()],
                /// `[step, columns]` f32, the step's gate projections, without `ape`.
                gate: const f32 align 16 [p.tokens, 2 * f.channels()],
                /// `[ratio, columns]` f32.
                ape: const f32 align 16 [CSA_RATIO, 2 * f.channels()],
                /// `[channels]` f32.
                norm: const f32 align 16 [f.channels()],
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                closing: const i32 [p.capacity],
                /// `[step]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[step]` tokens of the same request that precede the token in the step.
                token_index: const i32 [p.tokens],
                /// `[slots, rows of both rings, columns]` f32.
                state: const f32 align 16 [p.slots, csa_state_rows(p.ring), 2 * f.channels()],
                /// `[capacity, channels]` BF16.
                entries: mut u16 align 8 [p.capacity, f.channels()];
                CompressParams
            )
            { block: 128, min_blocks: 4, shared: compress::csa::SHARED_BYTES, min_sm: 90,
              grid: [p.capacity.div_ceil(compress::csa::records_of_block(f)), 1] }
            bodies {
                [CsaCompressor::Main] => compress_csa: compress::csa::entries,
                [CsaCompressor::Index] => compress_index: compress::csa::keys,
            }

            CompressHca<()> |p, f|
            "Folds the HCA runs of the step into running sums: pools those that close a window, and stores \
             the sums that a later step may go on from."
            (
                /// `[step, 512]` f32, the step's key projections.
                kv: const f32 align 16 [p.tokens, HEAD_DIM],
                /// `[step, 512]` f32, the step's gate projections, without `ape`.
                gate: const f32 align 16 [p.tokens, HEAD_DIM],
                /// `[128, 512]` f32.
                ape: const f32 align 16 [HCA_RATIO, HEAD_DIM],
                /// `[capacity]` rows of the last tokens of runs; -1 = padding.
                runs: const i32 [p.capacity],
                /// `[step]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[step]` tokens of the same request that precede the token in the step.
                token_index: const i32 [p.tokens],
                /// `[step]` tokens of the same request that follow the token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[slots * ring, 3 * 512]` f32: maximum, sum and weighted sum.
                state: mut f32 align 16 [p.slots, p.ring, 3 * HEAD_DIM],
                /// `[capacity, 512]` f32, the weighted means of runs that close a window.
                pooled: mut f32 align 16 [p.capacity, HEAD_DIM];
                CompressHcaParams
            )
            { block: compress::hca::THREADS, min_blocks: 8, shared: compress::hca::SHARED_BYTES, min_sm: 90,
              grid: [p.capacity, compress::hca::SPLITS] }
            bodies {
                [()] => compress_hca: compress::hca::compress,
            }
        } }
    };
}

//! Pooling: windows of projections become entries.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! compress_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            Compress<CsaStream>
            "Pools, norms and rotates the CSA entries (512 channels of 1024 columns) or indexer keys \
             (128 of 256) that the step closes. Grid: one block a record, or four records a block."
            (
                /// `[step, columns]` f32, the step's key projections.
                kv: const f32,
                /// `[step, columns]` f32, the step's gate projections, without `ape`.
                gate: const f32,
                /// `[ratio, columns]` f32.
                ape: const f32,
                /// `[channels]` f32.
                norm: const f32,
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32,
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                plan: const i32,
                /// `[step]` absolute position of each token.
                token_position: const i32,
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[step]` tokens of the same request that precede the token in the step.
                token_index: const i32,
                /// `[slots * ring, 2 * columns]` f32.
                state: const f32,
                /// `[capacity, channels]` BF16.
                entries: mut u16;
                CompressParams
            )
            { block: 128, min_blocks: 4, shared: 16, min_sm: 90 }
            bodies {
                CsaStream::Main => compress_csa: compress::overlap::main,
                CsaStream::Index => compress_index: compress::overlap::index,
            }

            CompressHca<()>
            "Pools, norms and rotates the HCA entries that the step closes. Grid: eight blocks a record, \
             each with its channels."
            (
                /// `[step, columns]` f32, the step's key projections.
                kv: const f32,
                /// `[step, columns]` f32, the step's gate projections, without `ape`.
                gate: const f32,
                /// `[ratio, columns]` f32.
                ape: const f32,
                /// `[channels]` f32.
                norm: const f32,
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32,
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                plan: const i32,
                /// `[step]` absolute position of each token.
                token_position: const i32,
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[step]` tokens of the same request that precede the token in the step.
                token_index: const i32,
                /// `[slots * ring, 2 * columns]` f32.
                state: const f32,
                /// `[capacity, 512]` f32, where the blocks of a record leave what they pooled; all bits set
                /// before and after.
                pooled: mut u32,
                /// `[capacity, channels]` BF16.
                entries: mut u16;
                CompressParams
            )
            { block: 256, min_blocks: 2, shared: 41488, min_sm: 90, in_order: 8 }
            bodies {
                () => compress_hca: compress::hca::compress,
            }
        } }
    };
}

//! Stores entries and indexer keys in the paged planes.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! flush_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            FlushCsa<(MainFormat, IndexFormat)> |p, f|
            "Quantises CSA entries and indexer keys (Hadamard first, if `hadamard` is 1) into the \
             paged planes."
            (
                /// `[capacity, 512]` BF16.
                entries: const u16 align 16 [p.capacity, HEAD_DIM],
                /// `[capacity, 128]` BF16.
                keys: const u16 align 8 [p.capacity, INDEX_DIM],
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                closing: const i32 [p.capacity],
                /// `[step]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[step]` tokens of the same request that precede each token in the step.
                token_index: const i32 [p.tokens],
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * 32, 576]` u8, the data plane of the entries.
                entry_data: mut u8 align 16 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, DATA_BYTES],
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.0.scale_bytes() as u32],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane of the indexer keys.
                index_code: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.1.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                index_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.1.scale_bytes() as u32],
                /// `[1]` count of records refused: their token, the tokens next to it, their slot or their block does not exist.
                faults: mut u32 [1];
                FlushParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.capacity.div_ceil(flush::CSA_RECORDS), 1] }
            bodies {
                [(MainFormat::Ue8m0, IndexFormat::Nvfp4)] =>
                    flush_csa_ue8m0_nvfp4: flush::csa::<row::Ue8m0Row, index_row::Nvfp4Row>,
                [(MainFormat::Ue8m0, IndexFormat::Mxfp4)] =>
                    flush_csa_ue8m0_mxfp4: flush::csa::<row::Ue8m0Row, index_row::Mxfp4Row>,
                [(MainFormat::Ue8m0, IndexFormat::Fp8)] =>
                    flush_csa_ue8m0_fp8: flush::csa::<row::Ue8m0Row, index_row::Fp8Row>,
                [(MainFormat::F32, IndexFormat::Nvfp4)] =>
                    flush_csa_f32_nvfp4: flush::csa::<row::F32Row, index_row::Nvfp4Row>,
                [(MainFormat::F32, IndexFormat::Mxfp4)] =>
                    flush_csa_f32_mxfp4: flush::csa::<row::F32Row, index_row::Mxfp4Row>,
                [(MainFormat::F32, IndexFormat::Fp8)] =>
                    flush_csa_f32_fp8: flush::csa::<row::F32Row, index_row::Fp8Row>,
            }

            FlushHca<MainFormat> |p, f|
            "Norms, rotates and quantises the HCA windows that closed into the paged planes."
            (
                /// `[capacity, 512]` f32, the weighted means of runs that close a window.
                pooled: const f32 align 16 [p.capacity, HEAD_DIM],
                /// `[512]` f32, weights of the norm.
                norm: const f32 align 16 [HEAD_DIM],
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[capacity]` rows of the last tokens of runs; -1 = padding.
                runs: const i32 [p.capacity],
                /// `[step]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[step]` tokens of the same request that precede each token in the step.
                token_index: const i32 [p.tokens],
                /// `[step]` tokens of the same request that follow each token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks, 576]` u8, the data plane of the entries.
                entry_data: mut u8 align 16 [p.num_blocks, BLOCK_TOKENS / HCA_RATIO, DATA_BYTES],
                /// `[num_blocks, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / HCA_RATIO, f.scale_bytes() as u32],
                /// `[1]` count of records refused: their token, the tokens next to it, their slot or their block does not exist.
                faults: mut u32 [1];
                FlushParams
            )
            { block: 128, min_blocks: 8, shared: flush::HCA_SHARED_BYTES, min_sm: 90,
              grid: [p.capacity, 1] }
            bodies {
                [MainFormat::Ue8m0] => flush_hca_ue8m0: flush::hca::<row::Ue8m0Row>,
                [MainFormat::F32] => flush_hca_f32: flush::hca::<row::F32Row>,
            }
        } }
    };
}

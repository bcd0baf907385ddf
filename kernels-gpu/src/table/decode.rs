//! Decode, drafts included: all cache writes of a layer in one launch.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! decode_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            DecodeCsa<(MainFormat, IndexFormat)> |p, f|
            "Decode of a CSA layer: window rows, state rows, and at the end of a window its entry and \
             indexer key."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                window_kv: const u16 align 16 [p.tokens, HEAD_DIM],
                /// `[tokens, 1024]` f32, key projections of the main compressor.
                main_kv: const f32 align 16 [p.tokens, 2 * HEAD_DIM],
                /// `[tokens, 1024]` f32, gate projections.
                main_gate: const f32 align 16 [p.tokens, 2 * HEAD_DIM],
                /// `[4, 1024]` f32, position bias.
                main_ape: const f32 align 16 [CSA_RATIO, 2 * HEAD_DIM],
                /// `[512]` f32, weights of the norm.
                main_norm: const f32 align 16 [HEAD_DIM],
                /// `[tokens, 256]` f32, key projections of the index compressor.
                index_kv: const f32 align 16 [p.tokens, 2 * INDEX_DIM],
                /// `[tokens, 256]` f32, gate projections.
                index_gate: const f32 align 16 [p.tokens, 2 * INDEX_DIM],
                /// `[4, 256]` f32, position bias.
                index_ape: const f32 align 16 [CSA_RATIO, 2 * INDEX_DIM],
                /// `[128]` f32, weights of the norm.
                index_norm: const f32 align 16 [INDEX_DIM],
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[tokens]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[tokens]` tokens of the same request that precede the token in the step.
                token_index: const i32 [p.tokens],
                /// `[tokens]` tokens of the same request that follow the token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[tokens]` row of the ring planes each token goes to.
                token_ring_row: const i32 [p.tokens],
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[slots * window ring, 576]` u8, the data plane of the window.
                ring_data: mut u8 align 16 [p.window_rows, DATA_BYTES],
                /// `[slots * window ring, scale_bytes]` u8, its scale plane.
                ring_scale: mut u8 align 4 [p.window_rows, f.0.scale_bytes() as u32],
                /// `[slots, rows of both rings, 1024]` f32.
                main_state: mut f32 align 16 [p.slots, csa_state_rows(p.state_ring), 2 * HEAD_DIM],
                /// `[slots, rows of both rings, 256]` f32.
                index_state: mut f32 align 16 [p.slots, csa_state_rows(p.state_ring), 2 * INDEX_DIM],
                /// `[num_blocks * 32, 576]` u8, the data plane of the entries.
                entry_data: mut u8 align 16 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, DATA_BYTES],
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.0.scale_bytes() as u32],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane of the indexer keys.
                index_code: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.1.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                index_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / CSA_RATIO, f.1.scale_bytes() as u32],
                /// `[1]` count of tokens and entries refused.
                faults: mut u32 [1];
                DecodeParams
            )
            { block: 128, min_blocks: 4, shared: decode::csa::SHARED_BYTES, min_sm: 90,
              grid: [p.tokens, decode::csa::PARTS] }
            bodies {
                [(MainFormat::Ue8m0, IndexFormat::Nvfp4)] =>
                    decode_csa_ue8m0_nvfp4: decode::csa::layer::<row::Ue8m0Row, index_row::Nvfp4Row>,
                [(MainFormat::Ue8m0, IndexFormat::Mxfp4)] =>
                    decode_csa_ue8m0_mxfp4: decode::csa::layer::<row::Ue8m0Row, index_row::Mxfp4Row>,
                [(MainFormat::Ue8m0, IndexFormat::Fp8)] =>
                    decode_csa_ue8m0_fp8: decode::csa::layer::<row::Ue8m0Row, index_row::Fp8Row>,
                [(MainFormat::F32, IndexFormat::Nvfp4)] =>
                    decode_csa_f32_nvfp4: decode::csa::layer::<row::F32Row, index_row::Nvfp4Row>,
                [(MainFormat::F32, IndexFormat::Mxfp4)] =>
                    decode_csa_f32_mxfp4: decode::csa::layer::<row::F32Row, index_row::Mxfp4Row>,
                [(MainFormat::F32, IndexFormat::Fp8)] =>
                    decode_csa_f32_fp8: decode::csa::layer::<row::F32Row, index_row::Fp8Row>,
            }

            DecodeHca<MainFormat> |p, f|
            "Decode of an HCA layer: window rows, running sums, and at the end of a window its entry."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                window_kv: const u16 align 16 [p.tokens, HEAD_DIM],
                /// `[tokens, 512]` f32, key projections.
                kv: const f32 align 16 [p.tokens, HEAD_DIM],
                /// `[tokens, 512]` f32, gate projections.
                gate: const f32 align 16 [p.tokens, HEAD_DIM],
                /// `[128, 512]` f32, position bias.
                ape: const f32 align 16 [HCA_RATIO, HEAD_DIM],
                /// `[512]` f32, weights of the norm.
                norm: const f32 align 16 [HEAD_DIM],
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[tokens]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[tokens]` tokens of the same request that precede the token in the step.
                token_index: const i32 [p.tokens],
                /// `[tokens]` tokens of the same request that follow the token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[tokens]` row of the ring planes each token goes to.
                token_ring_row: const i32 [p.tokens],
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[slots * window ring, 576]` u8, the data plane of the window.
                ring_data: mut u8 align 16 [p.window_rows, DATA_BYTES],
                /// `[slots * window ring, scale_bytes]` u8, its scale plane.
                ring_scale: mut u8 align 4 [p.window_rows, f.scale_bytes() as u32],
                /// `[slots * state ring, 3 * 512]` f32: maximum, sum and weighted sum.
                state: mut f32 align 16 [p.slots, p.state_ring, 3 * HEAD_DIM],
                /// `[num_blocks, 576]` u8, the data plane of the entries.
                entry_data: mut u8 align 16 [p.num_blocks, BLOCK_TOKENS / HCA_RATIO, DATA_BYTES],
                /// `[num_blocks, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8 align 4 [p.num_blocks, BLOCK_TOKENS / HCA_RATIO, f.scale_bytes() as u32],
                /// `[1]` count of tokens and entries refused.
                faults: mut u32 [1];
                DecodeParams
            )
            { block: 128, min_blocks: 4, shared: decode::hca::SHARED_BYTES, min_sm: 90, waits_in_body: true,
              grid: [decode::hca::blocks(p.tokens), 1] }
            bodies {
                [MainFormat::Ue8m0] => decode_hca_ue8m0: decode::hca::layer::<row::Ue8m0Row>,
                [MainFormat::F32] => decode_hca_f32: decode::hca::layer::<row::F32Row>,
            }
        } }
    };
}

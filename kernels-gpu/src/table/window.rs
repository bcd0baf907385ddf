//! The sliding-window ring.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! window_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            AppendSwa<MainFormat> |p, f|
            "Quantises the step's KV rows and scatters them into the sliding-window rings."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                kv: const u16 align 16 [p.tokens, HEAD_DIM],
                /// `[tokens]` row of the ring planes each token goes to; -1 = none.
                token_ring_row: const i32 [p.tokens],
                /// `[tokens]` row each token has in a checkpoint, 128 times the checkpoint more; -1 = none.
                token_checkpoint_row: const i32 [if p.checkpoints > 0 { p.tokens } else { 0 }],
                /// `[rows, 576]` u8, the data plane.
                ring_data: mut u8 align 16 [p.rows, DATA_BYTES],
                /// `[rows, scale_bytes]` u8, the scale plane.
                ring_scale: mut u8 align 4 [p.rows, f.scale_bytes() as u32],
                /// `[checkpoints, checkpoint_granules, 256]` u8.
                checkpoints: mut u8 align 16 [p.checkpoints, p.checkpoint_granules, 256],
                /// `[1]` count of tokens refused because their row is out of range.
                faults: mut u32 [1];
                AppendSwaParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens.div_ceil(swa::WARPS), 1] }
            bodies {
                [MainFormat::Ue8m0] => append_swa_ue8m0: swa::append::<row::Ue8m0Row>,
                [MainFormat::F32] => append_swa_f32: swa::append::<row::F32Row>,
            }

            GatherSwa<MainFormat> |p, f|
            "Gathers the window of each query, oldest first, dequantised to BF16: rows of the \
             step itself from `kv` through the same quantisation, older rows from the ring."
            (
                /// `[step, 512]` BF16, the step's own KV rows, after norm and RoPE.
                kv: const u16 align 16 [end(p.first, p.tokens), HEAD_DIM],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[step]` tokens of the same request that precede the query in the step.
                token_index: const i32 [end(p.first, p.tokens)],
                /// `[slots * ring, 576]` u8, the data plane.
                ring_data: const u8 align 16 [p.slots, p.ring, DATA_BYTES],
                /// `[slots * ring, scale_bytes]` u8, the scale plane.
                ring_scale: const u8 align 8 [p.slots, p.ring, f.scale_bytes() as u32],
                /// `[tokens, 128, 512]` BF16; row j is the query's j-th oldest key, the rest zero.
                tile: mut u16 align 16 [p.tokens, WINDOW, HEAD_DIM],
                /// `[tokens]` rows of the tile in use; 0 for padding.
                lengths: mut i32 [p.tokens],
                /// `[1]` count of queries refused: their slot is out of range, or more tokens precede them than there are.
                faults: mut u32 [1];
                GatherSwaParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens, swa::GATHER_BLOCKS] }
            bodies {
                [MainFormat::Ue8m0] => gather_swa_ue8m0: swa::gather::<row::Ue8m0Row>,
                [MainFormat::F32] => gather_swa_f32: swa::gather::<row::F32Row>,
            }
        } }
    };
}

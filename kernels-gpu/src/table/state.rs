//! The compressors' state rings.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! state_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            WriteState<CsaCompressor> |p, f|
            "Writes each token's keys and scores to the rings of a CSA compressor."
            (
                /// `[step, columns]` f32, the step's key projections.
                kv: const f32 align 16 [p.tokens, 2 * f.channels()],
                /// `[step, columns]` f32, the step's gate projections, without `ape`.
                gate: const f32 align 16 [p.tokens, 2 * f.channels()],
                /// `[ratio, columns]` f32.
                ape: const f32 align 16 [CSA_RATIO, 2 * f.channels()],
                /// `[step]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[step]` tokens of the same request that follow the token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[tokens]` row each token has in a checkpoint, 128 times the checkpoint more; -1 = none.
                token_checkpoint_row: const i32 [if p.checkpoints > 0 { p.tokens } else { 0 }],
                /// `[slots, rows of both rings, columns]` f32.
                state: mut f32 align 16 [p.slots, csa_state_rows(p.ring), 2 * f.channels()],
                /// `[checkpoints, checkpoint_granules, 256]` u8.
                checkpoints: mut u8 align 16 [p.checkpoints, p.checkpoint_granules, 256];
                WriteStateParams
            )
            { block: compress::state::WRITE_THREADS, min_blocks: 6, shared: 0, min_sm: 90,
              grid: [p.tokens.div_ceil(compress::state::TOKENS), 1] }
            bodies {
                [CsaCompressor::Main] => write_state_csa: compress::state::write::<1024>,
                [CsaCompressor::Index] => write_state_index: compress::state::write::<256>,
            }

            RotateState<()> |p, f|
            "Moves state rows of consecutive positions into another slot's ring, from a slot or \
             from an image in order of position. No step launches it (decision D3): it is for programs that keep state \
             of their own."
            (
                /// `[rows, row_words]` u32, the image; not read if the rows come from a slot.
                image: const u32 align 16 [if p.from == params::RotateStateParams::IMAGE { p.rows } else { 0 }, p.row_words],
                /// `[slots, slot_rows, row_words]` u32.
                state: mut u32 align 16 [1 + if p.from == params::RotateStateParams::IMAGE { p.to } else { p.to.max(p.from) }, p.slot_rows, p.row_words];
                RotateStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.rows, 1] }
            bodies {
                [()] => csa_rotate_state: compress::state::rotate,
            }

            ResetState<()> |p, f|
            "Overwrites all state rows of a slot with one word. No step launches it (decision D3): it is for programs \
             that keep state of their own."
            (
                /// `[slots, slot_rows, row_words]` u32.
                state: mut u32 align 16 [1 + p.slot, p.slot_rows, p.row_words];
                ResetStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.slot_rows, 1] }
            bodies {
                [()] => hca_reset_state: compress::state::reset,
            }

            CopyState<()> |p, f|
            "Copies slots or blocks, of all layers at once: to a checkpoint or another image, back, or to another slot \
             or block."
            (
                /// `[pieces, 8]` u32: which part of a pool each thread block copies; see `state_copy`.
                pieces: const u32 align 16 [p.pieces, params::CopyStateParams::PIECE],
                /// `[jobs, 4]` i32: unit, image or other unit, end of the image, end of the copy.
                jobs: const i32 align 16 [p.jobs, params::CopyStateParams::JOB],
                /// `[memory_granules, 256]` u8, the memory in which the pools of all units (slots or blocks) lie.
                units: mut u8 align 16 [p.memory_granules, 256],
                /// `[images, image_granules, 256]` u8: checkpoints, or images of whole units.
                images: mut u8 align 16 [p.images, p.image_granules, 256],
                /// `[1]` count of jobs refused, by piece.
                faults: mut u32 [1];
                CopyStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.pieces, p.jobs] }
            bodies {
                [()] => copy_state: state_copy::copy,
            }
        } }
    };
}

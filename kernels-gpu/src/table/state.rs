//! The compressors' state rings.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! state_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            WriteState<StateStream>
            "Writes each token's keys and scores to the compressor's ring. Grid: one block a token."
            (
                /// `[step, columns]` f32, the step's key projections.
                kv: const f32,
                /// `[step, columns]` f32, the step's gate projections, without `ape`.
                gate: const f32,
                /// `[ratio, columns]` f32.
                ape: const f32,
                /// `[step]` absolute position of each token.
                token_position: const i32,
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[step]` tokens of the same request that follow the token in the step.
                token_remaining: const i32,
                /// `[slots * ring, 2 * columns]` f32.
                state: mut f32;
                WriteStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                StateStream::CsaMain => write_state_csa: compress::state::write::<1024, 4>,
                StateStream::CsaIndex => write_state_index: compress::state::write::<256, 4>,
                StateStream::Hca => write_state_hca: compress::state::write::<512, 128>,
            }

            RotateState<()>
            "Moves state rows of consecutive positions into another slot's ring, from a slot or from an \
             image in order of position. Grid: one block a row."
            (
                /// `[rows, row_words]` u32, the image; not read if the rows come from a slot.
                image: const u32,
                /// `[slots * ring, row_words]` u32.
                state: mut u32;
                RotateStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                () => csa_rotate_state: compress::state::rotate,
            }

            ResetState<()>
            "Overwrites all state rows of a slot with one word. Grid: one block a row."
            (
                /// `[slots * ring, row_words]` u32.
                state: mut u32;
                ResetStateParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                () => hca_reset_state: compress::state::reset,
            }
        } }
    };
}

//! Preparation of a step, before its first layer: block table and work lists.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! step_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            UpdateTable<()> |p, f|
            "Enters the blocks that a step was given into the block table."
            (
                /// `[count]` elements of the table, slot times `max_blocks` plus logical block.
                update_index: const i32 [p.count],
                /// `[count]` the physical block each gets.
                update_block: const i32 [p.count],
                /// `[slots, max_blocks]`.
                table: mut i32 [p.elements];
                UpdateTableParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.count.div_ceil(block_table::THREADS), 1] }
            bodies {
                [()] => update_table: block_table::update,
            }

            ListClosingTokens<()> |p, f|
            "Lists the tokens that close a CSA window, and those that end an HCA run, in order."
            (
                /// `[tokens]` absolute position of each token.
                token_position: const i32 [p.tokens],
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32 [p.tokens],
                /// `[tokens]` tokens of the same request that follow the token in the step.
                token_remaining: const i32 [p.tokens],
                /// `[csa_capacity]` rows of the step's closing tokens, then -1.
                closing_csa: mut i32 [p.csa_capacity],
                /// `[hca_capacity]` rows of the last tokens of runs, then -1.
                runs_hca: mut i32 [p.hca_capacity];
                ListClosingTokensParams
            )
            { block: 1024, min_blocks: 1, shared: closing_tokens::SHARED_BYTES, min_sm: 90,
              grid: [2, 1] }
            bodies {
                [()] => list_closing_tokens: closing_tokens::list,
            }
        } }
    };
}

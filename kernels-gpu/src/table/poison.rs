//! Finds rows, and scores of keys, that were never written.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! poison_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            FindPoison<()> |p, f|
            "Counts and records the rows of gathered tiles whose rotary channels are all NaN."
            (
                /// `[tokens, rows, 512]` BF16, the tile of each query.
                tile: const u16 align 4 [p.tokens, p.rows, HEAD_DIM],
                /// `[tokens]` rows of each tile in use; not read for lists.
                lengths: const i32 [if p.source == params::FindPoisonParams::LIST { 0 } else { p.tokens }],
                /// `[tokens, rows]` entry of each row, -1 = none; read for lists only.
                selected: const i32 [if p.source == params::FindPoisonParams::LIST { p.tokens } else { 0 }, p.rows],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[2 + 5 * capacity]` rows found so far, and what that number was when the host last read; then of the first
                /// `capacity` since, row `i` at place `i % capacity`: layer and source, slot, position of the query, what the row
                /// is, and `i + 1` (see `FindPoisonParams`).
                found: mut u32 [params::FindPoisonParams::HEAD + params::FindPoisonParams::RECORD * p.capacity];
                FindPoisonParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens, p.rows.div_ceil(poison::WARPS).min(poison::MAX_ROW_BLOCKS)] }
            bodies {
                [()] => find_poison: poison::find,
            }

            FindPoisonedKeys<IndexFormat> |p, f|
            "Counts and records the indexer keys that a query's scores take and that nobody \
             wrote."
            (
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * 32, code_bytes]` u8, the code plane.
                index_code: const u8 align 4 [p.num_blocks, indexer::TILE, f.code_bytes() as u32],
                /// `[num_blocks * 32, scale_bytes]` u8, the scale plane.
                index_scale: const u8 align 4 [p.num_blocks, indexer::TILE, f.scale_bytes() as u32],
                /// `[2 + 5 * capacity]`, as of `find_poison`.
                found: mut u32 [params::FindPoisonParams::HEAD + params::FindPoisonParams::RECORD * p.capacity];
                FindPoisonedKeysParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens, p.columns.div_ceil(poison_keys::THREADS).min(poison::MAX_ROW_BLOCKS)] }
            bodies {
                [IndexFormat::Nvfp4] => find_poisoned_keys_nvfp4: poison_keys::find::<index_row::Nvfp4Row>,
                [IndexFormat::Mxfp4] => find_poisoned_keys_mxfp4: poison_keys::find::<index_row::Mxfp4Row>,
                [IndexFormat::Fp8] => find_poisoned_keys_fp8: poison_keys::find::<index_row::Fp8Row>,
            }
        } }
    };
}

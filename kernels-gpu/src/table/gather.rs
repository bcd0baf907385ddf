//! Gathers compressed entries from the paged planes.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! gather_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            GatherEntries<MainFormat> |p, f|
            "Gathers the compressed entries that each query's list names, dequantised to BF16."
            (
                /// `[tokens, rows]` entry of the query's request for each row of its tile; -1 = none.
                selected: const i32 [p.tokens, p.rows],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * entries_per_block, 576]` u8, the data plane.
                entry_data: const u8 align 16 [p.num_blocks, 1 << p.entries_log2, DATA_BYTES],
                /// `[num_blocks * entries_per_block, scale_bytes]` u8, the scale plane.
                entry_scale: const u8 align 8 [p.num_blocks, 1 << p.entries_log2, f.scale_bytes() as u32],
                /// `[tokens, rows, 512]` BF16; a row without an entry is zero, padding untouched.
                tile: mut u16 align 16 [p.tokens, p.rows, HEAD_DIM],
                /// `[1]` count of slots out of range, of entries beyond the query's position, and of
                /// entries whose block is missing or out of range.
                faults: mut u32 [1];
                GatherEntriesParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens.saturating_mul(p.rows.div_ceil(gather::BLOCK_ROWS)), 1] }
            bodies {
                [MainFormat::Ue8m0] => gather_entries_ue8m0: gather::selected::<row::Ue8m0Row>,
                [MainFormat::F32] => gather_entries_f32: gather::selected::<row::F32Row>,
            }

            GatherAll<MainFormat> |p, f|
            "Gathers all compressed entries that each query sees, oldest first, dequantised to \
             BF16."
            (
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots.max(1), p.max_blocks.max(1)],
                /// `[num_blocks * entries_per_block, 576]` u8, the data plane.
                entry_data: const u8 align 16 [p.num_blocks, 1 << p.entries_log2, DATA_BYTES],
                /// `[num_blocks * entries_per_block, scale_bytes]` u8, the scale plane.
                entry_scale: const u8 align 8 [p.num_blocks, 1 << p.entries_log2, f.scale_bytes() as u32],
                /// `[tokens, rows, 512]` BF16; row j is entry j, rows past the length untouched.
                tile: mut u16 align 16 [p.tokens, p.rows, HEAD_DIM],
                /// `[tokens]` rows of the tile in use, at most `rows`; 0 for padding.
                lengths: mut i32 [p.tokens],
                /// `[1]` count of slots out of range, of queries that see more than `rows` entries,
                /// and of entries whose block is missing or out of range.
                faults: mut u32 [1];
                GatherEntriesParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens.saturating_mul(p.rows.div_ceil(gather::BLOCK_ROWS)), 1] }
            bodies {
                [MainFormat::Ue8m0] => gather_all_ue8m0: gather::all::<row::Ue8m0Row>,
                [MainFormat::F32] => gather_all_f32: gather::all::<row::F32Row>,
            }

            CountEntries<()> |p, f|
            "Writes how many compressed entries each query sees."
            (
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens]` entries that the query sees; 0 for padding.
                lengths: mut i32 [p.tokens];
                CountEntriesParams
            )
            { block: 128, min_blocks: 1, shared: 0, min_sm: 90,
              grid: [p.tokens.div_ceil(gather::THREADS), 1] }
            bodies {
                [()] => count_entries: gather::count_entries,
            }
        } }
    };
}

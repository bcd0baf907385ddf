//! The kernel table: every kernel once. What it becomes: [`crate::kernels`].
//!
//! A row is an operation: its name and the format that chooses among its kernels, documentation,
//! pointers, scalars, launch shape, and a body per format.

/// The table. `$to! { $extra.. row.. }` is what it becomes.
#[doc(hidden)]
#[macro_export]
macro_rules! kernel_table {
    ([$($to:tt)*] $($extra:tt)*) => {
        $($to)*! { $($extra)*
            AppendSwa<MainFormat>
            "Quantises the step's KV rows and scatters them into the sliding-window rings. Grid: \
             four tokens a block, one warp each."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                kv: const u16,
                /// `[tokens]` row of the ring planes each token goes to; -1 = none.
                token_ring_row: const i32,
                /// `[rows, 576]` u8, the data plane.
                ring_data: mut u8,
                /// `[rows, scale_bytes]` u8, the scale plane.
                ring_scale: mut u8,
                /// `[1]` count of tokens refused because their row is out of range.
                faults: mut u32;
                AppendSwaParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => append_swa_ue8m0: swa::append::<row::Ue8m0Row>,
                MainFormat::F32 => append_swa_f32: swa::append::<row::F32Row>,
            }

            GatherSwa<MainFormat>
            "Gathers the window of each query, oldest first, dequantised to BF16: rows of the step \
             itself from `kv` through the same quantisation, older rows from the ring. Grid: (token, \
             eighth of the window), one warp a row."
            (
                /// `[step, 512]` BF16, the step's own KV rows, after norm and RoPE.
                kv: const u16,
                /// `[step]` absolute position of each query.
                token_position: const i32,
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32,
                /// `[step]` tokens of the same request that precede the query in the step.
                token_index: const i32,
                /// `[slots * ring, 576]` u8, the data plane.
                ring_data: const u8,
                /// `[slots * ring, scale_bytes]` u8, the scale plane.
                ring_scale: const u8,
                /// `[tokens, 128, 512]` BF16; row j is the query's j-th oldest key, the rest zero.
                tile: mut u16,
                /// `[tokens]` rows of the tile in use; 0 for padding.
                lengths: mut i32,
                /// `[1]` count of queries refused because their slot is out of range.
                faults: mut u32;
                GatherSwaParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => gather_swa_ue8m0: swa::gather::<row::Ue8m0Row>,
                MainFormat::F32 => gather_swa_f32: swa::gather::<row::F32Row>,
            }

            UpdateTable<()>
            "Enters the blocks that a step was given into the block table. Grid: one thread a block."
            (
                /// `[count]` elements of the table, slot times `max_blocks` plus logical block.
                update_index: const i32,
                /// `[count]` the physical block each gets.
                update_block: const i32,
                /// `[slots, max_blocks]`.
                table: mut i32;
                UpdateTableParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                () => update_table: table::update,
            }

            BuildPlan<()>
            "Lists the tokens that close a window of ratio 4 and of ratio 128, in order. Grid: one \
             block a list."
            (
                /// `[tokens]` absolute position of each token.
                token_position: const i32,
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[csa_capacity]` rows of the step's closing tokens, then -1.
                plan_csa: mut i32,
                /// `[hca_capacity]` rows of the step's closing tokens, then -1.
                plan_hca: mut i32;
                BuildPlanParams
            )
            { block: 1024, min_blocks: 1, shared: 128, min_sm: 90 }
            bodies {
                () => build_plan: plan::build,
            }

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
            "Pools, norms and rotates the HCA entries that the step closes. Grid: (record, eighth of \
             the channels)."
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
                /// `[capacity, 512]` f32, where the blocks of a record leave what they pooled.
                pooled: mut f32,
                /// `[capacity]` blocks that have; zero before and after.
                arrivals: mut u32,
                /// `[capacity, channels]` BF16.
                entries: mut u16;
                CompressParams
            )
            { block: 256, min_blocks: 2, shared: 12320, min_sm: 90 }
            bodies {
                () => compress_hca: compress::hca::compress,
            }

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

            FlushCsa<(MainFormat, IndexFormat)>
            "Quantises CSA entries and indexer keys (Hadamard first, if `rotate` is 1) into the \
             paged planes. Grid: two records a block, a warp for the entry and one for the key."
            (
                /// `[capacity, 512]` BF16.
                entries: const u16,
                /// `[capacity, 128]` BF16.
                keys: const u16,
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                plan: const i32,
                /// `[step]` absolute position of each token.
                token_position: const i32,
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32,
                /// `[num_blocks * 32, 576]` u8, the data plane of the entries.
                entry_data: mut u8,
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8,
                /// `[num_blocks * 32, code_bytes]` u8, the code plane of the indexer keys.
                index_code: mut u8,
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                index_scale: mut u8,
                /// `[1]` count of records refused for want of a slot or a block.
                faults: mut u32;
                FlushParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                (MainFormat::Ue8m0, IndexFormat::Nvfp4) =>
                    flush_csa_ue8m0_nvfp4: flush::csa::<row::Ue8m0Row, index_row::Nvfp4Row>,
                (MainFormat::Ue8m0, IndexFormat::Mxfp4) =>
                    flush_csa_ue8m0_mxfp4: flush::csa::<row::Ue8m0Row, index_row::Mxfp4Row>,
                (MainFormat::Ue8m0, IndexFormat::Fp8) =>
                    flush_csa_ue8m0_fp8: flush::csa::<row::Ue8m0Row, index_row::Fp8Row>,
                (MainFormat::F32, IndexFormat::Nvfp4) =>
                    flush_csa_f32_nvfp4: flush::csa::<row::F32Row, index_row::Nvfp4Row>,
                (MainFormat::F32, IndexFormat::Mxfp4) =>
                    flush_csa_f32_mxfp4: flush::csa::<row::F32Row, index_row::Mxfp4Row>,
                (MainFormat::F32, IndexFormat::Fp8) =>
                    flush_csa_f32_fp8: flush::csa::<row::F32Row, index_row::Fp8Row>,
            }

            FlushHca<MainFormat>
            "Quantises HCA entries into the paged planes. Grid: four records a block."
            (
                /// `[capacity, 512]` BF16.
                entries: const u16,
                /// `[capacity]` rows of the step's closing tokens; -1 = padding.
                plan: const i32,
                /// `[step]` absolute position of each token.
                token_position: const i32,
                /// `[step]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32,
                /// `[num_blocks, 576]` u8, the data plane of the entries.
                entry_data: mut u8,
                /// `[num_blocks, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8,
                /// `[1]` count of records refused for want of a slot or a block.
                faults: mut u32;
                FlushParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => flush_hca_ue8m0: flush::hca::<row::Ue8m0Row>,
                MainFormat::F32 => flush_hca_f32: flush::hca::<row::F32Row>,
            }

            DecodeCsa<(MainFormat, IndexFormat)>
            "One-token decode of a CSA layer: window row, state rows, and at the end of a window its \
             entry and indexer key. Grid: one block a token."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                window_kv: const u16,
                /// `[tokens, 1024]` f32, key projections of the main compressor.
                main_kv: const f32,
                /// `[tokens, 1024]` f32, gate projections.
                main_gate: const f32,
                /// `[4, 1024]` f32, position bias.
                main_ape: const f32,
                /// `[512]` f32, weights of the norm.
                main_norm: const f32,
                /// `[tokens, 256]` f32, key projections of the index compressor.
                index_kv: const f32,
                /// `[tokens, 256]` f32, gate projections.
                index_gate: const f32,
                /// `[4, 256]` f32, position bias.
                index_ape: const f32,
                /// `[128]` f32, weights of the norm.
                index_norm: const f32,
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32,
                /// `[tokens]` absolute position of each token.
                token_position: const i32,
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[tokens]` tokens of the same request that precede it in the step: 0.
                token_index: const i32,
                /// `[tokens]` row of the ring planes each token goes to.
                token_ring_row: const i32,
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32,
                /// `[slots * window ring, 576]` u8, the data plane of the window.
                ring_data: mut u8,
                /// `[slots * window ring, scale_bytes]` u8, its scale plane.
                ring_scale: mut u8,
                /// `[slots * state ring, 2048]` f32.
                main_state: mut f32,
                /// `[slots * state ring, 512]` f32.
                index_state: mut f32,
                /// `[num_blocks * 32, 576]` u8, the data plane of the entries.
                entry_data: mut u8,
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8,
                /// `[num_blocks * 32, code_bytes]` u8, the code plane of the indexer keys.
                index_code: mut u8,
                /// `[num_blocks * 32, scale_bytes]` u8, their scale plane.
                index_scale: mut u8,
                /// `[1]` count of tokens and entries refused.
                faults: mut u32;
                DecodeParams
            )
            { block: 192, min_blocks: 3, shared: 1040, min_sm: 90 }
            bodies {
                (MainFormat::Ue8m0, IndexFormat::Nvfp4) =>
                    decode_csa_ue8m0_nvfp4: decode::csa::<row::Ue8m0Row, index_row::Nvfp4Row>,
                (MainFormat::Ue8m0, IndexFormat::Mxfp4) =>
                    decode_csa_ue8m0_mxfp4: decode::csa::<row::Ue8m0Row, index_row::Mxfp4Row>,
                (MainFormat::Ue8m0, IndexFormat::Fp8) =>
                    decode_csa_ue8m0_fp8: decode::csa::<row::Ue8m0Row, index_row::Fp8Row>,
                (MainFormat::F32, IndexFormat::Nvfp4) =>
                    decode_csa_f32_nvfp4: decode::csa::<row::F32Row, index_row::Nvfp4Row>,
                (MainFormat::F32, IndexFormat::Mxfp4) =>
                    decode_csa_f32_mxfp4: decode::csa::<row::F32Row, index_row::Mxfp4Row>,
                (MainFormat::F32, IndexFormat::Fp8) =>
                    decode_csa_f32_fp8: decode::csa::<row::F32Row, index_row::Fp8Row>,
            }

            DecodeHca<MainFormat>
            "One-token decode of an HCA layer: window row, state row, and at the end of a window its \
             entry. Grid: (token, eighth of the channels)."
            (
                /// `[tokens, 512]` BF16, after norm and RoPE.
                window_kv: const u16,
                /// `[tokens, 512]` f32, key projections.
                kv: const f32,
                /// `[tokens, 512]` f32, gate projections.
                gate: const f32,
                /// `[128, 512]` f32, position bias.
                ape: const f32,
                /// `[512]` f32, weights of the norm.
                norm: const f32,
                /// `[32]` f32, the rotary frequencies of compressed layers.
                frequencies: const f32,
                /// `[tokens]` absolute position of each token.
                token_position: const i32,
                /// `[tokens]` slot of each token's request; -1 = padding.
                token_slot: const i32,
                /// `[tokens]` tokens of the same request that precede it in the step: 0.
                token_index: const i32,
                /// `[tokens]` row of the ring planes each token goes to.
                token_ring_row: const i32,
                /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
                table: const i32,
                /// `[tokens, 512]` f32, where the blocks of a token leave what they pooled.
                pooled: mut f32,
                /// `[tokens]` blocks that have; zero before and after.
                arrivals: mut u32,
                /// `[slots * window ring, 576]` u8, the data plane of the window.
                ring_data: mut u8,
                /// `[slots * window ring, scale_bytes]` u8, its scale plane.
                ring_scale: mut u8,
                /// `[slots * state ring, 1024]` f32.
                state: mut f32,
                /// `[num_blocks, 576]` u8, the data plane of the entries.
                entry_data: mut u8,
                /// `[num_blocks, scale_bytes]` u8, their scale plane.
                entry_scale: mut u8,
                /// `[1]` count of tokens and entries refused.
                faults: mut u32;
                DecodeParams
            )
            { block: 256, min_blocks: 2, shared: 13344, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => decode_hca_ue8m0: decode::hca::<row::Ue8m0Row>,
                MainFormat::F32 => decode_hca_f32: decode::hca::<row::F32Row>,
            }

            GatherKv<MainFormat>
            "Gathers the compressed entries that each query's list names, dequantised to BF16. Grid: \
             (token, 16 rows of its tile), one warp for four rows."
            (
                /// `[tokens, rows]` entry of the query's request for each row of its tile; -1 = none.
                selected: const i32,
                /// `[step]` absolute position of each query.
                token_position: const i32,
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32,
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32,
                /// `[num_blocks * entries_per_block, 576]` u8, the data plane.
                entry_data: const u8,
                /// `[num_blocks * entries_per_block, scale_bytes]` u8, the scale plane.
                entry_scale: const u8,
                /// `[tokens, rows, 512]` BF16; a row without an entry is zero, padding untouched.
                tile: mut u16,
                /// `[1]` count of slots out of range, of entries beyond the query's position, and of
                /// entries whose block is missing or out of range.
                faults: mut u32;
                GatherEntriesParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => gather_kv_ue8m0: gather::selected::<row::Ue8m0Row>,
                MainFormat::F32 => gather_kv_f32: gather::selected::<row::F32Row>,
            }

            GatherAll<MainFormat>
            "Gathers all compressed entries that each query sees, oldest first, dequantised to BF16. \
             Grid: (token, 16 rows of its tile), one warp for four rows."
            (
                /// `[step]` absolute position of each query.
                token_position: const i32,
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32,
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32,
                /// `[num_blocks * entries_per_block, 576]` u8, the data plane.
                entry_data: const u8,
                /// `[num_blocks * entries_per_block, scale_bytes]` u8, the scale plane.
                entry_scale: const u8,
                /// `[tokens, rows, 512]` BF16; row j is entry j, rows past the length untouched.
                tile: mut u16,
                /// `[tokens]` rows of the tile in use, at most `rows`; 0 for padding.
                lengths: mut i32,
                /// `[1]` count of slots out of range, of queries that see more than `rows` entries,
                /// and of entries whose block is missing or out of range.
                faults: mut u32;
                GatherEntriesParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                MainFormat::Ue8m0 => gather_all_ue8m0: gather::all::<row::Ue8m0Row>,
                MainFormat::F32 => gather_all_f32: gather::all::<row::F32Row>,
            }

            ValidLens<()>
            "Writes how many compressed entries each query sees. Grid: 128 queries a block, one \
             thread each."
            (
                /// `[step]` absolute position of each query.
                token_position: const i32,
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32,
                /// `[tokens]` entries that the query sees; 0 for padding.
                lengths: mut i32;
                ValidLensParams
            )
            { block: 128, min_blocks: 1, shared: 0, min_sm: 90 }
            bodies {
                () => valid_lens: gather::valid_lens,
            }
        }
    };
}

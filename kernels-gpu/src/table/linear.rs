//! Products of activations with a weight.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! linear_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            Bf16Linear<LinearTile> |p, f|
            "Multiplies activations by the transposed weight in BF16."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[columns, inner]` BF16.
                weight: const u16 align 16 [p.columns, p.inner],
                /// `[tokens, columns]` f32.
                output: mut f32 align 16 [p.tokens, p.columns];
                Bf16LinearParams
            )
            { block: linear::product::threads(linear::weights::BF16_FRAGMENTS), min_blocks: 1, shared: linear::product::shared_bytes(f.tokens()), min_sm: 90, waits_in_body: true,
              grid: [p.columns.div_ceil(linear::product::COLUMNS), p.tokens.div_ceil(f.tokens())] }
            bodies {
                [LinearTile::T8] => bf16_linear_8: linear::output::bf16::<1, { linear::product::words(8) }>,
                [LinearTile::T16] => bf16_linear_16: linear::output::bf16::<2, { linear::product::words(16) }>,
                [LinearTile::T32] => bf16_linear_32: linear::output::bf16::<4, { linear::product::words(32) }>,
            }

            Bf16LinearMany<()> |p, f|
            "As `bf16_linear`, with equal bits, for many tokens."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[columns, inner]` BF16.
                weight: const u16 align 16 [p.columns, p.inner],
                /// `[tokens, columns]` f32.
                output: mut f32 align 16 [p.tokens, p.columns];
                Bf16LinearManyParams
            )
            { block: linear::tiled::THREADS, min_blocks: 1, shared: linear::tiled::SHARED_BYTES, min_sm: 90,
              grid: [p.tokens.div_ceil(linear::tiled::TOKENS) * p.splits, 1] }
            bodies {
                [()] => bf16_linear_many: linear::tiled_output::bf16,
            }

            Bf16IndexQuery<IndexFormat> |p, f|
            "Queries of the indexer from the activations of many tokens, in one launch: product with the weight in \
             BF16, with the bits of `bf16_linear`, then as `index_query`."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[heads * 128, inner]` BF16.
                query_weight: const u16 align 16 [p.heads, INDEX_DIM, p.inner],
                /// `[tokens, heads]` f32, projected.
                projected_weight: const f32 [p.tokens, p.heads],
                /// `[32]` radians per token of each rotated pair.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, which stays untouched.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, 16384]` u8, as of `index_query`.
                query: mut u8 align 16 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32, as of `index_query`.
                weight: mut f32 [p.tokens, p.heads];
                Bf16IndexQueryParams
            )
            { block: linear::tiled::THREADS, min_blocks: 1, shared: linear::tiled_query::SHARED_BYTES, min_sm: 90,
              grid: [p.tokens.div_ceil(linear::tiled::TOKENS) * p.splits, 1] }
            bodies {
                [IndexFormat::Nvfp4] => bf16_index_query_nvfp4: linear::tiled_query::query::<index_row::Nvfp4Row>,
                [IndexFormat::Mxfp4] => bf16_index_query_mxfp4: linear::tiled_query::query::<index_row::Mxfp4Row>,
                [IndexFormat::Fp8] => bf16_index_query_fp8: linear::tiled_query::query::<index_row::Fp8Row>,
            }

            Bf16Narrow<LinearTile> |p, f|
            "Multiplies activations by the transposed weight in BF16, one of few columns."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[columns, inner]` BF16.
                weight: const u16 align 16 [p.columns, p.inner],
                /// `[tokens, columns]` f32.
                output: mut f32 [p.tokens, p.columns];
                Bf16LinearParams
            )
            { block: linear::narrow::THREADS, min_blocks: 1, shared: linear::narrow::shared_bytes(f.tokens()), min_sm: 90, cluster: 8, waits_in_body: true,
              grid: [linear::narrow::PARTS * p.columns.div_ceil(linear::narrow::COLUMNS), p.tokens.div_ceil(f.tokens())] }
            bodies {
                [LinearTile::T8] => bf16_narrow_8: linear::narrow::narrow::<1, { linear::narrow::words(8) }>,
                [LinearTile::T16] => bf16_narrow_16: linear::narrow::narrow::<2, { linear::narrow::words(16) }>,
                [LinearTile::T32] => bf16_narrow_32: linear::narrow::narrow::<4, { linear::narrow::words(32) }>,
            }

            Nvfp4Linear<(LinearTile, LinearOutput)> |p, f|
            "Multiplies activations by the transposed weight in NVFP4."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[columns / 64, inner / 128, 4096]` u8, rounded up: E2M1 codes by tiles of `kv_layout::linear`. No launch writes them, nor the scales.
                codes: const u8 align 16 [p.columns.div_ceil(TILE_COLUMNS), p.inner.div_ceil(TILE_INNER), TILE_CODES],
                /// `[columns / 64, inner / 128, 512]` u8, rounded up: E4M3 scales by tiles.
                scales: const u8 align 16 [p.columns.div_ceil(TILE_COLUMNS), p.inner.div_ceil(TILE_INNER), TILE_SCALES],
                /// `[tokens, columns]` f32 or BF16.
                output: mut u8 align 16 [p.tokens, p.columns, f.1.bytes()];
                Nvfp4LinearParams
            )
            { block: linear::product::threads(linear::weights::NVFP4_FRAGMENTS), min_blocks: 2, shared: linear::product::shared_bytes(f.0.tokens()), min_sm: 90, waits_in_body: true,
              grid: [p.columns.div_ceil(linear::product::COLUMNS), p.tokens.div_ceil(f.0.tokens())] }
            bodies {
                [(LinearTile::T8, LinearOutput::F32)] => nvfp4_linear_8_f32: linear::output::nvfp4::<linear::output::F32, 1, { linear::product::words(8) }>,
                [(LinearTile::T16, LinearOutput::F32)] => nvfp4_linear_16_f32: linear::output::nvfp4::<linear::output::F32, 2, { linear::product::words(16) }>,
                [(LinearTile::T32, LinearOutput::F32)] => nvfp4_linear_32_f32: linear::output::nvfp4::<linear::output::F32, 4, { linear::product::words(32) }>,
                [(LinearTile::T8, LinearOutput::Bf16)] => nvfp4_linear_8_bf16: linear::output::nvfp4::<linear::output::Bf16, 1, { linear::product::words(8) }>,
                [(LinearTile::T16, LinearOutput::Bf16)] => nvfp4_linear_16_bf16: linear::output::nvfp4::<linear::output::Bf16, 2, { linear::product::words(16) }>,
                [(LinearTile::T32, LinearOutput::Bf16)] => nvfp4_linear_32_bf16: linear::output::nvfp4::<linear::output::Bf16, 4, { linear::product::words(32) }>,
            }

            Nvfp4IndexQuery<(IndexFormat, LinearTile)> |p, f|
            "Queries of the indexer from activations, in one launch: product with the weight in \
             NVFP4, then as `index_query`."
            (
                /// `[tokens, inner]` BF16.
                input: const u16 align 16 [p.tokens, p.inner],
                /// `[heads * 128 / 64, inner / 128, 4096]` u8: as of `nvfp4_linear`.
                codes: const u8 align 16 [p.heads, INDEX_DIM / TILE_COLUMNS, p.inner.div_ceil(TILE_INNER), TILE_CODES],
                /// `[heads * 128 / 64, inner / 128, 512]` u8: as of `nvfp4_linear`.
                scales: const u8 align 16 [p.heads, INDEX_DIM / TILE_COLUMNS, p.inner.div_ceil(TILE_INNER), TILE_SCALES],
                /// `[tokens, heads]` f32, projected.
                projected_weight: const f32 [p.tokens, p.heads],
                /// `[32]` radians per token of each rotated pair.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding, which stays untouched.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[tokens, 16384]` u8, as of `index_query`.
                query: mut u8 align 4 [p.tokens, IndexFormat::MAX_QUERY_BYTES],
                /// `[tokens, heads]` f32, as of `index_query`.
                weight: mut f32 [p.tokens, p.heads];
                Nvfp4IndexQueryParams
            )
            { block: linear::product::threads(linear::weights::NVFP4_FRAGMENTS), min_blocks: 2, shared: linear::product::shared_bytes(f.1.tokens()), min_sm: 90, cluster: 2, waits_in_body: true,
              grid: [QUERY_HEADS * linear::query::HEAD_BLOCKS, p.tokens.div_ceil(f.1.tokens())] }
            bodies {
                [(IndexFormat::Nvfp4, LinearTile::T8)] => nvfp4_index_query_nvfp4_8: linear::query::query::<index_row::Nvfp4Row, 1, { linear::product::words(8) }>,
                [(IndexFormat::Nvfp4, LinearTile::T16)] => nvfp4_index_query_nvfp4_16: linear::query::query::<index_row::Nvfp4Row, 2, { linear::product::words(16) }>,
                [(IndexFormat::Nvfp4, LinearTile::T32)] => nvfp4_index_query_nvfp4_32: linear::query::query::<index_row::Nvfp4Row, 4, { linear::product::words(32) }>,
                [(IndexFormat::Mxfp4, LinearTile::T8)] => nvfp4_index_query_mxfp4_8: linear::query::query::<index_row::Mxfp4Row, 1, { linear::product::words(8) }>,
                [(IndexFormat::Mxfp4, LinearTile::T16)] => nvfp4_index_query_mxfp4_16: linear::query::query::<index_row::Mxfp4Row, 2, { linear::product::words(16) }>,
                [(IndexFormat::Mxfp4, LinearTile::T32)] => nvfp4_index_query_mxfp4_32: linear::query::query::<index_row::Mxfp4Row, 4, { linear::product::words(32) }>,
                [(IndexFormat::Fp8, LinearTile::T8)] => nvfp4_index_query_fp8_8: linear::query::query::<index_row::Fp8Row, 1, { linear::product::words(8) }>,
                [(IndexFormat::Fp8, LinearTile::T16)] => nvfp4_index_query_fp8_16: linear::query::query::<index_row::Fp8Row, 2, { linear::product::words(16) }>,
                [(IndexFormat::Fp8, LinearTile::T32)] => nvfp4_index_query_fp8_32: linear::query::query::<index_row::Fp8Row, 4, { linear::product::words(32) }>,
            }
        } }
    };
}

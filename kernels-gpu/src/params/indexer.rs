//! Scalars of the indexer's kernels.

use bytemuck::{Pod, Zeroable};

use super::Parameters;

parameters! {
    /// Scalars of `index_query_*`.
    IndexQueryParams {
        /// The first query token of the launch; its query is row 0.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Heads of a query.
        heads,
    }
}

parameters! {
    /// Scalars of `index_score_nvfp4`, `index_score_mxfp4` and `index_score_fp8`.
    IndexScoreParams {
        /// The first query token of the launch; its query and its scores are row 0.
        first,
        /// Heads of a query, at most 64.
        heads,
        /// Queries that see no more entries than this are left out.
        skip,
        /// Scores of a row, a multiple of 32.
        columns,
        /// log2 of the scores of a group whose largest is written, 3 or 5.
        group_log2,
        /// Tiles of 32 entries that a block takes in turn, at least one and at most 128.
        tiles,
        /// Rows of the block table; a slot beyond them is a fault, not a read.
        slots,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the key planes; one beyond them is a fault, not a read.
        num_blocks,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
    }
}

parameters! {
    /// Scalars of `index_score_chunk_*`.
    IndexScoreChunkParams {
        /// The first query token of the launch; its query and its scores are row 0.
        first,
        /// Heads of a query, at most 64.
        heads,
        /// Queries that see no more entries than this are left out.
        skip,
        /// Scores of a row, a multiple of 32.
        columns,
        /// log2 of the scores of a group whose largest is written, 3 or 5.
        group_log2,
        /// Tiles of 32 entries that a block takes in turn, at most 256.
        tiles,
        /// Rows of the block table; a slot beyond them is a fault, not a read.
        slots,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the key planes; one beyond them is a fault, not a read.
        num_blocks,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Queries of a thread block, at least one and at most [`crate::indexer::score::chunk::queries`].
        block_queries,
    }
}

parameters! {
    /// Scalars of `score_maxima`.
    ScoreMaximaParams {
        /// Scores of a row, a multiple of 32.
        columns,
        /// log2 of the scores of a group whose largest is written, 3 or 5.
        group_log2,
        /// Rows of scores.
        rows,
    }
}

parameters! {
    /// Scalars of `topk_select_*`.
    TopkSelectParams {
        /// Scores of a row, a multiple of 32.
        columns,
        /// log2 of the scores of a group in `maxima`, 3 or 5.
        group_log2,
        /// Indices of a row of the result, at most 2048.
        k,
        /// Rows of scores.
        rows,
    }
}

parameters! {
    /// Scalars of `index_topk_*`.
    IndexTopkParams {
        /// The first query token of the launch; its scores are row 0.
        first,
        /// Scores of a row, a multiple of 32.
        columns,
        /// log2 of the scores of a group in `maxima`, 3 or 5.
        group_log2,
        /// Indices of a row of the result, at most 2048.
        k,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
    }
}

parameters! {
    /// Scalars of `index_score_topk`.
    IndexScoreTopkParams {
        /// The first query token of the launch; its query and its list are row 0.
        first,
        /// Heads of a query, at most 64.
        heads,
        /// Entries of a list, at most 2048.
        k,
        /// Most entries of a query, at most 2048; one that sees more is a fault.
        columns,
        /// Rows of the block table; a slot beyond them is a fault, not a read.
        slots,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the key planes; one beyond them is a fault, not a read.
        num_blocks,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
    }
}

//! Scalars of the indexer's kernels.

use bytemuck::{Pod, Zeroable};

/// Scalars of `project`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ProjectParams {
    /// Rows of the product, at least one.
    pub rows: u32,
    /// Columns of the product, a multiple of 32.
    pub columns: u32,
    /// Columns of `input` and of `weight`, a multiple of 128.
    pub inner: u32,
}

/// Scalars of `index_query_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexQueryParams {
    /// The first query token of the launch; its query is row 0.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Heads of a query.
    pub heads: u32,
}

/// Scalars of `index_score_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexScoreParams {
    /// The first query token of the launch; its query and its scores are row 0.
    pub first: u32,
    /// Heads of a query, at most 64.
    pub heads: u32,
    /// Queries that see no more entries than this are left out.
    pub skip: u32,
    /// Scores of a row, a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group whose largest is written, 3 or 5.
    pub group_log2: u32,
    /// Tiles of 32 entries that a block takes, one after another.
    pub tiles: u32,
    /// Rows of the block table; a slot beyond them is a fault, not a read.
    pub slots: u32,
    /// Blocks in a row of the block table.
    pub max_blocks: u32,
    /// Blocks of the key planes; one beyond them is a fault, not a read.
    pub num_blocks: u32,
}

/// Scalars of `score_maxima`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ScoreMaximaParams {
    /// Scores of a row, a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group whose largest is written, 3 or 5.
    pub group_log2: u32,
}

/// Scalars of `topk_select_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TopkSelectParams {
    /// Scores of a row, a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group in `maxima`, 3 or 5.
    pub group_log2: u32,
    /// Indices of a row of the result, at most 2048.
    pub k: u32,
}

/// Scalars of `index_topk_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexTopkParams {
    /// The first query token of the launch; its scores are row 0.
    pub first: u32,
    /// Scores of a row, a multiple of 32.
    pub columns: u32,
    /// log2 of the scores of a group in `maxima`, 3 or 5.
    pub group_log2: u32,
    /// Indices of a row of the result, at most 2048.
    pub k: u32,
}

/// Scalars of `index_score_topk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexScoreTopkParams {
    /// The first query token of the launch; its query and its list are row 0.
    pub first: u32,
    /// Heads of a query, at most 64.
    pub heads: u32,
    /// Entries of a list, at most 2048.
    pub k: u32,
    /// Most entries of a query, at most 2048; one that sees more is a fault.
    pub columns: u32,
    /// Rows of the block table; a slot beyond them is a fault, not a read.
    pub slots: u32,
    /// Blocks in a row of the block table.
    pub max_blocks: u32,
    /// Blocks of the key planes; one beyond them is a fault, not a read.
    pub num_blocks: u32,
}

//! Functions for the dimensions and grids of the kernel table.

pub use kv_layout::attention::{
    AttendForm, AttendKernel, AttendedKeys, MAX_CONSECUTIVE, ManyEntries,
};
pub use kv_layout::geometry::{
    BLOCK_TOKENS, CSA_RATIO, CsaCompressor, HCA_RATIO, HEAD_DIM, INDEX_DIM, ROPE_DIM, WINDOW,
    csa_state_rows,
};
pub use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
pub use kv_layout::linear::{
    LinearOutput, LinearTile, TILE_CODES, TILE_COLUMNS, TILE_INNER, TILE_SCALES,
};
pub use kv_layout::main_row::MainFormat;
pub use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS, ExpertWidth, LogitsSplit};

use crate::attention::HEADS;
use crate::params::AttendParams;

/// Bytes of a row of a data plane.
pub const DATA_BYTES: u32 = kv_layout::main_row::DATA_BYTES as u32;

/// Multiprocessors of the GPU that shapes are tuned for, an H100 SXM or H200.
pub const MULTIPROCESSORS: u32 = 132;

/// Rows of a step's arrays of which `count` from `first` on are used.
#[must_use]
pub const fn end(first: u32, count: u32) -> u32 {
    first.saturating_add(count)
}

/// `count` if a query's keys have several pieces, else 0: the extent of what only pieces use.
#[must_use]
pub const fn several(pieces: u32, count: u32) -> u32 {
    if pieces > 1 { count } else { 0 }
}

/// Groups of 64 heads of a launch of attention, the last perhaps of fewer.
#[must_use]
pub const fn groups(p: &AttendParams) -> u32 {
    p.heads.div_ceil(HEADS)
}

/// Pieces of a query's keys in a launch of attention.
#[must_use]
pub const fn pieces(p: &AttendParams, f: AttendKernel) -> u32 {
    f.pieces(p.num_splits, p.key_halves)
}

/// Blocks of a launch of attention in the first dimension of its grid. Where a work item has one cluster or block, those of the groups of
/// 64 heads with the same keys follow each other, so that the second reads their rows from L2; else groups are the second dimension.
#[must_use]
pub fn attend_blocks(p: &AttendParams, f: AttendKernel) -> u32 {
    let pieces = p.tokens.saturating_mul(pieces(p, f));
    match f.form {
        AttendForm::Consecutive => p.tokens.div_ceil(p.queries_per_block.clamp(1, MAX_CONSECUTIVE)),
        AttendForm::Spread(_) | AttendForm::SpreadSplits(_) => pieces.saturating_mul(f.cluster()),
        AttendForm::Whole(_) => {
            let blocks =
                groups(p).saturating_mul(p.channel_halves).saturating_mul(p.blocks_per_split);
            pieces.saturating_mul(blocks).div_ceil(f.cluster()).saturating_mul(f.cluster())
        }
    }
}

/// The product of `dimensions`.
#[must_use]
pub fn product(dimensions: &[u32]) -> u64 {
    dimensions.iter().fold(1, |product: u64, &dimension| product.saturating_mul(dimension.into()))
}

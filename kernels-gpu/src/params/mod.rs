//! The scalars each kernel takes: one `#[repr(C)]` struct, passed by value after the pointers.
//!
//! `u32` only, no implicit padding, no `bool`: the struct is the PTX `.param` byte for byte.

mod indexer;

use bytemuck::{Pod, Zeroable};

pub use indexer::*;

/// Scalars of `append_swa_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AppendSwaParams {
    /// Rows of `kv` that the launch covers: the token capacity of the step's bucket.
    pub tokens: u32,
    /// Rows of the ring planes, slots times ring; a row beyond them is a fault, not a write.
    pub rows: u32,
}

/// Scalars of `gather_swa_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GatherSwaParams {
    /// The first query token of the launch; its tile row is 0.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Rows of one request's ring, `R` (see [`kv_layout::geometry::swa_ring_rows`]).
    pub ring: u32,
    /// Request slots the ring planes hold; a slot beyond them is a fault, not a read.
    pub slots: u32,
}

/// Scalars of `gather_kv_*` and `gather_all_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GatherEntriesParams {
    /// The first query token of the launch; its tile is the first one.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Rows of a query's tile: the length of its list, or the most entries that are gathered.
    pub rows: u32,
    /// log2 of the tokens of an entry: a shift, because the kernel waits for the quotient.
    pub ratio_log2: u32,
    /// log2 of the entries of a block.
    pub entries_log2: u32,
    /// Rows of the block table; a slot beyond them is a fault, not a read.
    pub slots: u32,
    /// Blocks in a row of the block table.
    pub max_blocks: u32,
    /// Blocks of the entry planes; one beyond them is a fault, not a read.
    pub num_blocks: u32,
}

/// Scalars of `valid_lens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ValidLensParams {
    /// The first query token of the launch.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Tokens per entry, not 0.
    pub ratio: u32,
}

/// Scalars of `update_table`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct UpdateTableParams {
    /// Blocks to enter.
    pub count: u32,
    /// Elements of the table; an index beyond them is left out.
    pub elements: u32,
}

/// Scalars of `build_plan`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BuildPlanParams {
    /// Tokens of the step, or of the bucket being captured.
    pub tokens: u32,
    /// Entries of the list of ratio 4.
    pub csa_capacity: u32,
    /// Entries of the list of ratio 128.
    pub hca_capacity: u32,
}

/// Scalars of `compress_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CompressParams {
    /// Records that the launch covers: entries of the work list.
    pub capacity: u32,
    /// Rows of one request's state ring.
    pub ring: u32,
    /// Request slots the state holds; a token beyond them is left out.
    pub slots: u32,
}

/// Scalars of `write_state_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WriteStateParams {
    /// Rows of one request's state ring.
    pub ring: u32,
    /// Request slots the state holds; a token beyond them is left out.
    pub slots: u32,
}

/// Scalars of `csa_rotate_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RotateStateParams {
    /// Rows to move.
    pub rows: u32,
    /// Position of the first of them; the others follow.
    pub position: u32,
    /// Slot they come from; [`Self::IMAGE`] = from the image.
    pub from: u32,
    /// Slot they go to.
    pub to: u32,
    /// Rows of one request's ring.
    pub ring: u32,
    /// 32-bit words of a row, a multiple of 4.
    pub row_words: u32,
}

impl RotateStateParams {
    /// The source is the image, not a slot.
    pub const IMAGE: u32 = u32::MAX;
}

/// Scalars of `hca_reset_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResetStateParams {
    /// The slot whose rows are overwritten.
    pub slot: u32,
    /// Rows of one request's ring.
    pub ring: u32,
    /// 32-bit words of a row, a multiple of 4.
    pub row_words: u32,
    /// What every word becomes.
    pub word: u32,
}

/// Scalars of `decode_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeParams {
    /// Tokens of the step.
    pub tokens: u32,
    /// Request slots; a slot beyond them is a fault.
    pub slots: u32,
    /// Rows of the sliding-window planes, slots times ring.
    pub window_rows: u32,
    /// Rows of one request's state ring.
    pub state_ring: u32,
    /// Blocks in a row of the block table.
    pub max_blocks: u32,
    /// Blocks of the planes; one beyond them is a fault, not a write.
    pub num_blocks: u32,
}

/// Scalars of `flush_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FlushParams {
    /// Records that the launch covers: entries of the work list.
    pub capacity: u32,
    /// Rows of the block table; a slot beyond them is a fault, not a read.
    pub slots: u32,
    /// Blocks in a row of the block table.
    pub max_blocks: u32,
    /// Blocks of the planes; one beyond them is a fault, not a write.
    pub num_blocks: u32,
    /// 1 = multiply indexer keys by the Hadamard matrix first, as the released model does; else 0.
    pub rotate: u32,
}

/// Scalars of `find_poison`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FindPoisonParams {
    /// The first query token of the launch; its tile is the first one.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Rows of a query's tile.
    pub rows: u32,
    /// The layer, for the record.
    pub layer: u32,
    /// What the tile's rows are: [`Self::WINDOW`], [`Self::LIST`] or [`Self::ALL`].
    pub source: u32,
    /// Rows that can be recorded; more are only counted.
    pub capacity: u32,
}

impl FindPoisonParams {
    /// Rows are the query's window: recorded is the position of the token.
    pub const WINDOW: u32 = 0;
    /// Rows are the entries of a list: recorded is the entry.
    pub const LIST: u32 = 1;
    /// Row i is entry i: recorded is the entry.
    pub const ALL: u32 = 2;
    /// Words of a record.
    pub const RECORD: u32 = 4;
    /// In a record's first word, what the layer is multiplied by; the source is added.
    pub const LAYER: u32 = 4;
}

/// Scalars of `find_poisoned_keys_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FindPoisonedKeysParams {
    /// The first query token of the launch.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Queries that see no more entries than this have no scores.
    pub skip: u32,
    /// Scores of a query; it may see more, which have none.
    pub columns: u32,
    /// The layer, for the record.
    pub layer: u32,
    /// Keys that can be recorded; more are only counted.
    pub capacity: u32,
    /// Slots of the block table.
    pub slots: u32,
    /// Blocks of a slot's row of the table.
    pub max_blocks: u32,
    /// Blocks of the planes.
    pub num_blocks: u32,
}

impl FindPoisonedKeysParams {
    /// What was found is the indexer key of an entry that was scored: recorded is the entry. Beside the
    /// sources of [`FindPoisonParams`].
    pub const KEY: u32 = 3;
    /// As of [`FindPoisonParams`], whose records these are.
    pub const LAYER: u32 = FindPoisonParams::LAYER;
}

/// Scalars of `activation_topk_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ActivationTopkParams {
    /// Tokens that the launch covers.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts of a token, at most 8.
    pub selected: u32,
    /// Bits of the f32 that the weights of a token add up to.
    pub scaling_bits: u32,
}

/// Scalars of `hash_router`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HashRouterParams {
    /// Tokens that the launch covers.
    pub tokens: u32,
    /// Experts of the layer; a table element beyond them is a fault, not a read.
    pub experts: u32,
    /// Experts of a token, at most 8.
    pub selected: u32,
    /// Rows of the table; a token id beyond them is a fault, not a read.
    pub vocabulary: u32,
    /// Bits of the f32 that the weights of a token add up to.
    pub scaling_bits: u32,
}

/// Scalars of `dense_router_decode_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DenseRouterDecodeParams {
    /// Tokens that the launch covers, at most 64.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
    /// Experts of a token, at most 8.
    pub selected: u32,
    /// Bits of the f32 that the weights of a token add up to.
    pub scaling_bits: u32,
}

/// Scalars of `hash_router_decode_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HashRouterDecodeParams {
    /// Tokens that the launch covers, at most 64.
    pub tokens: u32,
    /// Experts of the layer; a table element beyond them is a fault, not a read.
    pub experts: u32,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
    /// Experts of a token, at most 8.
    pub selected: u32,
    /// Rows of the table; a token id beyond them is a fault, not a read.
    pub vocabulary: u32,
    /// Bits of the f32 that the weights of a token add up to.
    pub scaling_bits: u32,
}

/// Scalars of `router_logits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RouterLogitsParams {
    /// Tokens that the launch covers.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Width of the hidden state, a multiple of 32.
    pub hidden: u32,
}

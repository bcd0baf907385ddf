//! The scalars of each kernel: one `#[repr(C)]` struct, passed by value after the pointers.
//!
//! `u32` only, no implicit padding, no `bool`: the struct is the PTX `.param` byte for byte.

use bytemuck::{Pod, Zeroable};

/// A parameter struct, field by field.
pub trait Parameters: Pod {
    /// The names of its fields, each a `u32`, in order.
    const FIELDS: &'static [&'static str];
}

/// Defines a parameter struct of `u32` fields.
macro_rules! parameters {
    ($(#[$doc:meta])* $name:ident { $( $(#[$field_doc:meta])* $field:ident ),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            $( $(#[$field_doc])* pub $field: u32, )*
        }

        impl Parameters for $name {
            const FIELDS: &'static [&'static str] = &[$( stringify!($field) ),*];
        }
    };
}

mod attention;
mod indexer;
mod linear;

pub use attention::*;
pub use indexer::*;
pub use linear::*;

parameters! {
    /// Scalars of `append_swa_*`.
    AppendSwaParams {
        /// Rows of `kv` that the launch covers: the token capacity of the step's bucket.
        tokens,
        /// Rows of the ring planes, slots times ring; a row beyond them is a fault, not a write.
        rows,
        /// Checkpoints; 0 = no token has a row in one. A row beyond them is left out.
        checkpoints,
        /// Granules of 256 bytes of a checkpoint.
        checkpoint_granules,
        /// Granules of a checkpoint before the layer's data rows, of which it has 128.
        data_granules,
        /// Granules of a checkpoint before the layer's scale rows.
        scale_granules,
    }
}

parameters! {
    /// Scalars of `gather_swa_*`.
    GatherSwaParams {
        /// The first query token of the launch; its tile row is 0.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Rows of one request's ring, `R` (see [`kv_layout::geometry::swa_ring_rows`]).
        ring,
        /// Request slots the ring planes hold; a slot beyond them is a fault, not a read.
        slots,
    }
}

parameters! {
    /// Scalars of `gather_entries_*` and `gather_all_*`.
    GatherEntriesParams {
        /// The first query token of the launch; its tile is the first one.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Rows of a query's tile: the length of its list, or the most entries that are gathered.
        rows,
        /// log2 of the tokens of an entry: a shift, because the kernel waits for the quotient.
        ratio_log2,
        /// log2 of the entries of a block.
        entries_log2,
        /// Rows of the block table; a slot beyond them is a fault, not a read.
        slots,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the entry planes; one beyond them is a fault, not a read.
        num_blocks,
    }
}

parameters! {
    /// Scalars of `count_entries`.
    CountEntriesParams {
        /// The first query token of the launch.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Tokens per entry, not 0.
        ratio,
    }
}

parameters! {
    /// Scalars of `update_table`.
    UpdateTableParams {
        /// Blocks to enter.
        count,
        /// Elements of the table; an index beyond them is left out.
        elements,
    }
}

parameters! {
    /// Scalars of `list_closing_tokens`.
    ListClosingTokensParams {
        /// Tokens of the step, or of the bucket being captured.
        tokens,
        /// Elements of the list of tokens that close a CSA window.
        csa_capacity,
        /// Elements of the list of HCA runs.
        hca_capacity,
    }
}

parameters! {
    /// Scalars of `compress_csa` and `compress_index`.
    CompressParams {
        /// Records of the work list that the launch covers.
        capacity,
        /// Rows of one request's ring of own halves.
        ring,
        /// Request slots the state holds; a token beyond them is left out.
        slots,
        /// Tokens of the step; a record that names one beyond them is left out.
        tokens,
    }
}

parameters! {
    /// Scalars of `compress_hca`.
    CompressHcaParams {
        /// Records of the list of runs that the launch covers.
        capacity,
        /// Rows of one request's ring.
        ring,
        /// Request slots the state holds; a run beyond them is left out.
        slots,
        /// Tokens of the step; a record that names one beyond them is left out.
        tokens,
        /// The runs that the launch folds: [`Self::CONTINUING`] or [`Self::STARTING`].
        part,
    }
}

impl CompressHcaParams {
    /// Runs that continue from a state row.
    pub const CONTINUING: u32 = 1;
    /// Runs that start a window.
    pub const STARTING: u32 = 0;
}

parameters! {
    /// Scalars of `write_state_*`.
    WriteStateParams {
        /// Rows of one request's ring of own halves.
        ring,
        /// Request slots the state holds; a token beyond them is left out.
        slots,
        /// Tokens of the step.
        tokens,
        /// Checkpoints; 0 = no token has a row in one. A row beyond them is left out.
        checkpoints,
        /// Granules of 256 bytes of a checkpoint.
        checkpoint_granules,
        /// Granules of a checkpoint before the compressor's rows, of which it has 4.
        row_granules,
    }
}

parameters! {
    /// Scalars of `csa_rotate_state`, which no step launches.
    RotateStateParams {
        /// Rows to move.
        rows,
        /// Position of the first of these rows; the others follow.
        position,
        /// Source slot; [`Self::IMAGE`] = from the image.
        from,
        /// Destination slot.
        to,
        /// Rows of the ring that contains them.
        ring,
        /// Rows of a slot, all its rings.
        slot_rows,
        /// The ring's first row in a slot.
        first_row,
        /// 32-bit words of a row, a multiple of 4.
        row_words,
    }
}

impl RotateStateParams {
    /// The source is the image, not a slot.
    pub const IMAGE: u32 = u32::MAX;
}

parameters! {
    /// Scalars of `hca_reset_state`, which no step launches.
    ResetStateParams {
        /// The slot whose rows are overwritten.
        slot,
        /// Rows of a slot.
        slot_rows,
        /// 32-bit words of a row, a multiple of 4.
        row_words,
        /// The value of every word afterwards.
        word,
    }
}

parameters! {
    /// Scalars of `copy_state`.
    CopyStateParams {
        /// The direction of the copies: [`Self::PACK`], [`Self::UNPACK`] or [`Self::COPY`].
        mode,
        /// Pieces of the table, a thread block each.
        pieces,
        /// Jobs.
        jobs,
        /// Units, which are slots or blocks, not 0; a job that names one beyond them is a fault.
        units,
        /// Granules of 256 bytes of the memory of all units, not 0; words beyond them are left out.
        memory_granules,
        /// Images; a job that names one beyond them is a fault.
        images,
        /// Granules of 256 bytes of an image; not 0 unless `mode` is [`Self::COPY`].
        image_granules,
    }
}

impl CopyStateParams {
    /// From a unit to an image.
    pub const PACK: u32 = 0;
    /// From an image to a unit.
    pub const UNPACK: u32 = 1;
    /// From a unit to another unit.
    pub const COPY: u32 = 2;
    /// Words of a piece: see `state_copy`.
    pub const PIECE: u32 = 8;
    /// Words of a job: unit; image, or the unit that is written; the position after the last row of the image; the
    /// position after the last row that is copied.
    pub const JOB: u32 = 4;
    /// Flag in the last word of a piece, added to the index of its first word: words have 4 bytes, not 16.
    pub const NARROW: u32 = 1 << 31;
    /// Words of a piece that a thread block copies.
    pub const BLOCK_WORDS: u32 = 512;
}

parameters! {
    /// Scalars of `digest_sections`.
    DigestParams {
        /// Sections.
        sections,
        /// Words of 8 bytes of the payload; a section beyond them is a fault.
        words,
    }
}

impl DigestParams {
    /// 32-bit words of a section's record.
    pub const RECORD: u32 = 64;
}

parameters! {
    /// Scalars of `decode_*`.
    DecodeParams {
        /// Tokens of the step.
        tokens,
        /// Request slots; a slot beyond them is a fault.
        slots,
        /// Rows of the sliding-window planes, slots times ring.
        window_rows,
        /// Rows of one request's state ring; in a CSA layer, of the ring of own halves. It determines how many tokens a
        /// request may have in the step.
        state_ring,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the planes; one beyond them is a fault, not a write.
        num_blocks,
    }
}

parameters! {
    /// Scalars of `flush_*`.
    FlushParams {
        /// Records of the work list that the launch covers.
        capacity,
        /// Rows of the block table; a slot beyond them is a fault, not a read.
        slots,
        /// Blocks in a row of the block table.
        max_blocks,
        /// Blocks of the planes; one beyond them is a fault, not a write.
        num_blocks,
        /// 1 = multiply indexer keys by the Hadamard matrix first, as the released model does; else 0.
        hadamard,
        /// Tokens of the step; a record that names one beyond them is a fault, not a read.
        tokens,
    }
}

parameters! {
    /// Scalars of `find_poison`.
    FindPoisonParams {
        /// The first query token of the launch; its tile is the first one.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Rows of a query's tile.
        rows,
        /// The layer, for the record.
        layer,
        /// The source of the tile's rows: [`Self::WINDOW`], [`Self::LIST`] or [`Self::ALL`].
        source,
        /// Rows that can be recorded; more are only counted.
        capacity,
    }
}

impl FindPoisonParams {
    /// Rows are the query's window; a record has the position of the token.
    pub const WINDOW: u32 = 0;
    /// Rows are the entries of a list; a record has the entry.
    pub const LIST: u32 = 1;
    /// Row `i` is entry `i`; a record has the entry.
    pub const ALL: u32 = 2;
    /// Words before the records: the number of rows found so far, and what that number was when the host last read the records.
    pub const HEAD: u32 = 2;
    /// Words of a record. The last one is the row's number, counted from 1, modulo 2^32: the record is another row's if it differs.
    pub const RECORD: u32 = 5;
    /// The first word of a record is the layer times this, plus the source.
    pub const LAYER: u32 = 4;
}

parameters! {
    /// Scalars of `find_poisoned_keys_*`.
    FindPoisonedKeysParams {
        /// The first query token of the launch.
        first,
        /// Query tokens that the launch covers, from `first` on.
        tokens,
        /// Queries that see no more entries than this have no scores.
        skip,
        /// Scores of a query; further entries that it sees have no scores.
        columns,
        /// The layer, for the record.
        layer,
        /// Keys that can be recorded; more are only counted.
        capacity,
        /// Slots of the block table.
        slots,
        /// Blocks of a slot's row of the table.
        max_blocks,
        /// Blocks of the planes.
        num_blocks,
    }
}

impl FindPoisonedKeysParams {
    /// The source of a record of an indexer key that was scored; the record has the entry. Beside the sources of
    /// [`FindPoisonParams`].
    pub const KEY: u32 = 3;
    /// As `FindPoisonParams::LAYER`: the records have the same format.
    pub const LAYER: u32 = FindPoisonParams::LAYER;
}

parameters! {
    /// Scalars of `activation_topk_*`.
    ActivationTopkParams {
        /// Tokens that the launch covers.
        tokens,
        /// Experts of the layer, a multiple of 32; at most 256, 384 or 512, as the kernel's name says.
        experts,
        /// Experts of a token, at most 8.
        selected,
        /// Bits of the f32 that the weights of a token add up to.
        scaling_bits,
    }
}

parameters! {
    /// Scalars of `hash_router`.
    HashRouterParams {
        /// Tokens that the launch covers.
        tokens,
        /// Experts of the layer; a table element beyond them is a fault, not a read.
        experts,
        /// Experts of a token, at most 8.
        selected,
        /// Rows of the table; a token id beyond them is a fault, not a read.
        vocabulary,
        /// Bits of the f32 that the weights of a token add up to.
        scaling_bits,
    }
}

parameters! {
    /// Scalars of `dense_router_decode_*`.
    DenseRouterDecodeParams {
        /// Tokens that the launch covers, at least one and at most 64.
        tokens,
        /// Experts of the layer, a multiple of 32; at most 256, 384 or 512, as the kernel's name says.
        experts,
        /// Width of the hidden state, a multiple of 32.
        hidden,
        /// Experts of a token, at most 8.
        selected,
        /// Bits of the f32 that the weights of a token add up to.
        scaling_bits,
    }
}

parameters! {
    /// Scalars of `hash_router_decode_*`.
    HashRouterDecodeParams {
        /// Tokens that the launch covers, at least one and at most 64.
        tokens,
        /// Experts of the layer; a table element beyond them is a fault, not a read.
        experts,
        /// Width of the hidden state, a multiple of 32.
        hidden,
        /// Experts of a token, at most 8.
        selected,
        /// Rows of the table; a token id beyond them is a fault, not a read.
        vocabulary,
        /// Bits of the f32 that the weights of a token add up to.
        scaling_bits,
    }
}

parameters! {
    /// Scalars of `router_logits_*`.
    RouterLogitsParams {
        /// Tokens that the launch covers.
        tokens,
        /// Experts of the layer.
        experts,
        /// Width of the hidden state, a multiple of 32.
        hidden,
    }
}

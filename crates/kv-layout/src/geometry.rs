//! The constants of a DeepSeek-V4 attention layer: equal in every released model.

/// Channels of a KV vector (K = V, one head). Dimension letter `d` in shapes.
pub const HEAD_DIM: u32 = 512;
/// Leading channels of a KV vector that carry no rotary embedding and are stored as E4M3.
pub const NOPE_DIM: u32 = 448;
/// Trailing channels that carry the rotary embedding and are stored as BF16.
pub const ROPE_DIM: u32 = 64;
/// Channels of an indexer key.
pub const INDEX_DIM: u32 = 128;
/// Tokens that sliding-window attention sees, the query's own included.
pub const WINDOW: u32 = 128;
/// Tokens per compressed entry in a CSA layer (with an overlapping previous window).
pub const CSA_RATIO: u32 = 4;
/// Tokens per compressed entry in an HCA layer.
pub const HCA_RATIO: u32 = 128;
/// Tokens of one request per block: lcm of the two ratios, so one table serves all layers.
pub const BLOCK_TOKENS: u32 = 128;
/// Longest context of the released models, in tokens.
pub const MAX_CONTEXT: u32 = 1 << 20;

/// Added to the mean square by the RMS norm of entries and keys (`rms_norm_eps`).
pub const NORM_EPSILON: f64 = 1e-6;

const _: () = assert!(NOPE_DIM + ROPE_DIM == HEAD_DIM);
const _: () =
    assert!(BLOCK_TOKENS.is_multiple_of(CSA_RATIO) && BLOCK_TOKENS.is_multiple_of(HCA_RATIO));

/// The kind of a layer: the keys that its attention reads besides the sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "config", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "config", serde(rename_all = "lowercase"))]
pub enum LayerKind {
    /// Sliding window only (ratio 0).
    Swa,
    /// Compressed sparse attention: ratio 4, overlap, an indexer picks the entries.
    Csa,
    /// Heavily compressed attention: ratio 128, all entries are read.
    Hca,
}

impl LayerKind {
    /// Tokens per compressed entry; `None` where there are none.
    #[must_use]
    pub const fn ratio(self) -> Option<u32> {
        match self {
            Self::Swa => None,
            Self::Csa => Some(CSA_RATIO),
            Self::Hca => Some(HCA_RATIO),
        }
    }

    /// Compressed entries of this layer in one block of [`BLOCK_TOKENS`] tokens.
    #[must_use]
    pub const fn entries_per_block(self) -> u32 {
        match self.ratio() {
            None => 0,
            Some(ratio) => BLOCK_TOKENS / ratio,
        }
    }
}

/// The two compressors of a CSA layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CsaCompressor {
    /// Main entries.
    Main,
    /// Indexer keys.
    Index,
}

impl CsaCompressor {
    /// Channels of an entry or a key. A token has twice as many columns of keys, and of gates.
    #[must_use]
    pub const fn channels(self) -> u32 {
        match self {
            Self::Main => HEAD_DIM,
            Self::Index => INDEX_DIM,
        }
    }
}

/// The compressors that keep state, by the layout of their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompressorKind {
    /// Main entries of a CSA layer: 1024 columns.
    CsaMain,
    /// Indexer keys of a CSA layer: 256 columns.
    CsaIndex,
    /// Entries of an HCA layer: 512 columns.
    Hca,
}

impl From<CsaCompressor> for CompressorKind {
    fn from(compressor: CsaCompressor) -> Self {
        match compressor {
            CsaCompressor::Main => Self::CsaMain,
            CsaCompressor::Index => Self::CsaIndex,
        }
    }
}

impl CompressorKind {
    /// Tokens of a window.
    #[must_use]
    pub const fn ratio(self) -> u32 {
        match self {
            Self::CsaMain | Self::CsaIndex => CSA_RATIO,
            Self::Hca => HCA_RATIO,
        }
    }

    /// Channels of an entry or a key.
    #[must_use]
    pub const fn channels(self) -> u32 {
        match self {
            Self::CsaMain | Self::Hca => HEAD_DIM,
            Self::CsaIndex => INDEX_DIM,
        }
    }

    /// Columns of keys of a token, and of gates.
    #[must_use]
    pub const fn columns(self) -> u32 {
        match self {
            Self::CsaMain => 2 * HEAD_DIM,
            Self::CsaIndex => 2 * INDEX_DIM,
            Self::Hca => HEAD_DIM,
        }
    }

    /// Floats of a state row: keys and scores of half the columns, or maximum, sum and weighted sum.
    #[must_use]
    pub const fn row_floats(self) -> u32 {
        match self {
            Self::CsaMain | Self::CsaIndex => self.columns(),
            Self::Hca => 3 * HEAD_DIM,
        }
    }
}

/// Rows of the sliding-window ring of one request, for steps that write up to `step_tokens` tokens
/// of it before any of them is accepted (1 = no speculation).
///
/// The oldest row a query needs is 127 positions back, and a rejected draft may have been written
/// `step_tokens - 1` positions ahead (docs/specification.md, section 7). One row less fails.
#[must_use]
pub const fn swa_ring_rows(step_tokens: u32) -> u32 {
    WINDOW.saturating_add(step_tokens.saturating_sub(1))
}

/// Rows of the ring of one request that keeps the own halves of a CSA compressor's tokens, for steps as in
/// [`swa_ring_rows`].
///
/// A window's own halves are needed until it closes: the oldest is 3 positions back (docs/specification.md, section 6).
#[must_use]
pub const fn csa_own_rows(step_tokens: u32) -> u32 {
    CSA_RATIO.saturating_add(step_tokens.saturating_sub(1))
}

/// Rows of the ring that keeps the previous halves, beside one of `own_rows` for the own halves: they are
/// needed until the next window closes, 4 tokens longer.
#[must_use]
pub const fn csa_previous_rows(own_rows: u32) -> u32 {
    own_rows.saturating_add(CSA_RATIO)
}

/// Rows of both rings of a CSA compressor.
#[must_use]
pub const fn csa_state_rows(own_rows: u32) -> u32 {
    own_rows.saturating_add(csa_previous_rows(own_rows))
}

/// Number of tokens that a step may write into a request's CSA state of `own_rows` rows so that they can still be
/// rejected.
#[must_use]
pub const fn csa_decode_tokens(own_rows: u32) -> u32 {
    own_rows.saturating_sub(CSA_RATIO - 1)
}

/// Rows of the ring of one request that keeps the running sums of an HCA layer, for steps as in [`swa_ring_rows`]: one
/// row for the sums before the step, and one for each of its tokens. One row less fails.
#[must_use]
pub const fn hca_state_rows(step_tokens: u32) -> u32 {
    step_tokens.saturating_add(1)
}

/// Number of tokens that a step may write into a request's HCA state of `rows` rows so that they can still be rejected.
#[must_use]
pub const fn hca_decode_tokens(rows: u32) -> u32 {
    rows.saturating_sub(1)
}

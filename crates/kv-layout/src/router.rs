//! Limits of the router kernels, and the choice of a kernel by the number of experts.

/// Most experts of a layer.
pub const MAX_EXPERTS: u32 = 512;
/// The number of experts is a multiple of this, so that rows of logits are aligned for vector loads of four.
pub const EXPERT_STEP: u32 = 32;
/// Most experts of a token.
pub const MAX_SELECTED: u32 = 8;
/// Most tokens that are routed from their hidden states in one launch.
pub const DECODE_TOKENS: u32 = 64;
/// The width of the hidden state is a multiple of this, the inner width of a tile of a matrix product.
pub const HIDDEN_STEP: u32 = 32;
/// Blocks of a cluster of the decode kernels, each with a slice of the hidden state and a share of
/// the tokens.
pub const DECODE_SLICES: u32 = 8;

/// The number of experts for which a lane of a warp has room: one kernel each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertWidth {
    /// 8 a lane, up to 256 experts (V4-Flash).
    W256,
    /// 12 a lane, up to 384 experts (V4-Pro).
    W384,
    /// 16 a lane, up to 512 experts.
    W512,
}

impl ExpertWidth {
    /// The narrowest one for `experts`; `None` unless they are a multiple of [`EXPERT_STEP`] from 32
    /// to [`MAX_EXPERTS`].
    #[must_use]
    pub const fn of(experts: u32) -> Option<Self> {
        match experts {
            _ if !experts.is_multiple_of(EXPERT_STEP) => None,
            1..=256 => Some(Self::W256),
            257..=384 => Some(Self::W384),
            385..=MAX_EXPERTS => Some(Self::W512),
            _ => None,
        }
    }

    /// Experts of a cluster of the decode kernels: as few as give at most 12 clusters for 256 and for 384 experts.
    #[must_use]
    pub const fn decode_experts(self) -> u32 {
        match self {
            Self::W256 => 24,
            Self::W384 | Self::W512 => 32,
        }
    }
}

/// The number of blocks of a cluster over which the prefill kernel spreads the hidden state of a tile: one kernel each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsSplit {
    /// Eight blocks with a slice each, so that few tokens fill the GPU.
    Eight,
    /// Two blocks with four slices each.
    Two,
}

impl LogitsSplit {
    /// Tokens of a tile.
    pub const TOKENS: u32 = 128;
    /// Experts of a tile.
    pub const EXPERTS: u32 = 128;
    /// About the number of blocks that the GPU runs at once: one a multiprocessor of an H100 or H200, in clusters.
    const FULL: u32 = 96;

    /// The split for `tokens` tokens of `experts` experts: two blocks a tile if these fill the GPU.
    #[must_use]
    pub const fn of(tokens: u32, experts: u32) -> Self {
        let tiles = tokens.div_ceil(Self::TOKENS).saturating_mul(experts.div_ceil(Self::EXPERTS));
        if tiles.saturating_mul(Self::Two.blocks()) >= Self::FULL { Self::Two } else { Self::Eight }
    }

    /// Blocks of a tile.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        match self {
            Self::Eight => 8,
            Self::Two => 2,
        }
    }
}

//! Layout of NVFP4 weights, and the kernels that a number of tokens chooses among.
//!
//! A weight `[columns, inner]` has one column of the product a row. Its values are E2M1 codes, two a byte, times
//! an E4M3 scale for each [`GROUP`] of them, times one f32 for the whole weight.

/// Values of a row that share a scale.
pub const GROUP: u32 = 16;
/// The length of a row is a multiple of this: what a lane of a matrix product takes at once.
pub const INNER_STEP: u32 = 32;
/// Most tokens that one read of the weight serves.
pub const MOST_TOKENS: u32 = 64;

/// Where code `i` of eight, the codes of a word, stands on a device: four bits, counted from the lowest. Codes of
/// an even and the next odd value are 16 bits apart, as the BF16 pairs that they become.
#[must_use]
pub const fn device_nibble(i: u32) -> u32 {
    i / 2 + i % 2 * 4
}

/// How many tokens a kernel has room for: one kernel each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearTile {
    /// 8 tokens.
    T8,
    /// 16 tokens.
    T16,
    /// 32 tokens.
    T32,
    /// 64 tokens; more are taken 64 by 64.
    T64,
}

impl LinearTile {
    /// The smallest one for `tokens`.
    #[must_use]
    pub const fn of(tokens: u32) -> Self {
        match tokens {
            0..=8 => Self::T8,
            9..=16 => Self::T16,
            17..=32 => Self::T32,
            _ => Self::T64,
        }
    }

    /// Its tokens.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        match self {
            Self::T8 => 8,
            Self::T16 => 16,
            Self::T32 => 32,
            Self::T64 => MOST_TOKENS,
        }
    }
}

/// What a product is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearOutput {
    /// f32.
    F32,
    /// BF16, rounded to nearest even.
    Bf16,
}

impl LinearOutput {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

//! Layout of NVFP4 weights, and the choice of a kernel by the number of tokens.
//!
//! A row of a weight `[columns, inner]` is a column of the product. Its values are E2M1 codes, two a byte, times an
//! E4M3 scale for each [`GROUP`] of them, times one f32 for the whole weight.
//!
//! On a device the weight is stored in tiles of [`TILE_COLUMNS`] by [`TILE_INNER`] values, `[columns / 64, inner /
//! 128]`, rounded up, with zeros past the end of the weight. A tile has [`TILE_CODES`] bytes of codes and
//! [`TILE_SCALES`] of scales. Both are in the order in which the lanes of a warp load them ([`tile_word`],
//! [`tile_scale`]), so that each load of a warp is 512 contiguous bytes.

/// Values of a row that share a scale.
pub const GROUP: u32 = 16;
/// The length of a row is a multiple of this.
pub const INNER_STEP: u32 = 32;
/// Most tokens that one read of the weight serves.
pub const MAX_TOKENS: u32 = 32;
/// Most tokens of a product that the kernels of decode batches take, where the weight is read once for each
/// [`MAX_TOKENS`]; more tokens take the tiled kernels.
pub const MAX_DECODE_BATCH: u32 = 64;
/// Most columns of a BF16 weight for the narrow kernels, where the blocks of a cluster read the same columns together,
/// each a part of the rows.
pub const MAX_NARROW_COLUMNS: u32 = 256;
/// Rows of a weight in a tile.
pub const TILE_COLUMNS: u32 = 64;
/// Values of a row in a tile.
pub const TILE_INNER: u32 = 128;
/// Bytes of codes in a tile.
pub const TILE_CODES: u32 = TILE_COLUMNS * TILE_INNER / 2;
/// Bytes of scales in a tile.
pub const TILE_SCALES: u32 = TILE_COLUMNS * TILE_INNER / GROUP;

/// Word of a tile that holds the [`device_word`] of a column's eight values from `8 * eight` on. A lane has one of
/// every eight columns, and 32 values of it.
#[must_use]
pub const fn tile_word(column: u32, eight: u32) -> u32 {
    column / 8 * 128 + (column % 8 * 4 + eight / 4) * 4 + eight % 4
}

/// Byte of a tile that holds the scale of a column's values from `16 * group` on. The scales of a lane's columns are
/// contiguous.
#[must_use]
pub const fn tile_scale(column: u32, group: u32) -> u32 {
    (column % 8 * 4 + group / 2) * 16 + column / 8 * 2 + group % 2
}

/// Positions of the bits of the first code of pair `pair` of four in a [`device_word`]: mantissa, exponent, sign. Those
/// of the second code are 16 bits higher, modulo 32.
const fn word_bits(pair: usize) -> [u32; 4] {
    const BITS: [[u32; 4]; 4] = [[6, 7, 8, 15], [2, 3, 4, 11], [12, 13, 14, 21], [0, 1, 10, 9]];
    BITS[pair]
}

/// Rearranges eight E2M1 codes of a stored weight, which has the first one in the lowest four bits, to a word of the
/// device layout. Their bits are placed so that [`device_pairs`] takes few instructions.
#[must_use]
pub const fn device_word(codes: u32) -> u32 {
    let (mut word, mut i) = (0, 0);
    while i < 32 {
        let (code, bit) = (i / 4, i % 4);
        let to = word_bits(code / 2)[bit] + code as u32 % 2 * 16;
        word |= (codes >> i & 1) << (to % 32);
        i += 1;
    }
    word
}

/// The eight codes of a [`device_word`] as BF16 pairs (0, 1), (2, 3), (4, 5), (6, 7), each 2^-126 times its value.
#[inline(always)]
#[must_use]
pub const fn device_pairs(word: u32) -> [u32; 4] {
    const ALL: u32 = 0x81C0_81C0;
    const EXPONENT: u32 = 0x0100_0100;
    let last = (word << 6) & (ALL - EXPONENT) | (word >> 2) & EXPONENT;
    [word & ALL, (word << 4) & ALL, word.rotate_right(6) & ALL, last]
}

/// The number of tokens for which a kernel has room: one kernel each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearTile {
    /// 8 tokens.
    T8,
    /// 16 tokens.
    T16,
    /// 32 tokens; more are taken 32 by 32.
    T32,
}

impl LinearTile {
    /// The smallest one for `tokens`.
    #[must_use]
    pub const fn of(tokens: u32) -> Self {
        match tokens {
            0..=8 => Self::T8,
            9..=16 => Self::T16,
            _ => Self::T32,
        }
    }

    /// The number of tokens.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        match self {
            Self::T8 => 8,
            Self::T16 => 16,
            Self::T32 => MAX_TOKENS,
        }
    }
}

/// The element type in which a product is stored.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{E2m1, bf16_to_f32};

    #[test]
    fn pairs_are_the_codes_times_a_power_of_two() {
        for word in (0..=u32::MAX).step_by(65_521) {
            for (i, pair) in device_pairs(device_word(word)).into_iter().enumerate() {
                let value = |half: u32| bf16_to_f32((pair >> (16 * half)) as u16) * 2_f32.powi(126);
                let code = |half: u32| E2m1((word >> (8 * i as u32 + 4 * half)) as u8 & 0xF);
                for half in [0, 1] {
                    assert_eq!(value(half).to_bits(), code(half).to_f32().to_bits(), "{word:x}");
                }
            }
        }
    }
}

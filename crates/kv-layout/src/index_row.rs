//! Indexer keys: one vector of [`INDEX_DIM`] channels per CSA entry, shared by all index heads.
//!
//! | format | codes | scales | row | who |
//! |---|---|---|---|---|
//! | [`IndexFormat::Nvfp4`] | 64 B E2M1 | 8 E4M3, one per 16 | 72 B | the original design |
//! | [`IndexFormat::Mxfp4`] | 64 B E2M1 | 4 UE8M0, one per 32 | 68 B | the released model |
//! | [`IndexFormat::Fp8`] | 128 B E4M3 | one f32 | 132 B | SGLang, vLLM, DeepGEMM |
//!
//! Codes and scales are two planes, each contiguous over all entries of the layer.

use crate::geometry::INDEX_DIM;

/// The format in which indexer keys are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "config", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "config", serde(rename_all = "lowercase"))]
pub enum IndexFormat {
    /// E2M1 codes, groups of 16, E4M3 scales.
    Nvfp4,
    /// E2M1 codes, groups of 32, UE8M0 scales.
    #[default]
    Mxfp4,
    /// E4M3 codes, one f32 scale per key.
    Fp8,
}

impl IndexFormat {
    /// Every format, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Nvfp4, Self::Mxfp4, Self::Fp8];

    /// Bytes of one key in the code plane.
    #[must_use]
    pub const fn code_bytes(self) -> u64 {
        match self {
            Self::Nvfp4 | Self::Mxfp4 => INDEX_DIM as u64 / 2,
            Self::Fp8 => INDEX_DIM as u64,
        }
    }

    /// Channels that share one scale.
    #[must_use]
    pub const fn group(self) -> u32 {
        match self {
            Self::Nvfp4 => 16,
            Self::Mxfp4 => 32,
            Self::Fp8 => INDEX_DIM,
        }
    }

    /// Bytes of one key in the scale plane.
    #[must_use]
    pub const fn scale_bytes(self) -> u64 {
        let bytes_per_scale = match self {
            Self::Nvfp4 | Self::Mxfp4 => 1,
            Self::Fp8 => 4,
        };
        (INDEX_DIM / self.group()) as u64 * bytes_per_scale
    }

    /// Bytes of one key over both planes.
    #[must_use]
    pub const fn row_bytes(self) -> u64 {
        self.code_bytes() + self.scale_bytes()
    }

    /// Byte offset of key `row` in the code plane.
    #[must_use]
    pub const fn code_offset(self, row: u64) -> u64 {
        row * self.code_bytes()
    }

    /// Byte offset of key `row` in the scale plane.
    #[must_use]
    pub const fn scale_offset(self, row: u64) -> u64 {
        row * self.scale_bytes()
    }

    /// The format's name in kernel names, configuration files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
        }
    }
}

const _: () = assert!(IndexFormat::Nvfp4.row_bytes() == 72);
const _: () = assert!(IndexFormat::Mxfp4.row_bytes() == 68);
const _: () = assert!(IndexFormat::Fp8.row_bytes() == 132);

/// Heads of an indexer's query in memory; heads that a model does not have are zero.
pub const QUERY_HEADS: u32 = 64;

impl IndexFormat {
    /// Bytes from one query to the next, whatever the format.
    pub const MAX_QUERY_BYTES: u32 = 2 * QUERY_HEADS * INDEX_DIM;

    /// Bytes of a query of all heads against keys of this format: BF16 for NVFP4, E4M3 for FP8, integers
    /// and the exponent gaps of their groups for MXFP4.
    #[must_use]
    pub const fn query_bytes(self) -> u32 {
        match self {
            Self::Nvfp4 => Self::MAX_QUERY_BYTES,
            Self::Mxfp4 => Self::query_exponent_gap_byte(QUERY_HEADS, 0),
            Self::Fp8 => Self::MAX_QUERY_BYTES / 2,
        }
    }

    /// Byte offset of a channel of a head in a query. The layout is that of the right operand of a tensor-core product
    /// (16 bytes of each head side by side), with the channels in the order in which keys are unpacked.
    #[must_use]
    pub const fn query_byte(self, head: u32, channel: u32) -> u32 {
        let (sixteen, byte) = match self {
            Self::Nvfp4 => {
                (channel / 8 % 4 * 4 + channel % 4, channel / 32 * 4 + channel / 4 % 2 * 2)
            }
            Self::Mxfp4 | Self::Fp8 => (channel / 4 % 8, channel / 32 * 4 + channel % 4),
        };
        16 * (QUERY_HEADS * sixteen + head) + byte
    }

    /// Byte of the exponent gap of a group, 32 channels of a head, in a query against MXFP4 keys.
    ///
    /// Such a query holds signed 8-bit integers: twice an E2M1 value, times a power of two up to 8. An integer
    /// stands for `integer * 2^-gap * m / 16`, where `m` is the largest scale of the head's groups; the head's
    /// weight contains `m / 16`. If the scales of a head differ by a factor of 8 at most, the powers of two
    /// express them and all gaps are 0. Otherwise every power is 8, and the exponent gap of a group is the
    /// difference of the exponents of `m` and of the group's scale.
    #[must_use]
    pub const fn query_exponent_gap_byte(head: u32, group: u32) -> u32 {
        Self::MAX_QUERY_BYTES / 2 + 4 * head + group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_channel_of_a_query_has_a_place_of_its_own() {
        for format in IndexFormat::ALL {
            let width = if format == IndexFormat::Nvfp4 { 2 } else { 1 };
            let bytes = width * QUERY_HEADS * INDEX_DIM;
            let exponent_gaps = if format == IndexFormat::Mxfp4 { 4 * QUERY_HEADS } else { 0 };
            assert_eq!(format.query_bytes(), bytes + exponent_gaps);
            let mut taken = [false; IndexFormat::MAX_QUERY_BYTES as usize];
            for channel in 0..QUERY_HEADS * INDEX_DIM {
                let byte = format.query_byte(channel / INDEX_DIM, channel % INDEX_DIM);
                assert!(byte < bytes && byte.is_multiple_of(width), "{format:?}: {byte}");
                assert!(!core::mem::replace(&mut taken[byte as usize], true), "{format:?}: {byte}");
            }
        }
    }
}

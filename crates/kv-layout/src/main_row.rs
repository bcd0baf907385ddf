//! Main rows: one KV vector of [`HEAD_DIM`] channels, for a token of the sliding window or a
//! compressed entry alike.
//!
//! A layer keeps its rows in two planes, both contiguous over all rows of the layer:
//!
//! | plane | row | content |
//! |---|---|---|
//! | data | 576 B | 448 E4M3 (channels 0..448), then 64 BF16 (channels 448..512) |
//! | scale | 8 B or 4 B | [`MainFormat::Ue8m0`]: 7 UE8M0 + 1 zero byte; [`MainFormat::F32`]: one f32 |
//!
//! The released model was trained for rows of 584 B; the original design has 580 B (docs/specification.md, section 17).
//! Two planes keep every data row 64-byte aligned. Offsets are 64-bit: a layer exceeds 2^31 bytes at 3.7 M rows.

use crate::geometry::{HEAD_DIM, NOPE_DIM, ROPE_DIM};

/// Bytes of one row in the data plane.
pub const DATA_BYTES: u64 = NOPE_DIM as u64 + 2 * ROPE_DIM as u64;
/// Byte offset, within a data row, of the BF16 channels.
pub const ROPE_OFFSET: u64 = NOPE_DIM as u64;
/// Channels that share one UE8M0 scale.
pub const UE8M0_GROUP: u32 = 64;
/// UE8M0 scales in use per row; the eighth byte of a scale row is zero.
pub const UE8M0_GROUPS: u32 = NOPE_DIM / UE8M0_GROUP;

const _: () = assert!(DATA_BYTES == 576 && DATA_BYTES.is_multiple_of(64));
const _: () = assert!(UE8M0_GROUPS == 7 && HEAD_DIM / UE8M0_GROUP == 8);

/// The format of main rows: how they are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "config", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "config", serde(rename_all = "lowercase"))]
pub enum MainFormat {
    /// Seven power-of-two scales per row, one per 64 channels: the released model, 584 B.
    #[default]
    Ue8m0,
    /// One f32 scale `amax / 448` per row: the original design, 580 B.
    F32,
}

impl MainFormat {
    /// Every format, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Ue8m0, Self::F32];

    /// Bytes of one row in the scale plane.
    #[must_use]
    pub const fn scale_bytes(self) -> u64 {
        match self {
            Self::Ue8m0 => 8,
            Self::F32 => 4,
        }
    }

    /// Bytes of one row over both planes.
    #[must_use]
    pub const fn row_bytes(self) -> u64 {
        DATA_BYTES + self.scale_bytes()
    }

    /// The format's name in kernel names, configuration files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ue8m0 => "ue8m0",
            Self::F32 => "f32",
        }
    }

    /// Byte offset of `row` in the scale plane.
    #[must_use]
    pub const fn scale_offset(self, row: u64) -> u64 {
        row * self.scale_bytes()
    }
}

/// Byte offset of `row` in the data plane.
#[must_use]
pub const fn data_offset(row: u64) -> u64 {
    row * DATA_BYTES
}

/// Byte offset, in the data plane, of the BF16 channels of `row`.
#[must_use]
pub const fn rope_offset(row: u64) -> u64 {
    data_offset(row) + ROPE_OFFSET
}

/// Row of `position` in the sliding-window ring of `slot`, `ring` rows per slot.
///
/// The position alone decides: no head counter, nothing to reset (decision D2).
///
/// # Panics
/// If `ring` is 0.
#[must_use]
pub const fn ring_row(slot: u32, ring: u32, position: u32) -> u64 {
    slot as u64 * ring as u64 + (position % ring) as u64
}

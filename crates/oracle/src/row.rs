//! Main rows: a data plane of 448 E4M3 codes and 64 BF16 values, and a scale plane.

use crate::number::{
    bf16_nearest, bf16_value, e4m3_nearest, e4m3_value, ue8m0_round_up, ue8m0_value,
};

/// Channels of a row.
pub const CHANNELS: usize = 512;
/// Number of leading channels that are stored as E4M3. The others keep their BF16 bits.
pub const QUANTISED: usize = 448;
const GROUP: usize = 64;

/// Scale format of a main row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// Seven powers of two, one per 64 channels, and a zero byte.
    Ue8m0,
    /// One f32, little-endian.
    F32,
}

/// A row, stored in two planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedRow {
    /// 576 bytes: 448 E4M3 codes, then 64 BF16 values, little-endian.
    pub data: Vec<u8>,
    /// 8 bytes ([`RowFormat::Ue8m0`]) or 4 ([`RowFormat::F32`]).
    pub scale: Vec<u8>,
}

impl RowFormat {
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::Ue8m0, Self::F32];

    /// The format called `name`, as in names of kernels.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "ue8m0" => Some(Self::Ue8m0),
            "f32" => Some(Self::F32),
            _ => None,
        }
    }

    /// Quantises `[512]` BF16 bits.
    ///
    /// # Panics
    /// If `row` does not have 512 channels.
    #[must_use]
    pub fn encode(self, row: &[u16]) -> EncodedRow {
        assert_eq!(row.len(), CHANNELS);
        let x: Vec<f32> = row[..QUANTISED].iter().map(|&bits| bf16_value(bits) as f32).collect();
        let (mut data, scale) = match self {
            Self::Ue8m0 => encode_ue8m0(&x),
            Self::F32 => encode_f32(&x),
        };
        data.extend(row[QUANTISED..].iter().flat_map(|bits| bits.to_le_bytes()));
        EncodedRow { data, scale }
    }

    /// The row as attention sees it: `[512]` BF16 bits.
    ///
    /// The product of code and scale is rounded to f32 once (exact for powers of two), then to BF16.
    ///
    /// # Panics
    /// If the planes are too short.
    #[must_use]
    pub fn decode(self, row: &EncodedRow) -> Vec<u16> {
        let scale_of = |channel: usize| match self {
            Self::Ue8m0 => ue8m0_value(row.scale[channel / GROUP]) as f32,
            Self::F32 => f32::from_le_bytes(row.scale[..4].try_into().expect("four bytes")),
        };
        let quantised = (0..QUANTISED)
            .map(|channel| bf16_nearest(e4m3_value(row.data[channel]) as f32 * scale_of(channel)));
        let kept = row.data[QUANTISED..]
            .chunks_exact(2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        quantised.chain(kept).collect()
    }
}

/// Scale `2^ceil(log2(max(amax, 1e-4) / 448))` per group, code `e4m3(x / scale)`.
fn encode_ue8m0(x: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut data = Vec::new();
    let mut scale = Vec::new();
    for group in x.chunks_exact(GROUP) {
        let byte = ue8m0_round_up(amax(group).max(1e-4) / 448.0);
        let s = ue8m0_value(byte);
        data.extend(group.iter().map(|&x| e4m3_nearest((f64::from(x) / s) as f32)));
        scale.push(byte);
    }
    scale.push(0);
    (data, scale)
}

/// Scale `amax / 448` (1e-12 if `amax` is not above 1e-12), code `e4m3(x / scale)`, both in f32.
fn encode_f32(x: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let amax = amax(x);
    let scale = if amax > 1e-12 { amax / 448.0 } else { 1e-12 };
    (x.iter().map(|&x| e4m3_nearest(x / scale)).collect(), scale.to_le_bytes().to_vec())
}

/// The largest magnitude, at most the largest finite f32. NaN does not count, since `f32::max` returns the other
/// operand.
pub(super) fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |most, x| most.max(x.abs())).min(f32::MAX)
}

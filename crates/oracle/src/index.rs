//! Indexer keys: 128 channels as NVFP4, MXFP4 or FP8.

use crate::number::{
    bf16_value, e2m1_nearest, e2m1_value, e4m3_nearest, e4m3_value, ue8m0_round_up, ue8m0_value,
};
use crate::row::amax;

/// Channels of a key.
pub const CHANNELS: usize = 128;

/// Storage format of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFormat {
    /// E2M1 in groups of 16; scale `e4m3(clamp(amax / 6, 2^-9, 448))`.
    Nvfp4,
    /// E2M1 in groups of 32; scale `2^ceil(log2(max(amax, 6 * 2^-126) / 6))`.
    Mxfp4,
    /// E4M3; one f32 scale `max(amax, 1e-4) / 448`.
    Fp8,
}

/// A key, stored in two planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedKey {
    /// 64 bytes of E2M1 codes, the even channel in the low nibble; or 128 bytes of E4M3 codes.
    pub codes: Vec<u8>,
    /// 8 E4M3 bytes, 4 UE8M0 bytes, or one f32, little-endian.
    pub scale: Vec<u8>,
}

impl KeyFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Nvfp4, Self::Mxfp4, Self::Fp8];

    /// The format called `name`, as in names of kernels.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "nvfp4" => Some(Self::Nvfp4),
            "mxfp4" => Some(Self::Mxfp4),
            "fp8" => Some(Self::Fp8),
            _ => None,
        }
    }

    /// Quantises `[128]` BF16 bits.
    ///
    /// # Panics
    /// If `key` does not have 128 channels.
    #[must_use]
    pub fn encode(self, key: &[u16]) -> EncodedKey {
        assert_eq!(key.len(), CHANNELS);
        let x: Vec<f32> = key.iter().map(|&bits| bf16_value(bits) as f32).collect();
        match self {
            Self::Nvfp4 => encode_fp4(&x, 16, |amax| {
                let code = e4m3_nearest((amax / 6.0).clamp(1.0 / 512.0, 448.0));
                (code, e4m3_value(code) as f32)
            }),
            Self::Mxfp4 => encode_fp4(&x, 32, |amax| {
                let byte = ue8m0_round_up(amax.max(6.0 * f32::MIN_POSITIVE) / 6.0);
                (byte, ue8m0_value(byte) as f32)
            }),
            Self::Fp8 => {
                let scale = amax(&x).max(1e-4) / 448.0;
                let codes = x.iter().map(|&x| e4m3_nearest(x * (1.0 / scale))).collect();
                EncodedKey { codes, scale: scale.to_le_bytes().to_vec() }
            }
        }
    }

    /// The key as the indexer scores it: `[128]` f32. The product of code and scale is rounded once.
    ///
    /// # Panics
    /// If the planes are too short.
    #[must_use]
    pub fn decode(self, key: &EncodedKey) -> Vec<f32> {
        let fp4 = |channel: usize| e2m1_value(key.codes[channel / 2] >> (channel % 2 * 4)) as f32;
        (0..CHANNELS)
            .map(|channel| match self {
                Self::Nvfp4 => fp4(channel) * e4m3_value(key.scale[channel / 16]) as f32,
                Self::Mxfp4 => fp4(channel) * ue8m0_value(key.scale[channel / 32]) as f32,
                Self::Fp8 => {
                    let scale = key.scale[..4].try_into().expect("four bytes");
                    e4m3_value(key.codes[channel]) as f32 * f32::from_le_bytes(scale)
                }
            })
            .collect()
    }
}

/// Quantises to E2M1. `scale_of` maps a group's largest magnitude to the stored scale byte and its value.
fn encode_fp4(x: &[f32], group: usize, scale_of: impl Fn(f32) -> (u8, f32)) -> EncodedKey {
    let mut nibbles = Vec::new();
    let mut scale = Vec::new();
    for group in x.chunks_exact(group) {
        let (byte, value) = scale_of(amax(group));
        nibbles.extend(group.iter().map(|&x| e2m1_nearest(x / value)));
        scale.push(byte);
    }
    let codes = nibbles.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect();
    EncodedKey { codes, scale }
}

//! Checks whether stored bytes are a correct quantisation of a vector that is known only up to the error of f32
//! arithmetic.
//!
//! The kernels compute an entry in f32, the reference in f64. Both then round to BF16. If the two values lie on
//! different sides of the middle between two BF16 values, both roundings are correct.

use crate::hadamard::hadamard;
use crate::index::{EncodedKey, KeyFormat};
use crate::number::{bf16_nearest_f64, bf16_value};
use crate::row::{EncodedRow, QUANTISED, RowFormat};

/// Largest error of f32 against f64, as a fraction of the entry's largest magnitude.
const TOLERANCE: f64 = 5e-6;
/// Most channels of an indexer key for which both roundings are tried, those nearest the middle first. On average fewer
/// than three channels are within the tolerance of the middle; one key in 6,000 has more than this limit.
const MAX_OPEN: usize = 10;

/// The storage format.
#[derive(Clone, Copy, Debug)]
pub enum Codec {
    /// A compressed entry.
    Row(RowFormat),
    /// An indexer key, which goes through the Hadamard transform before it is stored.
    Key(KeyFormat),
}

/// The stored bytes of a row or a key, in two planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of the data plane of a row, or of the code plane of a key.
    pub data: Vec<u8>,
    /// Bytes of the scale plane.
    pub scale: Vec<u8>,
}

impl Codec {
    /// The bytes that the reference stores for an entry (`[512]` or `[128]`).
    #[must_use]
    pub fn store(self, entry: &[f64]) -> Stored {
        let bf16 = round(entry, 0.0);
        match self {
            Self::Row(_) => self.encode(&bf16),
            Self::Key(_) => {
                let key: Vec<f64> = bf16.into_iter().map(bf16_value).collect();
                self.encode(&round(&hadamard(&key), 0.0))
            }
        }
    }

    /// Whether `stored` is the result for some vector that is as near to `entry` as f32 arithmetic (`TOLERANCE`).
    #[must_use]
    pub fn explains(self, stored: &Stored, entry: &[f64]) -> bool {
        self.explains_within(TOLERANCE, stored, entry)
    }

    /// Whether `stored` is the result for some vector, each channel of which differs from that of `entry` by at most
    /// `tolerance` times the largest magnitude of `entry`.
    #[must_use]
    pub fn explains_within(self, tolerance: f64, stored: &Stored, entry: &[f64]) -> bool {
        let slack = tolerance * entry.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        match self {
            Self::Row(_) => self.quantises(stored, entry, slack),
            Self::Key(_) => roundings(entry, slack)
                .any(|rounded| self.quantises(stored, &hadamard(&rounded), slack)),
        }
    }

    /// Whether `stored` is the quantised form of some vector within `slack` of `x`.
    ///
    /// A scale follows from the largest channel of its group, which may round down or up. For each of these two
    /// roundings, the other channels are quantised at both ends of their range. Codes increase with values, so a
    /// correct code lies between the two results.
    fn quantises(self, stored: &Stored, x: &[f64], slack: f64) -> bool {
        if self.encode(&round(x, 0.0)) == *stored {
            return true;
        }
        let ends = [round(x, -slack), round(x, slack)];
        let got = self.decode(stored);
        let [one, other] = [0, 1].map(|way| {
            let bounds = [0, 1].map(|end| self.encode(&self.pinned(x, &ends[end], &ends[way])));
            self.groups_between(stored, &got, &bounds)
        });
        one.into_iter().zip(other).all(|(one, other)| one || other)
    }

    /// `end`, except that the largest channel of each group is taken from `way`, and no other channel of the group may
    /// be larger.
    fn pinned(self, x: &[f64], end: &[u16], way: &[u16]) -> Vec<u16> {
        const MAGNITUDE: u16 = 0x7FFF;
        let mut pinned = end.to_vec();
        for (group, x) in x.chunks(self.group()).enumerate() {
            let first = group * self.group();
            let largest = |a: &usize, b: &usize| x[*a].abs().total_cmp(&x[*b].abs());
            let pivot = first + (0..x.len()).max_by(largest).unwrap_or_default();
            let most = way[pivot] & MAGNITUDE;
            for bits in &mut pinned[first..first + x.len()] {
                *bits = *bits & !MAGNITUDE | (*bits & MAGNITUDE).min(most);
            }
            pinned[pivot] = way[pivot];
        }
        pinned
    }

    /// For each group, whether `stored` has the scale of both bounds, and values between those of the bounds.
    fn groups_between(self, stored: &Stored, got: &[f64], bounds: &[Stored; 2]) -> Vec<bool> {
        let [least, most] = bounds.each_ref().map(|bound| self.decode(bound));
        let between = |channel: usize| {
            let got = &got[channel];
            least[channel].total_cmp(got).is_le() && most[channel].total_cmp(got).is_ge()
        };
        let scale = |row: &Stored, group| -> Option<Vec<u8>> {
            row.scale.chunks(self.group_scale_bytes()).nth(group).map(<[u8]>::to_vec)
        };
        let channels = 0..got.len();
        let groups = channels.step_by(self.group()).enumerate().map(|(group, first)| {
            let end = got.len().min(first + self.group());
            bounds.iter().all(|bound| scale(bound, group) == scale(stored, group))
                && (first..end).all(between)
        });
        groups.collect()
    }

    /// Number of channels that share a scale. In a row the last group is the unquantised channels.
    fn group(self) -> usize {
        match self {
            Self::Row(RowFormat::Ue8m0) => 64,
            Self::Row(RowFormat::F32) => QUANTISED,
            Self::Key(KeyFormat::Nvfp4) => 16,
            Self::Key(KeyFormat::Mxfp4) => 32,
            Self::Key(KeyFormat::Fp8) => 128,
        }
    }

    fn group_scale_bytes(self) -> usize {
        match self {
            Self::Row(RowFormat::Ue8m0) | Self::Key(KeyFormat::Nvfp4 | KeyFormat::Mxfp4) => 1,
            Self::Row(RowFormat::F32) | Self::Key(KeyFormat::Fp8) => 4,
        }
    }

    fn encode(self, bf16: &[u16]) -> Stored {
        match self {
            Self::Row(format) => {
                let EncodedRow { data, scale } = format.encode(bf16);
                Stored { data, scale }
            }
            Self::Key(format) => {
                let EncodedKey { codes: data, scale } = format.encode(bf16);
                Stored { data, scale }
            }
        }
    }

    fn decode(self, Stored { data, scale }: &Stored) -> Vec<f64> {
        let (data, scale) = (data.clone(), scale.clone());
        match self {
            Self::Row(format) => {
                format.decode(&EncodedRow { data, scale }).into_iter().map(bf16_value).collect()
            }
            Self::Key(format) => {
                let key = format.decode(&EncodedKey { codes: data, scale });
                key.into_iter().map(f64::from).collect()
            }
        }
    }
}

/// `x + shift` rounded to BF16.
fn round(x: &[f64], shift: f64) -> Vec<u16> {
    x.iter().map(|&x| bf16_nearest_f64(x + shift)).collect()
}

/// The values of the BF16 vectors to which `x` may be rounded, the nearest first. A channel whose two roundings differ
/// by no more than twice the slack has its nearest rounding only.
pub fn roundings(x: &[f64], slack: f64) -> impl Iterator<Item = Vec<f64>> {
    let [least, nearest, most] = [-slack, 0.0, slack]
        .map(|shift| round(x, shift).into_iter().map(bf16_value).collect::<Vec<f64>>());
    let mut open: Vec<usize> =
        (0..x.len()).filter(|&channel| most[channel] - least[channel] > 2.0 * slack).collect();
    let from_middle = |channel: usize| (x[channel] - (least[channel] + most[channel]) / 2.0).abs();
    open.sort_by(|&a, &b| from_middle(a).total_cmp(&from_middle(b)));
    open.truncate(MAX_OPEN);
    (0..1_u32 << open.len()).map(move |choice| {
        let mut values = nearest.clone();
        for (bit, &channel) in open.iter().enumerate() {
            if choice >> bit & 1 == 1 {
                values[channel] = least[channel] + most[channel] - nearest[channel];
            }
        }
        values
    })
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const CODECS: [(Codec, usize); 5] = [
        (Codec::Row(RowFormat::Ue8m0), 512),
        (Codec::Row(RowFormat::F32), 512),
        (Codec::Key(KeyFormat::Nvfp4), 128),
        (Codec::Key(KeyFormat::Mxfp4), 128),
        (Codec::Key(KeyFormat::Fp8), 128),
    ];

    fn vector(rng: &mut ChaCha8Rng, channels: usize) -> Vec<f64> {
        (0..channels).map(|_| rng.random_range(-2.0..2.0)).collect()
    }

    /// `x` as f32 arithmetic gives it: every channel is off by up to 2e-6 of the largest magnitude.
    fn off(rng: &mut ChaCha8Rng, x: &[f64]) -> Vec<f64> {
        x.iter().map(|x| x + rng.random_range(-4e-6..4e-6)).collect()
    }

    #[test]
    fn what_f32_makes_of_a_vector_is_explained_though_its_bytes_may_differ() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for (codec, channels) in CODECS {
            let mut different = 0;
            for _ in 0..120 {
                let x = vector(&mut rng, channels);
                let stored = codec.store(&off(&mut rng, &x));
                assert!(codec.explains(&stored, &x), "{codec:?}");
                different += u32::from(stored != codec.store(&x));
            }
            // A key has a quarter of the channels, most of them in four bits, so that a difference is too rare to
            // expect.
            let expected = matches!(codec, Codec::Row(_));
            assert!(different > 0 || !expected, "{codec:?}: no rounding went the other way");
        }
    }

    #[test]
    fn every_flipped_byte_is_noticed() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for (codec, channels) in CODECS {
            let x = vector(&mut rng, channels);
            let stored = codec.store(&x);
            for byte in (0..stored.data.len()).step_by(7) {
                let mut stored = stored.clone();
                stored.data[byte] ^= 0x22;
                assert!(!codec.explains(&stored, &x), "{codec:?}, byte {byte}");
            }
            for byte in 0..stored.scale.len() {
                let mut stored = stored.clone();
                stored.scale[byte] ^= 1;
                assert!(!codec.explains(&stored, &x), "{codec:?}, scale byte {byte}");
            }
        }
    }

    #[test]
    fn a_largest_channel_between_two_values_may_round_either_way() {
        let mut x = vec![0.5; 512];
        // The middle between 1 and the next BF16 value, 1 + 2^-7. The f32 scale depends on this rounding.
        x[3] = 1.0 + 1.0 / 256.0;
        let codec = Codec::Row(RowFormat::F32);
        let stored = either_side(codec, &mut x, 1e-6);
        assert_ne!(stored[0].scale, stored[1].scale);
        assert!(stored.iter().all(|stored| codec.explains(stored, &x)));
        x[3] += 1e-4;
        assert!(!codec.explains(&stored[0], &x));
    }

    #[test]
    fn a_channel_of_a_key_between_two_values_may_round_either_way() {
        let mut x = vec![0.5; 128];
        // The middle between 64 and the next BF16 value, 64.5. All channels of the transform depend on this rounding.
        x[3] = 64.25;
        let codec = Codec::Key(KeyFormat::Fp8);
        let stored = either_side(codec, &mut x, 1e-5);
        assert_ne!(stored[0].scale, stored[1].scale);
        assert!(stored.iter().all(|stored| codec.explains(stored, &x)));
        x[3] += 1e-2;
        assert!(!codec.explains(&stored[0], &x));
    }

    #[test]
    fn of_many_channels_between_two_values_the_nearest_to_the_middle_are_tried() {
        // All these channels are within the tolerance of a middle, but only the last one is very close to it.
        let mut x = vec![0.5 + 1.0 / 512.0 + 2e-4; MAX_OPEN];
        x.resize(128, 0.5);
        let codec = Codec::Key(KeyFormat::Fp8);
        let stored = [-1e-5, 1e-5].map(|off| {
            x[127] = 64.25 + off;
            codec.store(&x)
        });
        x[127] = 64.25;
        assert_ne!(stored[0], stored[1]);
        assert!(stored.iter().all(|stored| codec.explains(stored, &x)));
    }

    /// The stored bytes if channel 3 is a little less, and if it is a little more.
    fn either_side(codec: Codec, x: &mut [f64], off: f64) -> [Stored; 2] {
        let middle = x[3];
        let stored = [-off, off].map(|off| {
            x[3] = middle + off;
            codec.store(x)
        });
        x[3] = middle;
        stored
    }
}

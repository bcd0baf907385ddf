//! Rotary embedding: frequencies, angles, and the rotation of a vector's last 64 channels.
//!
//! Frequencies and angles are f32, rounded at each operation as the model rounds them (docs/specification.md, section
//! 4). A more exact frequency would make a different model: one ulp of it changes the angle at position 10^6 by up to
//! 0.06 rad.

use std::array;
use std::f64::consts::TAU;

/// Number of rotated channels: the last ones of a vector.
pub const CHANNELS: usize = 64;
/// Number of pairs of neighbouring channels `(2j, 2j + 1)`. Each pair has its own frequency.
pub const PAIRS: usize = CHANNELS / 2;

/// The frequencies of a layer, for everything that the layer rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Layers of ratio 0: theta 10,000.
    Main,
    /// Layers of ratio 4 and 128: theta 160,000, with YaRN from 65,536 tokens by a factor of 16.
    Compress,
}

impl Table {
    /// Both tables.
    pub const ALL: [Self; 2] = [Self::Main, Self::Compress];

    /// `[32]` f32, in radians per token.
    #[must_use]
    pub fn frequencies(self) -> [f32; PAIRS] {
        match self {
            Self::Main => plain(10_000.0),
            Self::Compress => yarn(160_000.0),
        }
    }

    /// Rotates each pair of the last 64 channels of `x` by its angle at `position`.
    ///
    /// # Panics
    /// If `x` has fewer than 64 channels.
    #[must_use]
    pub fn rotate(self, x: &[f64], position: usize) -> Vec<f64> {
        self.turn(x, position, 1.0)
    }

    /// The inverse of [`Self::rotate`].
    ///
    /// # Panics
    /// If `x` has fewer than 64 channels.
    #[must_use]
    pub fn rotate_back(self, x: &[f64], position: usize) -> Vec<f64> {
        self.turn(x, position, -1.0)
    }

    fn turn(self, x: &[f64], position: usize, direction: f64) -> Vec<f64> {
        let first = x.len() - CHANNELS;
        let mut turned = x.to_vec();
        let pairs = turned[first..].chunks_exact_mut(2);
        for (pair, frequency) in pairs.zip(self.frequencies()) {
            let (cos, sin) = cos_sin(position, frequency);
            let (cos, sin) = (f64::from(cos), direction * f64::from(sin));
            let (even, odd) = (pair[0], pair[1]);
            pair[0] = even * cos - odd * sin;
            pair[1] = odd * cos + even * sin;
        }
        turned
    }
}

/// The angle at a position: one product of two f32, in radians.
#[must_use]
pub fn angle(position: usize, frequency: f32) -> f32 {
    position as f32 * frequency
}

/// Cosine and sine of [`angle`], each rounded to f32 once.
#[must_use]
pub fn cos_sin(position: usize, frequency: f32) -> (f32, f32) {
    let angle = f64::from(angle(position, frequency));
    (angle.cos() as f32, angle.sin() as f32)
}

/// `1 / theta^(2j / 64)`: the power rounded to f32, then the quotient.
fn plain(theta: f64) -> [f32; PAIRS] {
    array::from_fn(|j| 1.0 / theta.powf(2.0 * j as f64 / CHANNELS as f64) as f32)
}

/// YaRN: low frequencies are divided by 16, high ones are kept, and those between are interpolated.
fn yarn(theta: f64) -> [f32; PAIRS] {
    const FACTOR: f32 = 16.0;
    const TRAINED_CONTEXT: f64 = 65_536.0;
    // The (fractional) index of the pair that makes `turns` turns over the context of the training.
    let pair_of =
        |turns: f64| CHANNELS as f64 * (TRAINED_CONTEXT / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (low, high) = (pair_of(32.0).floor() as f32, pair_of(1.0).ceil() as f32);
    let plain = plain(theta);
    array::from_fn(|j| {
        let ramp = ((j as f32 - low) / (high - low)).clamp(0.0, 1.0);
        plain[j] / FACTOR * ramp + plain[j] * (1.0 - ramp)
    })
}

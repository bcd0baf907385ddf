//! The rotary frequencies, as the released models compute them (docs/specification.md, section 4).

use kv_layout::geometry::{COMPRESS_ROPE_THETA, ROPE_DIM, YARN_FACTOR};

/// Pairs of channels that are rotated, and so frequencies.
pub const PAIRS: usize = ROPE_DIM as usize / 2;

/// YaRN's factor.
const FACTOR: f32 = YARN_FACTOR as f32;
/// YaRN: pairs below this keep their frequency, pairs from `HIGH` on are slowed by [`FACTOR`]. These
/// are the bounds for 65,536 trained positions, `beta_fast` 32 and `beta_slow` 1.
const LOW: f32 = 15.0;
/// See [`LOW`].
const HIGH: f32 = 25.0;

/// Frequencies of every layer with compressed entries: of its entries, keys, queries and window.
///
/// Rounded to f32 after every step, as the models do: at position 2^20 a frequency that is one unit in
/// the last place off turns a pair by up to 0.06 rad.
#[must_use]
pub fn compress_frequencies() -> [f32; PAIRS] {
    std::array::from_fn(|pair| {
        let exponent = (2 * pair) as f64 / f64::from(ROPE_DIM);
        let frequency = 1.0 / (COMPRESS_ROPE_THETA.powf(exponent) as f32);
        let slowed = ((pair as f32 - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        frequency / FACTOR * slowed + frequency * (1.0 - slowed)
    })
}

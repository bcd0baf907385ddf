//! The rotary frequencies, as the released models compute them (docs/specification.md, section 4).

use std::f64::consts::TAU;

use kv_layout::config::CompressRope;
use kv_layout::geometry::ROPE_DIM;

/// Number of channel pairs that are rotated, which is also the number of frequencies.
pub const PAIRS: usize = ROPE_DIM as usize / 2;

/// Frequencies of every layer with compressed entries: of its entries, keys, queries and window.
///
/// Rounded to f32 after every step, as the models do: at position 2^20, an error of one unit in the
/// last place of a frequency turns a pair by up to 0.06 rad.
#[must_use]
pub fn compress_frequencies(rope: &CompressRope) -> [f32; PAIRS] {
    let factor = rope.factor as f32;
    let (low, high) = (bound(rope, rope.beta_fast).floor(), bound(rope, rope.beta_slow).ceil());
    let (low, high) = (low.max(0.0) as f32, high.min(f64::from(ROPE_DIM - 1)) as f32);
    // Equal bounds would divide by zero.
    let high = if low == high { high + 0.001 } else { high };
    std::array::from_fn(|pair| {
        let frequency = plain_frequency(rope.theta, pair);
        let slowed = ((pair as f32 - low) / (high - low)).clamp(0.0, 1.0);
        frequency / factor * slowed + frequency * (1.0 - slowed)
    })
}

/// Frequencies of a layer without compressed entries, of base `theta`.
#[must_use]
pub fn plain_frequencies(theta: f64) -> [f32; PAIRS] {
    std::array::from_fn(|pair| plain_frequency(theta, pair))
}

fn plain_frequency(theta: f64, pair: usize) -> f32 {
    let exponent = (2 * pair) as f64 / f64::from(ROPE_DIM);
    1.0 / (theta.powf(exponent) as f32)
}

/// The pair, as a fraction, that turns `turns` times over the context trained on.
fn bound(rope: &CompressRope, turns: f64) -> f64 {
    let ratio = rope.trained_context / (turns * TAU);
    f64::from(ROPE_DIM) * ratio.ln() / (2.0 * rope.theta.ln())
}

//! Attention: one softmax over keys and a sink. Keys are also the values.

use crate::indexer::product;
use crate::rope::{CHANNELS as ROTARY, Table};
use crate::row::CHANNELS;

/// The attention result of one head of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// `[512]`: the weighted sum of the keys, with rotary channels rotated back.
    pub sum: Vec<f64>,
    /// `[512]`: the weighted sum of the keys' magnitudes, by which errors are measured. For a rotary channel it is the
    /// magnitude of its pair.
    pub magnitude: Vec<f64>,
    /// Natural logarithm of the softmax's denominator, the sink included; -infinity if that is 0.
    pub lse: f64,
}

impl Attended {
    /// `[512]`: largest error of `sum` if weights are rounded to BF16 once, the result is rounded to BF16 once, and
    /// sums are in f32. BF16 has seven bits after the leading one, so a value is rounded by at most 2^-8 of it.
    #[must_use]
    pub fn bound(&self) -> Vec<f64> {
        let bound = |(sum, magnitude): (&f64, &f64)| {
            2f64.powi(-8) * (magnitude + sum.abs()) + 1e-5 * magnitude
        };
        self.sum.iter().zip(&self.magnitude).map(bound).collect()
    }
}

/// Attention of a head's query (`[512]`) at `position` over `keys` (`[512]` each).
///
/// # Panics
/// If a vector does not have 512 channels.
#[must_use]
pub fn attend(
    query: &[f64],
    keys: &[Vec<f64>],
    sink: f64,
    (table, position): (Table, usize),
) -> Attended {
    assert!(query.len() == CHANNELS && keys.iter().all(|key| key.len() == CHANNELS));
    let score = |key: &Vec<f64>| product(query, key).value / (CHANNELS as f64).sqrt();
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let most = scores.iter().copied().fold(sink, f64::max);
    if most == f64::NEG_INFINITY {
        let nothing = vec![0.0; CHANNELS];
        return Attended { sum: nothing.clone(), magnitude: nothing, lse: most };
    }
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let total = weights.iter().sum::<f64>() + (sink - most).exp();
    let (mut sum, mut magnitude) = (vec![0.0; CHANNELS], vec![0.0; CHANNELS]);
    for (weight, key) in weights.iter().zip(keys) {
        for ((sum, magnitude), value) in sum.iter_mut().zip(&mut magnitude).zip(key) {
            *sum += weight * value;
            *magnitude += weight * value.abs();
        }
    }
    sum.iter_mut().chain(&mut magnitude).for_each(|of_channel| *of_channel /= total);
    magnitude[CHANNELS - ROTARY..].chunks_exact_mut(2).for_each(|pair| {
        pair.fill(pair[0] + pair[1]);
    });
    let sum = table.rotate_back(&sum, position);
    Attended { sum, magnitude, lse: most + total.ln() }
}

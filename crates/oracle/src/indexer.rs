//! The indexer: queries, scores and selected entries, computed from vectors alone. See docs/specification.md, section
//! 12.

use std::cmp::Ordering;

use crate::hadamard::hadamard;
use crate::index::{CHANNELS, KeyFormat};
use crate::number::{bf16_nearest_f64, bf16_value};
use crate::rope::Table;

/// `1 / (sqrt(128) sqrt(heads))`: the constant by which every projected weight is multiplied.
#[must_use]
pub fn weight_scale(heads: usize) -> f64 {
    1.0 / (CHANNELS as f64 * heads as f64).sqrt()
}

/// One head's query as the scores use it, `[128]`: rotated at its position, rounded to BF16, multiplied by the Hadamard
/// matrix, rounded to BF16 again, then quantised to the format of the keys and decoded.
///
/// # Panics
/// If `query` does not have 128 channels.
#[must_use]
pub fn query(format: KeyFormat, query: &[f32], position: usize) -> Vec<f64> {
    let values: Vec<f64> = query.iter().copied().map(f64::from).collect();
    let round = |x: Vec<f64>| x.into_iter().map(bf16_nearest_f64).collect::<Vec<u16>>();
    let rotated = round(Table::Compress.rotate(&values, position));
    let rotated: Vec<f64> = rotated.into_iter().map(bf16_value).collect();
    let bits = round(hadamard(&rotated));
    format.decode(&format.encode(&bits)).into_iter().map(f64::from).collect()
}

/// A score, and the sum of the magnitudes of its terms, `sum |w q K|` over heads and channels, by which an error of the
/// score is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// `sum_h w_h relu(q_h . key)`; NaN if a product is.
    pub value: f64,
    /// `sum_h |w_h| sum_c |q_hc key_c|`.
    pub magnitude: f64,
}

/// The score of one key. `queries` is `[heads, 128]`; `weights` is `[heads]` and includes the constants.
#[must_use]
pub fn score(queries: &[Vec<f64>], weights: &[f64], key: &[f64]) -> Score {
    let mut score = Score { value: 0.0, magnitude: 0.0 };
    for (query, weight) in queries.iter().zip(weights) {
        let product = product(query, key);
        // `f64::max` alone would make 0 of a NaN.
        let positive = if product.value.is_nan() { f64::NAN } else { product.value.max(0.0) };
        score.value += weight * positive;
        score.magnitude += weight.abs() * product.magnitude;
    }
    score
}

/// The scalar product of two vectors, whose length is a multiple of eight, and the sum of the magnitudes of its terms.
/// There are eight partial sums, since additions to a single sum would wait for each other.
pub(crate) fn product(a: &[f64], b: &[f64]) -> Score {
    let (mut value, mut magnitude) = ([0.0; 8], [0.0; 8]);
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            let term = a[lane] * b[lane];
            value[lane] += term;
            magnitude[lane] += term.abs();
        }
    }
    Score { value: value.iter().sum(), magnitude: magnitude.iter().sum() }
}

/// The indices of the `k` largest scores, largest first. Among equal scores the lower index is first, and NaN is last.
/// Missing entries are -1 if there are fewer than `k` scores.
#[must_use]
pub fn top_k(scores: &[f32], k: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    // A stable sort keeps equal scores in the order of their index.
    order.sort_by(|&a, &b| {
        let (a, b) = (scores[a as usize], scores[b as usize]);
        b.partial_cmp(&a).unwrap_or_else(|| match (a.is_nan(), b.is_nan()) {
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            _ => Ordering::Equal,
        })
    });
    order.resize(order.len().max(k), -1);
    order.truncate(k);
    order
}

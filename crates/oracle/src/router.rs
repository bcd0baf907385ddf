//! The MoE router in f64: gate, activation, selection, weights. See docs/specification.md, section 14.

use crate::number::bf16_value;

/// The selected experts of a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    /// Indices of experts: the best first, or in the order of the table.
    pub ids: Vec<i32>,
    /// Weights of these experts.
    pub weights: Vec<f64>,
    /// By how much the score of the last selected expert exceeds that of the best expert that was not selected,
    /// relative to its score; 0 for equal scores, infinite if all experts or none are selected.
    pub gap: f64,
}

/// sqrt(ln(1 + e^x)). An infinite `x` counts as the largest `f32`.
#[must_use]
pub fn activation(logit: f64) -> f64 {
    let logit = if logit == f64::INFINITY { f64::from(f32::MAX) } else { logit };
    (logit.max(0.0) + (-logit.abs()).exp().ln_1p()).sqrt()
}

/// Logits of a token: `x` `[hidden]` and `gate` `[experts, hidden]`, both BF16 bits.
///
/// # Panics
/// If `x` is empty, or the length of `gate` is not a multiple of its length.
#[must_use]
pub fn logits(x: &[u16], gate: &[u16]) -> Vec<f64> {
    assert!(!x.is_empty() && gate.len().is_multiple_of(x.len()));
    let x: Vec<f64> = x.iter().map(|&bits| f64::from(bf16_value(bits) as f32)).collect();
    let product = |(x, &bits): (&f64, &u16)| x * f64::from(bf16_value(bits) as f32);
    gate.chunks_exact(x.len()).map(|row| x.iter().zip(row).map(product).sum()).collect()
}

/// Selects the `selected` experts with the largest activation plus bias. Their weights follow from the activations
/// alone, and add up to `scaling`. Among equal scores the lower index is first. A NaN score ranks last, and a NaN logit
/// gets no weight.
///
/// # Panics
/// If there are fewer experts than `selected`, or `bias` has another length than `logits`.
#[must_use]
pub fn select(logits: &[f64], bias: &[f64], selected: usize, scaling: f64) -> Routed {
    assert!(selected <= logits.len() && bias.len() == logits.len());
    let scores: Vec<f64> =
        logits.iter().zip(bias).map(|(&logit, bias)| activation_or_nan(logit) + bias).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (scores[a], scores[b]);
        match (a.is_nan(), b.is_nan()) {
            (false, false) => b.partial_cmp(&a).expect("both are numbers"),
            (a, b) => a.cmp(&b),
        }
    });
    let gap = match (order[..selected].last(), order.get(selected)) {
        (Some(&last), Some(&next)) if scores[last] == scores[next] => 0.0,
        (Some(&last), Some(&next)) => (scores[last] - scores[next]) / scores[last].abs(),
        _ => f64::INFINITY,
    };
    let ids: Vec<i32> = order[..selected].iter().map(|&expert| expert as i32).collect();
    Routed { weights: weights(logits, &ids, scaling), ids, gap }
}

/// The weights of the experts `ids` of a token with these logits.
///
/// # Panics
/// If an expert has no logit.
#[must_use]
pub fn weights(logits: &[f64], ids: &[i32], scaling: f64) -> Vec<f64> {
    let own = |&id: &i32| {
        let logit = logits[usize::try_from(id).expect("an expert")];
        if logit.is_nan() { 0.0 } else { activation(logit) }
    };
    let activations: Vec<f64> = ids.iter().map(own).collect();
    let sum: f64 = activations.iter().sum();
    activations.iter().map(|activation| activation / (sum + 1e-20) * scaling).collect()
}

/// The activation, NaN for a NaN logit. The formula alone would lose the NaN, since [`f64::max`] returns the operand
/// that is a number.
fn activation_or_nan(logit: f64) -> f64 {
    if logit.is_nan() { f64::NAN } else { activation(logit) }
}

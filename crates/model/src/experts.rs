//! The experts of a layer. Each token runs through the routed experts that the router chose for it, and through the
//! shared expert.

use ndarray::{Array2, ArrayView2, Axis};

use crate::linear::Linear;

/// A feed-forward network with a gate: `w2 (silu(w1 x) * w3 x)`.
#[derive(Clone, Debug)]
pub struct Expert {
    /// `w1`, `[intermediate, hidden]`.
    pub gate: Linear,
    /// `w3`, `[intermediate, hidden]`.
    pub up: Linear,
    /// `w2`, `[hidden, intermediate]`.
    pub down: Linear,
    /// Upper bound of the gate before silu, and bound of the absolute value of the other factor.
    pub limit: f32,
}

impl Expert {
    /// `[tokens, hidden]` to `[tokens, hidden]`.
    #[must_use]
    pub fn apply(&self, x: ArrayView2<'_, f32>) -> Array2<f32> {
        let (mut gate, up) = (self.gate.apply(x), self.up.apply(x));
        let limit = self.limit;
        gate.zip_mut_with(&up, |gate, up| {
            // Not `f32::min`, which takes the limit in place of a NaN.
            let limited = if *gate > limit { limit } else { *gate };
            *gate = limited / (1.0 + (-limited).exp()) * up.clamp(-limit, limit);
        });
        self.down.apply(gate.view())
    }
}

/// The experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    /// The routed experts, by number.
    pub routed: Vec<Expert>,
    /// The shared expert, which every token runs through.
    pub shared: Expert,
}

/// The routed experts of each token, and their weights: `[tokens, per_token]`.
#[derive(Debug)]
pub struct Choice {
    /// Numbers of the experts: best first, or in the order of the table in layers that choose by table.
    pub experts: Array2<i32>,
    /// Weights; those of a token add up to the model's scaling factor.
    pub weights: Array2<f32>,
}

impl Experts {
    /// The weighted sum of each token's routed experts plus the shared expert: `[tokens, hidden]`. The experts of a
    /// token are added in the order of their numbers, so that the bits of its sum do not depend on other tokens.
    #[must_use]
    pub fn apply(&self, x: ArrayView2<'_, f32>, choice: &Choice) -> Array2<f32> {
        let mut tokens_of: Vec<Vec<(usize, f32)>> = vec![Vec::new(); self.routed.len()];
        for ((token, place), &expert) in choice.experts.indexed_iter() {
            tokens_of[expert as usize].push((token, choice.weights[[token, place]]));
        }
        let mut sums = Array2::zeros(x.raw_dim());
        for (expert, tokens) in self.routed.iter().zip(&tokens_of) {
            if tokens.is_empty() {
                continue;
            }
            let rows: Vec<usize> = tokens.iter().map(|&(token, _)| token).collect();
            let results = expert.apply(x.select(Axis(0), &rows).view());
            for (&(token, weight), result) in tokens.iter().zip(results.outer_iter()) {
                sums.row_mut(token).scaled_add(weight, &result);
            }
        }
        sums + self.shared.apply(x)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, array};

    use super::Expert;
    use crate::linear::Linear;

    /// The limit bounds the gate from above only, and the other factor on both sides.
    #[test]
    fn factors_are_limited() {
        let times = |factor: f32| Linear::new(Array2::from_diag_elem(2, factor));
        let expert = |limit| Expert { gate: times(20.0), up: times(20.0), down: times(1.0), limit };
        let silu = |gate: f32| gate / (1.0 + (-gate).exp());
        let x = array![[1.0, -0.1], [0.4, -1.0]];
        let expected =
            array![[silu(10.0) * 10.0, silu(-2.0) * -2.0], [silu(8.0) * 8.0, silu(-20.0) * -10.0]];
        assert_eq!(expert(10.0).apply(x.view()), expected);
        let expected = x.mapv(|x: f32| silu(20.0 * x) * (20.0 * x));
        assert_eq!(expert(f32::INFINITY).apply(x.view()), expected);
        let gate_of_nan = Expert { gate: times(f32::NAN), ..expert(10.0) };
        assert!(gate_of_nan.apply(x.view())[[0, 0]].is_nan());
    }
}

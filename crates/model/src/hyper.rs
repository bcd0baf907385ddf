//! Manifold-constrained hyper-connections (mHC): the residual stream consists of several streams.
//!
//! A sub-layer (attention or experts) reads one vector: a weighted sum of a token's streams. Its result is added to
//! each stream with a weight, while the streams are mixed by a doubly stochastic matrix. All weights depend on the
//! token: they are a projection of its streams.

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis};

use crate::linear::Linear;
use crate::norm::normalise;

/// The residual streams: `[tokens, streams, hidden]`.
pub type Streams = Array3<f32>;

/// The constants of all hyper-connections of a model.
#[derive(Clone, Copy, Debug)]
pub struct HyperConstants {
    /// Number of streams of a token.
    pub streams: usize,
    /// Rounds of the Sinkhorn-Knopp algorithm.
    pub iterations: usize,
    /// Added to the weights of the sum, to the softmax, and to the divisors of the Sinkhorn-Knopp algorithm.
    pub epsilon: f32,
    /// Epsilon of the norm.
    pub norm_epsilon: f32,
}

/// The hyper-connection around one sub-layer.
#[derive(Clone, Debug)]
pub struct HyperConnection {
    /// `[2 * streams + streams^2, streams * hidden]`: computes the weights of the sum, of the result, and of the
    /// matrix, in this order.
    pub projection: Linear,
    /// `[2 * streams + streams^2]`: the bias of these weights.
    pub base: Array1<f32>,
    /// The scales of the three kinds of weights, applied before the bias.
    pub scale: [f32; 3],
    /// The constants of the model.
    pub constants: HyperConstants,
}

/// How the result of a sub-layer joins each token's streams.
#[derive(Debug)]
pub struct Mixing {
    /// `[tokens, streams]`: weights of the sub-layer's result.
    result: Array2<f32>,
    /// `[tokens, streams from, streams to]`.
    matrix: Array3<f32>,
}

impl HyperConnection {
    /// The input of the sub-layer, `[tokens, hidden]`, and how its result joins the streams.
    #[must_use]
    pub fn collapse(&self, streams: &Streams) -> (Array2<f32>, Mixing) {
        let n = self.constants.streams;
        let weights = self.projection.apply(normed(streams, self.constants.norm_epsilon).view());
        let tokens = weights.nrows();
        let [sum_scale, result_scale, matrix_scale] = self.scale;
        let mut sums = Array2::zeros((tokens, n));
        let mut result = Array2::zeros((tokens, n));
        let mut matrix = Array3::zeros((tokens, n, n));
        for (token, weights) in weights.outer_iter().enumerate() {
            let at = |index: usize, scale: f32| weights[index] * scale + self.base[index];
            for k in 0..n {
                sums[[token, k]] = sigmoid(at(k, sum_scale)) + self.constants.epsilon;
                result[[token, k]] = 2.0 * sigmoid(at(n + k, result_scale));
            }
            let logits =
                Array2::from_shape_fn((n, n), |(from, to)| at(2 * n + from * n + to, matrix_scale));
            matrix.index_axis_mut(Axis(0), token).assign(&self.sinkhorn(logits));
        }
        (weighted_sum(&sums, streams), Mixing { result, matrix })
    }

    /// The Sinkhorn-Knopp algorithm: takes the softmax of each row, then divides columns and rows by their sums in
    /// turn, for the given number of rounds, so that both add up to nearly 1.
    fn sinkhorn(&self, mut matrix: Array2<f32>) -> Array2<f32> {
        let HyperConstants { iterations, epsilon, .. } = self.constants;
        for mut row in matrix.outer_iter_mut() {
            let most = row.fold(f32::NEG_INFINITY, |most, &value| most.max(value));
            row.mapv_inplace(|value| (value - most).exp());
            let sum = row.sum();
            row.mapv_inplace(|value| value / sum + epsilon);
        }
        let divide = |matrix: &mut Array2<f32>, axis: Axis| {
            let sums = matrix.sum_axis(axis).insert_axis(axis) + epsilon;
            *matrix /= &sums;
        };
        divide(&mut matrix, Axis(0));
        for _ in 1..iterations {
            divide(&mut matrix, Axis(1));
            divide(&mut matrix, Axis(0));
        }
        matrix
    }
}

impl Mixing {
    /// The streams after a sub-layer with this `result`, `[tokens, hidden]`: `new[k] = weight[k] * result + sum_j
    /// matrix[j][k] * old[j]`.
    #[must_use]
    pub fn expand(&self, result: ArrayView2<'_, f32>, streams: &Streams) -> Streams {
        let mut mixed = Streams::zeros(streams.raw_dim());
        for (token, mut mixed) in mixed.outer_iter_mut().enumerate() {
            for (to, mut stream) in mixed.outer_iter_mut().enumerate() {
                stream.scaled_add(self.result[[token, to]], &result.row(token));
                for (from, old) in streams.index_axis(Axis(0), token).outer_iter().enumerate() {
                    stream.scaled_add(self.matrix[[token, from, to]], &old);
                }
            }
        }
        mixed
    }
}

/// Collapses a token's streams to one vector, after the last layer.
#[derive(Clone, Debug)]
pub struct HyperHead {
    /// `[streams, streams * hidden]`: computes the weights of the streams.
    pub projection: Linear,
    /// `[streams]`: the bias of the weights.
    pub base: Array1<f32>,
    /// The scale of the weights, applied before the bias.
    pub scale: f32,
    /// The constants of the model.
    pub constants: HyperConstants,
}

impl HyperHead {
    /// The weighted sum of the streams, `[tokens, hidden]`.
    #[must_use]
    pub fn collapse(&self, streams: &Streams) -> Array2<f32> {
        let HyperConstants { epsilon, norm_epsilon, .. } = self.constants;
        let mut weights = self.projection.apply(normed(streams, norm_epsilon).view());
        for mut row in weights.outer_iter_mut() {
            row.zip_mut_with(&self.base, |weight, base| {
                *weight = sigmoid(*weight * self.scale + base) + epsilon;
            });
        }
        weighted_sum(&weights, streams)
    }
}

/// The streams of each token, concatenated and normalised as one vector: `[tokens, streams * hidden]`.
fn normed(streams: &Streams, epsilon: f32) -> Array2<f32> {
    let (tokens, count, hidden) = streams.dim();
    let rows = streams.to_shape((tokens, count * hidden)).expect("as many elements");
    let mut rows = rows.into_owned();
    rows.outer_iter_mut().for_each(|row| normalise(row, epsilon));
    rows
}

fn weighted_sum(weights: &Array2<f32>, streams: &Streams) -> Array2<f32> {
    let (tokens, _, hidden) = streams.dim();
    let mut sums = Array2::zeros((tokens, hidden));
    for ((mut sum, weights), streams) in
        sums.outer_iter_mut().zip(weights.outer_iter()).zip(streams.outer_iter())
    {
        for (&weight, stream) in weights.iter().zip(streams.outer_iter()) {
            sum.scaled_add(weight, &stream);
        }
    }
    sums
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

//! RMS norm.

use ndarray::{Array1, Array2, ArrayViewMut1};

/// RMS norm with a weight for each channel.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// `[channels]`.
    pub weight: Array1<f32>,
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

impl RmsNorm {
    /// The norm with these weights, `[channels]`.
    #[must_use]
    pub fn new(weight: Array1<f32>, epsilon: f32) -> Self {
        Self { weight, epsilon }
    }

    /// Normalises each row of `x`, `[tokens, channels]`.
    #[must_use]
    pub fn apply(&self, mut x: Array2<f32>) -> Array2<f32> {
        for mut row in x.outer_iter_mut() {
            normalise(row.view_mut(), self.epsilon);
            row *= &self.weight;
        }
        x
    }
}

/// Divides `x` by its root mean square. The squares are summed in f64.
pub fn normalise(mut x: ArrayViewMut1<'_, f32>, epsilon: f32) {
    let squares: f64 = x.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    let mean = (squares / x.len() as f64) as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    x *= scale;
}

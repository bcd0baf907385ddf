//! Dense products in f32.

use ndarray::{Array2, ArrayView2, s};

/// The number of rows of a product is padded to a multiple of this. The matrix product sums a row of a full tile in
/// another order than a row of a partial tile, so without padding a token's bits would depend on the number of tokens
/// in the batch. It is a multiple of the 8 rows that `matrixmultiply` takes at once.
const ROWS: usize = 16;

/// A linear projection without bias.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Array2<f32>,
}

impl Linear {
    /// The projection with these weights, `[outputs, inputs]`.
    #[must_use]
    pub fn new(weight: Array2<f32>) -> Self {
        Self { weight }
    }

    /// Number of outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.weight.nrows()
    }

    /// `x` W^T: `[tokens, inputs]` to `[tokens, outputs]`. The bits of a row of the result do not depend on the number
    /// or the contents of other rows.
    #[must_use]
    pub fn apply(&self, x: ArrayView2<'_, f32>) -> Array2<f32> {
        let (tokens, inputs) = x.dim();
        let mut rows = Array2::zeros((tokens.next_multiple_of(ROWS), inputs));
        rows.slice_mut(s![..tokens, ..]).assign(&x);
        rows.dot(&self.weight.t()).slice_move(s![..tokens, ..])
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Axis, s};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::Linear;

    fn random(random: &mut StdRng, rows: usize, columns: usize) -> Array2<f32> {
        Array2::from_shape_simple_fn((rows, columns), || random.random_range(-1.0..1.0))
    }

    /// Inner lengths below and above the block of the inner dimension that the product takes at once, and output counts
    /// that do not fill a tile.
    #[test]
    fn a_row_has_the_same_bits_in_every_batch() {
        let source = &mut StdRng::seed_from_u64(1);
        for (inputs, outputs) in [(32, 64), (64, 5), (300, 33), (1100, 130)] {
            let linear = Linear::new(random(source, outputs, inputs));
            let x = random(source, 70, inputs);
            let together = linear.apply(x.view());
            for tokens in [1, 2, 7, 8, 9, 31, 69] {
                for first in [0, 1, 70 - tokens] {
                    let part = linear.apply(x.slice(s![first..first + tokens, ..]));
                    for (row, expected) in
                        part.axis_iter(Axis(0)).zip(together.outer_iter().skip(first))
                    {
                        let bits = |value: &f32| value.to_bits();
                        assert!(row.iter().map(bits).eq(expected.iter().map(bits)));
                    }
                }
            }
        }
    }
}

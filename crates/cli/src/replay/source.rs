//! Where KV rows come from: a pool of random rows, of which each layer of each step reads a part.
//!
//! The pool is uploaded once. Where a layer begins in it changes from step to step and from layer
//! to layer, so that a row taken from the wrong step or layer is noticed.

use dsv4_kv::kv_layout::format::bf16_from_f32;
use dsv4_kv::kv_layout::geometry::HEAD_DIM;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Rows at which a layer may begin.
const STARTS: u32 = 1024;

/// The pool.
#[derive(Debug)]
pub struct Source {
    /// `[rows, 512]` BF16 bits.
    rows: Vec<u16>,
    layers: u32,
}

impl Source {
    /// Rows of the pool for steps of up to `step_tokens` tokens.
    pub fn rows(step_tokens: u32) -> u32 {
        step_tokens + STARTS - 1
    }

    /// Normally distributed rows, each times a power of two from 2^-4 to 2^4, so that scales differ.
    pub fn new(seed: u64, step_tokens: u32, layers: u32) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut rows = Vec::new();
        for _ in 0..Self::rows(step_tokens) {
            let size = f32::from(rng.random_range(-4i8..=4)).exp2();
            rows.extend((0..HEAD_DIM).map(|_| {
                let value: f32 = StandardNormal.sample(&mut rng);
                bf16_from_f32(value * size)
            }));
        }
        Self { rows, layers }
    }

    /// All rows, `[rows, 512]` BF16 bits.
    pub fn as_slice(&self) -> &[u16] {
        &self.rows
    }

    /// One row, `[512]` BF16 bits.
    pub fn row(&self, row: u32) -> &[u16] {
        &self.rows[(row * HEAD_DIM) as usize..][..HEAD_DIM as usize]
    }

    /// The row of the pool that is the first token's in the given step and layer.
    pub fn first_row(&self, step: u64, layer: u32) -> u32 {
        let key = step * u64::from(self.layers) + u64::from(layer);
        // Fibonacci hashing: the top bits of a multiple of 2^64 / golden ratio.
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - STARTS.ilog2())) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_stay_inside_the_pool_and_begin_at_different_rows() {
        let source = Source::new(3, 16, 5);
        assert_eq!(source.as_slice().len(), 1039 * 512);
        let starts: Vec<_> =
            (0..200).flat_map(|step| (0..5).map(move |layer| (step, layer))).collect();
        let mut starts: Vec<_> =
            starts.into_iter().map(|(step, layer)| source.first_row(step, layer)).collect();
        assert!(starts.iter().all(|&start| start + 16 <= Source::rows(16)));
        assert!(starts.windows(2).all(|pair| pair[0] != pair[1]));
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() > 800, "{} different of 1000", starts.len());
    }

    #[test]
    fn rows_differ_from_each_other() {
        let source = Source::new(3, 1, 1);
        assert!((1..1024).all(|row| source.row(row) != source.row(row - 1)));
    }
}

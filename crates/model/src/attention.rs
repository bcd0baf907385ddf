//! Attention: one key head for all query heads (multi-query), keys that are also the values, a sink for each head, and
//! a grouped output projection.
//!
//! A query attends to its sliding window and, in layers with compressed entries, to entries: one softmax over both. The
//! cache stores and gathers those rows; this module has everything around that.

use half::bf16;
use kv_layout::geometry::HEAD_DIM;
use ndarray::{Array1, Array2, ArrayView2, Axis, concatenate, s};
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::linear::Linear;
use crate::norm::{RmsNorm, normalise};
use crate::rotary::{Rotary, Turn};

/// Channels of a head.
const CHANNELS: usize = HEAD_DIM as usize;

/// The attention weights of a layer.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `wq_a`, `[q_lora_rank, hidden]`: the query's latent, which the indexer reads too.
    pub latent: Linear,
    /// `q_norm`.
    pub latent_norm: RmsNorm,
    /// `wq_b`, `[heads * 512, q_lora_rank]`.
    pub query: Linear,
    /// `wkv`, `[512, hidden]`: the key, which is also the value.
    pub kv: Linear,
    /// `kv_norm`.
    pub kv_norm: RmsNorm,
    /// `attn_sink`, `[heads]`: a score that takes a share of the softmax without contributing a value.
    pub sinks: Array1<f32>,
    /// `wo_a`, for each group of heads `[o_lora_rank, heads / groups * 512]`.
    pub output_groups: Vec<Linear>,
    /// `wo_b`, `[hidden, groups * o_lora_rank]`.
    pub output: Linear,
    /// The layer's rotary embedding, of queries and keys.
    pub rotary: Rotary,
    /// The rotary embedding by which weighted sums of values are rotated back.
    pub output_rotary: Rotary,
    /// Epsilon of the norm of each head's query, which has no weights.
    pub norm_epsilon: f32,
}

/// The rows that one query attends to, `[rows, 512]`.
pub type Keys = Vec<f32>;

impl Attention {
    /// The normalised latent of the queries, `[tokens, q_lora_rank]`.
    #[must_use]
    pub fn latent(&self, x: ArrayView2<'_, f32>) -> Array2<f32> {
        self.latent_norm.apply(self.latent.apply(x))
    }

    /// Queries, normalised per head and rotated: `[tokens, heads * 512]`.
    #[must_use]
    pub fn queries(&self, latent: ArrayView2<'_, f32>, positions: &[u32]) -> Array2<f32> {
        let mut queries = self.query.apply(latent);
        for (mut row, &position) in queries.outer_iter_mut().zip(positions) {
            for mut head in row.exact_chunks_mut(CHANNELS) {
                normalise(head.view_mut(), self.norm_epsilon);
                self.rotary.turn(contiguous(&mut head), position, Turn::Forward);
            }
        }
        queries
    }

    /// Window rows in the form that the cache takes: `[tokens, 512]` BF16, normalised and rotated.
    #[must_use]
    pub fn window_rows(&self, x: ArrayView2<'_, f32>, positions: &[u32]) -> Vec<bf16> {
        let mut rows = self.kv_norm.apply(self.kv.apply(x));
        for (mut row, &position) in rows.outer_iter_mut().zip(positions) {
            self.rotary.turn(contiguous(&mut row), position, Turn::Forward);
        }
        rows.iter().map(|&value| bf16::from_f32(value)).collect()
    }

    /// Attention of `queries`, `[tokens, heads * 512]`, each over its own keys: the weighted sums of keys for each
    /// head, rotated back. `[tokens, heads * 512]`.
    #[must_use]
    pub fn attend(
        &self,
        queries: ArrayView2<'_, f32>,
        keys: &[Keys],
        positions: &[u32],
    ) -> Array2<f32> {
        let width = queries.ncols();
        let mut sums = vec![0.0; queries.len()];
        sums.par_chunks_exact_mut(width).zip(keys.par_iter()).enumerate().for_each(
            |(token, (sums, keys))| {
                let query = queries.row(token);
                let heads = query.exact_chunks(CHANNELS).into_iter();
                let heads = heads.zip(sums.as_chunks_mut::<CHANNELS>().0).zip(&self.sinks);
                for ((query, sum), &sink) in heads {
                    attend_head(query.as_slice().expect("rows are contiguous"), keys, sink, sum);
                    self.output_rotary.turn(sum, positions[token], Turn::Back);
                }
            },
        );
        Array2::from_shape_vec(queries.raw_dim(), sums).expect("as many as queries")
    }

    /// The output projection: first each group of heads separately, then all groups together. `[tokens, hidden]`.
    #[must_use]
    pub fn project_output(&self, attended: ArrayView2<'_, f32>) -> Array2<f32> {
        let width = attended.ncols() / self.output_groups.len();
        let group = |(index, projection): (usize, &Linear)| {
            projection.apply(attended.slice(s![.., index * width..(index + 1) * width]))
        };
        let groups: Vec<_> = self.output_groups.iter().enumerate().map(group).collect();
        let views: Vec<_> = groups.iter().map(|group| group.view()).collect();
        self.output.apply(concatenate(Axis(1), &views).expect("as many tokens").view())
    }
}

fn contiguous<'a>(row: &'a mut ndarray::ArrayViewMut1<'_, f32>) -> &'a mut [f32] {
    row.as_slice_mut().expect("rows are contiguous")
}

/// Writes the weighted sum of the keys to `sum`. The weights are one softmax over all keys and the sink.
fn attend_head(query: &[f32], keys: &[f32], sink: f32, sum: &mut [f32; CHANNELS]) {
    let scale = 1.0 / (CHANNELS as f32).sqrt();
    let keys = keys.as_chunks::<CHANNELS>().0;
    let mut weights: Vec<f32> = keys.iter().map(|key| dot(query, key) * scale).collect();
    let most = weights.iter().copied().fold(sink, f32::max);
    weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
    let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let total = (total + f64::from((sink - most).exp())) as f32;
    sum.fill(0.0);
    for (weight, key) in weights.iter().zip(keys) {
        let share = weight / total;
        sum.iter_mut().zip(key).for_each(|(sum, value)| *sum += share * value);
    }
}

/// The dot product, in 16 partial sums that are added at the end. The order is fixed, and one that the compiler can
/// vectorise.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for (a, b) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

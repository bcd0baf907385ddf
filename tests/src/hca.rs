//! HCA entries and running sums by the f32 operations of the kernels, written a second time, so that tests can compare
//! bits and not only values. Of the code of the kernels only exp, sine and cosine are used; these have tests of their
//! own.

use dsv4_kv::kv_layout::geometry::{HCA_RATIO, HEAD_DIM, ROPE_DIM};
use dsv4_kv::state::RunningSums;
use dsv4_kv_oracle::number::bf16_nearest;
use dsv4_kv_oracle::rope::Table;
use kernels_gpu::math::{cos_sin, exp_nonpositive};

use crate::history::History;

/// Channels of an entry.
const CHANNELS: usize = HEAD_DIM as usize;
/// Tokens of a window.
const RATIO: usize = HCA_RATIO as usize;

/// The running sums after 0, 1, .. tokens of a history; `None` where no window is open.
#[must_use]
pub fn running_sums(history: &History) -> Vec<Option<RunningSums>> {
    let mut sums: Option<RunningSums> = None;
    let next = |token: usize| {
        let folded = fold(sums.take(), history, token);
        sums = (!(token + 1).is_multiple_of(RATIO)).then_some(folded);
        sums.clone()
    };
    std::iter::once(None).chain((0..history.tokens()).map(next)).collect()
}

/// The pooled vector of window `entry` of a history.
#[must_use]
pub fn pooled(history: &History, entry: usize) -> Vec<f32> {
    let tokens = entry * RATIO..(entry + 1) * RATIO;
    let sums = tokens.fold(None, |sums, token| Some(fold(sums, history, token)));
    let RunningSums { sum, weighted, .. } = sums.expect("a window has tokens");
    weighted.iter().zip(&sum).map(|(weighted, sum)| weighted / sum).collect()
}

/// Adds one token of a window to the running sums. The larger of its score and the running maximum gets weight 1; the
/// other side is scaled down.
fn fold(sums: Option<RunningSums>, history: &History, token: usize) -> RunningSums {
    let mut sums = sums.unwrap_or_else(|| RunningSums {
        position: 0,
        maximum: vec![f32::NEG_INFINITY; CHANNELS],
        sum: vec![0.0; CHANNELS],
        weighted: vec![0.0; CHANNELS],
    });
    sums.position = token as u32;
    for channel in 0..CHANNELS {
        let at = token * CHANNELS + channel;
        let bias = history.ape[token % RATIO * CHANNELS + channel];
        let (key, score) = (history.kv[at], history.gate[at] + bias);
        let RunningSums { maximum, sum, weighted, .. } = &mut sums;
        let (maximum, sum) = (&mut maximum[channel], &mut sum[channel]);
        let weighted = &mut weighted[channel];
        if score > *maximum {
            let factor = exp_nonpositive(*maximum - score);
            *maximum = score;
            *sum = sum.mul_add(factor, 1.0);
            *weighted = weighted.mul_add(factor, key);
        } else {
            let is_equal = score == *maximum;
            let factor = exp_nonpositive(if is_equal { 0.0 } else { score - *maximum });
            *sum += factor;
            *weighted = key.mul_add(factor, *weighted);
        }
    }
    sums
}

/// The BF16 entry of a pooled window: RMS norm, rotation, one rounding.
#[must_use]
pub fn finish(pooled: &[f32], norm: &[f32], entry: usize) -> Vec<u16> {
    let scale = 1.0 / (sum_of_squares(pooled) / HEAD_DIM as f32 + 1e-6).sqrt();
    let mut normed: Vec<f32> =
        pooled.iter().zip(norm).map(|(value, weight)| value * scale * weight).collect();
    let rotary = &mut normed[CHANNELS - ROPE_DIM as usize..];
    for (pair, frequency) in rotary.chunks_exact_mut(2).zip(Table::Compress.frequencies()) {
        let (cos, sin) = cos_sin((entry * RATIO) as f32 * frequency);
        let (even, odd) = (pair[0], pair[1]);
        (pair[0], pair[1]) = (even * cos - odd * sin, even * sin + odd * cos);
    }
    normed.into_iter().map(bf16_nearest).collect()
}

/// Sums squares in the order of the kernel: four neighbouring channels in order, a binary tree over 32 such sums, then
/// the four trees in order.
fn sum_of_squares(values: &[f32]) -> f32 {
    let quads = values.chunks_exact(4);
    let quads = quads.map(|v| ((v[0] * v[0] + v[1] * v[1]) + v[2] * v[2]) + v[3] * v[3]);
    let quads: Vec<f32> = quads.collect();
    let trees = quads.chunks_exact(32).map(|lanes| {
        let mut lanes = lanes.to_vec();
        while lanes.len() > 1 {
            let half = lanes.len() / 2;
            lanes = (0..half).map(|lane| lanes[lane] + lanes[lane + half]).collect();
        }
        lanes[0]
    });
    trees.reduce(|sum, tree| sum + tree).expect("an entry has four")
}

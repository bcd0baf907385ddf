//! Compressed entries, computed from the token history alone: there are no steps, chunks or state here.
//!
//! Entry `i` of ratio `m` is a function of the projections of its own `m` tokens, which begin at `m * i`, and with
//! overlap also of the `m` tokens before them. Everything is f64, and rounded once to BF16.
//! See docs/specification.md, section 5.

use std::ops::Range;

use crate::hadamard::hadamard;
use crate::number::bf16_nearest_f64;
use crate::rope::Table;

const NORM_EPSILON: f64 = 1e-6;

/// The parameters in which the three compressors differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens per entry, `m`.
    pub ratio: usize,
    /// Whether an entry also pools the tokens of the window before its own.
    pub overlap: bool,
    /// Channels of an entry, `d`.
    pub channels: usize,
}

impl Shape {
    /// Main entries of a CSA layer.
    pub const CSA: Self = Self { ratio: 4, overlap: true, channels: 512 };
    /// Indexer keys of a CSA layer.
    pub const INDEX: Self = Self { ratio: 4, overlap: true, channels: 128 };
    /// Entries of an HCA layer.
    pub const HCA: Self = Self { ratio: 128, overlap: false, channels: 512 };

    /// Columns of a token's projections: `d`, or `2d` with overlap. Of these the first `d` go into the entry of the
    /// next window, and the last `d` into the entry of the token's own window.
    #[must_use]
    pub fn columns(self) -> usize {
        if self.overlap { 2 * self.channels } else { self.channels }
    }

    /// Position at which an entry is rotated: that of its window's first token.
    #[must_use]
    pub fn rope_position(self, entry: usize) -> usize {
        self.ratio * entry
    }

    /// After `end` tokens, the positions whose projections later entries still need: the open window, and with overlap
    /// the window before it.
    #[must_use]
    pub fn state_keep(self, end: usize) -> Range<usize> {
        let open = end / self.ratio * self.ratio;
        let first = if self.overlap { open.saturating_sub(self.ratio) } else { open };
        first..end
    }

    /// The tokens that an entry pools, oldest first: position, and first column of the half that is used.
    fn rows(self, entry: usize) -> impl Iterator<Item = (usize, usize)> {
        let own = self.ratio * entry..self.ratio * (entry + 1);
        let has_previous = self.overlap && entry > 0;
        let previous = if has_previous { own.start - self.ratio..own.start } else { 0..0 };
        let own_half = self.columns() - self.channels;
        previous.map(|position| (position, 0)).chain(own.map(move |position| (position, own_half)))
    }
}

/// One compressor of one layer, with a request's tokens from position 0.
#[derive(Clone, Copy, Debug)]
pub struct Compressor<'a> {
    /// The compressor's parameters: `m`, `d` and the number of columns.
    pub shape: Shape,
    /// `[tokens, columns]`: the values that are pooled.
    pub kv: &'a [f32],
    /// `[tokens, columns]`: the logits of the pooling weights, without `ape`.
    pub gate: &'a [f32],
    /// `[m, columns]`: row `p mod m` is added to the gate of position `p`.
    pub ape: &'a [f32],
    /// `[d]`: weight of the RMS norm.
    pub norm_w: &'a [f32],
}

impl Compressor<'_> {
    /// `[d]`: in each channel the softmax-weighted mean over the entry's tokens. These are 8 (CSA), 128 (HCA), or 4 in
    /// entry 0 with overlap, which has no previous window.
    ///
    /// # Panics
    /// If the history does not reach the end of the entry's window.
    #[must_use]
    pub fn pooled(&self, entry: usize) -> Vec<f64> {
        let columns = self.shape.columns();
        let cell = |channel: usize, (position, half): (usize, usize)| {
            let at = |array: &[f32], row: usize| f64::from(array[row * columns + half + channel]);
            let bias = at(self.ape, position % self.shape.ratio);
            (at(self.gate, position) + bias, at(self.kv, position))
        };
        (0..self.shape.channels)
            .map(|channel| {
                let cells: Vec<_> = self.shape.rows(entry).map(|row| cell(channel, row)).collect();
                softmax_mean(&cells)
            })
            .collect()
    }

    /// `[d]`: the pooled channels after RMS norm over all of them and rotation of the last 64 at the entry's position.
    /// It reads no history, so any `entry` is allowed.
    #[must_use]
    pub fn norm_and_rotate(&self, pooled: &[f64], entry: usize) -> Vec<f64> {
        let mean_square = pooled.iter().map(|x| x * x).sum::<f64>() / pooled.len() as f64;
        let norm = (mean_square + NORM_EPSILON).sqrt();
        let normed: Vec<f64> =
            pooled.iter().zip(self.norm_w).map(|(x, &w)| x / norm * f64::from(w)).collect();
        Table::Compress.rotate(&normed, self.shape.rope_position(entry))
    }

    /// `[d]`: the entry before it is rounded to BF16.
    ///
    /// # Panics
    /// As [`Self::pooled`].
    #[must_use]
    pub fn entry(&self, entry: usize) -> Vec<f64> {
        self.norm_and_rotate(&self.pooled(entry), entry)
    }

    /// `[d]` BF16 bits: the entry before quantisation.
    ///
    /// # Panics
    /// As [`Self::pooled`].
    #[must_use]
    pub fn entry_bf16(&self, entry: usize) -> Vec<u16> {
        round(&self.entry(entry))
    }

    /// `[d]` BF16 bits: the Hadamard transform of the entry, which is an indexer key before quantisation.
    ///
    /// # Panics
    /// As [`Self::pooled`].
    #[must_use]
    pub fn key_bf16(&self, entry: usize) -> Vec<u16> {
        round(&hadamard(&self.entry(entry)))
    }
}

/// The entries that a step closes: those whose last token is one of the `tokens` tokens from position `start`.
#[must_use]
pub fn closed_entries(start: usize, tokens: usize, ratio: usize) -> Range<usize> {
    start / ratio..(start + tokens) / ratio
}

/// Number of entries that the query at `position` sees. Its own token may close the last of them.
#[must_use]
pub fn visible(position: usize, ratio: usize) -> usize {
    (position + 1) / ratio
}

/// The mean of `(logit, value)` cells, weighted by the softmax of their logits.
fn softmax_mean(cells: &[(f64, f64)]) -> f64 {
    let top = cells.iter().map(|&(logit, _)| logit).fold(f64::NEG_INFINITY, f64::max);
    let weight = |logit: f64| (logit - top).exp();
    let sum: f64 = cells.iter().map(|&(logit, _)| weight(logit)).sum();
    cells.iter().map(|&(logit, value)| weight(logit) / sum * value).sum()
}

fn round(x: &[f64]) -> Vec<u16> {
    x.iter().map(|&x| bf16_nearest_f64(x)).collect()
}

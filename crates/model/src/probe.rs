//! A look into a forward pass.

use ndarray::Array2;

use crate::experts::Choice;
use crate::hyper::Streams;

/// Sees the activations of a forward pass, and may replace some: to compare a model with a reference, layer by
/// layer. Layers are counted from 0. `()` does nothing.
pub trait Probe {
    /// The streams that layer `layer` begins with, `[tokens, streams, hidden]`.
    fn layer_input(&mut self, _layer: usize, _streams: &mut Streams) {}

    /// What attention reads, `[tokens, hidden]`: collapsed and normed.
    fn attention_input(&mut self, _layer: usize, _x: &mut Array2<f32>) {}

    /// The entries that a CSA layer's indexer picked for the next queries of the step, `[queries, most]`, -1
    /// behind the last.
    fn selected(&mut self, _layer: usize, _lists: &Array2<i32>) {}

    /// The experts of the step's tokens.
    fn routed(&mut self, _layer: usize, _choice: &Choice) {}

    /// The streams behind layer `layer`.
    fn layer_output(&mut self, _layer: usize, _streams: &Streams) {}
}

impl Probe for () {}

//! Observes a forward pass.

use ndarray::Array2;

use crate::experts::Choice;
use crate::hyper::Streams;

/// Observes the activations of a forward pass, and may replace some, to compare a model with a reference layer by
/// layer. Layers are counted from 0. `()` does nothing.
pub trait Probe {
    /// The input streams of layer `layer`, `[tokens, streams, hidden]`.
    fn layer_input(&mut self, _layer: usize, _streams: &mut Streams) {}

    /// The input of attention, `[tokens, hidden]`: collapsed and normalised streams.
    fn attention_input(&mut self, _layer: usize, _x: &mut Array2<f32>) {}

    /// The entries that the indexer of a CSA layer picked for the next tile of queries, `[queries, most]`; unused
    /// places are -1.
    fn selected(&mut self, _layer: usize, _lists: &Array2<i32>) {}

    /// The experts of the step's tokens.
    fn routed(&mut self, _layer: usize, _choice: &Choice) {}

    /// The output streams of layer `layer`.
    fn layer_output(&mut self, _layer: usize, _streams: &Streams) {}
}

impl Probe for () {}

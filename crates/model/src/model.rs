//! The model: embedding, layers, and the head that computes logits.

use dsv4_kv_model_files::Config;
use dsv4_kv_router::RouterConfig;
use ndarray::{Array2, Axis};

use crate::hyper::{HyperHead, Streams};
use crate::layer::Layer;
use crate::linear::Linear;
use crate::norm::RmsNorm;

/// A DeepSeek-V4 model in host memory, in f32: four bytes for each parameter.
#[derive(Clone, Debug)]
pub struct Model {
    /// The model's configuration.
    pub config: Config,
    /// The configuration that all routers share.
    pub router: RouterConfig,
    /// `embed`, `[vocabulary, hidden]`.
    pub embedding: Array2<f32>,
    /// The layers in order, without draft (MTP) layers.
    pub layers: Vec<Layer>,
    /// Collapses the streams to one vector, before the head.
    pub head_streams: HyperHead,
    /// `norm`.
    pub norm: RmsNorm,
    /// `head`, `[vocabulary, hidden]`.
    pub head: Linear,
}

impl Model {
    /// The streams at the first layer: a copy of the token's embedding in each stream. `[tokens, streams, hidden]`.
    ///
    /// # Panics
    /// For a token outside the vocabulary.
    #[must_use]
    pub fn embed(&self, tokens: &[u32]) -> Streams {
        let streams = self.head_streams.constants.streams;
        let mut embedded = Streams::zeros((tokens.len(), streams, self.embedding.ncols()));
        for (mut row, &token) in embedded.outer_iter_mut().zip(tokens) {
            row.assign(&self.embedding.row(token as usize));
        }
        embedded
    }

    /// The logits of the tokens `rows` of a step, `[rows, vocabulary]`, from the streams after the last layer.
    #[must_use]
    pub fn logits(&self, streams: &Streams, rows: &[usize]) -> Array2<f32> {
        if rows.is_empty() {
            return Array2::zeros((0, self.head.outputs()));
        }
        let streams = streams.select(Axis(0), rows);
        let hidden = self.norm.apply(self.head_streams.collapse(&streams));
        self.head.apply(hidden.view())
    }
}

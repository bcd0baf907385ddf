//! Each layer's launches as a graph: update, gathers and append of a small step, replayed between the dense
//! mathematics of the host.

use dsv4_kv::{Bucket, CapturedStep, StepRequest};
use dsv4_kv_device::Backend;

use super::Engine;
use super::buffers::TILE_QUERIES;
use super::updated::Updated;
use crate::error::ModelError;

/// The graphs of all layers, for one bucket.
pub struct Captured<B: Backend> {
    bucket: Bucket,
    layers: Vec<CapturedStep<B>>,
}

impl<B: Backend> Captured<B> {
    /// The steps that the graphs serve.
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// The graph of a layer.
    pub fn layer(&self, index: usize) -> &CapturedStep<B> {
        &self.layers[index]
    }

    /// Whether the graphs serve a step of these requests.
    pub fn serves(&self, requests: &[StepRequest]) -> bool {
        let Bucket { tokens, tokens_per_request, requests: most, context } = self.bucket;
        let fits = |request: &StepRequest| {
            request.tokens <= tokens_per_request && request.start + request.tokens <= context
        };
        let all: u32 = requests.iter().map(|request| request.tokens).sum();
        all <= tokens && requests.len() <= most as usize && requests.iter().all(fits)
    }
}

impl<B: Backend> Engine<B> {
    /// Captures each layer's launches for steps of up to `requests` requests with up to `tokens_per_request`
    /// tokens each. From then on steps that fit replay the graphs, with the same bits as without.
    ///
    /// # Errors
    /// [`ModelError::BucketTooLarge`] for more tokens than are gathered at once;
    /// [`ModelError::Cache`], as [`dsv4_kv::KvCacheManager::capture`].
    pub fn capture(&mut self, requests: u32, tokens_per_request: u32) -> Result<(), ModelError> {
        let tokens = requests.saturating_mul(tokens_per_request);
        if tokens > TILE_QUERIES {
            return Err(ModelError::BucketTooLarge { tokens, most: TILE_QUERIES });
        }
        let context = self.cache.config().max_context;
        let bucket = Bucket { tokens, tokens_per_request, requests, context };
        let Self { cache, stream, layers, buffers, .. } = self;
        let mut graphs = Vec::new();
        for (index, device) in layers.iter().enumerate() {
            let memory = buffers.memory().into_iter().chain(device.memory()).collect();
            graphs.push(cache.capture(stream, &bucket, memory, |layers| {
                let (id, _) = layers.ids().nth(index).expect("a layer of the trunk");
                let updated = Updated::update(layers, id, device, buffers)?;
                updated.gather(device, buffers, 0..tokens)?;
                updated.append()
            })?);
        }
        self.captured = Some(Captured { bucket, layers: graphs });
        Ok(())
    }
}

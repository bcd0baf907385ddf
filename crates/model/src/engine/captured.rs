//! One graph per layer, with its launches for a small step: update, gathers or attention, and append. They are replayed
//! between the dense mathematics of the host.

use dsv4_kv::{Bucket, CapturedStep, KvCacheManager, StepRequest};
use dsv4_kv_device::{Backend, Stream};

use super::buffers::Buffers;
use super::device_layer::DeviceLayer;
use super::tile::TILE_QUERIES;
use super::updated::Updated;
use crate::error::ModelError;

/// The graphs of all layers, for one bucket.
pub struct Captured<B: Backend> {
    bucket: Bucket,
    layers: Vec<CapturedStep<B>>,
}

impl<B: Backend> Captured<B> {
    /// Captures each layer's launches for the steps of `bucket`, which has at most [`TILE_QUERIES`] tokens.
    pub fn record(
        cache: &mut KvCacheManager<B>,
        stream: &Stream<B>,
        layers: &[DeviceLayer<B>],
        buffers: &Buffers<B>,
        bucket: Bucket,
    ) -> Result<Self, ModelError> {
        let (tokens, most) = (bucket.tokens, TILE_QUERIES);
        if tokens > most {
            return Err(ModelError::BucketTooLarge { tokens, most });
        }
        let mut graphs = Vec::new();
        for (index, device) in layers.iter().enumerate() {
            let memory = buffers.memory().into_iter().chain(device.memory()).collect();
            graphs.push(cache.capture(stream, &bucket, memory, |layers| {
                let (id, _) = layers.layer_kinds().nth(index).expect("a layer of the trunk");
                let updated = Updated::update(layers, id, device, buffers)?;
                updated.attend(device, buffers, 0..tokens)?;
                updated.append()
            })?);
        }
        Ok(Self { bucket, layers: graphs })
    }

    /// The bucket of the graphs.
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

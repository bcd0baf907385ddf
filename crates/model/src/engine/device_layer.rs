//! A layer's weights on the device.

use dsv4_kv::CsaIndexer;
use dsv4_kv_device::{Backend, Buffer, Memory, Stream};
use dsv4_kv_router::{Batch, Router};
use half::bf16;
use ndarray::{Array2, ArrayView2};

use super::tile::rounded;
use crate::error::ModelError;
use crate::experts::Choice;
use crate::layer::{Compressed, Compressor, Layer};
use crate::model::Model;

/// The weights of a layer's compressed entries.
pub enum DeviceCompressed<B: Backend> {
    Swa,
    Csa {
        main: dsv4_kv::CompressorWeights<B>,
        index: dsv4_kv::CompressorWeights<B>,
        indexer: CsaIndexer<B>,
    },
    Hca {
        main: dsv4_kv::CompressorWeights<B>,
    },
}

/// Inputs and outputs of the router, for the tokens of a step.
struct Routed<B: Backend> {
    /// `[step tokens, hidden]`.
    x: Buffer<B, bf16>,
    /// `[step tokens]`.
    token: Buffer<B, i32>,
    /// `[step tokens, experts of a token]`.
    ids: Buffer<B, i32>,
    /// `[step tokens, experts of a token]`.
    weights: Buffer<B, f32>,
}

/// One layer.
pub struct DeviceLayer<B: Backend> {
    compressed: DeviceCompressed<B>,
    /// `[heads]`.
    sinks: Buffer<B, f32>,
    router: Router<B>,
    routed: Routed<B>,
    /// Routed experts of a token.
    selected: usize,
}

impl<B: Backend> DeviceLayer<B> {
    /// Copies the weights of layer `index`, for steps of up to `step_tokens` tokens.
    pub fn new(
        stream: &Stream<B>,
        model: &Model,
        layer: &Layer,
        step_tokens: u32,
    ) -> Result<Self, ModelError> {
        let compressed = match &layer.compressed {
            Compressed::Swa => DeviceCompressed::Swa,
            Compressed::Csa(csa) => DeviceCompressed::Csa {
                main: device_compressor(stream, &csa.main)?,
                index: device_compressor(stream, &csa.index)?,
                indexer: CsaIndexer::from_host(stream, &model.config.cache, &csa.indexer)?,
            },
            Compressed::Hca(main) => {
                DeviceCompressed::Hca { main: device_compressor(stream, main)? }
            }
        };
        let hidden = u64::from(model.config.hidden_size);
        let tokens = u64::from(step_tokens);
        let device = stream.device();
        let per_token = model.config.experts.per_token;
        let selected = tokens * u64::from(per_token);
        Ok(Self {
            sinks: stream.upload_new("sinks", &layer.attention.sinks.to_vec())?,
            selected: per_token as usize,
            compressed,
            router: Router::new(stream, &model.router, &layer.router, step_tokens)?,
            routed: Routed {
                x: device.allocate("router input", tokens * hidden)?,
                token: device.allocate("router tokens", tokens)?,
                ids: device.allocate("experts", selected)?,
                weights: device.allocate("weights of experts", selected)?,
            },
        })
    }

    /// The weights of its compressed entries.
    pub fn compressed(&self) -> &DeviceCompressed<B> {
        &self.compressed
    }

    /// The sinks of its heads, `[heads]`.
    pub fn sinks(&self) -> &Buffer<B, f32> {
        &self.sinks
    }

    /// Chooses experts for the step's tokens from `x`, `[tokens, hidden]`, which is rounded to BF16 for the router.
    pub fn route(
        &mut self,
        stream: &Stream<B>,
        x: ArrayView2<'_, f32>,
        tokens: &[u32],
    ) -> Result<Choice, ModelError> {
        let Self { router, routed, selected, .. } = self;
        let Routed { x: to, token, ids, weights } = routed;
        stream.upload(&rounded(x, x.ncols()), to, 0)?;
        let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        stream.upload(&tokens, token, 0)?;
        let batch = Batch { tokens: tokens.len() as u32, token, ids, weights };
        router.route(stream, to, &batch)?;
        router.check_faults(stream)?;
        let shape = (tokens.len(), *selected);
        let mut choice = Choice { experts: Array2::zeros(shape), weights: Array2::zeros(shape) };
        stream.download(ids, 0, contiguous(&mut choice.experts))?;
        stream.download(weights, 0, contiguous(&mut choice.weights))?;
        Ok(choice)
    }

    /// The memory that a graph of the layer's launches must retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let mut memory = match &self.compressed {
            DeviceCompressed::Swa => Vec::new(),
            DeviceCompressed::Csa { main, index, indexer } => {
                [main, index].into_iter().flat_map(|c| c.memory()).chain(indexer.memory()).collect()
            }
            DeviceCompressed::Hca { main } => main.memory(),
        };
        memory.push(self.sinks.memory());
        memory
    }
}

/// The weights of a compressor that the cache's kernels read.
fn device_compressor<B: Backend>(
    stream: &Stream<B>,
    compressor: &Compressor,
) -> Result<dsv4_kv::CompressorWeights<B>, ModelError> {
    let Compressor { position_bias, norm, .. } = compressor;
    Ok(dsv4_kv::CompressorWeights::from_host(stream, position_bias, norm)?)
}

fn contiguous<T>(array: &mut Array2<T>) -> &mut [T] {
    array.as_slice_mut().expect("a new array is contiguous")
}

//! The inputs of a step: values for each token, taken from the pools and uploaded.

use std::collections::HashMap;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::kv_layout::geometry::{CompressorKind, HEAD_DIM};
use dsv4_kv::{CacheConfig, RequestId, StepRequest};
use rayon::prelude::*;

use super::entries::compressors;
use super::history::Prefix;
use super::source::{ROW_SETS, Source, VALUE_TENSORS, ValueTensor, shape};

const IN_TENSOR: &str = "a step has no more tokens than it may have";

/// KV rows, keys and gates of the step's tokens, and the prefix of each request.
pub struct Inputs<B: Backend> {
    /// `[ROW_SETS, step_tokens, 512]` BF16.
    rows: Buffer<B, bf16>,
    /// `[VALUE_TENSORS, step_tokens, columns]` for each compressor that the model has.
    values: Vec<(CompressorKind, Buffer<B, f32>)>,
    /// Most tokens of a step.
    step_tokens: u64,
    /// The last prefix of each running request.
    ends: HashMap<RequestId, Prefix>,
    /// The prefixes of the step's tokens.
    prefixes: Vec<Prefix>,
    /// Staging memory for one set of rows.
    staged_rows: Vec<u16>,
    /// Staging memory for one tensor of values.
    staged_values: Vec<f32>,
}

/// The compressors that the layers of a model have.
fn kinds(config: &CacheConfig) -> Vec<CompressorKind> {
    let mut kinds = Vec::new();
    for &which in config.model.layers.iter().flat_map(|&kind| compressors(kind)) {
        if !kinds.contains(&which) {
            kinds.push(which);
        }
    }
    kinds
}

/// Number of elements of the values of a compressor.
fn elements(which: CompressorKind, step_tokens: u64) -> u64 {
    u64::from(VALUE_TENSORS) * step_tokens * shape(which).columns() as u64
}

/// Bytes of device memory for the inputs of a step.
pub fn bytes(config: &CacheConfig) -> u64 {
    let step_tokens = u64::from(config.max_step_tokens);
    let rows = 2 * u64::from(ROW_SETS) * step_tokens * u64::from(HEAD_DIM);
    let values = kinds(config).into_iter().map(|which| 4 * elements(which, step_tokens));
    rows + values.sum::<u64>()
}

impl<B: Backend> Inputs<B> {
    /// Allocates the inputs of a step.
    pub fn new(device: &Device<B>, config: &CacheConfig) -> Result<Self, DeviceError> {
        let step_tokens = u64::from(config.max_step_tokens);
        let rows = u64::from(ROW_SETS) * step_tokens * u64::from(HEAD_DIM);
        let values = kinds(config).into_iter().map(|which| {
            Ok((which, device.allocate("keys and gates", elements(which, step_tokens))?))
        });
        Ok(Self {
            rows: device.allocate("KV rows", rows)?,
            values: values.collect::<Result<_, DeviceError>>()?,
            step_tokens,
            ends: HashMap::new(),
            prefixes: Vec::new(),
            staged_rows: Vec::new(),
            staged_values: Vec::new(),
        })
    }

    /// Records that a request was admitted with tokens that end in `prefix`.
    pub fn admit(&mut self, id: RequestId, prefix: Prefix) {
        self.ends.insert(id, prefix);
    }

    /// Removes a request.
    pub fn release(&mut self, id: RequestId) {
        self.ends.remove(&id);
    }

    /// Uploads the inputs of a step. `tokens` are its token ids, in the order of the step.
    pub fn begin_step(
        &mut self,
        stream: &Stream<B>,
        source: &Source,
        step: &[StepRequest],
        tokens: &[u32],
    ) -> Result<()> {
        self.prefixes.clear();
        let mut left = tokens;
        for part in step {
            let (tokens, others) = left.split_at(part.tokens as usize);
            let end = self.ends.get_mut(&part.id).context("a request in a step was admitted")?;
            self.prefixes.extend(end.each(tokens));
            *end = self.prefixes.last().copied().unwrap_or(*end);
            left = others;
        }
        self.upload_rows(stream, source)?;
        self.upload_values(stream, source)
    }

    /// The prefixes of the step's tokens, in the order of the step.
    pub fn prefixes(&self) -> &[Prefix] {
        &self.prefixes
    }

    /// KV rows of the step's tokens for a layer, `[tokens, 512]`.
    pub fn kv(&self, layer: u32) -> Result<Buffer<B, bf16>> {
        let (row, set) = (u64::from(HEAD_DIM), u64::from(Source::row_set(layer)));
        let tokens = self.prefixes.len() as u64;
        self.rows.slice(set * self.step_tokens * row, tokens * row).context(IN_TENSOR)
    }

    /// Keys or gates of the step's tokens, `[tokens, columns]`.
    pub fn values(&self, which: CompressorKind, tensor: ValueTensor) -> Result<Buffer<B, f32>> {
        let found = self.values.iter().find(|(of, _)| *of == which);
        let (_, values) = found.context("the model has the compressor")?;
        let (columns, tokens) = (shape(which).columns() as u64, self.prefixes.len() as u64);
        let start = u64::from(tensor.0) * self.step_tokens * columns;
        values.slice(start, tokens * columns).context(IN_TENSOR)
    }

    fn upload_rows(&mut self, stream: &Stream<B>, source: &Source) -> Result<()> {
        let Self { rows, prefixes, staged_rows, step_tokens, .. } = self;
        let row = HEAD_DIM as usize;
        staged_rows.resize(prefixes.len() * row, 0);
        for set in 0..ROW_SETS {
            let tokens = staged_rows.par_chunks_exact_mut(row).zip(&*prefixes);
            tokens.for_each(|(to, &prefix)| {
                to.copy_from_slice(source.row(Source::row_of(prefix, set)));
            });
            let at = u64::from(set) * *step_tokens * u64::from(HEAD_DIM);
            stream.upload(bytemuck::cast_slice(staged_rows), rows, at)?;
        }
        Ok(())
    }

    fn upload_values(&mut self, stream: &Stream<B>, source: &Source) -> Result<()> {
        let Self { values, prefixes, staged_values, step_tokens, .. } = self;
        for (which, values) in values {
            let columns = shape(*which).columns();
            staged_values.resize(prefixes.len() * columns, 0.0);
            for tensor in (0..VALUE_TENSORS).map(ValueTensor) {
                let tokens = staged_values.par_chunks_exact_mut(columns).zip(&*prefixes);
                tokens.for_each(|(to, &prefix)| {
                    let from = Source::values_of(prefix, *which, tensor);
                    to.copy_from_slice(&source.as_floats()[from]);
                });
                let at = u64::from(tensor.0) * *step_tokens * columns as u64;
                stream.upload(staged_values, values, at)?;
            }
        }
        Ok(())
    }
}

//! The inputs of compressors and windows: random projections and weights, different in each layer.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Memory, Stream, bf16};
use dsv4_kv::kv_layout::geometry::{CSA_RATIO, CompressorKind, HCA_RATIO, HEAD_DIM, INDEX_DIM};
use dsv4_kv::step::CompressorInputs;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::repeated;

/// Number of random values, which are repeated. It is divisible by 4 but by no higher power of two, so that a channel
/// has other values in every repetition.
const PATTERN: usize = (1 << 20) + 4;
/// Columns of the wider main compressor (CSA), and of the indexer's compressor.
const MAIN: u64 = CompressorKind::CsaMain.columns() as u64;
const INDEX: u64 = CompressorKind::CsaIndex.columns() as u64;
/// Number of f32 weights of a main compressor and of the indexer's compressor: position bias and norm.
const MAIN_BIAS: u64 = HCA_RATIO as u64 * HEAD_DIM as u64;
const INDEX_BIAS: u64 = CSA_RATIO as u64 * INDEX;
const NORM: u64 = HEAD_DIM as u64;

/// Random projections and weights of all layers.
pub struct Projections<B: Backend> {
    values: Buffer<B, f32>,
    rows: Buffer<B, bf16>,
}

/// The inputs of a layer of any kind.
pub struct LayerProjections<B: Backend> {
    /// `[tokens, 512]` BF16: the rows for the window.
    pub kv: Buffer<B, bf16>,
    /// Inputs of the main compressor.
    pub main: Compressor<B>,
    /// Inputs of the indexer's compressor.
    pub index: Compressor<B>,
}

/// A compressor's inputs: keys, gates, position bias and norm.
pub struct Compressor<B: Backend>(pub [Buffer<B, f32>; 4]);

impl<B: Backend> Compressor<B> {
    /// The inputs in the form that an update takes.
    pub fn inputs(&self) -> CompressorInputs<'_, B> {
        let [kv, gate, ape, norm] = &self.0;
        CompressorInputs { kv, gate, ape, norm }
    }
}

/// Number of f32 values of a layer in a step of `tokens` tokens.
fn layer_floats(tokens: u64) -> u64 {
    2 * tokens * (MAIN + INDEX) + MAIN_BIAS + INDEX_BIAS + 2 * NORM
}

impl<B: Backend> Projections<B> {
    /// Projections for steps of each of these sizes: number of different layers, and tokens.
    pub fn new(stream: &Stream<B>, sizes: &[(u64, u64)]) -> Result<Self> {
        let mut random = SmallRng::seed_from_u64(1);
        let most = |of: fn((u64, u64)) -> u64| sizes.iter().copied().map(of).max().unwrap_or(0);
        let floats = most(|(layers, tokens)| layers * layer_floats(tokens));
        let rows = most(|(layers, tokens)| layers * tokens * u64::from(HEAD_DIM));
        let len = PATTERN.min(floats as usize);
        let pattern: Vec<f32> = (0..len).map(|_| random.random_range(-3.0..3.0)).collect();
        Ok(Self {
            values: repeated(stream, "projections", floats, &pattern)?,
            rows: random_bf16(stream, "window rows", rows)?,
        })
    }

    /// The inputs of layer `layer` in a step of `tokens` tokens.
    pub fn layer(&self, layer: u64, tokens: u64) -> LayerProjections<B> {
        let mut start = layer * layer_floats(tokens);
        let mut next = |len: u64| {
            let taken = self.values.slice(start, len).expect("projections of every layer");
            start += len;
            taken
        };
        let main =
            Compressor([next(tokens * MAIN), next(tokens * MAIN), next(MAIN_BIAS), next(NORM)]);
        let [kv, gate] = [tokens * INDEX; 2].map(&mut next);
        let norm = next(NORM).slice(0, INDEX_DIM.into()).expect("a part of the norm");
        let index = Compressor([kv, gate, next(INDEX_BIAS), norm]);
        let row = tokens * u64::from(HEAD_DIM);
        let kv = self.rows.slice(layer * row, row).expect("rows of every layer");
        LayerProjections { kv, main, index }
    }

    /// All memory of the projections, for a graph to retain.
    pub fn memory(&self) -> [Memory<B>; 2] {
        [self.values.memory(), self.rows.memory()]
    }
}

/// `len` random numbers in [-1, 1), a repeated pattern.
pub fn random_bf16<B: Backend>(
    stream: &Stream<B>,
    label: &'static str,
    len: u64,
) -> Result<Buffer<B, bf16>> {
    let mut random = SmallRng::seed_from_u64(2);
    let mut value = || bf16::from_f32(random.random_range(-1.0..1.0));
    let pattern: Vec<bf16> = (0..PATTERN.min(len as usize)).map(|_| value()).collect();
    Ok(repeated(stream, label, len, &pattern)?)
}

//! A model of random weights with the dataflow of a DeepSeek-V4 attention layer: small hidden state,
//! few heads, no experts. What it says means nothing, but every output depends on every
//! row that the cache gives back.

use dsv4_kv::kv_layout::config::CompressRope;
use dsv4_kv::kv_layout::geometry::{
    BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, NOPE_DIM, ROPE_DIM,
};
use dsv4_kv::{bf16, rope};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Different tokens.
pub const VOCABULARY: usize = 100;
/// Most tokens of the request: three blocks.
pub const CONTEXT: u32 = 3 * BLOCK_TOKENS;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
/// Heads of the indexer, as in the preset.
const INDEX_HEADS: u32 = 64;
const CHANNELS: usize = HEAD_DIM as usize;

/// A vector for each of several tokens.
pub type Vectors = Vec<Vec<f32>>;

/// A matrix: for each input, a weight for each output.
pub struct Matrix(Vec<Vec<f32>>);

impl Matrix {
    fn random(random: &mut StdRng, inputs: usize, outputs: usize) -> Self {
        let size = (3.0 / inputs as f32).sqrt();
        let row = |_| (0..outputs).map(|_| random.random_range(-size..size)).collect();
        Self((0..inputs).map(row).collect())
    }

    fn times(&self, input: &[f32]) -> Vec<f32> {
        let mut sums = vec![0.0; self.0[0].len()];
        for (x, row) in input.iter().zip(&self.0) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += x * weight);
        }
        sums
    }

    /// The products with all inputs, one after another.
    pub fn times_each(&self, inputs: &Vectors) -> Vec<f32> {
        inputs.iter().flat_map(|input| self.times(input)).collect()
    }
}

/// What makes compressed entries, or indexer keys, of a layer's inputs.
pub struct Compressor {
    /// Projects keys.
    pub kv: Matrix,
    /// Projects gates: how much a token counts in its window.
    pub gate: Matrix,
    /// Position bias of the gates.
    pub ape: Vec<f32>,
    /// Weights of the norm.
    pub norm: Vec<f32>,
}

impl Compressor {
    fn random(random: &mut StdRng, ratio: u32, columns: u32, channels: u32) -> Self {
        let bias = ratio * columns;
        Self {
            kv: Matrix::random(random, HIDDEN, columns as usize),
            gate: Matrix::random(random, HIDDEN, columns as usize),
            ape: (0..bias).map(|_| random.random_range(-1.0..1.0)).collect(),
            norm: (0..channels).map(|_| random.random_range(0.5..1.5)).collect(),
        }
    }
}

/// The weights of one layer.
pub struct Layer {
    kv: Matrix,
    query: Matrix,
    output: Matrix,
    /// One a head: a score that takes its share of the softmax and gives no value.
    sinks: [f32; HEADS],
    frequencies: [f32; rope::PAIRS],
    /// None with a window alone; main entries and indexer keys with CSA; main entries with HCA.
    pub compressors: Vec<Compressor>,
    /// The indexer's queries, and a weight for each of its heads.
    indexer: [Matrix; 2],
}

impl Layer {
    fn random(random: &mut StdRng, kind: LayerKind) -> Self {
        // A CSA window overlaps the one before it, so that every token has two keys and two gates.
        let shapes: &[_] = match kind {
            LayerKind::Swa => &[],
            LayerKind::Csa => {
                &[(CSA_RATIO, 2 * HEAD_DIM, HEAD_DIM), (CSA_RATIO, 2 * INDEX_DIM, INDEX_DIM)]
            }
            LayerKind::Hca => &[(HCA_RATIO, HEAD_DIM, HEAD_DIM)],
        };
        let main_frequency = |pair| 10_000f32.powf(-2.0 * pair as f32 / ROPE_DIM as f32);
        Self {
            kv: Matrix::random(random, HIDDEN, CHANNELS),
            query: Matrix::random(random, HIDDEN, HEADS * CHANNELS),
            output: Matrix::random(random, HEADS * CHANNELS, HIDDEN),
            sinks: std::array::from_fn(|_| random.random_range(-1.0..1.0)),
            frequencies: match kind {
                LayerKind::Swa => std::array::from_fn(main_frequency),
                LayerKind::Csa | LayerKind::Hca => {
                    rope::compress_frequencies(&CompressRope::RELEASED)
                }
            },
            compressors: shapes
                .iter()
                .map(|&(ratio, columns, channels)| {
                    Compressor::random(random, ratio, columns, channels)
                })
                .collect(),
            indexer: [INDEX_HEADS * INDEX_DIM, INDEX_HEADS]
                .map(|outputs| Matrix::random(random, HIDDEN, outputs as usize)),
        }
    }

    /// What the indexer scores entries with: a vector for each of its heads, `[tokens, 64 * 128]`, and
    /// a weight for each, `[tokens, 64]`.
    pub fn index_queries(&self, inputs: &Vectors) -> (Vec<f32>, Vec<f32>) {
        let [vectors, weights] = &self.indexer;
        (vectors.times_each(inputs), weights.times_each(inputs))
    }

    /// The token's key, which is its value too: `[512]` BF16.
    pub fn key(&self, input: &[f32], position: u32) -> Vec<bf16> {
        let mut key = normed(&self.kv.times(input));
        self.rotate(&mut key, position as f32);
        key.into_iter().map(bf16::from_f32).collect()
    }

    /// Attention of one token to `keys` (`[rows, 512]`), added to its hidden state.
    pub fn attend(&self, input: &[f32], position: u32, keys: &[f32], hidden: &[f32]) -> Vec<f32> {
        let mut attended = Vec::new();
        for (query, sink) in self.query.times(input).chunks_exact(CHANNELS).zip(self.sinks) {
            let mut query = normed(query);
            self.rotate(&mut query, position as f32);
            let mut sum = attend_head(&query, keys, sink);
            // Values carry their keys' rotation; turned back, only distances are left.
            self.rotate(&mut sum, -(position as f32));
            attended.extend(sum);
        }
        let output = self.output.times(&attended);
        hidden.iter().zip(output).map(|(hidden, output)| hidden + output).collect()
    }

    /// Turns each pair of the rotary channels by its angle at `position`.
    fn rotate(&self, channels: &mut [f32], position: f32) {
        let pairs = channels[NOPE_DIM as usize..].chunks_exact_mut(2);
        for (pair, frequency) in pairs.zip(self.frequencies) {
            let (sin, cos) = (position * frequency).sin_cos();
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
        }
    }
}

/// One softmax over all keys, window and entries alike, and the sink; the weighted sum of the keys.
fn attend_head(query: &[f32], keys: &[f32], sink: f32) -> Vec<f32> {
    let keys = keys.chunks_exact(CHANNELS);
    let dot = |key: &[f32]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
    let scores: Vec<f32> = keys.clone().map(|key| dot(key) / (CHANNELS as f32).sqrt()).collect();
    let most = scores.iter().copied().fold(sink, f32::max);
    let (mut sum, mut total) = (vec![0.0; CHANNELS], (sink - most).exp());
    for (score, key) in scores.iter().zip(keys) {
        let weight = (score - most).exp();
        total += weight;
        sum.iter_mut().zip(key).for_each(|(sum, value)| *sum += weight * value);
    }
    sum.iter_mut().for_each(|value| *value /= total);
    sum
}

/// The vector at a root mean square of 1.
pub fn normed(values: &[f32]) -> Vec<f32> {
    let squares: f32 = values.iter().map(|value| value * value).sum();
    let scale = (squares / values.len() as f32 + 1e-6).sqrt();
    values.iter().map(|value| value / scale).collect()
}

/// The weights of all layers, and tokens to vectors and back.
pub struct Model {
    embedding: Matrix,
    head: Matrix,
    /// In order.
    pub layers: Vec<Layer>,
}

impl Model {
    /// A model with layers of these kinds.
    pub fn random(kinds: &[LayerKind], seed: u64) -> Self {
        let random = &mut StdRng::seed_from_u64(seed);
        Self {
            embedding: Matrix::random(random, VOCABULARY, HIDDEN),
            head: Matrix::random(random, HIDDEN, VOCABULARY),
            layers: kinds.iter().map(|&kind| Layer::random(random, kind)).collect(),
        }
    }

    /// The hidden state that a token starts from.
    pub fn embed(&self, token: usize) -> Vec<f32> {
        normed(&self.embedding.0[token])
    }

    /// The likeliest token after an output.
    pub fn next_token(&self, output: &[f32]) -> usize {
        let scores = self.head.times(&normed(output));
        (0..VOCABULARY).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).expect("tokens")
    }
}

//! Stories: random tokens of one request as every layer of a model sees them, and what a cache must hold for them.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{CacheConfig, LayerId};
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::{EncodedKey, KeyFormat};
use dsv4_kv_oracle::number::{bf16_nearest, bf16_value};
use dsv4_kv_oracle::row::EncodedRow;
use kv_layout::geometry::{CompressorKind, LayerKind};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::history::{History, shape};
use crate::inputs::{oracle, rows};
use crate::model::{OnDevice, assert_rounds, ring};

/// Maximum tokens of a step of a cache of [`config`].
pub const STEP_TOKENS: u32 = 512;

/// The kinds of the layers of the preset `tiny`.
#[must_use]
pub fn tiny() -> Vec<LayerKind> {
    ModelConfig::preset("tiny").unwrap().layers
}

/// The formats of main rows and of indexer keys in a cache.
pub type Formats = (MainFormat, IndexFormat);

/// A small cache of a model with these kinds of layers.
pub fn config(layers: &[LayerKind], formats: Formats, max_requests: u32) -> CacheConfig {
    let tiny = ModelConfig::preset("tiny").unwrap();
    CacheConfig {
        main_format: formats.0,
        index_format: formats.1,
        max_requests,
        num_blocks: 5 * max_requests,
        max_context: 640,
        max_step_tokens: STEP_TOKENS,
        // The last layer of the preset is a draft layer.
        ..CacheConfig::new(ModelConfig {
            mtp_layers: if layers == tiny.layers { tiny.mtp_layers } else { 0 },
            layers: layers.to_vec(),
            ..tiny
        })
    }
}

/// The compressors of a layer.
pub fn compressors(kind: LayerKind) -> &'static [CompressorKind] {
    match kind {
        LayerKind::Swa => &[],
        LayerKind::Csa => &[CompressorKind::CsaMain, CompressorKind::CsaIndex],
        LayerKind::Hca => &[CompressorKind::Hca],
    }
}

/// The tokens of one request as one layer sees them.
struct Seen {
    /// `[tokens]` of `[512]`: keys of the sliding window, BF16 bits.
    rows: Vec<Vec<u16>>,
    /// One per compressor of the layer. The weights are the same in all stories.
    histories: Vec<History>,
}

/// The contents of a request's blocks in one layer.
pub struct Stored {
    /// The compressed entries, oldest first.
    pub entries: Vec<EncodedRow>,
    /// The indexer keys, oldest first.
    pub keys: Vec<EncodedKey>,
}

/// The tokens of one request, as each layer sees them.
pub struct Story {
    layers: Vec<Seen>,
    tokens: usize,
}

impl Story {
    /// A story of random tokens. Stories of different seeds share only the weights of the compressors.
    pub fn random(layers: &[LayerKind], tokens: usize, seed: u64) -> Self {
        Self::of_rows(layers, tokens, seed, &rows)
    }

    /// As [`Self::random`], with window keys made by `rows`, which takes a number of tokens and a seed that differs per
    /// layer.
    pub fn of_rows(
        layers: &[LayerKind],
        tokens: usize,
        seed: u64,
        rows: &dyn Fn(usize, u64) -> Vec<Vec<u16>>,
    ) -> Self {
        let layers = layers.iter().zip(1000..).map(|(&kind, layer)| {
            let history = |(&stream, at): (&CompressorKind, u64)| {
                let History { ape, norm, .. } = History::random(stream, 1, 10 * layer + at);
                let own = History::random(stream, tokens, 10 * (1000 * seed + layer) + at);
                History { ape, norm, ..own }
            };
            let histories = compressors(kind).iter().zip(0..).map(history).collect();
            Seen { rows: rows(tokens, 1000 * seed + layer), histories }
        });
        Self { layers: layers.collect(), tokens }
    }

    /// One story made of several: story `i` gives the tokens from the end of the previous one up to its own end
    /// position.
    ///
    /// # Panics
    /// If there are no stories, or a story has fewer tokens than its end position.
    #[must_use]
    pub fn spliced(stories: &[(&Self, usize)]) -> Self {
        let starts = || std::iter::once(0).chain(stories.iter().map(|&(_, end)| end));
        let pieces = || starts().zip(stories).map(|(from, &(story, end))| (story, from..end));
        let of_layer = |layer: usize| {
            let rows = pieces().flat_map(|(story, range)| story.layers[layer].rows[range].to_vec());
            let first = &stories[0].0.layers[layer].histories;
            let history = |(at, first): (usize, &History)| {
                let (mut kv, mut gate) = (Vec::new(), Vec::new());
                for (story, range) in pieces() {
                    let part = story.layers[layer].histories[at].projections(range);
                    kv.extend(part.0);
                    gate.extend(part.1);
                }
                let (ape, norm) = (first.ape.clone(), first.norm.clone());
                History { stream: first.stream, kv, gate, ape, norm }
            };
            let histories = first.iter().enumerate().map(history).collect();
            Seen { rows: rows.collect(), histories }
        };
        let layers = (0..stories[0].0.layers.len()).map(of_layer).collect();
        Self { layers, tokens: stories.last().map_or(0, |&(_, end)| end) }
    }

    /// Number of tokens of the story.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The sliding-window keys of a layer, `[tokens]` of `[512]` BF16.
    #[must_use]
    pub fn window_rows(&self, layer: LayerId) -> &[Vec<u16>] {
        &self.layers[layer.0 as usize].rows
    }

    /// The inputs of the compressors of a layer.
    #[must_use]
    pub fn histories(&self, layer: LayerId) -> &[History] {
        &self.layers[layer.0 as usize].histories
    }

    /// The entries and indexer keys that each layer stores for the story. Each compressor runs alone over the whole
    /// story in one chunk; its entries are checked against those of the oracle, and the oracle encodes them.
    pub fn stored<B: Backend>(&self, device: &Device<B>, formats: Formats) -> Vec<Stored> {
        let (main, index) = (oracle(formats.0), KeyFormat::from_name(formats.1.name()).unwrap());
        let of_layer = |seen: &Seen| {
            let mut stored = Stored { entries: Vec::new(), keys: Vec::new() };
            for history in &seen.histories {
                let entries = entries_alone(device, history);
                if history.stream == CompressorKind::CsaIndex {
                    stored.keys = entries.iter().map(|key| index.encode(&rotated(key))).collect();
                } else {
                    stored.entries = entries.iter().map(|entry| main.encode(entry)).collect();
                }
            }
            stored
        };
        self.layers.iter().map(of_layer).collect()
    }
}

/// The entries of a history that a separate compressor computes in one chunk.
pub fn entries_alone<B: Backend>(device: &Device<B>, history: &History) -> Vec<Vec<u16>> {
    let compressor = OnDevice::new(device, history, 1, ring(history.stream, 1));
    let entries = compressor.feed(history, [history.tokens()]);
    assert_eq!(entries.len(), history.tokens() / shape(history.stream).ratio);
    for (i, entry) in entries.iter().enumerate() {
        let want: Vec<f32> = history.oracle().entry(i).iter().map(|&x| x as f32).collect();
        assert_rounds(entry, &want, 5e-6, &format!("{:?} entry {i}", history.stream));
    }
    entries
}

/// An indexer key after the Hadamard transform, by f32 additions of neighbours at distances 1, 2, .. 64, as the kernels
/// do it. It is checked against the exact transform, from which it may differ by the rounding of a value.
pub fn rotated(key: &[u16]) -> Vec<u16> {
    let scale = (1.0 / 128_f64.sqrt()) as f32;
    let exact: Vec<f64> = key.iter().map(|&bits| bf16_value(bits)).collect();
    let mut values: Vec<f32> = exact.iter().map(|&value| value as f32).collect();
    for distance in [1, 2, 4, 8, 16, 32, 64] {
        for low in (0..key.len()).filter(|low| low & distance == 0) {
            let (a, b) = (values[low], values[low + distance]);
            (values[low], values[low + distance]) = (a + b, a - b);
        }
    }
    let rotated: Vec<u16> = values.iter().map(|value| bf16_nearest(value * scale)).collect();
    let exact: Vec<f32> = hadamard(&exact).iter().map(|&value| value as f32).collect();
    assert_rounds(&rotated, &exact, 2e-6, "the rotation of an indexer key");
    rotated
}

//! Input of a compressor: a token history and weights.

use dsv4_kv_oracle::compressor::{Compressor, Shape};
use kv_layout::geometry::CompressorKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::golden;

/// The shape of this compressor in the oracle.
pub fn shape(stream: CompressorKind) -> Shape {
    match stream {
        CompressorKind::CsaMain => Shape::CSA,
        CompressorKind::CsaIndex => Shape::INDEX,
        CompressorKind::Hca => Shape::HCA,
    }
}

/// Input of a compressor: a token history from position 0, and weights.
#[derive(Clone)]
pub struct History {
    /// The compressor that reads it.
    pub stream: CompressorKind,
    /// `[tokens, columns]`: keys.
    pub kv: Vec<f32>,
    /// `[tokens, columns]`: gates.
    pub gate: Vec<f32>,
    /// `[ratio, columns]`: the position bias.
    pub ape: Vec<f32>,
    /// `[channels]`: weights of the norm.
    pub norm: Vec<f32>,
}

impl History {
    /// The history of the golden vectors.
    ///
    /// # Panics
    /// If a file cannot be read.
    #[must_use]
    pub fn golden(stream: CompressorKind) -> Self {
        let name = match stream {
            CompressorKind::CsaMain => "csa",
            CompressorKind::CsaIndex => "idx",
            CompressorKind::Hca => "hca",
        };
        let load = |what: &str| golden::load::<f32>(&format!("{name}_{what}")).unwrap().data;
        let (kv, gate) = (load("kv"), load("gate"));
        Self { stream, kv, gate, ape: load("ape"), norm: load("norm_w") }
    }

    /// Random projections and weights.
    pub fn random(stream: CompressorKind, tokens: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let Shape { ratio, channels, .. } = shape(stream);
        let columns = shape(stream).columns();
        let mut values = |count, size: f32| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-size..size)).collect()
        };
        Self {
            stream,
            kv: values(tokens * columns, 4.0),
            gate: values(tokens * columns, 6.0),
            ape: values(ratio * columns, 1.0),
            norm: values(channels, 2.0),
        }
    }

    /// Number of tokens in the history.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.kv.len() / shape(self.stream).columns()
    }

    /// The same input as the oracle takes it.
    #[must_use]
    pub fn oracle(&self) -> Compressor<'_> {
        let Self { stream, kv, gate, ape, norm } = self;
        Compressor { shape: shape(*stream), kv, gate, ape, norm_w: norm }
    }

    /// Projections of the tokens `range`.
    pub fn projections(&self, range: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let columns = shape(self.stream).columns();
        let cut = range.start * columns..range.end * columns;
        (self.kv[cut.clone()].to_vec(), self.gate[cut].to_vec())
    }
}

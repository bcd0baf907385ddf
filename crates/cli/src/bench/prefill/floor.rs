//! Lower bounds of the time of a kernel: a copy of its bytes, or its products at the rate of the tensor cores.

use std::fmt;

use anyhow::Result;
use dsv4_kv::device::{Backend, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{
    CSA_RATIO, CompressorKind, HCA_RATIO, HEAD_DIM, INDEX_DIM, WINDOW, swa_ring_rows,
};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;

use super::super::timing::time_copy;

/// Dense BF16 products of an H200, in operations per second: the best measured rate.
const BF16: f64 = 790e12;
/// Dense 8-bit products of an H200, in operations per second, as specified.
const EIGHT_BITS: f64 = 1979e12;
/// Bytes of a row in BF16.
const ROW: u64 = 2 * HEAD_DIM as u64;

/// Microseconds of BF16 operations at the rate of the tensor cores.
pub fn bf16_microseconds(operations: f64) -> f64 {
    operations / BF16 * 1e6
}

/// A chunk of a request.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Tokens of the request before it.
    pub past: u32,
}

/// The bound of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Floor {
    /// Bytes: every input read once, every output written once.
    Copy(u64),
    /// Operations, at the BF16 rate.
    Bf16(f64),
    /// Operations, at the rate of 8-bit products.
    EightBits(f64),
}

impl Floor {
    /// The bound in microseconds. A copy is measured, as one of `nodes` nodes of a graph.
    pub fn microseconds<B: Backend>(self, stream: &Stream<B>, nodes: u64) -> Result<f64> {
        match self {
            Self::Copy(bytes) => time_copy(stream, (bytes, nodes)),
            Self::Bf16(operations) => Ok(bf16_microseconds(operations)),
            Self::EightBits(operations) => Ok(operations / EIGHT_BITS * 1e6),
        }
    }
}

impl fmt::Display for Floor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy(bytes) => write!(f, "copy of {:.2} MB", *bytes as f64 / 1e6),
            Self::Bf16(operations) => {
                write!(f, "{:.1} GFLOP at {:.0} TFLOP/s", operations / 1e9, BF16 / 1e12)
            }
            Self::EightBits(operations) => {
                write!(f, "{:.1} GOP at {:.0} TOP/s", operations / 1e9, EIGHT_BITS / 1e12)
            }
        }
    }
}

impl Chunk {
    fn tokens(self) -> u64 {
        self.tokens.into()
    }

    /// Bytes of the keys and gates of a compressor.
    fn projections_of(self, compressor: CompressorKind) -> u64 {
        self.tokens() * 2 * 4 * u64::from(compressor.columns())
    }

    pub fn update_csa(self) -> Floor {
        let read = [CompressorKind::CsaMain, CompressorKind::CsaIndex];
        let read: u64 = read.into_iter().map(|of| self.projections_of(of)).sum();
        let row = MainFormat::default().row_bytes() + IndexFormat::default().row_bytes();
        Floor::Copy(read + self.tokens() / u64::from(CSA_RATIO) * row)
    }

    pub fn update_hca(self) -> Floor {
        let entries = self.tokens() / u64::from(HCA_RATIO);
        let written = entries * MainFormat::default().row_bytes();
        Floor::Copy(self.projections_of(CompressorKind::Hca) + written)
    }

    /// The projections of the indexer's queries and of their head weights.
    pub fn projections(self, model: &ModelConfig) -> Floor {
        let heads = f64::from(model.index_heads);
        let query = heads * f64::from(INDEX_DIM) * f64::from(model.q_lora_rank);
        let weights = heads * f64::from(model.hidden_size);
        Floor::Bf16(2.0 * f64::from(self.tokens) * (query + weights))
    }

    pub fn index_query(self, model: &ModelConfig) -> Floor {
        let heads = u64::from(model.index_heads);
        let read = 4 * heads * u64::from(INDEX_DIM + 1);
        let written = u64::from(IndexFormat::default().query_bytes()) + 4 * heads;
        Floor::Copy(self.tokens() * (read + written))
    }

    /// Every query with every key that it sees.
    pub fn scores(self, model: &ModelConfig) -> Floor {
        let seen = |token: u64| (u64::from(self.past) + token + 1) / u64::from(CSA_RATIO);
        let pairs: u64 = (0..self.tokens()).map(seen).sum();
        Floor::EightBits(2.0 * pairs as f64 * f64::from(model.index_heads) * f64::from(INDEX_DIM))
    }

    pub fn windows(self) -> Floor {
        let older = u64::from(self.past.min(WINDOW - 1)) * MainFormat::default().row_bytes();
        let rows: u64 = (0..self.tokens())
            .map(|token| (u64::from(self.past) + token + 1).min(WINDOW.into()))
            .sum();
        Floor::Copy(older + (self.tokens() + rows) * ROW)
    }

    pub fn append(self, drafts: u32) -> Floor {
        let rows = self.tokens().min(swa_ring_rows(drafts + 1).into());
        Floor::Copy(4 * self.tokens() + rows * (ROW + MainFormat::default().row_bytes()))
    }
}

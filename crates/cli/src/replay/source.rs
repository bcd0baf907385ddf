//! Where the cache's inputs come from: pools of random values, of which each layer of each step reads
//! a part.
//!
//! The pools are uploaded once. Where a tensor begins in its pool changes from step to step, from
//! layer to layer and from tensor to tensor, so that a row taken from the wrong one is noticed.

use dsv4_kv::kv_layout::format::bf16_from_f32;
use dsv4_kv::kv_layout::geometry::{CompressorKind, HEAD_DIM, INDEX_DIM};
use dsv4_kv::kv_layout::index_row::QUERY_HEADS;
use dsv4_kv_oracle::compressor::Shape;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::select::MOST_QUERIES;

/// Rows at which a tensor may begin.
const STARTS: u32 = 1024;
/// Columns of a row of the f32 pool: those of the widest tensor.
const COLUMNS: u32 = 2 * HEAD_DIM;
/// Rows of the f32 pool that the largest weights take: `[128, 512]`.
const WEIGHT_ROWS: u32 = 128 * HEAD_DIM / COLUMNS;
/// Elements of the f32 pool that the queries of a batch take: `[256, 64 * 128]`.
const QUERIES: u32 = MOST_QUERIES * QUERY_HEADS * INDEX_DIM;
/// Rows of the f32 pool that they take with their weights: `[256, 64]`.
const QUERY_ROWS: u32 = (QUERIES + MOST_QUERIES * QUERY_HEADS) / COLUMNS;
/// Tensors that begin at rows of their own: KV rows, four for each of three compressors, and the
/// indexer's.
const TENSORS: u64 = 14;

/// The pools.
#[derive(Debug)]
pub struct Source {
    /// `[rows, 512]` BF16 bits.
    rows: Vec<u16>,
    /// `[wide_rows, 1024]`
    floats: Vec<f32>,
    layers: u32,
}

/// Where a compressor's tensors begin in the f32 pool, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    /// `[tokens, columns]`: keys of the step.
    pub kv: usize,
    /// `[tokens, columns]`: gates of the step.
    pub gate: usize,
    /// `[ratio, columns]`: position bias of the layer.
    pub ape: usize,
    /// `[channels]`: norm weights of the layer.
    pub norm: usize,
}

/// Where the indexer's inputs for a batch of queries begin in the f32 pool, in elements.
#[derive(Clone, Copy, Debug)]
pub struct QueryOffsets {
    /// `[queries, heads * 128]`: projected queries.
    pub query: usize,
    /// `[queries, heads]`: projected weights of the heads.
    pub weight: usize,
}

/// What a compressor's tensors look like.
pub const fn shape(which: CompressorKind) -> Shape {
    match which {
        CompressorKind::CsaMain => Shape::CSA,
        CompressorKind::CsaIndex => Shape::INDEX,
        CompressorKind::Hca => Shape::HCA,
    }
}

impl Source {
    /// Rows of the BF16 pool for steps of up to `step_tokens` tokens.
    pub fn rows(step_tokens: u32) -> u32 {
        step_tokens + STARTS - 1
    }

    /// Elements of the f32 pool for such steps.
    pub fn floats(step_tokens: u32) -> u64 {
        let longest = step_tokens.max(WEIGHT_ROWS).max(QUERY_ROWS);
        u64::from(Self::rows(longest)) * u64::from(COLUMNS)
    }

    /// Normally distributed rows, each times a power of two from 2^-4 to 2^4, so that scales differ;
    /// and normally distributed f32 of deviation 2, so that some gates weigh much more than others.
    pub fn new(seed: u64, step_tokens: u32, layers: u32) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut rows = Vec::new();
        for _ in 0..Self::rows(step_tokens) {
            let size = f32::from(rng.random_range(-4i8..=4)).exp2();
            rows.extend((0..HEAD_DIM).map(|_| {
                let value: f32 = StandardNormal.sample(&mut rng);
                bf16_from_f32(value * size)
            }));
        }
        let mut float = || {
            let value: f32 = StandardNormal.sample(&mut rng);
            2.0 * value
        };
        let floats = (0..Self::floats(step_tokens)).map(|_| float()).collect();
        Self { rows, floats, layers }
    }

    /// All rows, `[rows, 512]` BF16 bits.
    pub fn as_slice(&self) -> &[u16] {
        &self.rows
    }

    /// All f32 values.
    pub fn as_floats(&self) -> &[f32] {
        &self.floats
    }

    /// One row, `[512]` BF16 bits.
    pub fn row(&self, row: u32) -> &[u16] {
        &self.rows[(row * HEAD_DIM) as usize..][..HEAD_DIM as usize]
    }

    /// The row of the BF16 pool that is the first token's in the given step and layer.
    pub fn first_row(&self, step: u64, layer: u32) -> u32 {
        self.start(step, layer, 0)
    }

    /// Where the tensors of a compressor begin. Weights are the same in every step.
    pub fn offsets(&self, step: u64, layer: u32, which: CompressorKind) -> Offsets {
        let first: u64 = match which {
            CompressorKind::CsaMain => 1,
            CompressorKind::CsaIndex => 5,
            CompressorKind::Hca => 9,
        };
        let columns = shape(which).columns();
        let at = |step, tensor: u64| self.start(step, layer, first + tensor) as usize * columns;
        Offsets { kv: at(step, 0), gate: at(step, 1), ape: at(0, 2), norm: at(0, 3) }
    }

    /// Where the indexer's inputs begin for a batch of up to [`MOST_QUERIES`] queries from `first` on.
    pub fn query_offsets(&self, step: u64, layer: u32, first: u32) -> QueryOffsets {
        let row = self.start(step, layer, 13) ^ scattered(first.into());
        let query = (row * COLUMNS) as usize;
        QueryOffsets { query, weight: query + QUERIES as usize }
    }

    fn start(&self, step: u64, layer: u32, tensor: u64) -> u32 {
        scattered((step * u64::from(self.layers) + u64::from(layer)) * TENSORS + tensor)
    }
}

/// A row below [`STARTS`] by Fibonacci hashing: the top bits of a multiple of 2^64 / golden ratio.
fn scattered(key: u64) -> u32 {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - STARTS.ilog2())) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_stay_inside_the_pool_and_begin_at_different_rows() {
        let source = Source::new(3, 16, 5);
        assert_eq!(source.as_slice().len(), 1039 * 512);
        let starts: Vec<_> =
            (0..200).flat_map(|step| (0..5).map(move |layer| (step, layer))).collect();
        let mut starts: Vec<_> =
            starts.into_iter().map(|(step, layer)| source.first_row(step, layer)).collect();
        assert!(starts.iter().all(|&start| start + 16 <= Source::rows(16)));
        assert!(starts.windows(2).all(|pair| pair[0] != pair[1]));
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() > 600, "{} different of 1000", starts.len());
    }

    #[test]
    fn rows_differ_from_each_other() {
        let source = Source::new(3, 1, 1);
        assert!((1..1024).all(|row| source.row(row) != source.row(row - 1)));
    }

    #[test]
    fn tensors_of_compressors_lie_inside_the_pool_and_weights_stay() {
        let source = Source::new(3, 16, 5);
        let floats = source.as_floats().len();
        for which in [CompressorKind::CsaMain, CompressorKind::CsaIndex, CompressorKind::Hca] {
            let shape = shape(which);
            let first = source.offsets(0, 2, which);
            for step in 0..200 {
                let Offsets { kv, gate, ape, norm } = source.offsets(step, 2, which);
                assert_eq!((ape, norm), (first.ape, first.norm));
                assert_ne!(kv, gate);
                assert!(kv.max(gate) + 16 * shape.columns() <= floats);
                assert!(ape + shape.ratio * shape.columns() <= floats);
                assert!(norm + shape.channels <= floats);
            }
        }
    }

    #[test]
    fn batches_of_queries_lie_inside_the_pool_and_begin_at_different_rows() {
        let source = Source::new(3, 16, 5);
        let floats = source.as_floats().len();
        let mut starts = Vec::new();
        for first in (0..16).map(|batch| batch * MOST_QUERIES) {
            for step in 0..20 {
                let QueryOffsets { query, weight } = source.query_offsets(step, 2, first);
                assert!(query + 256 * 64 * 128 <= weight && weight + 256 * 64 <= floats);
                starts.push(query);
            }
        }
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() > 250, "{} different of 320", starts.len());
    }
}

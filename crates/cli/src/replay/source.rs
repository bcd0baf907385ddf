//! The cache's inputs: pools of random values.
//!
//! The rows of a token depend on the token and on those before it ([`Prefix`]), so that requests share what they could
//! share with a model. There are several *sets* of rows, which layers use in turn, so that a row that is read from the
//! wrong layer is noticed. Weights differ from layer to layer, the indexer's queries from batch to batch.

use std::ops::Range;

use dsv4_kv::kv_layout::format::bf16_from_f32;
use dsv4_kv::kv_layout::geometry::{CompressorKind, HEAD_DIM, INDEX_DIM};
use dsv4_kv::kv_layout::index_row::QUERY_HEADS;
use dsv4_kv_oracle::compressor::Shape;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::history::Prefix;
use super::select::MAX_QUERIES;

/// Number of sets of KV rows.
pub const ROW_SETS: u32 = 4;
/// Number of sets of keys of a compressor, and as many of gates.
const VALUE_SETS: u32 = 2;
/// Number of sets of keys and gates together.
pub const VALUE_TENSORS: u32 = 2 * VALUE_SETS;
/// Number of pool rows at which a token's row or a tensor may begin.
const STARTS: u32 = 1024;
/// Columns of a row of the f32 pool, as many as the widest tensor has.
const COLUMNS: u32 = 2 * HEAD_DIM;
/// Elements of the f32 pool for the queries of a batch: `[256, 64 * 128]`.
const QUERIES: u32 = MAX_QUERIES * QUERY_HEADS * INDEX_DIM;
/// Rows of the f32 pool for these queries with their weights (`[256, 64]`): more than for any other tensor.
const QUERY_ROWS: u32 = (QUERIES + MAX_QUERIES * QUERY_HEADS) / COLUMNS;
/// Number of tensors of a layer that begin at their own row: two weights of each of three compressors, and the
/// indexer's inputs.
const TENSORS: u64 = 7;

const _: () = assert!(QUERY_ROWS >= 128 * HEAD_DIM / COLUMNS);

/// The pools of random values.
#[derive(Debug)]
pub struct Source {
    /// `[1024, 512]` BF16 bits.
    rows: Vec<u16>,
    /// `[rows, 1024]`
    floats: Vec<f32>,
    layers: u32,
}

/// One of the sets of a compressor's keys or gates, below [`VALUE_TENSORS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueTensor(pub u32);

impl ValueTensor {
    /// The keys of a layer. Neighbouring layers of one kind are two layers apart.
    pub const fn keys(layer: u32) -> Self {
        Self(layer / 2 % VALUE_SETS)
    }

    /// The gates of a layer. They differ from those of the layers with the same keys.
    pub const fn gates(layer: u32) -> Self {
        Self(VALUE_SETS + layer / 2 / VALUE_SETS % VALUE_SETS)
    }
}

/// Offsets of a compressor's weights in the f32 pool, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightOffsets {
    /// `[ratio, columns]`: position bias of the layer.
    pub ape: usize,
    /// `[channels]`: norm weights of the layer.
    pub norm: usize,
}

/// Offsets of the indexer's inputs for a batch of queries in the f32 pool, in elements.
#[derive(Clone, Copy, Debug)]
pub struct QueryOffsets {
    /// `[queries, heads * 128]`: projected queries.
    pub query: usize,
    /// `[queries, heads]`: projected weights of the heads.
    pub weight: usize,
}

/// The shapes of a compressor's tensors.
pub const fn shape(which: CompressorKind) -> Shape {
    match which {
        CompressorKind::CsaMain => Shape::CSA,
        CompressorKind::CsaIndex => Shape::INDEX,
        CompressorKind::Hca => Shape::HCA,
    }
}

/// The number of a compressor, for hashing.
const fn number(which: CompressorKind) -> u64 {
    match which {
        CompressorKind::CsaMain => 0,
        CompressorKind::CsaIndex => 1,
        CompressorKind::Hca => 2,
    }
}

impl Source {
    /// Number of elements of the f32 pool.
    pub fn floats() -> u64 {
        u64::from(STARTS - 1 + QUERY_ROWS) * u64::from(COLUMNS)
    }

    /// Normally distributed rows, each multiplied by a power of two from 2^-4 to 2^4, so that scales differ; and
    /// normally distributed f32 values of deviation 2, so that some gates have much more weight than others.
    pub fn new(seed: u64, layers: u32) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut rows = Vec::new();
        for _ in 0..STARTS {
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
        let floats = (0..Self::floats()).map(|_| float()).collect();
        Self { rows, floats, layers }
    }

    /// Number of rows of the BF16 pool.
    pub fn rows(&self) -> usize {
        self.rows.len() / HEAD_DIM as usize
    }

    /// All f32 values.
    pub fn as_floats(&self) -> &[f32] {
        &self.floats
    }

    /// One row, `[512]` BF16 bits.
    pub fn row(&self, row: u32) -> &[u16] {
        &self.rows[(row * HEAD_DIM) as usize..][..HEAD_DIM as usize]
    }

    /// The set of KV rows that a layer uses.
    pub fn row_set(layer: u32) -> u32 {
        layer % ROW_SETS
    }

    /// The row of the BF16 pool for a token in a set.
    pub fn row_of(prefix: Prefix, set: u32) -> u32 {
        scattered(prefix.0.wrapping_add(set.into()))
    }

    /// The range of a token's keys or gates for a compressor in the f32 pool.
    pub fn values_of(prefix: Prefix, which: CompressorKind, tensor: ValueTensor) -> Range<usize> {
        let columns = shape(which).columns();
        let first = u64::from(ROW_SETS) + number(which) * u64::from(VALUE_TENSORS);
        let row = scattered(prefix.0.wrapping_add(first + u64::from(tensor.0))) as usize;
        row * columns..(row + 1) * columns
    }

    /// Offsets of the weights of a compressor.
    pub fn weights(&self, layer: u32, which: CompressorKind) -> WeightOffsets {
        let columns = shape(which).columns();
        let at = |tensor| self.start(0, layer, 2 * number(which) + tensor) as usize * columns;
        WeightOffsets { ape: at(0), norm: at(1) }
    }

    /// Offsets of the indexer's inputs for a batch of up to [`MAX_QUERIES`] queries that begins with query `first`.
    pub fn query_offsets(&self, step: u64, layer: u32, first: u32) -> QueryOffsets {
        let row = self.start(step, layer, 6) ^ scattered(first.into());
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

    /// The prefixes of a text.
    fn prefixes(count: u32) -> Vec<Prefix> {
        Prefix::EMPTY.each(&(0..count).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn prefixes_and_sets_have_different_rows() {
        let sets = |&prefix: &Prefix| (0..ROW_SETS).map(move |set| Source::row_of(prefix, set));
        let prefixes = prefixes(200);
        let mut rows: Vec<_> = prefixes.iter().flat_map(sets).collect();
        for of_token in rows.chunks(ROW_SETS as usize) {
            assert!((1..of_token.len()).all(|set| !of_token[..set].contains(&of_token[set])));
        }
        rows.sort_unstable();
        rows.dedup();
        assert!(rows.len() > 500 && rows.last() < Some(&STARTS), "{} different of 800", rows.len());
        let other = Prefix::EMPTY.then(1).then(1);
        assert_ne!(other, prefixes[1]);
    }

    #[test]
    fn rows_differ_from_each_other() {
        let source = Source::new(3, 1);
        assert_eq!(source.rows(), 1024);
        assert!((1..1024).all(|row| source.row(row) != source.row(row - 1)));
    }

    #[test]
    fn tensors_of_compressors_lie_inside_the_pool_and_neighbours_differ() {
        let source = Source::new(3, 5);
        let floats = source.as_floats().len();
        for which in [CompressorKind::CsaMain, CompressorKind::CsaIndex, CompressorKind::Hca] {
            let shape = shape(which);
            for prefix in prefixes(200) {
                let of = |tensor| Source::values_of(prefix, which, ValueTensor(tensor));
                assert!((0..VALUE_TENSORS).all(|tensor| of(tensor).end <= floats));
                assert!((1..VALUE_TENSORS).all(|tensor| of(tensor) != of(tensor - 1)));
            }
            for layer in 0..5 {
                let WeightOffsets { ape, norm } = source.weights(layer, which);
                assert_ne!(source.weights(layer + 1, which), WeightOffsets { ape, norm });
                assert!(ape + shape.ratio * shape.columns() <= floats);
                assert!(norm + shape.channels <= floats);
            }
        }
        // A layer has other keys or other gates than the next two layers of its kind.
        let tensors = |layer| (ValueTensor::keys(layer), ValueTensor::gates(layer));
        assert!((0..40).all(|layer| tensors(layer) != tensors(layer + 2)));
        assert!((0..40).all(|layer| tensors(layer) != tensors(layer + 4)));
        assert!((0..40).all(|layer| Source::row_set(layer) != Source::row_set(layer + 1)));
    }

    #[test]
    fn batches_of_queries_lie_inside_the_pool_and_begin_at_different_rows() {
        let source = Source::new(3, 5);
        let floats = source.as_floats().len();
        let mut starts = Vec::new();
        for first in (0..16).map(|batch| batch * MAX_QUERIES) {
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

//! Attention in place for the queries that gather: random heads, and the results that are kept for verification.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::kv_layout::geometry::HEAD_DIM;
use dsv4_kv::step::{AttentionTensors, QueryForm};
use dsv4_kv::{KvError, LayerId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::kept::Shape;
use super::select::MAX_QUERIES;

/// Number of heads of a sampled query whose results are recomputed.
pub const CHECKED: u32 = 2;
/// Number of pool rows at which the heads of a batch may begin.
const STARTS: u32 = 1024;
/// Standard deviation of the values of a head, chosen so that scores with the largest rows differ by several units.
const DEVIATION: f32 = 0.25;

/// The shape of the results of a query: one row per head. Heads need no names, so the single word is not read.
pub fn results(heads: u32) -> Shape {
    Shape { rows: heads, words: 1 }
}

/// Elements of the pool of heads, and of the results of a batch.
fn elements(heads: u32) -> [u64; 2] {
    let batch = MAX_QUERIES * heads;
    [STARTS + batch, batch].map(|rows| u64::from(rows) * u64::from(HEAD_DIM))
}

/// Bytes of device memory for attention with `heads` heads.
pub fn bytes(heads: u32) -> u64 {
    let [pool, out] = elements(heads);
    2 * (pool + out) + 4 * u64::from(heads)
}

/// The heads of all batches: a pool of random rows, and the sinks.
pub struct HeadSource {
    /// `[rows, 512]` BF16.
    pool: Vec<bf16>,
    /// One per head.
    sinks: Vec<f32>,
}

impl HeadSource {
    /// Normally distributed heads, and sinks between -4 and 4.
    pub fn new(seed: u64, heads: u32) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0xA77E);
        let normal = Normal::new(0.0_f32, DEVIATION).expect("a deviation");
        let pool =
            (0..elements(heads)[0]).map(|_| bf16::from_f32(normal.sample(&mut rng))).collect();
        Self { pool, sinks: (0..heads).map(|_| rng.random_range(-4.0..4.0)).collect() }
    }

    /// Number of heads of a query.
    pub fn heads(&self) -> u32 {
        self.sinks.len() as u32
    }

    /// The pool row at which the heads of a batch begin. `first` is the batch's first query.
    fn start(step: u64, layer: LayerId, first: u32) -> u32 {
        let mixed = (step << 32 ^ u64::from(layer.0) << 24 ^ u64::from(first))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 32) as u32 % STARTS
    }

    /// A head of query `query` of a batch (`[512]`), and its sink.
    pub fn head(
        &self,
        (step, layer): (u64, LayerId),
        (first, query): (u32, u32),
        head: u32,
    ) -> (&[bf16], f32) {
        let row = Self::start(step, layer, first) + (query - first) * self.heads() + head;
        (&self.pool[(row * HEAD_DIM) as usize..][..HEAD_DIM as usize], self.sinks[head as usize])
    }
}

/// A head of a query that attended. Vectors are `[512]`.
pub struct Head<'a> {
    /// Its index.
    pub number: u32,
    /// The query vector, after norm and RoPE.
    pub query: &'a [bf16],
    /// Its sink.
    pub sink: f32,
    /// The result on the device, as BF16 bits.
    pub got: &'a [u16],
}

/// Heads and results on the device.
pub struct Attend<B: Backend> {
    pool: Buffer<B, bf16>,
    sinks: Buffer<B, f32>,
    /// `[MAX_QUERIES, heads, 512]`: results of the current batch.
    pub out: Buffer<B, bf16>,
    /// Number of heads of a query.
    pub heads: u32,
}

impl<B: Backend> Attend<B> {
    /// Copies the heads to the device.
    pub fn new(device: &Device<B>, stream: &Stream<B>, from: &HeadSource) -> Result<Self, KvError> {
        let heads = from.heads();
        let [pool, out] = elements(heads);
        let pool = device.allocate("heads", pool)?;
        let sinks = device.allocate("sinks", heads.into())?;
        stream.upload(&from.pool, &pool, 0)?;
        stream.upload(&from.sinks, &sinks, 0)?;
        Ok(Self { pool, sinks, out: device.allocate("results of attention", out)?, heads })
    }

    /// Passes the heads of a batch of `queries` queries to `attend`. `first` is the batch's first query.
    pub fn with(
        &self,
        (step, layer): (u64, LayerId),
        (first, queries): (u32, u32),
        attend: impl FnOnce(&AttentionTensors<'_, B>) -> Result<(), KvError>,
    ) -> Result<()> {
        let row = u64::from(HeadSource::start(step, layer, first)) * u64::from(HEAD_DIM);
        let len = u64::from(queries * self.heads) * u64::from(HEAD_DIM);
        let query = &self.pool.slice(row, len).context("heads lie inside the pool")?;
        let Self { sinks, out, heads, .. } = self;
        let form = QueryForm::Rotated;
        Ok(attend(&AttentionTensors { heads: *heads, query, form, sinks, out, lse: None })?)
    }
}

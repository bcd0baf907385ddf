//! Queries computed from activations in one launch, with query weights in NVFP4 and in BF16. They equal, byte for byte,
//! those of two launches: the product, then `index_query`.

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream};
use dsv4_kv::ops::{self, IndexQueries, QueryProduct, QueryQuantisation, StepQueries};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv_linear::ops::{Bf16Weight, multiply_bf16};
use dsv4_kv_linear::{Nvfp4Linear, Nvfp4Matrix};
use half::bf16;
use kv_layout::config::CompressRope;
use kv_layout::index_row::IndexFormat;
use kv_layout::linear::MAX_DECODE_BATCH;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::indexer::query::{CANARY, CHANNELS};
use crate::inputs::{download, upload, upload_bf16};
use crate::refused::named;

/// A batch of queries, some of them padding, and the query weight of an indexer.
struct Case<B: Backend> {
    stream: Stream<B>,
    tokens: u32,
    heads: u32,
    latent: Buffer<B, bf16>,
    weight: Nvfp4Linear<B>,
    bf16: Buffer<B, bf16>,
    projected_weight: Buffer<B, f32>,
    frequencies: Buffer<B, f32>,
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
}

impl<B: Backend> Case<B> {
    fn new(device: &Device<B>, [tokens, heads, inner]: [u32; 3]) -> Self {
        let stream = device.stream().unwrap();
        let mut random = StdRng::seed_from_u64(tokens.into());
        let mut values = |count: u32, size: f32| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-size..size)).collect()
        };
        let columns = heads * CHANNELS as u32;
        let to_bits = |values: &[f32]| -> Vec<u16> {
            values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()
        };
        let weight = values(columns * inner, 0.2);
        let bf16 = to_bits(&weight);
        let weight = Nvfp4Matrix::quantise(&weight, columns, inner).unwrap();
        let latent = to_bits(&values(tokens * inner, 2.0));
        let weights = values(tokens * heads, 1.0);
        // The step has one token before the first query.
        let position = (0..=tokens as i32).map(|i| i * 1017 % 70_000);
        let slot = (0..=tokens as i32).map(|i| if i % 5 == 3 { -1 } else { i });
        Self {
            tokens,
            heads,
            latent: upload_bf16(&stream, &latent),
            weight: Nvfp4Linear::new(&stream, &weight).unwrap(),
            bf16: upload_bf16(&stream, &bf16),
            projected_weight: upload(&stream, &weights),
            frequencies: upload(&stream, &compress_frequencies(&CompressRope::RELEASED)),
            position: upload(&stream, &position.collect::<Vec<_>>()),
            slot: upload(&stream, &slot.collect::<Vec<_>>()),
            stream,
        }
    }

    /// Runs `launch`; returns the bytes of the queries and the bits of their head weights.
    fn made(
        &self,
        launch: impl FnOnce(&StepQueries<'_, B>, &IndexQueries<'_, B>) -> Result<(), DeviceError>,
    ) -> (Vec<u8>, Vec<u32>) {
        let Self { stream, tokens, heads, position, slot, .. } = self;
        let bytes = tokens * IndexFormat::MAX_QUERY_BYTES + 16;
        let query = &upload(stream, &vec![0x77_u8; bytes as usize]);
        let weight = &upload(stream, &vec![CANARY; (tokens * heads + 1) as usize]);
        let queries = StepQueries { position, slot, index: slot, first: 1, count: *tokens };
        launch(&queries, &IndexQueries { query, weight, heads: *heads }).unwrap();
        let bits = |weight: f32| weight.to_bits();
        (download(stream, query), download(stream, weight).into_iter().map(bits).collect())
    }

    /// The same results by two launches: the product `project`, then `index_query`.
    fn in_two(
        &self,
        format: IndexFormat,
        project: impl FnOnce(&Buffer<B, f32>),
    ) -> (Vec<u8>, Vec<u32>) {
        let Self { stream, tokens, heads, projected_weight, frequencies, .. } = self;
        let count = u64::from(tokens * heads) * CHANNELS as u64;
        let projected = &stream.device().allocate("projected", count).unwrap();
        project(projected);
        self.made(|queries, to| {
            let quantisation =
                QueryQuantisation { queries, projected, projected_weight, frequencies, format, to };
            ops::index_query(stream, &quantisation)
        })
    }

    /// Checks one launch with the weight in BF16 against products in batches of decode size, then `index_query`.
    fn check_bf16(&self, format: IndexFormat) {
        let Self { stream, latent, bf16, projected_weight, frequencies, .. } = self;
        let (columns, inner) = (self.heads * CHANNELS as u32, self.weight.inner());
        let weight = || Bf16Weight { values: bf16, columns, inner };
        let in_two = self.in_two(format, |projected| {
            for first in (0..self.tokens).step_by(MAX_DECODE_BATCH as usize) {
                let tokens = MAX_DECODE_BATCH.min(self.tokens - first);
                let of = |rows: u32, row: u32| u64::from(rows) * u64::from(row);
                let x = latent.slice(of(first, inner), of(tokens, inner)).unwrap();
                let y = projected.slice(of(first, columns), of(tokens, columns)).unwrap();
                multiply_bf16(stream, weight(), &x, tokens, &y).unwrap();
            }
        });
        let in_one = self.made(|queries, to| {
            let weight = weight();
            let product =
                QueryProduct { queries, latent, weight, projected_weight, frequencies, format, to };
            ops::bf16_index_query(stream, &product)
        });
        let what = format!("{format:?}, {} tokens, {columns} columns", self.tokens);
        assert!(in_one.0 == in_two.0, "queries of {what}");
        assert_eq!(in_one.1, in_two.1, "weights of {what}");
    }

    fn check(&self, format: IndexFormat) {
        let Self { stream, latent, weight, projected_weight, frequencies, .. } = self;
        let in_two = self.in_two(format, |projected| {
            weight.multiply(stream, latent, self.tokens, projected).unwrap();
        });
        let in_one = self.made(|queries, to| {
            let product =
                QueryProduct { queries, latent, weight, projected_weight, frequencies, format, to };
            ops::nvfp4_index_query(stream, &product)
        });
        let [tokens, heads, inner] = [self.tokens, self.heads, weight.inner()];
        let what = format!("{format:?}, {tokens} tokens, {heads} heads, {inner} values");
        assert!(in_one.0 == in_two.0, "queries of {what}");
        assert_eq!(in_one.1, in_two.1, "weights of {what}");
    }
}

/// Batches for each kernel, and one that needs several blocks of tokens; with all heads, one, and some.
pub fn one_launch_equals_two<B: Backend>(device: &Device<B>) {
    for shape in [[1, 64, 96], [9, 3, 544], [17, 2, 32], [33, 1, 1056], [70, 1, 160]] {
        let case = Case::new(device, shape);
        for format in IndexFormat::ALL {
            case.check(format);
        }
    }
}

/// Batches that end inside the rows of a warp or have several tiles; all heads, one, and some; inner dimensions that
/// end inside a chunk, or have several chunks per part.
pub fn one_launch_of_many_tokens_equals_two<B: Backend>(device: &Device<B>) {
    for shape in [[3, 64, 32], [70, 1, 672], [201, 3, 160]] {
        let case = Case::new(device, shape);
        for format in IndexFormat::ALL {
            case.check_bf16(format);
        }
    }
}

pub fn wrong_weights_are_refused<B: Backend>(device: &Device<B>) {
    let case = Case::new(device, [2, 2, 64]);
    let Case { stream, latent, weight, projected_weight, frequencies, position, slot, .. } = &case;
    let buffer = device.allocate("queries", 2 * 16384).unwrap();
    let run = |heads: u32, latent: &Buffer<B, bf16>| {
        let product = QueryProduct {
            queries: &StepQueries { position, slot, index: slot, first: 0, count: 2 },
            latent,
            weight,
            projected_weight,
            frequencies,
            format: IndexFormat::Mxfp4,
            to: &IndexQueries { query: &buffer, weight: projected_weight, heads },
        };
        named(ops::nvfp4_index_query(stream, &product))
    };
    for (heads, what) in [
        (0, "indexer heads"),
        (1, "columns of the query weight"),
        (3, "columns of the query weight"),
        (65, "indexer heads"),
    ] {
        assert_eq!(run(heads, latent), what, "{heads} heads");
    }
    assert_eq!(run(2, &latent.slice(0, 127).unwrap()), "input");
}

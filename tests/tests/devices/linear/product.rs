//! Products with weights in NVFP4, compared with the oracle; the bits of a token in every batch.

use dsv4_kv::device::{Backend, Device, Stream};
use dsv4_kv_linear::{Nvfp4Linear, Nvfp4Matrix};
use dsv4_kv_oracle::linear::{bound, decode, product};
use dsv4_kv_tests::inputs::{download, download_bits, upload, upload_bf16};
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Fills outputs before a launch.
pub const CANARY: f32 = -777.0;

/// A weight and activations.
struct Case {
    inner: u32,
    weight: Nvfp4Matrix,
    /// `[tokens, inner]` BF16 bits.
    x: Vec<u16>,
}

impl Case {
    fn random(columns: u32, inner: u32, tokens: u32) -> Self {
        let mut random = StdRng::seed_from_u64(u64::from(columns) << 32 | u64::from(inner));
        let mut normal =
            |size: f32| random.random_range(-size..size) * random.random_range(0.0..1.0);
        let values: Vec<f32> = (0..columns * inner).map(|_| normal(0.1)).collect();
        let weight = Nvfp4Matrix::quantise(&values, columns, inner).unwrap();
        let x = (0..tokens * inner).map(|_| bf16::from_f32(normal(2.0)).to_bits()).collect();
        Self { inner, weight, x }
    }

    fn tokens(&self) -> u32 {
        self.x.len() as u32 / self.inner
    }
}

/// Compares `found`, `[tokens, columns]`, with the oracle's products of `x` and `weight`, whose rows have `inner`
/// values.
pub fn assert_products(found: &[f32], x: &[u16], weight: &[f64], inner: usize) {
    let columns = weight.len() / inner;
    assert_eq!(found.len() / columns, x.len() / inner);
    for (token, found) in found.chunks_exact(columns).enumerate() {
        let x = &x[token * inner..][..inner];
        for (column, &found) in found.iter().enumerate() {
            let sum = product(x, &weight[column * inner..][..inner]);
            let error = (f64::from(found) - sum.value).abs();
            assert!(
                error <= bound(inner) * sum.magnitude,
                "token {token}, column {column} of {columns} x {inner}: {found} for {sum:?}"
            );
        }
    }
}

/// Runs a launch and returns its result. Asserts that elements after the result are untouched.
pub fn launch<B: Backend>(
    stream: &Stream<B>,
    elements: u32,
    launch: impl FnOnce(&dsv4_kv::device::Buffer<B, f32>),
) -> Vec<f32> {
    let to = upload(stream, &vec![CANARY; elements as usize + 3]);
    launch(&to);
    let mut found = download(stream, &to);
    assert_eq!(found.split_off(elements as usize), [CANARY; 3]);
    found
}

/// Inner dimensions that end inside a run of a lane, a chunk and a stage, and that have several stages; columns that
/// end inside a fragment and inside a block; batches for every kernel.
const SHAPES: [(u32, u32, u32); 9] = [
    (1, 32, 1),
    (5, 96, 8),
    (64, 160, 9),
    (100, 512, 17),
    (128, 544, 33),
    (16, 1024, 64),
    (65, 1536, 3),
    (40, 128, 65),
    (8, 2080, 2),
];

/// Products in f32 and BF16.
pub fn products_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    for (columns, inner, tokens) in SHAPES {
        let case = Case::random(columns, inner, tokens);
        let Case { weight, x, .. } = &case;
        let exact = decode(weight.codes(), weight.scales(), weight.scale());
        let (x, on_device) = (upload_bf16(stream, x), Nvfp4Linear::new(stream, weight).unwrap());
        let found = launch(stream, tokens * columns, |to| {
            on_device.multiply(stream, &x, tokens, to).unwrap();
        });
        assert_products(&found, &case.x, &exact, inner as usize);
        let narrow = upload_bf16(stream, &vec![0; (tokens * columns) as usize]);
        on_device.multiply_to_bf16(stream, &x, tokens, &narrow).unwrap();
        let rounded: Vec<_> = found.iter().map(|&sum| bf16::from_f32(sum).to_bits()).collect();
        assert_eq!(download_bits(stream, &narrow), rounded);
    }
}

/// Every code with every scale, times one: exact.
pub fn every_code_under_every_scale_is_exact<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    let scales: Vec<u8> = (0..=255).filter(|byte| byte & 0x7F != 0x7F).collect();
    let (columns, inner) = (scales.len() as u32 / 2, 32);
    let row = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE];
    let codes: Vec<u8> = row.repeat(scales.len());
    let x: Vec<_> = (0..32 * 32).map(|i| bf16::from(i8::from(i % 33 == 0)).to_bits()).collect();
    let x = upload_bf16(stream, &x);
    for scale in [1.0, -3.0, 2f32.powi(100), f32::from_bits(0x0040_0000)] {
        let weight =
            Nvfp4Matrix::from_parts(columns, inner, codes.clone(), scales.clone(), scale).unwrap();
        let on_device = Nvfp4Linear::new(stream, &weight).unwrap();
        let found = launch(stream, 32 * columns, |to| {
            on_device.multiply(stream, &x, 32, to).unwrap();
        });
        let exact = decode(&codes, &scales, scale);
        for (at, found) in found.into_iter().enumerate() {
            let (token, column) = (at / columns as usize, at % columns as usize);
            assert_eq!(found, exact[column * 32 + token] as f32, "{column} {token} {scale}");
        }
    }
}

/// The same tokens at several places in batches of every size.
pub fn a_token_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    for (columns, inner) in [(24, 1056), (64, 96)] {
        let case = Case::random(columns, inner, 131);
        let on_device = Nvfp4Linear::new(stream, &case.weight).unwrap();
        let all = upload_bf16(stream, &case.x);
        let run = |first: u32, count: u32| {
            let of = |tokens: u32| u64::from(tokens) * u64::from(inner);
            let x = all.slice(of(first), of(count)).unwrap();
            let sums = launch(stream, count * columns, |to| {
                on_device.multiply(stream, &x, count, to).unwrap();
            });
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let whole = run(0, case.tokens());
        for count in [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 130] {
            for first in [0, 1, 131 - count] {
                let part = run(first, count);
                let range = (first * columns) as usize..((first + count) * columns) as usize;
                assert_eq!(part[..], whole[range], "{count} tokens from {first} on");
            }
        }
    }
}

/// Infinity and NaN in a token stay in its row.
pub fn what_is_no_number_stays_in_its_row<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    let mut case = Case::random(20, 160, 11);
    let good = case.x.clone();
    case.x[3 * 160 + 150] = bf16::NAN.to_bits();
    case.x[9 * 160 + 7] = bf16::INFINITY.to_bits();
    let on_device = Nvfp4Linear::new(stream, &case.weight).unwrap();
    let run = |x: &[u16]| {
        let x = upload_bf16(stream, x);
        launch(stream, 11 * 20, |to| on_device.multiply(stream, &x, 11, to).unwrap())
    };
    let (found, good) = (run(&case.x), run(&good));
    for token in 0..11 {
        let (found, good) = (&found[token * 20..][..20], &good[token * 20..][..20]);
        match token {
            3 => assert!(found.iter().all(|sum| sum.is_nan())),
            9 => assert!(found.iter().all(|sum| !sum.is_finite())),
            _ => assert_eq!(found, good),
        }
    }
}

pub fn wrong_sizes_are_refused<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    let case = Case::random(8, 64, 4);
    let on_device = Nvfp4Linear::new(stream, &case.weight).unwrap();
    let x = upload_bf16(stream, &case.x);
    let y = upload(stream, &[CANARY; 4 * 8]);
    on_device.multiply(stream, &x, 0, &y).unwrap();
    assert_eq!(download(stream, &y), [CANARY; 32]);
    for (tokens, len, short) in [(5, 32, "input"), (4, 31, "output")] {
        let y = y.slice(0, len).unwrap();
        let error = on_device.multiply(stream, &x, tokens, &y).unwrap_err().to_string();
        assert!(error.contains(short), "{error}");
    }
}

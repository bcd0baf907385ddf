//! Products with narrow and wide weights in BF16, compared with the oracle; the bits of a token in every batch.

use dsv4_kv::device::{Backend, Buffer, Device, bf16};
use dsv4_kv_linear::ops::{Bf16Weight, multiply_bf16};
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_tests::inputs::{download, upload, upload_bf16};
use dsv4_kv_tests::refused::named;
use kv_layout::linear::MAX_NARROW_COLUMNS;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::product::{CANARY, assert_products, launch};

/// Columns of the narrowest weight that the kernels do not treat as narrow.
const WIDE: u32 = MAX_NARROW_COLUMNS + 1;

/// BF16 bits of random numbers, most of them small.
fn random(count: u32) -> Vec<u16> {
    let mut random = StdRng::seed_from_u64(count.into());
    let mut value = || random.random_range(-2.0..2.0) * random.random_range(0.0..1.0);
    (0..count).map(|_| bf16::from_f32(value()).to_bits()).collect()
}

/// Inner dimensions with fewer chunks than warps and with several chunks per warp, which end inside a load of a lane;
/// columns that end inside a fragment and inside a block; batches for every kernel.
const SHAPES: [(u32, u32, u32); 17] = [
    (1, 32, 1),
    (5, 96, 8),
    (64, 160, 9),
    (100, 512, 17),
    (128, 544, 33),
    (16, 1024, 64),
    (65, 2080, 3),
    (40, 128, 65),
    (17, 9280, 2),
    (MAX_NARROW_COLUMNS, 32, 4),
    (WIDE, 32, 9),
    (WIDE + 3, 544, 1),
    (WIDE + 6, 1568, 17),
    (320, 128, 33),
    (WIDE, 96, 65),
    (WIDE + 1, 160, 194),
    (MAX_NARROW_COLUMNS - 60, 96, 129),
];

pub fn products_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    for (columns, inner, tokens) in SHAPES {
        let (x, weight) = (random(tokens * inner), random(columns * inner));
        let (on_device, values) = (upload_bf16(stream, &x), &upload_bf16(stream, &weight));
        let found = launch(stream, tokens * columns, |to| {
            let weight = Bf16Weight { values, columns, inner };
            multiply_bf16(stream, weight, &on_device, tokens, to).unwrap();
        });
        let weight: Vec<f64> = weight.into_iter().map(bf16_value).collect();
        assert_products(&found, &x, &weight, inner as usize);
    }
}

/// Products of integers are exact in any order of sums.
pub fn products_of_integers_are_exact<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(8);
    for (columns, inner, tokens) in [(96, 384, 35), (5, 2336, 3), (WIDE, 160, 10)] {
        let mut integers =
            |count: u32| -> Vec<i8> { (0..count).map(|_| random.random_range(-9..=9)).collect() };
        let (x, weight) = (integers(tokens * inner), integers(columns * inner));
        let wide = |values: &[i8]| -> Vec<bf16> { values.iter().map(|&x| x.into()).collect() };
        let (input, values) = (upload(stream, &wide(&x)), &upload(stream, &wide(&weight)));
        let found = launch(stream, tokens * columns, |to| {
            let weight = Bf16Weight { values, columns, inner };
            multiply_bf16(stream, weight, &input, tokens, to).unwrap();
        });
        let product = |(x, w): (&i8, &i8)| i32::from(*x) * i32::from(*w);
        let rows = weight.chunks_exact(inner as usize);
        let wanted = x.chunks_exact(inner as usize).flat_map(|x| {
            rows.clone().map(|row| x.iter().zip(row).map(product).sum::<i32>() as f32)
        });
        assert_eq!(found, Vec::from_iter(wanted));
    }
}

/// The same tokens at several places in batches of every size.
pub fn a_token_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    const TOKENS: u32 = 70;
    let stream = &device.stream().unwrap();
    // In the last two shapes parts have no chunk, and two chunks.
    for (columns, inner) in [(64, 1344), (24, 96), (WIDE, 160), (WIDE, 672)] {
        let values = &upload_bf16(stream, &random(columns * inner));
        let all = upload_bf16(stream, &random(TOKENS * inner));
        let run = |first: u32, count: u32| {
            let of = |tokens: u32| u64::from(tokens) * u64::from(inner);
            let x = all.slice(of(first), of(count)).unwrap();
            let sums = launch(stream, count * columns, |to| {
                let weight = Bf16Weight { values, columns, inner };
                multiply_bf16(stream, weight, &x, count, to).unwrap();
            });
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let whole = run(0, TOKENS);
        for count in [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65] {
            for first in [0, 1, TOKENS - count] {
                let range = (first * columns) as usize..((first + count) * columns) as usize;
                assert_eq!(run(first, count), whole[range], "{count} tokens from {first} on");
            }
        }
    }
}

/// Infinity and NaN in a token stay in its row.
pub fn what_is_no_number_stays_in_its_row<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    for columns in [20, WIDE] {
        let (inner, tokens) = (160, 11);
        let values = &upload_bf16(stream, &random(columns * inner));
        let run = |x: &[u16]| {
            let x = upload_bf16(stream, x);
            launch(stream, tokens * columns, |to| {
                let weight = Bf16Weight { values, columns, inner };
                multiply_bf16(stream, weight, &x, tokens, to).unwrap();
            })
        };
        let mut x = random(tokens * inner);
        let good = run(&x);
        x[3 * 160 + 150] = bf16::NAN.to_bits();
        x[9 * 160 + 7] = bf16::INFINITY.to_bits();
        let found = run(&x);
        let rows = |sums: &[f32], token: usize| {
            sums[token * columns as usize..][..columns as usize].to_vec()
        };
        for token in 0..tokens as usize {
            let (found, good) = (rows(&found, token), rows(&good, token));
            match token {
                3 => assert!(found.iter().all(|sum| sum.is_nan())),
                9 => assert!(found.iter().all(|sum| !sum.is_finite())),
                _ => assert_eq!(found, good),
            }
        }
    }
}

pub fn wrong_sizes_are_refused<B: Backend>(device: &Device<B>) {
    let stream = &device.stream().unwrap();
    let buffer = |columns: u32| upload_bf16(stream, &vec![0; (columns * 64) as usize]);
    let x = buffer(4);
    for columns in [8, WIDE] {
        let values = &buffer(columns);
        let y: Buffer<B, f32> = upload(stream, &vec![CANARY; (4 * columns) as usize]);
        let run = |columns: u32, inner: u32, tokens: u32, y: &Buffer<B, f32>| {
            multiply_bf16(stream, Bf16Weight { values, columns, inner }, &x, tokens, y)
        };
        run(columns, 64, 0, &y).unwrap();
        let short_y = &y.slice(0, u64::from(4 * columns) - 1).unwrap();
        for (columns, inner, tokens, y, what) in [
            (0, 64, 4, &y, "columns of a weight"),
            (columns, 0, 4, &y, "values of a row"),
            (columns, 48, 4, &y, "values of a row"),
            (columns, 64, 5, &y, "input"),
            (columns + 1, 64, 1, &y, "weight"),
            (columns, 64, 4, short_y, "output"),
        ] {
            assert_eq!(named(run(columns, inner, tokens, y)), what, "{columns} of {inner} values");
        }
        assert_eq!(download(stream, &y), vec![CANARY; (4 * columns) as usize]);
    }
}

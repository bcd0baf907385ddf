//! Raw queries, which the kernel norms and rotates.

use dsv4_kv::device::{Backend, Device, bf16};
use dsv4_kv::ops::QueryForm;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::rope::Table;
use kernels_gpu::math::{cos_sin, rms_scale, rotate};
use kv_layout::geometry::{HEAD_DIM, NOPE_DIM, NORM_EPSILON, WINDOW};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::decode::{SHAPE, query, query_of, shape_of};
use super::layer::{Layer, Query, Shape, Which, random_row};

const CHANNELS: usize = HEAD_DIM as usize;

/// A raw query of one head, normed and rotated in f32 as by the kernel, and rounded once. Each of 32 lanes adds the
/// squares of eight channels of each half of the head; the sums of the lanes are added in a butterfly.
pub fn prepared(raw: &[u16], table: Table, position: u32) -> Vec<u16> {
    let value = |channel: usize| bf16::from_bits(raw[channel]).to_f32();
    let mut sums: [f32; 32] = std::array::from_fn(|lane| {
        let channels = (8 * lane..8 * lane + 8).chain(256 + 8 * lane..256 + 8 * lane + 8);
        channels.fold(0.0, |sum, channel| value(channel).mul_add(value(channel), sum))
    });
    for mask in [16, 8, 4, 2, 1] {
        sums = std::array::from_fn(|lane| sums[lane] + sums[lane ^ mask]);
    }
    let scale = rms_scale::<HEAD_DIM>(sums[0]);
    let mut normed: Vec<f32> = (0..CHANNELS).map(|channel| value(channel) * scale).collect();
    let pairs = normed[NOPE_DIM as usize..].as_chunks_mut::<2>().0;
    for (pair, frequency) in pairs.iter_mut().zip(table.frequencies()) {
        *pair = rotate(pair[0], pair[1], cos_sin(position as f32 * frequency));
    }
    normed.into_iter().map(|value| bf16::from_f32(value).to_bits()).collect()
}

/// As [`prepared`], in f64 and without rounding.
fn exact(raw: &[u16], table: Table, position: u32) -> Vec<f64> {
    let values: Vec<f64> = raw.iter().map(|&bits| bf16_value(bits)).collect();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    let scale = (squares / CHANNELS as f64 + NORM_EPSILON).sqrt().recip();
    let normed: Vec<f64> = values.iter().map(|value| value * scale).collect();
    table.rotate(&normed, position as usize)
}

/// Raw heads of every magnitude, some of them zero.
fn raw_heads(random: &mut StdRng, count: usize) -> Vec<Vec<u16>> {
    let mut head = |at: usize| match at % 9 {
        8 => vec![0; CHANNELS],
        size => random_row(random, 10_f32.powi(size as i32 - 4)),
    };
    (0..count).map(&mut head).collect()
}

/// Raw queries give, bit for bit, the results of queries that were normed and rotated before: with windows, lists and
/// all entries, in both formats, with numbers of heads that do not fill a block, and padding between. The prepared
/// queries equal those of `f64`, rounded once.
pub fn raw_queries_are_normed_and_rotated<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(81);
    for (which, entries, heads) in
        [(Which::Nothing, 0, 65), (Which::List, 70, 128), (Which::All(3), 3, 5)]
    {
        for format in MainFormat::ALL {
            let shape = shape_of(which, entries.max(3), Shape { format, heads, ..SHAPE });
            let mut layer = Layer::random(device, shape, 82);
            let mut last = query_of(which, entries, 1, &mut random);
            let rows = last.list.len();
            let mut other = |slot, position| Query {
                list: (0..rows as i32).map(|_| random.random_range(0..2)).collect(),
                ..query(slot, position)
            };
            let queries = [other(0, 8), other(-1, 3), other(2, WINDOW + 17)];
            last.position = last.position.max(300);
            let queries = [&queries[..], &[last]].concat();
            let raw = raw_heads(&mut random, queries.len() * heads as usize);
            let position = |at: usize| queries[at / heads as usize].position;
            let table = Table::Compress;
            let rotated: Vec<_> = raw
                .iter()
                .enumerate()
                .map(|(at, raw)| prepared(raw, table, position(at)))
                .collect();
            for (at, (raw, rotated)) in raw.iter().zip(&rotated).enumerate() {
                for (bits, exact) in rotated.iter().zip(exact(raw, table, position(at))) {
                    let (got, most) = (bf16_value(*bits), exact.abs() * 2f64.powi(-8) + 1e-5);
                    assert!((got - exact).abs() <= most, "head {at}: {got}, not {exact}");
                }
            }
            for blocks in which.blocks_to_check() {
                layer.blocks = blocks;
                let [want, got] = [(QueryForm::Rotated, &rotated), (QueryForm::Raw, &raw)].map(
                    |(form, heads)| {
                        layer.form = form;
                        layer.attend(&queries, which, heads)
                    },
                );
                let what = format!("{which:?}, {blocks:?}, {format:?}");
                assert!(got.out == want.out && got.lse == want.lse, "{what}: other bits");
                assert_eq!(got.faults, want.faults, "{what}");
            }
        }
    }
}

/// NaN and infinities in a raw head stay in that head.
pub fn no_number_reaches_another_head<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 9;
    let shape = Shape { heads: HEADS as u32, slots: 1, ..SHAPE };
    let mut layer = Layer::random(device, shape, 83);
    layer.form = QueryForm::Raw;
    let mut heads = raw_heads(&mut StdRng::seed_from_u64(84), HEADS);
    let clean = layer.attend(&[query(0, 200)], Which::Nothing, &heads);
    (heads[2][511], heads[5][3]) = (0x7FC0, 0x7F80);
    let spoilt = layer.attend(&[query(0, 200)], Which::Nothing, &heads);
    for head in 0..HEADS {
        let of_head = head * CHANNELS..(head + 1) * CHANNELS;
        let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
        if [2, 5].contains(&head) {
            assert!(spoilt.out[of_head].iter().all(is_nan), "head {head}");
        } else {
            assert_eq!(spoilt.out[of_head.clone()], clean.out[of_head], "head {head}");
            assert_eq!(spoilt.lse[head], clean.lse[head], "head {head}");
        }
    }
}

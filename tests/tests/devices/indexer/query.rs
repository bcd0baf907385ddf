//! Queries of the indexer: the results of `index_query`, and queries and keys for the tests of scores.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{self, IndexQueries, StepQueries};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::indexer::{query, weight_scale};
use dsv4_kv_oracle::number::bf16_value;
use half::bf16;
use kv_layout::config::CompressRope;
use kv_layout::format::E4m3;
use kv_layout::index_row::IndexFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{download, upload};

/// Channels of a key.
pub const CHANNELS: usize = 128;

/// The oracle's implementation of a format.
pub fn oracle(format: IndexFormat) -> KeyFormat {
    KeyFormat::from_name(format.name()).unwrap()
}

/// `[count, 128]` BF16 bits: channels of very different magnitude.
pub fn keys(count: usize, random: &mut StdRng) -> Vec<Vec<u16>> {
    let mut channel = |_| {
        let size = 2_f32.powi(random.random_range(-6..3));
        bf16::from_f32(random.random_range(-size..size)).to_bits()
    };
    (0..count).map(|_| (0..CHANNELS).map(&mut channel).collect()).collect()
}

/// Fills outputs before a launch, so that unwanted writes show.
pub const CANARY: f32 = -12345.0;

/// Queries of `heads` heads, `[rows, heads, 128]` BF16, converted to the bytes and the order that the kernels take.
pub fn in_order(format: IndexFormat, queries: &[u16], heads: usize) -> Vec<u8> {
    let arrange = |query: &[u16]| {
        let mut row = vec![0; IndexFormat::MAX_QUERY_BYTES as usize];
        let is_mxfp4 = format == IndexFormat::Mxfp4;
        let heads = query.chunks(CHANNELS).filter(|_| is_mxfp4);
        let exponent_gaps: Vec<_> = heads.flat_map(exponent_gaps).collect();
        for (at, &bits) in query.iter().enumerate() {
            let place = place(format, at);
            match format {
                IndexFormat::Nvfp4 => row[place..place + 2].copy_from_slice(&bits.to_le_bytes()),
                IndexFormat::Mxfp4 => {
                    let exponent_gap = exponent_gaps[at / GROUP];
                    row[place] = integer(bits, exponent_gap).unwrap().cast_unsigned();
                    row[gap_place(at)] = exponent_gap;
                }
                IndexFormat::Fp8 => {
                    let value = bf16::from_bits(bits).to_f32();
                    let code = E4m3::from_f32(value);
                    assert_eq!(code.to_f32(), value, "no E4M3 value");
                    row[place] = code.0;
                }
            }
        }
        row
    };
    queries.chunks(heads * CHANNELS).flat_map(arrange).collect()
}

/// Number of channels that share a scale of MXFP4.
pub const GROUP: usize = IndexFormat::Mxfp4.group() as usize;

/// The integer that stands for a channel of a query in a group with this exponent gap; `None` if there is none.
fn integer(bits: u16, exponent_gap: u8) -> Option<i8> {
    let value = bf16_value(bits) * 2_f64.powi(exponent_gap.into());
    (value.fract() == 0.0 && value.abs() <= 127.0).then_some(value as i8)
}

/// The smallest exponent gaps of the groups of a head with which all channels are integers; 0 for all if possible.
fn exponent_gaps(head: &[u16]) -> Vec<u8> {
    let fits = |group: &[u16], exponent_gap: u8| {
        group.iter().all(|&bits| integer(bits, exponent_gap).is_some())
    };
    if fits(head, 0) {
        return vec![0; head.len() / GROUP];
    }
    head.chunks(GROUP)
        .map(|group| (0..64).find(|&exponent_gap| fits(group, exponent_gap)).unwrap())
        .collect()
}

/// The byte of the exponent gap of element `at` of a query, counted over heads and channels.
fn gap_place(at: usize) -> usize {
    let (head, group) = ((at / CHANNELS) as u32, (at % CHANNELS / GROUP) as u32);
    IndexFormat::query_exponent_gap_byte(head, group) as usize
}

/// The first byte of element `at` of a query, counted over heads and channels.
fn place(format: IndexFormat, at: usize) -> usize {
    format.query_byte((at / CHANNELS) as u32, (at % CHANNELS) as u32) as usize
}

/// The value of element `at` of a query.
fn element(format: IndexFormat, query: &[u8], at: usize) -> f64 {
    let place = place(format, at);
    match format {
        IndexFormat::Nvfp4 => bf16_value(u16::from_le_bytes([query[place], query[place + 1]])),
        IndexFormat::Mxfp4 => {
            let integer = f64::from(query[place].cast_signed());
            integer * 0.5_f64.powi(query[gap_place(at)].into())
        }
        IndexFormat::Fp8 => E4m3(query[place]).to_f32().into(),
    }
}

/// Queries are rotated, transformed and quantised as by the oracle. Nearly every channel has the same value; the others
/// have the second of the two values that a rounding on the way may give.
pub fn queries_equal_the_oracle<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 6;
    const QUERY: usize = IndexFormat::MAX_QUERY_BYTES as usize;
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(7);
    let tokens = [(0, 0), (1, 4095), (-1, -1), (0, 1_000_003)];
    let (slot, position): (Vec<i32>, Vec<i32>) = tokens.iter().copied().unzip();
    let (slot, position) = (upload(&stream, &slot), upload(&stream, &position));
    let queries =
        StepQueries { position: &position, slot: &slot, index: &slot, first: 1, count: 3 };
    // BF16 values, so that the oracle takes the same inputs.
    let projected = keys(3 * HEADS, &mut random);
    let values: Vec<f32> =
        projected.iter().flatten().map(|&bits| bf16_value(bits) as f32).collect();
    let weights: Vec<f32> = (0..3 * HEADS).map(|_| random.random_range(-2.0..2.0)).collect();
    let frequencies = upload(&stream, &compress_frequencies(&CompressRope::RELEASED));
    for format in IndexFormat::ALL {
        let query_out = upload(&stream, &vec![0x77_u8; 3 * QUERY]);
        let weight_out = upload(&stream, &[CANARY; 3 * HEADS]);
        let to = IndexQueries { query: &query_out, weight: &weight_out, heads: HEADS as u32 };
        let (from, weight) = (upload(&stream, &values), upload(&stream, &weights));
        ops::index_query(
            &stream,
            &ops::QueryQuantisation {
                queries: &queries,
                projected: &from,
                projected_weight: &weight,
                frequencies: &frequencies,
                format,
                to: &to,
            },
        )
        .unwrap();
        let found = download(&stream, &query_out);
        let scaled = download(&stream, &weight_out);
        let mut different = 0;
        for row in [0, 2] {
            for head in 0..HEADS {
                let at = row * HEADS + head;
                let head = &values[at * CHANNELS..][..CHANNELS];
                let wanted = query(oracle(format), head, tokens[row + 1].1 as usize);
                let constant = f64::from(weights[at]) * weight_scale(HEADS);
                let scale = f64::from(scaled[at]) / constant;
                let is_fp8 = format == IndexFormat::Fp8;
                let is_nvfp4 = format == IndexFormat::Nvfp4;
                assert!(!is_nvfp4 || (scale - 1.0).abs() < 1e-6, "{scale}");
                let scale = if is_nvfp4 { 1.0 } else { scale };
                let most = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                let first = at % HEADS * CHANNELS;
                for (channel, &wanted) in wanted.iter().enumerate() {
                    let value = element(format, &found[row * QUERY..], first + channel);
                    let error = (value * scale - wanted).abs();
                    let step = if is_fp8 { 1.0 / 14.0 } else { 1.0 / 3.0 };
                    assert!(error <= step * most + 1e-9, "{format:?}: {wanted} is off by {error}");
                    different += usize::from(error > 1e-5 * most);
                }
            }
        }
        assert!(different <= 2 * HEADS * CHANNELS / 100, "{format:?}: {different} differ");
        let mut missing = HEADS * CHANNELS..64 * CHANNELS;
        let is_zero = |at: usize| {
            let has_gap = format == IndexFormat::Mxfp4 && found[gap_place(at)] != 0;
            element(format, &found, at) == 0.0 && !has_gap
        };
        assert!(missing.all(is_zero), "heads that are not there");
        assert!(found[QUERY..2 * QUERY].iter().all(|&byte| byte == 0x77), "padding was written");
        assert!(scaled[HEADS..2 * HEADS].iter().all(|&weight| weight == CANARY));
    }
}

/// Queries against MXFP4 keys whose groups have different scales even after the transform. Up to a factor of 8 the
/// integers hold the difference; beyond that, exponent gaps do. A group of only NaN gets the least scale, a group of
/// zeros does not; such groups come alone, and NaN also beside infinities.
pub fn queries_of_distant_groups_equal_the_oracle<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 6;
    /// The weight of the head with the least scale is so large that the scaled weight is not subnormal.
    const WEIGHTS: [f32; HEADS] = [1.0, 1.0, 1.0, 1.0, (1_u64 << 60) as f32, 1.0];
    let format = IndexFormat::Mxfp4;
    let stream = device.stream().unwrap();
    // The transform is its own inverse. These are values whose transform has groups `below[i]` binades below 16.
    let groups = |below: [i32; 4]| {
        let value =
            |at: usize| if at % GROUP < 2 { 0.5_f64.powi(below[at / GROUP] - 4) } else { 0.0 };
        hadamard(&(0..CHANNELS).map(value).collect::<Vec<_>>())
    };
    // The transform of values that repeat after half of the channels is zero in its upper half.
    let half = (0..CHANNELS).map(|at| if at % (CHANNELS / 2) < 2 { 16.0 } else { 0.0 }).collect();
    let with = |value: f64, channels: &[usize]| {
        (0..CHANNELS).map(|at| if channels.contains(&at) { value } else { 0.0 }).collect()
    };
    // With two infinities half of the sums are NaN: those of every second group.
    let (nan, infinite) = (with(f64::NAN, &[5]), with(f64::INFINITY, &[0, GROUP]));
    let zeros = vec![0.0; CHANNELS];
    let heads = [groups([0, 2, 1, 3]), groups([0, 4, 1, 0]), half, zeros, nan, infinite];
    let values: Vec<f32> = heads.iter().flatten().map(|&x| x as f32).collect();
    let position = upload(&stream, &[0]);
    let queries =
        StepQueries { position: &position, slot: &position, index: &position, first: 0, count: 1 };
    let query_out = upload(&stream, &vec![0x77_u8; IndexFormat::MAX_QUERY_BYTES as usize]);
    let weight_out = upload(&stream, &[CANARY; HEADS]);
    let to = IndexQueries { query: &query_out, weight: &weight_out, heads: HEADS as u32 };
    let (from, weight) = (upload(&stream, &values), upload(&stream, &WEIGHTS));
    let frequencies = upload(&stream, &compress_frequencies(&CompressRope::RELEASED));
    ops::index_query(
        &stream,
        &ops::QueryQuantisation {
            queries: &queries,
            projected: &from,
            projected_weight: &weight,
            frequencies: &frequencies,
            format,
            to: &to,
        },
    )
    .unwrap();
    let found = download(&stream, &query_out);
    let scaled = download(&stream, &weight_out);
    for head in 0..HEADS {
        let wanted = query(oracle(format), &values[head * CHANNELS..][..CHANNELS], 0);
        let scale = f64::from(scaled[head]) / f64::from(WEIGHTS[head]) / weight_scale(HEADS);
        for (channel, &wanted) in wanted.iter().enumerate() {
            let value = element(format, &found, head * CHANNELS + channel) * scale;
            assert!(
                (value - wanted).abs() <= 1e-6 * wanted.abs(),
                "head {head}: {value}, not {wanted}"
            );
        }
        let exponent_gaps =
            [0, 1, 2, 3].map(|group| found[gap_place(head * CHANNELS + group * GROUP)]);
        let expected = match head {
            1 => [0, 4, 1, 0],
            // The scales of the groups are 2^126 and 2^-126.
            5 => [0, 252, 0, 252],
            _ => [0; 4],
        };
        assert_eq!(exponent_gaps, expected, "head {head}");
    }
}

//! The indexer's kernels: projections, queries, and scores over keys of every format.

use dsv4_kv::device::ops::{
    self, BlockTable, GatherQueries, IndexKeys, IndexQueries, Scores, maxima_len,
};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::index::{EncodedKey, KeyFormat};
use dsv4_kv_oracle::indexer::{Score, query, score, weight_scale};
use dsv4_kv_oracle::number::bf16_value;
use half::bf16;
use kv_layout::format::E4m3;
use kv_layout::index_row::IndexFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{download, upload};

const CHANNELS: usize = 128;
/// Of the sum of magnitudes: how far a score may be from the oracle's with the same operands. Tensor
/// cores drop bits of sums of FP8 products.
fn tolerance(format: IndexFormat) -> f64 {
    if format == IndexFormat::Fp8 { 5e-5 } else { 1e-5 }
}

fn oracle(format: IndexFormat) -> KeyFormat {
    KeyFormat::from_name(format.name()).unwrap()
}

/// `[count, 128]` BF16 bits: channels of very different size.
fn keys(count: usize, random: &mut StdRng) -> Vec<Vec<u16>> {
    let mut channel = |_| {
        let size = 2_f32.powi(random.random_range(-6..3));
        bf16::from_f32(random.random_range(-size..size)).to_bits()
    };
    (0..count).map(|_| (0..CHANNELS).map(&mut channel).collect()).collect()
}

/// One CSA layer's keys and a block table: each slot's blocks anywhere.
struct Layer<D: Device> {
    device: D,
    stream: D::Stream,
    format: IndexFormat,
    code: Buffer<D, u8>,
    scale: Buffer<D, u8>,
    table: Vec<i32>,
    max_blocks: u32,
    num_blocks: u32,
    /// Every key of the planes.
    encoded: Vec<EncodedKey>,
}

impl<D: Device> Layer<D> {
    fn new(device: &D, format: IndexFormat, (slots, max_blocks): (u32, u32)) -> Self {
        let stream = device.stream().unwrap();
        let mut random = StdRng::seed_from_u64(5);
        let num_blocks = slots * max_blocks + 2;
        let encode = |key: &Vec<u16>| oracle(format).encode(key);
        let encoded: Vec<_> =
            keys(32 * num_blocks as usize, &mut random).iter().map(encode).collect();
        let plane = |part: fn(&EncodedKey) -> &Vec<u8>| {
            encoded.iter().flat_map(part).copied().collect::<Vec<u8>>()
        };
        // Every block is used once, in an order that is none.
        let table = (0..(slots * max_blocks) as i32).map(|i| (7 * i + 3) % num_blocks as i32);
        Self {
            code: upload(device, &stream, &plane(|key| &key.codes)),
            scale: upload(device, &stream, &plane(|key| &key.scale)),
            table: table.collect(),
            device: device.clone(),
            stream,
            format,
            max_blocks,
            num_blocks,
            encoded,
        }
    }

    /// An entry's key as the oracle reads it; `None` if its block is missing, or its scale is beyond
    /// what scores take.
    fn key(&self, slot: i32, entry: usize) -> Option<Vec<f64>> {
        let block = self.table[slot as usize * self.max_blocks as usize + entry / 32];
        let row = usize::try_from(block).ok()? * 32 + entry % 32;
        let encoded = self.encoded.get(row)?;
        let beyond = self.format == IndexFormat::Mxfp4 && encoded.scale.iter().any(|&b| b > 160);
        if beyond {
            return None;
        }
        let key = oracle(self.format).decode(encoded);
        Some(key.into_iter().map(f64::from).collect())
    }

    /// Scores queries (slot, position) and checks each score, each maximum, and that nothing else
    /// was written; what was counted in the fault word.
    fn check(&self, queries: &[(i32, i32)], first: usize, case: &Case) -> u32 {
        let Self { device, stream, .. } = self;
        let rows = queries.len() - first;
        let (slot, position): (Vec<i32>, Vec<i32>) = queries.iter().copied().unzip();
        let (slot, position) = (upload(device, stream, &slot), upload(device, stream, &position));
        let gathered = GatherQueries {
            position: &position,
            slot: &slot,
            index: &slot,
            first: first as u32,
            count: rows as u32,
        };
        let Case { heads, columns, skip, .. } = *case;
        let (query, weight) = case.operands(rows);
        let query = in_order(self.format, &query, heads as usize);
        let (query, weight) = (upload(device, stream, &query), upload(device, stream, &weight));
        let quantised = IndexQueries { query: &query, weight: &weight, heads };
        let scores = upload(device, stream, &vec![CANARY; rows * columns as usize + 1]);
        let groups = maxima_len(columns) as usize;
        let maxima = upload(device, stream, &vec![CANARY; rows * groups]);
        let to = Scores { scores: &scores, maxima: &maxima, columns };
        let table = upload(device, stream, &self.table);
        let slots = self.table.len() as u32 / self.max_blocks;
        let table = BlockTable { table: &table, slots, max_blocks: self.max_blocks };
        let Self { code, scale, format, .. } = self;
        let keys = IndexKeys { code, scale, format: *format, rotate: true };
        let planes = (&keys, self.num_blocks);
        let faults = upload(device, stream, &[0]);
        let run = ops::index_score;
        run(device, stream, &gathered, &quantised, &table, planes, skip, &to, &faults).unwrap();
        let (scores, maxima) =
            (download(device, stream, &scores), download(device, stream, &maxima));
        assert_eq!(scores[scores.len() - 1], CANARY, "behind the scores");
        for (row, &(slot, position)) in queries[first..].iter().enumerate() {
            let scores = &scores[row * columns as usize..][..columns as usize];
            let seen = visible(position.max(0) as usize, 4).min(columns as usize);
            let live = (0..slots as i32).contains(&slot) && seen > skip as usize;
            let seen = if live { seen } else { 0 };
            if seen > 0 {
                self.check_row(&case.vectors(row), slot, &scores[..seen]);
            }
            assert!(scores[seen..].iter().all(|&score| score == CANARY), "behind query {row}");
            let group = columns as usize / groups;
            for (at, scores) in scores[..seen].chunks(group).enumerate() {
                let largest = scores.iter().copied().fold(f32::NAN, f32::max);
                let found = maxima[row * groups + at];
                assert!(
                    found == largest || found.is_nan() && largest.is_nan(),
                    "{found} {largest}"
                );
            }
        }
        download(device, stream, &faults)[0]
    }

    fn check_row(&self, (queries, weights): &(Vec<Vec<f64>>, Vec<f64>), slot: i32, scores: &[f32]) {
        for (entry, &found) in scores.iter().enumerate() {
            let Some(key) = self.key(slot, entry) else {
                assert!(found.is_nan(), "entry {entry} scores {found}, not NaN");
                continue;
            };
            let Score { value, magnitude } = score(queries, weights, &key);
            let error = (f64::from(found) - value).abs();
            let format = self.format;
            assert!(
                error <= tolerance(self.format) * magnitude,
                "{format:?} entry {entry}: {found}, not {value}: {:e} of {magnitude}",
                error / magnitude
            );
        }
    }
}

/// Queries of `heads` heads, `[rows, heads, 128]` BF16, as the kernels take them.
fn in_order(format: IndexFormat, queries: &[u16], heads: usize) -> Vec<u8> {
    let arrange = |query: &[u16]| {
        let mut row = vec![0; IndexFormat::MOST_QUERY_BYTES as usize];
        for (at, &bits) in query.iter().enumerate() {
            let place = place(format, at);
            if format != IndexFormat::Fp8 {
                row[place..place + 2].copy_from_slice(&bits.to_le_bytes());
            } else {
                let value = bf16::from_bits(bits).to_f32();
                let code = E4m3::from_f32(value);
                assert_eq!(code.to_f32(), value, "no E4M3 value");
                row[place] = code.0;
            }
        }
        row
    };
    queries.chunks(heads * CHANNELS).flat_map(arrange).collect()
}

/// Where an element of a query, by heads, stands.
fn place(format: IndexFormat, at: usize) -> usize {
    format.query_byte((at / CHANNELS) as u32, (at % CHANNELS) as u32) as usize
}

/// The element of a query that stands there.
fn element(format: IndexFormat, query: &[u8], at: usize) -> f64 {
    let place = place(format, at);
    match format {
        IndexFormat::Nvfp4 | IndexFormat::Mxfp4 => {
            bf16_value(u16::from_le_bytes([query[place], query[place + 1]]))
        }
        IndexFormat::Fp8 => E4m3(query[place]).to_f32().into(),
    }
}

/// What an element holds that nobody should write.
const CANARY: f32 = -12345.0;

/// Queries that are quantised already, and how they are scored.
struct Case {
    heads: u32,
    columns: u32,
    skip: u32,
    format: IndexFormat,
}

impl Case {
    /// `[rows, heads, 128]` BF16 and `[rows, heads]` f32: values of the format, weights of both signs.
    fn operands(&self, rows: usize) -> (Vec<u16>, Vec<f32>) {
        let mut random = StdRng::seed_from_u64(6);
        let heads = rows * self.heads as usize;
        let value = |x: f32| bf16::from_f32(x).to_bits();
        let queries = keys(heads, &mut random).into_iter().flat_map(|key| {
            let encoded = oracle(self.format).encode(&key);
            let unscaled = |codes: &[u8]| {
                codes
                    .iter()
                    .map(|&code| value(dsv4_kv_oracle::number::e4m3_value(code) as f32))
                    .collect()
            };
            match self.format {
                IndexFormat::Fp8 => unscaled(&encoded.codes),
                _ => {
                    oracle(self.format).decode(&encoded).into_iter().map(value).collect::<Vec<_>>()
                }
            }
        });
        let queries = queries.collect();
        let mut random = StdRng::seed_from_u64(9);
        (queries, (0..heads).map(|_| random.random_range(-0.1..0.1)).collect())
    }

    /// The operands of a row, as the oracle takes them.
    fn vectors(&self, row: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
        let (queries, weights) = self.operands(row + 1);
        let heads = self.heads as usize;
        let queries = queries.chunks_exact(CHANNELS).skip(row * heads);
        let wide = |head: &[u16]| head.iter().map(|&bits| bf16_value(bits)).collect();
        let weights = weights[row * heads..].iter().map(|&weight| f64::from(weight)).collect();
        (queries.map(wide).collect(), weights)
    }
}

/// The last position of a request that sees `entries` entries.
fn sees(entries: i32) -> i32 {
    4 * (entries + 1) - 2
}

/// Queries of several requests at whole and broken tiles, in every format, from blocks anywhere.
pub fn scores_equal_the_oracle<D: Device>(device: &D) {
    for format in IndexFormat::ALL {
        let layer = Layer::new(device, format, (3, 5));
        let queries =
            [(0, 9), (1, sees(1)), (2, sees(70)), (-1, -1), (0, sees(160)), (1, sees(33))];
        let case = Case { heads: 64, columns: 160, skip: 0, format };
        assert_eq!(layer.check(&queries, 1, &case), 0);
    }
}

/// Fewer heads than a full set, and a number that is no multiple of a product's.
pub fn few_heads_equal_the_oracle<D: Device>(device: &D) {
    for (heads, format) in
        [(1, IndexFormat::Mxfp4), (8, IndexFormat::Nvfp4), (40, IndexFormat::Fp8)]
    {
        let layer = Layer::new(device, format, (1, 2));
        let case = Case { heads, columns: 64, skip: 0, format };
        assert_eq!(layer.check(&[(0, sees(45))], 0, &case), 0);
    }
}

/// Short queries are left out, slots that do not exist and rows that are too short are counted, and a
/// missing block gives NaN.
pub fn scores_count_what_they_refuse<D: Device>(device: &D) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (2, 4));
    let case = |columns, skip| Case { heads: 16, columns, skip, format };
    let queries = [(0, sees(40)), (1, sees(41)), (2, sees(64)), (i32::MAX, sees(9)), (1, sees(96))];
    assert_eq!(layer.check(&queries, 0, &case(96, 40)), 2, "two slots");
    assert_eq!(layer.check(&queries[..1], 0, &case(32, 0)), 1, "one query sees too much");
    layer.table[1] = -1;
    assert_eq!(layer.check(&queries[..1], 0, &case(64, 0)), 1, "one tile");
    layer.table[1] = layer.num_blocks as i32;
    assert_eq!(layer.check(&queries[..1], 0, &case(64, 0)), 1, "one tile");
}

/// So many queries, padding most of them, that a block takes all tiles of one: eleven for some warps, in
/// turn in the places that shared memory has for them.
pub fn blocks_of_many_tiles_equal_the_oracle<D: Device>(device: &D) {
    for format in IndexFormat::ALL {
        let layer = Layer::new(device, format, (2, 44));
        let mut queries = vec![(0, sees(1400)), (1, sees(1))];
        queries.resize(528, (-1, -1));
        let case = Case { heads: 4, columns: 1408, skip: 0, format };
        assert_eq!(layer.check(&queries, 0, &case), 0);
    }
}

/// Many tiles: more than one block a query, and groups of 32.
pub fn long_rows_equal_the_oracle<D: Device>(device: &D) {
    let format = IndexFormat::Mxfp4;
    let layer = Layer::new(device, format, (1, 40));
    for columns in [1280, 65_568] {
        let case = Case { heads: 16, columns, skip: 512, format };
        assert_eq!(layer.check(&[(0, sees(1275))], 0, &case), 0);
    }
}

/// Keys of any size that their scale allows are scored exactly; one beyond the range scores NaN.
pub fn scales_of_any_size_are_exact<D: Device>(device: &D) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (1, 1));
    let first = 32 * layer.table[0] as usize;
    for (key, scale) in [60, 100, 127, 150, 160, 161, 200, 255].into_iter().enumerate() {
        layer.encoded[first + key].scale = vec![scale; 4];
    }
    let scales: Vec<u8> = layer.encoded.iter().flat_map(|key| key.scale.clone()).collect();
    layer.scale = upload(device, &layer.stream, &scales);
    let case = Case { heads: 16, columns: 32, skip: 0, format };
    assert_eq!(layer.check(&[(0, sees(32))], 0, &case), 0);
}

/// Rotated, transformed and quantised as the oracle does it: the same value in nearly every channel,
/// and elsewhere one of the two that a rounding on the way may give.
pub fn queries_equal_the_oracle<D: Device>(device: &D) {
    const HEADS: usize = 6;
    const QUERY: usize = IndexFormat::MOST_QUERY_BYTES as usize;
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(7);
    let tokens = [(0, 0), (1, 4095), (-1, -1), (0, 1_000_003)];
    let (slot, position): (Vec<i32>, Vec<i32>) = tokens.iter().copied().unzip();
    let (slot, position) = (upload(device, &stream, &slot), upload(device, &stream, &position));
    let queries =
        GatherQueries { position: &position, slot: &slot, index: &slot, first: 1, count: 3 };
    // BF16 values, so that the oracle sees the same.
    let projected = keys(3 * HEADS, &mut random);
    let values: Vec<f32> =
        projected.iter().flatten().map(|&bits| bf16_value(bits) as f32).collect();
    let weights: Vec<f32> = (0..3 * HEADS).map(|_| random.random_range(-2.0..2.0)).collect();
    let frequencies = upload(device, &stream, &compress_frequencies());
    for format in IndexFormat::ALL {
        let query_out = upload(device, &stream, &vec![0x77_u8; 3 * QUERY]);
        let weight_out = upload(device, &stream, &[CANARY; 3 * HEADS]);
        let to = IndexQueries { query: &query_out, weight: &weight_out, heads: HEADS as u32 };
        let (from, weight) = (upload(device, &stream, &values), upload(device, &stream, &weights));
        let run = ops::index_query;
        run(device, &stream, &queries, &from, &weight, &frequencies, format, &to).unwrap();
        let found = download(device, &stream, &query_out);
        let scaled = download(device, &stream, &weight_out);
        let mut different = 0;
        for row in [0, 2] {
            for head in 0..HEADS {
                let at = row * HEADS + head;
                let head = &values[at * CHANNELS..][..CHANNELS];
                let wanted = query(oracle(format), head, tokens[row + 1].1 as usize);
                let constant = f64::from(weights[at]) * weight_scale(HEADS);
                let scale = f64::from(scaled[at]) / constant;
                let is_fp8 = format == IndexFormat::Fp8;
                assert!(is_fp8 || (scale - 1.0).abs() < 1e-6, "{scale}");
                let scale = if is_fp8 { scale } else { 1.0 };
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
        assert!(missing.all(|at| element(format, &found, at) == 0.0), "heads that are not there");
        assert!(found[QUERY..2 * QUERY].iter().all(|&byte| byte == 0x77), "padding was written");
        assert!(scaled[HEADS..2 * HEADS].iter().all(|&weight| weight == CANARY));
    }
}

/// Products of integers are exact, whatever the order of sums; rows behind the last stay untouched.
pub fn projections_are_exact_on_integers<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(8);
    for [rows, columns, inner] in [[1, 32, 128], [16, 64, 256], [35, 96, 384]] {
        let mut integers =
            |count: u32| -> Vec<i8> { (0..count).map(|_| random.random_range(-9..=9)).collect() };
        let (input, weight) = (integers(rows * inner), integers(columns * inner));
        let bits = |values: &[i8]| -> Vec<u16> {
            values.iter().map(|&x| bf16::from_f32(x.into()).to_bits()).collect()
        };
        let (a, b) =
            (upload(device, &stream, &bits(&input)), upload(device, &stream, &bits(&weight)));
        let output = upload(device, &stream, &vec![CANARY; (rows * columns + 1) as usize]);
        ops::project(device, &stream, &a, &b, &output, [rows, columns, inner]).unwrap();
        let found = download(device, &stream, &output);
        let inner = inner as usize;
        let wanted = input.chunks_exact(inner).flat_map(|row| {
            weight.chunks_exact(inner).map(|column| {
                row.iter().zip(column).map(|(&x, &y)| i32::from(x) * i32::from(y)).sum::<i32>()
                    as f32
            })
        });
        let wanted: Vec<f32> = wanted.chain([CANARY]).collect();
        assert_eq!(found, wanted);
    }
}

/// Sizes that the kernels do not take are refused by name.
pub fn wrong_sizes_are_refused<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let (a, b) = (device.allocate("a", 256).unwrap(), device.allocate("b", 32 * 128).unwrap());
    let output = device.allocate("output", 64).unwrap();
    let run = |shape| ops::project(device, &stream, &a, &b, &output, shape);
    run([2, 32, 128]).unwrap();
    for shape in [[2, 33, 128], [2, 32, 64], [2, 32, 0]] {
        assert!(matches!(run(shape), Err(DeviceError::Argument { .. })), "{shape:?}");
    }
    for shape in [[3, 32, 128], [1, 64, 128], [1, 32, 256]] {
        assert!(matches!(run(shape), Err(DeviceError::Length { .. })), "{shape:?}");
    }
}

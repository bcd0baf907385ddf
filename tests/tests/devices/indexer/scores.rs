//! The scores of the indexer over keys of every format.

use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::ops::{
    self, BlockTable, IndexKeys, IndexQueries, KeyScores, Scores, StepQueries, maxima_len,
};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::index::EncodedKey;
use dsv4_kv_oracle::indexer::{Score, score};
use dsv4_kv_oracle::number::bf16_value;
use half::bf16;
use kv_layout::index_row::IndexFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::indexer::query::{CANARY, CHANNELS, GROUP, in_order, keys, oracle};
use crate::inputs::{download, upload};

/// Maximum error of a score against the oracle's with the same random operands, as a part of the sum of magnitudes.
/// Tensor cores drop bits in sums of FP8 products, which matters most when few heads are added.
fn tolerance(format: IndexFormat) -> f64 {
    if format == IndexFormat::Fp8 { 2e-4 } else { 1e-5 }
}

/// The keys of one CSA layer and a block table, in which the blocks of a slot are scattered.
pub struct Layer<B: Backend> {
    pub stream: Stream<B>,
    pub format: IndexFormat,
    code: Buffer<B, u8>,
    scale: Buffer<B, u8>,
    pub table: Vec<i32>,
    max_blocks: u32,
    pub num_blocks: u32,
    /// All keys of the planes, by row.
    pub encoded: Vec<EncodedKey>,
}

/// Quantised queries on the device, and the block table.
pub struct Step<B: Backend> {
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
    first: u32,
    pub count: u32,
    query: Buffer<B, u8>,
    weight: Buffer<B, f32>,
    heads: u32,
    table: Buffer<B, i32>,
    slots: u32,
    max_blocks: u32,
}

impl<B: Backend> Step<B> {
    pub fn queries(&self) -> StepQueries<'_, B> {
        let Self { position, slot, first, count, .. } = self;
        StepQueries { position, slot, index: slot, first: *first, count: *count }
    }

    pub fn quantised(&self) -> IndexQueries<'_, B> {
        IndexQueries { query: &self.query, weight: &self.weight, heads: self.heads }
    }

    pub fn table(&self) -> BlockTable<'_, B> {
        BlockTable { table: &self.table, slots: self.slots, max_blocks: self.max_blocks }
    }
}

impl<B: Backend> Layer<B> {
    pub fn new(device: &Device<B>, format: IndexFormat, (slots, max_blocks): (u32, u32)) -> Self {
        let stream = device.stream().unwrap();
        let mut random = StdRng::seed_from_u64(5);
        let num_blocks = slots * max_blocks + 2;
        let encode = |key: &Vec<u16>| oracle(format).encode(key);
        let encoded: Vec<_> =
            keys(32 * num_blocks as usize, &mut random).iter().map(encode).collect();
        let plane = |part: fn(&EncodedKey) -> &Vec<u8>| {
            encoded.iter().flat_map(part).copied().collect::<Vec<u8>>()
        };
        // Each block is used once, in scrambled order.
        let table = (0..(slots * max_blocks) as i32).map(|i| (7 * i + 3) % num_blocks as i32);
        Self {
            code: upload(&stream, &plane(|key| &key.codes)),
            scale: upload(&stream, &plane(|key| &key.scale)),
            table: table.collect(),
            stream,
            format,
            max_blocks,
            num_blocks,
            encoded,
        }
    }

    /// Uploads `encoded` to the planes.
    pub fn upload_keys(&mut self) {
        let plane = |part: fn(&EncodedKey) -> &Vec<u8>| {
            self.encoded.iter().flat_map(part).copied().collect::<Vec<u8>>()
        };
        let (codes, scales) = (plane(|key| &key.codes), plane(|key| &key.scale));
        self.code = upload(&self.stream, &codes);
        self.scale = upload(&self.stream, &scales);
    }

    /// The planes of the keys.
    pub fn keys(&self) -> IndexKeys<'_, B> {
        let Self { code, scale, format, num_blocks, .. } = self;
        let (format, num_blocks) = (*format, *num_blocks);
        IndexKeys { code, scale, format, hadamard: true, num_blocks }
    }

    /// Quantises and uploads `queries` (slot, position), for launches that start at query `first`.
    pub fn step(&self, queries: &[(i32, i32)], first: usize, case: &Case) -> Step<B> {
        self.step_of(queries, first, case.heads, &case.operands(queries.len() - first))
    }

    /// [`Self::step`] of the operands that [`Case::operands`] describes.
    pub fn step_of(
        &self,
        queries: &[(i32, i32)],
        first: usize,
        heads: u32,
        (query, weight): &(Vec<u16>, Vec<f32>),
    ) -> Step<B> {
        let Self { stream, .. } = self;
        let rows = queries.len() - first;
        let (slot, position): (Vec<i32>, Vec<i32>) = queries.iter().copied().unzip();
        let query = in_order(self.format, query, heads as usize);
        Step {
            position: upload(stream, &position),
            slot: upload(stream, &slot),
            first: first as u32,
            count: rows as u32,
            query: upload(stream, &query),
            weight: upload(stream, weight),
            heads,
            table: upload(stream, &self.table),
            slots: self.table.len() as u32 / self.max_blocks,
            max_blocks: self.max_blocks,
        }
    }

    /// The key of an entry as the oracle reads it; `None` if its block is missing or a scale is NaN.
    fn key(&self, slot: i32, entry: usize) -> Option<Vec<f64>> {
        let block = self.table[slot as usize * self.max_blocks as usize + entry / 32];
        let row = usize::try_from(block).ok()? * 32 + entry % 32;
        let encoded = self.encoded.get(row)?;
        if self.format == IndexFormat::Mxfp4 && encoded.scale.contains(&255) {
            return None;
        }
        let key = oracle(self.format).decode(encoded);
        Some(key.into_iter().map(f64::from).collect())
    }

    /// Scores the queries of the step, except those with at most `skip` keys.
    pub fn score(&self, step: &Step<B>, skip: u32, to: &Scores<B>, faults: &Buffer<B, u32>) {
        let (queries, from) = (&step.queries(), &step.quantised());
        let (table, keys) = (&step.table(), &self.keys());
        let launch = KeyScores { queries, from, table, keys, skip, to, faults };
        // SAFETY: the step's arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::index_score(&self.stream, &launch) }.unwrap();
    }

    /// Expects the kernel for chunks to write the same bits as [`Self::score`], all of which began as `CANARY`. A NaN may have
    /// other bits.
    fn expect_of_chunk(&self, step: &Step<B>, skip: u32, to: &Scores<B>, faults: &Buffer<B, u32>) {
        let stream = &self.stream;
        let (queries, from) = (&step.queries(), &step.quantised());
        let (table, keys) = (&step.table(), &self.keys());
        let launch = KeyScores { queries, from, table, keys, skip, to, faults };
        let bits = |buffer: &Buffer<B, f32>| {
            let bits = |x: f32| if x.is_nan() { f32::NAN } else { x }.to_bits();
            Vec::from_iter(download(stream, buffer).into_iter().map(bits))
        };
        let &Scores { scores, maxima, columns } = to;
        let expected = [bits(scores), bits(maxima), download(stream, faults)];
        for each in [1, 3, 8, u32::MAX] {
            let canaries = |of: &Buffer<B, f32>| upload(stream, &vec![CANARY; of.len() as usize]);
            let (scores, maxima) = (canaries(scores), canaries(maxima));
            let to = &Scores { scores: &scores, maxima: &maxima, columns };
            let faults = &upload(stream, &[0]);
            let launch = KeyScores { to, faults, ..launch };
            // SAFETY: the step's arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::index_score_chunk(stream, &launch, each) }.unwrap();
            let found = [bits(&scores), bits(&maxima), download(stream, faults)];
            let equal = [0, 1, 2].map(|i| found[i] == expected[i]);
            assert_eq!(equal, [true; 3], "scores, maxima, faults with {each} queries of a request");
        }
    }

    /// Scores `queries` (slot, position). Checks each score, each maximum of a group, and that nothing else was
    /// written. Returns the count of the fault word.
    fn check(&self, queries: &[(i32, i32)], first: usize, case: &Case) -> u32 {
        let Self { stream, .. } = self;
        let rows = queries.len() - first;
        let step = self.step(queries, first, case);
        let Case { columns, skip, .. } = *case;
        let scores = upload(stream, &vec![CANARY; rows * columns as usize + 1]);
        let groups = maxima_len(columns) as usize;
        let maxima = upload(stream, &vec![CANARY; rows * groups]);
        let to = Scores { scores: &scores, maxima: &maxima, columns };
        let faults = upload(stream, &[0]);
        self.score(&step, skip, &to, &faults);
        self.expect_of_chunk(&step, skip, &to, &faults);
        let (scores, maxima) = (download(stream, &scores), download(stream, &maxima));
        assert_eq!(scores[scores.len() - 1], CANARY, "behind the scores");
        for (row, &(slot, position)) in queries[first..].iter().enumerate() {
            let scores = &scores[row * columns as usize..][..columns as usize];
            let seen = visible(position.max(0) as usize, 4).min(columns as usize);
            let live = (0..step.slots as i32).contains(&slot) && seen > skip as usize;
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
        download(stream, &faults)[0]
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

/// Random quantised queries, and how they are scored.
pub struct Case {
    pub heads: u32,
    pub columns: u32,
    pub skip: u32,
    pub format: IndexFormat,
    /// Binades by which each group of a query against MXFP4 keys lies below the group before it.
    pub fall: i32,
}

impl Case {
    /// `[rows, heads, 128]` BF16 and `[rows, heads]` f32: values of the format, and weights of both signs.
    pub fn operands(&self, rows: usize) -> (Vec<u16>, Vec<f32>) {
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
            let decode = || oracle(self.format).decode(&encoded).into_iter();
            match self.format {
                IndexFormat::Nvfp4 => decode().map(value).collect::<Vec<_>>(),
                IndexFormat::Mxfp4 => {
                    // Scaled as if the largest scale were 16: integers times powers of 1/2.
                    let most = i32::from(*encoded.scale.iter().max().unwrap()) - 127 - 4;
                    let power = |at: usize| 2_f32.powi(-most - self.fall * (at / GROUP) as i32);
                    decode().enumerate().map(|(at, x)| value(x * power(at))).collect()
                }
                IndexFormat::Fp8 => unscaled(&encoded.codes),
            }
        });
        let queries = queries.collect();
        let mut random = StdRng::seed_from_u64(9);
        (queries, (0..heads).map(|_| random.random_range(-0.1..0.1)).collect())
    }

    /// The operands of one row, as the oracle takes them.
    fn vectors(&self, row: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
        let (queries, weights) = self.operands(row + 1);
        let heads = self.heads as usize;
        let queries = queries.chunks_exact(CHANNELS).skip(row * heads);
        let wide = |head: &[u16]| head.iter().map(|&bits| bf16_value(bits)).collect();
        let weights = weights[row * heads..].iter().map(|&weight| f64::from(weight)).collect();
        (queries.map(wide).collect(), weights)
    }
}

/// The last position at which a query sees exactly `entries` entries.
pub fn sees(entries: i32) -> i32 {
    4 * (entries + 1) - 2
}

/// Queries of several requests with full and partial tiles, in every format, with scattered blocks.
pub fn scores_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in IndexFormat::ALL {
        let layer = Layer::new(device, format, (3, 5));
        let queries =
            [(0, 9), (1, sees(1)), (2, sees(70)), (-1, -1), (0, sees(160)), (1, sees(33))];
        let case = Case { heads: 64, columns: 160, skip: 0, format, fall: 0 };
        assert_eq!(layer.check(&queries, 1, &case), 0);
        // The first sees more entries than a row has, but the row has no more than are skipped.
        let case = Case { columns: 32, skip: 64, ..case };
        assert_eq!(layer.check(&[(0, sees(100)), (1, sees(32))], 0, &case), 1);
    }
}

/// Runs of queries of one request, longer and shorter than a block of the kernel for chunks takes, with padding and
/// refused slots between them. Queries of a run see different numbers of entries, some more than a row has.
pub fn runs_of_queries_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in IndexFormat::ALL {
        let mut layer = Layer::new(device, format, (3, 12));
        layer.table[3] = -1;
        let run = |slot: i32, seen: std::ops::Range<i32>| seen.map(move |i| (slot, sees(i)));
        let mut queries: Vec<_> = run(1, 300..313).collect();
        queries.extend(run(0, 100..104));
        queries.extend([(-1, -1), (-1, -1), (7, sees(9)), (0, sees(104))]);
        queries.extend(run(2, 20..45));
        queries.extend(run(1, 378..386));
        let case = Case { heads: 24, columns: 384, skip: 30, format, fall: 0 };
        let missing = queries.iter().filter(|(slot, _)| *slot == 0).count() as u32;
        assert_eq!(missing, 5, "these see entries of the fourth block, which is missing");
        assert_eq!(
            layer.check(&queries, 2, &case),
            missing + 2,
            "and a slot, a query that sees 385"
        );
    }
}

/// Fewer heads than 64, among them numbers that are no multiple of those of a product.
pub fn few_heads_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for (heads, format) in [
        (1, IndexFormat::Mxfp4),
        (8, IndexFormat::Nvfp4),
        (40, IndexFormat::Fp8),
        (1, IndexFormat::Fp8),
    ] {
        let layer = Layer::new(device, format, (1, 2));
        let case = Case { heads, columns: 64, skip: 0, format, fall: 0 };
        assert_eq!(layer.check(&[(0, sees(45))], 0, &case), 0);
    }
}

/// Queries with few keys are skipped. Slots that do not exist and rows that are too short are counted. A missing block
/// gives NaN.
pub fn scores_count_what_they_refuse<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (2, 4));
    let case = |columns, skip| Case { heads: 16, columns, skip, format, fall: 0 };
    let queries = [(0, sees(40)), (1, sees(41)), (2, sees(64)), (i32::MAX, sees(9)), (1, sees(96))];
    assert_eq!(layer.check(&queries, 0, &case(96, 40)), 2, "two slots");
    assert_eq!(layer.check(&queries[..1], 0, &case(32, 0)), 1, "one query sees too much");
    layer.table[1] = -1;
    assert_eq!(layer.check(&queries[..1], 0, &case(64, 0)), 1, "one tile");
    layer.table[1] = layer.num_blocks as i32;
    assert_eq!(layer.check(&queries[..1], 0, &case(64, 0)), 1, "one tile");
}

/// So many queries, most of them padding, that one block takes all tiles of a query. Some warps get eleven tiles, and
/// use their buffers in shared memory several times.
pub fn blocks_of_many_tiles_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in IndexFormat::ALL {
        let layer = Layer::new(device, format, (2, 44));
        let mut queries = vec![(0, sees(1400)), (1, sees(1))];
        queries.resize(528, (-1, -1));
        let case = Case { heads: 4, columns: 1408, skip: 0, format, fall: 0 };
        assert_eq!(layer.check(&queries, 0, &case), 0);
    }
}

/// Long rows: several blocks per query, and maxima of groups of 32.
pub fn long_rows_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let layer = Layer::new(device, format, (1, 40));
    for columns in [1280, 65_568] {
        let case = Case { heads: 16, columns, skip: 512, format, fall: 0 };
        assert_eq!(layer.check(&[(0, sees(1275))], 0, &case), 0);
    }
}

/// MXFP4 keys and queries whose groups have scales too far apart for integers: some of them only, and in any round of a
/// block.
pub fn distant_groups_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (1, 11));
    let mut random = StdRng::seed_from_u64(12);
    for key in layer.encoded.iter_mut().step_by(101) {
        for scale in &mut key.scale {
            *scale = random.random_range(115..=139);
        }
    }
    layer.upload_keys();
    for fall in [0, 1, 2, 9] {
        let queries = [(0, sees(352)), (0, sees(77))];
        let case = Case { heads: 20, columns: 352, skip: 0, format, fall };
        assert_eq!(layer.check(&queries, 0, &case), 0);
    }
}

/// A key whose groups have scales too far apart for integers makes its whole cache block take another way. The other
/// keys' scores keep their bits: also beside a key that the query does not see, such as one of a later token.
pub fn a_score_does_not_depend_on_keys_beside_it<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (1, 2));
    let mut random = StdRng::seed_from_u64(13);
    for key in &mut layer.encoded {
        key.scale = (0..4).map(|_| random.random_range(126..=128)).collect();
    }
    let (queries, heads) = ([(0, sees(31)), (0, sees(40))], 64);
    let case = Case { heads, columns: 64, skip: 0, format, fall: 0 };
    let bits = |layer: &mut Layer<B>| {
        layer.upload_keys();
        let step = layer.step(&queries, 0, &case);
        let stream = &layer.stream;
        let scores = upload(stream, &[CANARY; 128]);
        let maxima = upload(stream, &vec![CANARY; 2 * maxima_len(64) as usize]);
        let to = Scores { scores: &scores, maxima: &maxima, columns: 64 };
        layer.score(&step, 0, &to, &upload(stream, &[0]));
        Vec::from_iter(download(stream, &scores).iter().map(|score| score.to_bits()))
    };
    let alike = bits(&mut layer);
    let at = |block: usize, key: usize| 32 * layer.table[block] as usize + key;
    let (unseen, seen) = ([at(0, 31), at(1, 9)], at(1, 3));
    let kept = layer.encoded[unseen[1]].scale.clone();
    for key in unseen {
        layer.encoded[key].scale = vec![127, 120, 127, 127];
    }
    let beside = bits(&mut layer);
    // The first query sees neither, the second sees the first of them.
    let differ = |found: &[u32]| {
        let differ = |&at: &usize| found[at] != alike[at];
        Vec::from_iter((0..128).filter(differ))
    };
    assert!(differ(&beside).iter().all(|&at| at == 64 + 31), "{:?}", differ(&beside));
    layer.encoded[unseen[1]].scale = kept;
    layer.encoded[seen].scale = vec![130, 120, 127, 127];
    let beside = bits(&mut layer);
    assert!(differ(&beside).iter().all(|at| [64 + 31, 64 + 35].contains(at)));
    assert!(!differ(&beside).is_empty(), "the keys themselves score otherwise");
}

/// Keys of any magnitude that their scale allows are scored exactly; a key with a NaN scale scores NaN.
pub fn scales_of_any_size_are_exact<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (1, 1));
    let first = 32 * layer.table[0] as usize;
    for (key, scale) in [0, 1, 60, 100, 127, 150, 160, 200, 255].into_iter().enumerate() {
        layer.encoded[first + key].scale = vec![scale; 4];
    }
    layer.upload_keys();
    let case = Case { heads: 16, columns: 32, skip: 0, format, fall: 0 };
    assert_eq!(layer.check(&[(0, sees(32))], 0, &case), 0);
}

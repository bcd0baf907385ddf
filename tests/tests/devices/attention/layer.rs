//! A layer's rings, entries and block table with random rows, and attention over them on a device and in `f64`.

use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::ops::{
    self, Attended, AttendedEntries, Attention, BlockTable, Entries, GatherQueries, SwaRing,
};
use dsv4_kv_oracle::attention::{self, Attended as Expected};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_oracle::row::EncodedRow;
use kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, WINDOW};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::inputs::{download, download_bits, oracle, upload, upload_bf16};

const CHANNELS: usize = HEAD_DIM as usize;
/// What outputs hold that nobody should write.
pub const CANARY: u8 = 0xA5;

/// The size of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub format: MainFormat,
    /// Tokens of an entry.
    pub ratio: u32,
    pub heads: u32,
    pub slots: u32,
    /// Rows of a ring.
    pub ring: u32,
    /// Blocks of a request.
    pub blocks: u32,
}

/// A query of a step: its slot, -1 for padding, and its position; the entries that it attends to.
#[derive(Clone, Debug)]
pub struct Query {
    pub slot: i32,
    pub position: u32,
    pub list: Vec<i32>,
}

/// Which entries queries attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Nothing,
    List,
    /// All that a query sees, at most so many.
    All(u32),
}

/// What a launch wrote.
pub struct Written {
    /// `[queries, heads, 512]` BF16 bits.
    pub out: Vec<u16>,
    /// `[queries, heads]` bits.
    pub lse: Vec<u32>,
    pub faults: u32,
}

/// A layer on a device, every row of it known.
pub struct Layer<B: Backend> {
    pub shape: Shape,
    pub stream: Stream<B>,
    /// `[slots * ring]`, and `[blocks * entries]`.
    pub window: Vec<EncodedRow>,
    pub entries: Vec<EncodedRow>,
    /// `[slots, blocks]`.
    pub table: Vec<i32>,
    pub sinks: Vec<f32>,
    device: Device<B>,
}

/// BF16 bits of a row of `size` at most.
pub fn random_row(random: &mut StdRng, size: f32) -> Vec<u16> {
    let mut value = || bf16::from_f32(random.random_range(-size..size)).to_bits();
    (0..CHANNELS).map(|_| value()).collect()
}

impl<B: Backend> Layer<B> {
    /// Random rows everywhere, blocks of requests in random order.
    pub fn random(device: &Device<B>, shape: Shape, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let Shape { format, slots, ring, blocks, heads, ratio } = shape;
        let mut rows = |count: u32| -> Vec<EncodedRow> {
            let format = oracle(format);
            (0..count)
                .map(|_| {
                    let size = 2f32.powi(random.random_range(-3..2));
                    format.encode(&random_row(&mut random, size))
                })
                .collect()
        };
        let (window, entries) = (rows(slots * ring), rows(slots * blocks * BLOCK_TOKENS / ratio));
        let mut table: Vec<i32> = (0..(slots * blocks) as i32).collect();
        table.shuffle(&mut random);
        let sinks = (0..heads).map(|_| random.random_range(-3.0..3.0)).collect();
        let stream = device.stream().unwrap();
        Self { shape, stream, window, entries, table, sinks, device: device.clone() }
    }

    /// Queries of `[queries, heads, 512]` BF16 bits whose scores differ by several units.
    pub fn random_heads(&self, queries: usize, seed: u64) -> Vec<Vec<u16>> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..queries * self.shape.heads as usize).map(|_| random_row(&mut random, 6.0)).collect()
    }

    fn seen(&self, query: &Query) -> usize {
        visible(query.position as usize, self.shape.ratio as usize)
    }

    /// The entries of `query` that count.
    fn attended(&self, query: &Query, which: Which) -> Vec<usize> {
        let seen = self.seen(query);
        match which {
            Which::Nothing => Vec::new(),
            Which::All(most) => (0..seen.min(most as usize)).collect(),
            Which::List => {
                let read = query.list.iter().take(seen);
                let counted = read.filter_map(|&entry| usize::try_from(entry).ok());
                counted.filter(|&entry| entry < seen).collect()
            }
        }
    }

    /// The stored row of an entry of the request in `slot`, if its block exists.
    fn entry_row(&self, slot: usize, entry: usize) -> Option<usize> {
        let per_block = (BLOCK_TOKENS / self.shape.ratio) as usize;
        let of_slot = self.table.chunks(self.shape.blocks as usize).nth(slot)?;
        let block = usize::try_from(*of_slot.get(entry / per_block)?).ok()?;
        let row = block * per_block + entry % per_block;
        (row < self.entries.len()).then_some(row)
    }

    /// Rows that `query` attends to, in the order of its keys.
    pub fn keys(&self, query: &Query, which: Which) -> Vec<&EncodedRow> {
        let (slot, position) = (query.slot as usize, query.position);
        let first = (position + 1).saturating_sub(WINDOW);
        let row =
            |p: u32| &self.window[slot * self.shape.ring as usize + (p % self.shape.ring) as usize];
        let entries = self.attended(query, which).into_iter();
        let entries = entries.filter_map(|entry| Some(&self.entries[self.entry_row(slot, entry)?]));
        (first..=position).map(row).chain(entries).collect()
    }

    /// What head `head` of `query` should get.
    pub fn expected(&self, query: &Query, which: Which, head: usize, q: &[u16]) -> Expected {
        let values = |bits: &[u16]| bits.iter().map(|&bits| bf16_value(bits)).collect();
        let format = oracle(self.shape.format);
        let keys: Vec<Vec<f64>> =
            self.keys(query, which).into_iter().map(|row| values(&format.decode(row))).collect();
        let q: Vec<f64> = values(q);
        let place = (Table::Compress, query.position as usize);
        attention::attend(&q, &keys, self.sinks[head].into(), place)
    }

    /// Runs attention of `queries`, whose heads are `heads`, in a step that has one more token before them.
    pub fn attend(&self, queries: &[Query], which: Which, heads: &[Vec<u16>]) -> Written {
        let (stream, shape) = (&self.stream, self.shape);
        let plane = |rows: &[EncodedRow], part: fn(&EncodedRow) -> &Vec<u8>| {
            upload(stream, &rows.iter().flat_map(part).copied().collect::<Vec<u8>>())
        };
        let planes = |rows| (plane(rows, |row| &row.data), plane(rows, |row| &row.scale));
        let (window, entries) = (planes(&self.window), planes(&self.entries));
        let step = |of: fn(&Query) -> i32| {
            upload(stream, &std::iter::once(-1).chain(queries.iter().map(of)).collect::<Vec<i32>>())
        };
        let (slot, position) = (step(|query| query.slot), step(|query| query.position as i32));
        let index = step(|_| 0);
        let count = queries.len();
        let (query, table) = (upload_bf16(stream, &heads.concat()), upload(stream, &self.table));
        let lists: Vec<i32> = queries.iter().flat_map(|query| query.list.iter().copied()).collect();
        let selected = upload(stream, &lists);
        let elements = count as u64 * u64::from(shape.heads);
        let out: Buffer<B, bf16> = self.canaries(elements * u64::from(HEAD_DIM));
        let (lse, faults) = (self.canaries(elements), upload(stream, &[0_u32]));
        let entries = Entries {
            data: &entries.0,
            scale: &entries.1,
            format: shape.format,
            entries_per_block: BLOCK_TOKENS / shape.ratio,
            num_blocks: shape.slots * shape.blocks,
        };
        let (table, entries) =
            (BlockTable { table: &table, slots: shape.slots, max_blocks: shape.blocks }, &entries);
        let (table, rows) = (&table, queries[0].list.len() as u32);
        let attended = |which, rows| Some(AttendedEntries { entries, table, which, rows });
        let attention = Attention {
            queries: &GatherQueries {
                position: &position,
                slot: &slot,
                index: &index,
                first: 1,
                count: count as u32,
            },
            query: &query,
            heads: shape.heads,
            sinks: &upload(stream, &self.sinks),
            frequencies: &upload(stream, &Table::Compress.frequencies()),
            ring: &SwaRing {
                data: &window.0,
                scale: &window.1,
                format: shape.format,
                ring: shape.ring,
                slots: shape.slots,
            },
            own: None,
            entries: match which {
                Which::Nothing => None,
                Which::List => attended(Attended::List(&selected), rows),
                Which::All(most) => attended(Attended::All, most),
            },
            out: &out,
            lse: Some(&lse),
            faults: &faults,
        };
        ops::attend(stream, &attention).unwrap();
        Written {
            out: download_bits(stream, &out),
            lse: download(stream, &lse.view().cast::<u32>().unwrap()),
            faults: download(stream, &faults)[0],
        }
    }

    fn canaries<T: bytemuck::Pod>(&self, len: u64) -> Buffer<B, T> {
        let buffer = self.device.allocate("canaries", len).unwrap();
        self.stream.fill(&buffer, CANARY).unwrap();
        buffer
    }

    /// A query along key `key` of `query`, of which it is the largest score by far.
    pub fn along(&self, query: &Query, which: Which, key: usize) -> Vec<u16> {
        let row = oracle(self.shape.format).decode(self.keys(query, which)[key]);
        let values: Vec<f32> = row.iter().map(|&bits| bf16_value(bits) as f32).collect();
        let length = values.iter().map(|value| value * value).sum::<f32>();
        values.iter().map(|value| bf16::from_f32(4096.0 * value / length).to_bits()).collect()
    }

    /// Which of the keys of `query`, turned back, is nearest to `out` by its direction.
    pub fn nearest(&self, query: &Query, which: Which, out: &[u16]) -> usize {
        let out: Vec<f64> = out.iter().map(|&bits| bf16_value(bits)).collect();
        let format = oracle(self.shape.format);
        let cosine = |row: &EncodedRow| {
            let key: Vec<f64> = format.decode(row).iter().map(|&bits| bf16_value(bits)).collect();
            let key = Table::Compress.rotate_back(&key, query.position as usize);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            dot(&out, &key) / dot(&key, &key).sqrt()
        };
        let keys = self.keys(query, which);
        let all = keys.iter().map(|row| cosine(row)).enumerate();
        all.max_by(|a, b| a.1.total_cmp(&b.1)).expect("a query sees itself").0
    }

    /// Makes every row NaN that is not one of `kept`.
    pub fn spoil_all_but(&mut self, kept: &[EncodedRow]) {
        for row in self.window.iter_mut().chain(&mut self.entries) {
            if !kept.contains(row) {
                row.data.fill(0x7F);
                row.scale.fill(0xFF);
            }
        }
    }

    /// Attention of `queries` on the device, compared with `f64` by the bound of the contract; the fault count.
    pub fn check(&self, queries: &[Query], which: Which, heads: &[Vec<u16>]) -> u32 {
        let written = self.attend(queries, which, heads);
        let per_query = self.shape.heads as usize;
        let found = written.out.chunks(CHANNELS).zip(&written.lse).zip(heads).enumerate();
        for (at, ((out, &lse), q)) in found {
            let (query, head) = (&queries[at / per_query], at % per_query);
            let what = format!(
                "{:?} query {} at {}, head {head}",
                self.shape,
                at / per_query,
                query.position
            );
            if query.slot < 0 || query.slot as u32 >= self.shape.slots {
                assert!(out.iter().all(|&bits| bits == 0xA5A5) && lse == 0xA5A5_A5A5, "{what}");
                continue;
            }
            let expected = self.expected(query, which, head, q);
            let lse = f64::from(f32::from_bits(lse));
            assert!((lse - expected.lse).abs() < 1e-4, "{what}: lse {lse}, not {}", expected.lse);
            assert_near(out, &expected, &what);
        }
        written.faults
    }
}

/// Whether `out` is what `expected` says, within the bound of the contract.
pub fn assert_near(out: &[u16], expected: &Expected, what: &str) {
    let bound = expected.bound();
    for (channel, (&bits, want)) in out.iter().zip(&expected.sum).enumerate() {
        let got = bf16_value(bits);
        let (off, most) = ((got - want).abs(), bound[channel]);
        assert!(
            off <= most,
            "{what}, channel {channel}: {got}, not {want}, off by {off} of {most}"
        );
    }
}

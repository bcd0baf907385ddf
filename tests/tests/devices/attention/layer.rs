//! A layer with random rows: rings, entries, block table and own rows of a step; and attention over them on a device
//! and in `f64`.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::ops::{
    self, Attended, AttendedEntries, Attention, BlockTable, Entries, OwnRows, QueryForm,
    StepQueries, SwaRing,
};
use dsv4_kv_oracle::attention::{self, Attended as Expected};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_oracle::row::EncodedRow;
use kv_layout::attention::{AttendedKeys, KeyCluster};
use kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, WINDOW};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::workspace::Workspace;
use crate::inputs::{
    CANARY, CANARY_BF16, CANARY_F32, download, download_bits, oracle, upload, upload_bf16,
};
use crate::refused::kernel_without;

const CHANNELS: usize = HEAD_DIM as usize;
/// Number of keys in a tile, which a block multiplies at a time.
pub const TILE: usize = 64;

/// The dimensions of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub format: MainFormat,
    /// Tokens per entry.
    pub ratio: u32,
    pub heads: u32,
    pub slots: u32,
    /// Rows per ring.
    pub ring: u32,
    /// Blocks per request.
    pub blocks: u32,
}

/// A query of a step: its slot, -1 for padding; its position; its number among its request's tokens of the step; and
/// the list of entries that it attends to.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub slot: i32,
    pub position: u32,
    pub index: i32,
    pub list: Vec<i32>,
}

/// The entries that queries attend to, besides the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Nothing,
    List,
    /// All entries that a query sees, at most this many.
    All(u32),
}

impl Which {
    /// The corresponding [`AttendedKeys`].
    pub const fn keys(self) -> AttendedKeys {
        match self {
            Self::Nothing => AttendedKeys::Window,
            Self::List => AttendedKeys::List,
            Self::All(_) => AttendedKeys::All,
        }
    }

    /// The number of blocks that share the keys of a query.
    pub const fn blocks(self) -> usize {
        self.keys().blocks() as usize
    }

    /// The numbers of blocks that may share a query's keys in this kind of attention.
    pub const fn clusters(self) -> &'static [KeyCluster] {
        match self {
            Self::Nothing => &[KeyCluster::TwoBlocks],
            Self::List | Self::All(_) => &[KeyCluster::TwoBlocks, KeyCluster::OneBlock],
        }
    }

    /// Forms to check: each of these numbers, and queries spread over eight blocks, channels in halves, and whole.
    pub fn blocks_to_check(self) -> [Blocks; 3] {
        let two = KeyCluster::TwoBlocks;
        let one = if self == Self::Nothing { two } else { KeyCluster::OneBlock };
        [Blocks::halves(two), Blocks::whole(one), Blocks::spread(two)]
    }

    /// Entries with which, after a full window, each block has three tiles: the third reuses the buffer of the first.
    pub const fn entries_of_three_tiles(self) -> usize {
        3 * self.blocks() * TILE - WINDOW as usize
    }
}

/// The outputs of a launch.
pub struct Written {
    /// `[queries, heads, 512]` BF16 bits.
    pub out: Vec<u16>,
    /// `[queries, heads]` bits.
    pub lse: Vec<u32>,
    pub faults: u32,
    /// The name of the launched kernel.
    pub kernel: &'static str,
}

/// A layer on a device, with a copy of every row on the host.
pub struct Layer<B: Backend> {
    pub shape: Shape,
    pub stream: Stream<B>,
    /// `[slots * ring]` for the window, and `[blocks * entries]` for the entries.
    pub window: Vec<EncodedRow>,
    pub entries: Vec<EncodedRow>,
    /// Rows of the step's tokens, if windows are read there: the row of query `i` is row `i + 1`.
    pub own: Vec<EncodedRow>,
    /// `[slots, blocks]`.
    pub table: Vec<i32>,
    pub sinks: Vec<f32>,
    /// Whether queries are raw, or normed and rotated.
    pub form: QueryForm,
    /// The form of the launch.
    pub blocks: Blocks,
    /// Queries per launch for whose splits there is memory; `None` for all.
    pub at_once: Option<u32>,
    device: Device<B>,
}

/// BF16 bits of a random row with values up to `size`.
pub fn random_row(random: &mut StdRng, size: f32) -> Vec<u16> {
    let mut value = || bf16::from_f32(random.random_range(-size..size)).to_bits();
    (0..CHANNELS).map(|_| value()).collect()
}

impl<B: Backend> Layer<B> {
    /// Random rows everywhere; the blocks of requests are in random order.
    pub fn random(device: &Device<B>, shape: Shape, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let Shape { format, slots, ring, blocks, heads, ratio } = shape;
        let mut rows = |count: u32| random_rows(&mut random, format, count as usize, -3..2);
        let (window, entries) = (rows(slots * ring), rows(slots * blocks * BLOCK_TOKENS / ratio));
        let mut table: Vec<i32> = (0..(slots * blocks) as i32).collect();
        table.shuffle(&mut random);
        let sinks = (0..heads).map(|_| random.random_range(-3.0..3.0)).collect();
        let stream = device.stream().unwrap();
        Self {
            shape,
            stream,
            window,
            entries,
            own: Vec::new(),
            table,
            sinks,
            form: QueryForm::Rotated,
            blocks: Blocks::whole(KeyCluster::TwoBlocks),
            at_once: None,
            device: device.clone(),
        }
    }

    /// As [`Self::random`] with rows of one magnitude: else a query along a short row may score higher with a long one.
    pub fn even(device: &Device<B>, shape: Shape, seed: u64) -> Self {
        let (mut layer, mut random) =
            (Self::random(device, shape, seed), StdRng::seed_from_u64(seed));
        for rows in [&mut layer.window, &mut layer.entries] {
            *rows = random_rows(&mut random, shape.format, rows.len(), 0..1);
        }
        layer
    }

    /// Random heads, `[queries, heads]` of 512 BF16 bits, whose scores differ by several units.
    pub fn random_heads(&self, queries: usize, seed: u64) -> Vec<Vec<u16>> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..queries * self.shape.heads as usize).map(|_| random_row(&mut random, 6.0)).collect()
    }

    fn seen(&self, query: &Query) -> usize {
        visible(query.position as usize, self.shape.ratio as usize)
    }

    /// The entries of `query` that have a weight in its softmax.
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

    /// The row where an entry of the request in `slot` is stored; `None` if its block does not exist.
    pub fn entry_row(&self, slot: usize, entry: usize) -> Option<usize> {
        let per_block = (BLOCK_TOKENS / self.shape.ratio) as usize;
        let of_slot = self.table.chunks(self.shape.blocks as usize).nth(slot)?;
        let block = usize::try_from(*of_slot.get(entry / per_block)?).ok()?;
        let row = block * per_block + entry % per_block;
        (row < self.entries.len()).then_some(row)
    }

    /// The rows that `query`, number `at` of the launch, attends to, in the order of its keys.
    pub fn keys(&self, (at, query): (usize, &Query), which: Which) -> Vec<&EncodedRow> {
        let (slot, position) = (query.slot as usize, query.position);
        let first = (position + 1).saturating_sub(WINDOW);
        let row = |p: u32| {
            let before = (position - p) as usize;
            if before <= query.index as usize && !self.own.is_empty() {
                return &self.own[1 + at - before];
            }
            &self.window[slot * self.shape.ring as usize + (p % self.shape.ring) as usize]
        };
        let entries = self.attended(query, which).into_iter();
        let entries = entries.filter_map(|entry| Some(&self.entries[self.entry_row(slot, entry)?]));
        (first..=position).map(row).chain(entries).collect()
    }

    /// The values of the rows of [`Self::keys`].
    pub fn key_values(&self, query: (usize, &Query), which: Which) -> Vec<Vec<f64>> {
        let format = oracle(self.shape.format);
        self.keys(query, which).into_iter().map(|row| values(&format.decode(row))).collect()
    }

    /// The expected result of head `head` of `query`, whose keys are `keys`.
    fn expected(&self, query: &Query, keys: &[Vec<f64>], head: usize, q: &[u16]) -> Expected {
        let place = (Table::Compress, query.position as usize);
        attention::attend(&values(q), keys, self.sinks[head].into(), place)
    }

    /// Whether `query`, number `at` of the launch, is padding, or its slot or its own rows do not exist.
    fn is_nobody(&self, at: usize, query: &Query) -> bool {
        let has_slot = u32::try_from(query.slot).is_ok_and(|slot| slot < self.shape.slots);
        let has_own = usize::try_from(query.index).is_ok_and(|index| index <= 1 + at);
        !has_slot || !self.own.is_empty() && !has_own
    }

    /// Runs attention for `queries` with the heads `heads`, in a step that has one more token before them.
    pub fn attend(&self, queries: &[Query], which: Which, heads: &[Vec<u16>]) -> Written {
        self.try_attend(queries, which, heads).unwrap()
    }

    /// As [`Self::attend`]; the launch may be refused.
    pub fn try_attend(
        &self,
        queries: &[Query],
        which: Which,
        heads: &[Vec<u16>],
    ) -> Result<Written, DeviceError> {
        self.attend_in(self.blocks, queries, which, heads)
    }

    fn attend_in(
        &self,
        blocks: Blocks,
        queries: &[Query],
        which: Which,
        heads: &[Vec<u16>],
    ) -> Result<Written, DeviceError> {
        let (stream, shape) = (&self.stream, self.shape);
        let plane = |rows: &[EncodedRow], part: fn(&EncodedRow) -> &Vec<u8>| {
            upload(stream, &rows.iter().flat_map(part).copied().collect::<Vec<u8>>())
        };
        let planes = |rows| (plane(rows, |row| &row.data), plane(rows, |row| &row.scale));
        let (window, entries) = (planes(&self.window), planes(&self.entries));
        let own = planes(&self.own);
        let step = |of: fn(&Query) -> i32| {
            upload(stream, &std::iter::once(-1).chain(queries.iter().map(of)).collect::<Vec<i32>>())
        };
        let (slot, position) = (step(|query| query.slot), step(|query| query.position as i32));
        let index = step(|query| query.index);
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
        let table = &BlockTable { table: &table, slots: shape.slots, max_blocks: shape.blocks };
        let (entries, rows) = (&entries, queries.first().map_or(0, |of| of.list.len() as u32));
        let workspace = self.workspace(blocks, count as u32, which);
        let splits = workspace.splits.as_ref();
        let attended = |which, rows| Some(AttendedEntries { entries, table, which, rows, splits });
        let short = out.slice(0, out.len().saturating_sub(1)).unwrap();
        let mut attention = Attention {
            queries: &StepQueries {
                position: &position,
                slot: &slot,
                index: &index,
                first: 1,
                count: count as u32,
            },
            query: &query,
            form: self.form,
            heads: shape.heads,
            cluster: blocks.cluster,
            multiprocessors: blocks.multiprocessors,
            exchange: workspace.exchange.as_ref(),
            sinks: &upload(stream, &self.sinks),
            frequencies: &upload(stream, &Table::Compress.frequencies()),
            ring: &SwaRing {
                data: &window.0,
                scale: &window.1,
                format: shape.format,
                ring: shape.ring,
                slots: shape.slots,
            },
            own: (!self.own.is_empty()).then_some(OwnRows {
                data: &own.0,
                scale: &own.1,
                rows: self.own.len() as u32,
            }),
            entries: match which {
                Which::Nothing => None,
                Which::List => attended(Attended::List(&selected), rows),
                Which::All(most) => attended(Attended::All, most),
            },
            out: &short,
            lse: Some(&lse),
            faults: &faults,
        };
        let kernel = kernel_without("out", ops::check_attend(stream, &attention))?;
        attention.out = &out;
        ops::check_attend(stream, &attention)?;
        // SAFETY: the step's arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::attend(stream, &attention) }?;
        workspace.assert_ready(stream);
        Ok(Written {
            out: download_bits(stream, &out),
            lse: download(stream, &lse.view().cast::<u32>().unwrap()),
            faults: download(stream, &faults)[0],
            kernel,
        })
    }

    /// The workspace for `queries` queries: for the splits of their keys, and for clusters of spread splits.
    fn workspace(&self, blocks: Blocks, queries: u32, which: Which) -> Workspace<B> {
        let of_a_query = self.clusters_of_a_query(which, blocks.cluster);
        let splits = self.at_once.unwrap_or(queries) * of_a_query;
        let splits = matches!(which, Which::All(_)).then_some(splits);
        let spread = blocks.spread_clusters * queries * of_a_query;
        Workspace::new(&self.device, &self.stream, splits, spread)
    }

    /// Number of splits of a query's keys, times number of groups of 64 heads.
    fn clusters_of_a_query(&self, which: Which, cluster: KeyCluster) -> u32 {
        let keys = if let Which::All(most) = which { WINDOW + most } else { 0 };
        AttendedKeys::All.num_splits(keys, cluster, self.shape.heads)
            * self.shape.heads.div_ceil(64)
    }

    fn canaries<T: bytemuck::Pod>(&self, len: u64) -> Buffer<B, T> {
        let buffer = self.device.allocate("canaries", len).unwrap();
        self.stream.fill(&buffer, CANARY).unwrap();
        buffer
    }

    /// Attention of the last query, with one head along each of its keys: that key outweighs all others, so that the
    /// result is its row alone. A key that is missing, read twice or wrong shows in the result or in the log-sum-exp.
    pub fn check_needles(&self, queries: &[Query], which: Which) {
        let at = queries.len() - 1;
        let all: Vec<usize> = (0..self.keys((at, &queries[at]), which).len()).collect();
        self.check_some_needles(queries, which, &all);
    }

    /// As [`Self::check_needles`], along the keys with the numbers `some`.
    pub fn check_some_needles(&self, queries: &[Query], which: Which, some: &[usize]) {
        let per_query = self.shape.heads as usize;
        let at = queries.len() - 1;
        let keys = self.key_values((at, &queries[at]), which);
        for needles in some.chunks(per_query) {
            let needle = |head: usize| &keys[needles[head % needles.len()]];
            let mut heads = vec![vec![0; CHANNELS]; at * per_query];
            heads.extend((0..per_query).map(|head| along(needle(head))));
            for blocks in which.blocks_to_check().into_iter().chain(Blocks::of_own_rows(&self.own))
            {
                let written = self.attend_in(blocks, queries, which, &heads).unwrap();
                self.check_query((at, &queries[at]), which, &heads, &written);
                for head in 0..per_query {
                    let q = at * per_query + head;
                    let lse = f32::from_bits(written.lse[q]);
                    let score = dot(&values(&heads[q]), needle(head)) / (CHANNELS as f64).sqrt();
                    assert!(
                        f64::from(lse) - score < 0.01,
                        "the key has all of the softmax: {lse}, {score}"
                    );
                }
                assert_eq!(written.faults, 0);
            }
        }
    }

    /// Runs attention of `queries` in several forms ([`Which::blocks_to_check`]), and compares each with `f64` by the
    /// bound of the contract. Returns the number of faults.
    pub fn check(&self, queries: &[Query], which: Which, heads: &[Vec<u16>]) -> u32 {
        let forms = which.blocks_to_check().into_iter().chain(Blocks::of_own_rows(&self.own));
        let faults = forms.map(|blocks| {
            let written = self.attend_in(blocks, queries, which, heads).unwrap();
            for query in queries.iter().enumerate() {
                self.check_query(query, which, heads, &written);
            }
            written.faults
        });
        faults.reduce(|a, b| if a == b { a } else { panic!("{a} faults, then {b}") }).unwrap()
    }

    /// Asserts that a query has the result that `f64` gives, or, if it is invalid, that its outputs are untouched.
    fn check_query(
        &self,
        (at, query): (usize, &Query),
        which: Which,
        heads: &[Vec<u16>],
        written: &Written,
    ) {
        let per_query = self.shape.heads as usize;
        let what = format!("{:?} query {at} at {}", self.shape, query.position);
        let of_query = at * per_query..(at + 1) * per_query;
        let (out, lse) = (
            &written.out[of_query.start * CHANNELS..of_query.end * CHANNELS],
            &written.lse[of_query.clone()],
        );
        if self.is_nobody(at, query) {
            assert!(out.iter().all(|&bits| bits == CANARY_BF16), "{what}");
            assert!(lse.iter().all(|&bits| bits == CANARY_F32), "{what}");
            return;
        }
        let keys = self.key_values((at, query), which);
        for (head, q) in heads[of_query].iter().enumerate() {
            let expected = self.expected(query, &keys, head, q);
            let (got, what) = (&out[head * CHANNELS..][..CHANNELS], format!("{what}, head {head}"));
            assert_lse(lse[head], &expected, &what);
            assert_near(got, &expected, &what);
        }
    }
}

fn values(bits: &[u16]) -> Vec<f64> {
    bits.iter().map(|&bits| bf16_value(bits)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A query along `key`, so that its score with `key` is by far the largest.
fn along(key: &[f64]) -> Vec<u16> {
    let length = dot(key, key);
    key.iter().map(|value| bf16::from_f64(1024.0 * value / length).to_bits()).collect()
}

/// `count` random rows with values up to powers of two, whose exponents are in this range.
pub fn random_rows(
    random: &mut StdRng,
    format: MainFormat,
    count: usize,
    exponents: Range<i32>,
) -> Vec<EncodedRow> {
    let mut row = || {
        let size = 2f32.powi(random.random_range(exponents.clone()));
        oracle(format).encode(&random_row(random, size))
    };
    (0..count).map(|_| row()).collect()
}

/// Asserts that the bits of a log-sum-exp equal the expected value within a bound.
pub fn assert_lse(bits: u32, expected: &Expected, what: &str) {
    let lse = f64::from(f32::from_bits(bits));
    // A score is a sum of rounded products, hence the relative part of the bound.
    let bound = f64::max(1e-4, expected.lse.abs() * 2_f64.powi(-19));
    assert!((lse - expected.lse).abs() < bound, "{what}: lse {lse}, not {}", expected.lse);
}

/// Asserts that `out` equals the expected result within the bound of the contract.
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

//! Compressed entries on a device: pool, block table, and gathers, compared with the oracle.

use std::collections::HashMap;

use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::ops::{self, BlockTable, Entries, StepQueries};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::row::{EncodedRow, QUANTISED};
use kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM};
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::inputs::{
    CANARY, CANARY_BF16, assert_same, download, download_bits, oracle, rows, special_rows, upload,
};

const ROW: usize = HEAD_DIM as usize;

/// A query of a step: slot and position; both are -1 for padding.
pub type Query = (i32, i32);
pub const PADDING: Query = (-1, -1);

/// The entry planes of one layer and a block table. Every block in the table is full of entries.
pub struct Pool<B: Backend> {
    pub device: Device<B>,
    pub stream: Stream<B>,
    pub data: Buffer<B, u8>,
    pub scale: Buffer<B, u8>,
    table: Buffer<B, i32>,
    pub faults: Buffer<B, u32>,
    pub shape: Shape,
    /// The entries of the block table that were set: (slot, block of the request) to block.
    placed: HashMap<(u32, u32), i32>,
    /// Rows from which entries are made; see [`Pool::stored`].
    samples: Vec<EncodedRow>,
}

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub format: MainFormat,
    pub entries_per_block: u32,
    pub num_blocks: u32,
    pub slots: u32,
    pub max_blocks: u32,
}

impl Shape {
    pub fn ratio(self) -> u32 {
        BLOCK_TOKENS / self.entries_per_block
    }

    /// The last position at which a query sees exactly `entries` entries.
    pub fn position(self, entries: u32) -> i32 {
        ((entries + 1) * self.ratio()) as i32 - 2
    }
}

impl<B: Backend> Pool<B> {
    pub fn new(device: &Device<B>, shape: Shape) -> Self {
        let Shape { format, entries_per_block, num_blocks, slots, max_blocks } = shape;
        let stream = device.stream().unwrap();
        let rows_of_pool = u64::from(num_blocks) * u64::from(entries_per_block);
        let table = device.allocate("block table", u64::from(slots * max_blocks)).unwrap();
        stream.fill(&table, 0xFF).unwrap();
        let samples = [rows(23, 1), special_rows(2)].concat();
        Self {
            data: device.allocate("entry data", rows_of_pool * DATA_BYTES).unwrap(),
            scale: device.allocate("entry scales", rows_of_pool * format.scale_bytes()).unwrap(),
            faults: device.allocate("fault word", 1).unwrap(),
            samples: samples.iter().map(|row| oracle(format).encode(row)).collect(),
            device: device.clone(),
            placed: HashMap::new(),
            stream,
            table,
            shape,
        }
    }

    /// A pool with a request in each slot, of which a query may see `visible[slot]` entries, in scattered blocks.
    pub fn scattered(
        device: &Device<B>,
        format: MainFormat,
        entries_per_block: u32,
        visible: &[u32],
    ) -> Self {
        let blocks = |&entries: &u32| entries.div_ceil(entries_per_block);
        let num_blocks = visible.iter().map(blocks).sum::<u32>() + 2;
        let max_blocks = visible.iter().map(blocks).max().unwrap() + 1;
        let slots = visible.len() as u32;
        let shape = Shape { format, entries_per_block, num_blocks, slots, max_blocks };
        let mut pool = Self::new(device, shape);
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        free.shuffle(&mut StdRng::seed_from_u64(3));
        for (slot, entries) in visible.iter().enumerate() {
            for logical in 0..blocks(entries) {
                pool.place(slot as u32, logical, free.pop().unwrap());
            }
        }
        pool
    }

    /// Enters `block` into the table, and fills the block with entries.
    pub fn place(&mut self, slot: u32, logical: u32, block: i32) {
        self.name(slot, logical, block);
        let Shape { format, entries_per_block, .. } = self.shape;
        let first = block as u64 * u64::from(entries_per_block);
        let rows: Vec<_> =
            (0..u64::from(entries_per_block)).map(|i| self.stored(first + i)).collect();
        let plane = |part: fn(&EncodedRow) -> &Vec<u8>| {
            rows.iter().flat_map(part).copied().collect::<Vec<u8>>()
        };
        let stream = &self.stream;
        let scale = first * format.scale_bytes();
        stream.upload(&plane(|row| &row.data), &self.data, first * DATA_BYTES).unwrap();
        stream.upload(&plane(|row| &row.scale), &self.scale, scale).unwrap();
    }

    /// Enters `block` into the table, whether the block exists or not.
    pub fn name(&mut self, slot: u32, logical: u32, block: i32) {
        let at = u64::from(slot * self.shape.max_blocks + logical);
        self.stream.upload(&[block], &self.table, at).unwrap();
        self.placed.insert((slot, logical), block);
    }

    /// The contents of a row of the planes: a sample with the row's number in the first rotary channels, so that no two
    /// rows are equal.
    fn stored(&self, row: u64) -> EncodedRow {
        let mut stored = self.samples[(row % self.samples.len() as u64) as usize].clone();
        stored.data[QUANTISED..QUANTISED + 4].copy_from_slice(&(row as u32).to_le_bytes());
        stored
    }

    /// The value of entry `index` that `query` should get; `None` if the entry is a fault.
    fn entry(&self, (slot, position): Query, index: i32) -> Option<Vec<u16>> {
        let Shape { format, entries_per_block, num_blocks, .. } = self.shape;
        if index as usize >= visible(position as usize, self.shape.ratio() as usize) {
            return None;
        }
        let index = index as u32;
        let block = *self.placed.get(&(slot as u32, index / entries_per_block))?;
        let known = (0..i64::from(num_blocks)).contains(&i64::from(block));
        let within = u64::from(index % entries_per_block);
        known.then(|| {
            let row = block as u64 * u64::from(entries_per_block) + within;
            oracle(format).decode(&self.stored(row))
        })
    }

    pub fn table(&self) -> BlockTable<'_, B> {
        let Shape { slots, max_blocks, .. } = self.shape;
        BlockTable { table: &self.table, slots, max_blocks }
    }

    pub fn entries(&self) -> Entries<'_, B> {
        let Shape { format, entries_per_block, num_blocks, .. } = self.shape;
        Entries { data: &self.data, scale: &self.scale, format, entries_per_block, num_blocks }
    }

    /// A tile for `queries` queries of `rows` rows, and one row more, filled with canaries.
    pub fn tile(&self, queries: usize, rows: usize) -> Buffer<B, bf16> {
        let tile = self.device.allocate("tile", ((queries * rows + 1) * ROW) as u64).unwrap();
        self.stream.fill(&tile, CANARY).unwrap();
        tile
    }

    /// Reads the fault word and sets it to zero.
    fn take_faults(&self) -> u32 {
        let faults = download(&self.stream, &self.faults)[0];
        self.stream.fill(&self.faults, 0).unwrap();
        faults
    }

    /// Gathers `lists`, those of the queries from `first` on, and compares the tile with the oracle. Returns the count
    /// of the fault word.
    pub fn check_lists(&self, queries: &[Query], first: usize, lists: &[Vec<i32>]) -> u32 {
        let stream = &self.stream;
        let step = Step::new(stream, queries);
        let rows = lists[0].len();
        let tile = self.tile(lists.len(), rows);
        let selected = upload(stream, &lists.concat());
        let range = step.queries(first, lists.len());
        let (table, entries) = (self.table(), self.entries());
        let (length, faults) = (rows as u32, &self.faults);
        ops::gather_entries(
            stream,
            &ops::EntryGather {
                queries: &range,
                rows: length,
                table: &table,
                entries: &entries,
                tile: &tile,
                faults,
            },
            &selected,
        )
        .unwrap();
        let got = download_bits(stream, &tile);
        for ((list, &query), got) in lists.iter().zip(&queries[first..]).zip(got.chunks(rows * ROW))
        {
            for (row, (&index, got)) in list.iter().zip(got.chunks(ROW)).enumerate() {
                let want = if self.is_live(query) {
                    self.entry(query, index.max(0)).filter(|_| index >= 0).unwrap_or(vec![0; ROW])
                } else {
                    canaries(ROW)
                };
                let what = format!("{:?} {query:?} row {row}, entry {index}", self.shape);
                assert_same(got, &want, &what);
            }
        }
        assert_same(&got[got.len() - ROW..], &canaries(ROW), "behind the tile");
        self.take_faults()
    }

    /// Gathers all entries of the queries `first..first + count` into tiles of `rows` rows, and compares tile and
    /// lengths with the oracle. Returns the count of the fault word.
    pub fn check_all(&self, queries: &[Query], (first, count): (usize, usize), rows: usize) -> u32 {
        let stream = &self.stream;
        let step = Step::new(stream, queries);
        let tile = self.tile(count, rows);
        let lengths = upload(stream, &vec![-9_i32; count]);
        let range = step.queries(first, count);
        let (table, entries) = (self.table(), self.entries());
        let (most, faults) = (rows as u32, &self.faults);
        ops::gather_all(
            stream,
            &ops::EntryGather {
                queries: &range,
                rows: most,
                table: &table,
                entries: &entries,
                tile: &tile,
                faults,
            },
            &lengths,
        )
        .unwrap();
        let got = download_bits(stream, &tile);
        let lengths = download(stream, &lengths);
        for ((&query, got), length) in
            queries[first..].iter().zip(got.chunks_exact(rows * ROW)).zip(lengths)
        {
            let seen = visible(query.1.max(0) as usize, self.shape.ratio() as usize);
            let want = if self.is_live(query) { seen.min(rows) } else { 0 };
            assert_eq!(length, want as i32, "{:?} {query:?}", self.shape);
            for (row, got) in got.chunks(ROW).enumerate() {
                let want = if row < want {
                    self.entry(query, row as i32).unwrap_or(vec![0; ROW])
                } else {
                    canaries(ROW)
                };
                assert_same(got, &want, &format!("{:?} {query:?} row {row}", self.shape));
            }
        }
        assert_same(&got[got.len() - ROW..], &canaries(ROW), "behind the tile");
        self.take_faults()
    }

    fn is_live(&self, (slot, position): Query) -> bool {
        (0..self.shape.slots as i32).contains(&slot) && position >= 0
    }
}

fn canaries(elements: usize) -> Vec<u16> {
    vec![CANARY_BF16; elements]
}

/// The arrays of a step.
pub struct Step<B: Backend> {
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
}

impl<B: Backend> Step<B> {
    pub fn new(stream: &Stream<B>, queries: &[Query]) -> Self {
        let (slot, position): (Vec<i32>, Vec<i32>) = queries.iter().copied().unzip();
        Self { position: upload(stream, &position), slot: upload(stream, &slot) }
    }

    pub fn queries(&self, first: usize, count: usize) -> StepQueries<'_, B> {
        let Self { position, slot } = self;
        // Gathers of entries do not depend on the index of a token in its request's step.
        let index = slot;
        StepQueries { position, slot, index, first: first as u32, count: count as u32 }
    }
}

//! Attention over the rows of the cache where they lie, at decode sizes.
//!
//! Every node is a layer of its own: its rings, entries, lists, queries and results are no other node's. A list names
//! one entry in eight, at random.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, LayerKind, WINDOW};
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat, ROPE_OFFSET, UE8M0_GROUPS};
use dsv4_kv::ops::{
    self, Attended, AttendedEntries, Attention, BlockTable, Entries, GatherQueries, SwaRing,
};
use indicatif::ProgressBar;
use rand::rngs::SmallRng;
use rand::seq::{SliceRandom, index};
use rand::{Rng, SeedableRng};

use super::inputs::{ensure_none_refused, part, repeated, upload};
use super::timing::{Measurement, measurement, nodes_for};

/// Rows of a ring: a window, and four drafts.
const RING: u32 = WINDOW + 4;
/// Entries that a query sees for each that its list names.
const SEEN_PER_LISTED: u32 = 8;
/// Rows of a random pattern; the planes repeat them.
const PATTERN_ROWS: u64 = 64 << 10;
const FORMAT: MainFormat = MainFormat::Ue8m0;

/// One case: heads, kind of layer, entries of a query, requests, queries of a request.
struct Case {
    heads: u32,
    kind: LayerKind,
    entries: u32,
    requests: u32,
    queries: u32,
}

/// Cases of 64 and 128 heads.
fn cases() -> Vec<Case> {
    let case =
        |heads, kind, entries, requests, queries| Case { heads, kind, entries, requests, queries };
    let mut cases = Vec::new();
    for requests in [1, 32, 256] {
        cases.push(case(64, LayerKind::Swa, 0, requests, 1));
    }
    for (requests, queries) in [(1, 1), (32, 1), (256, 1), (32, 4)] {
        cases.push(case(64, LayerKind::Csa, 512, requests, queries));
    }
    for (entries, requests) in [(64, 32), (1024, 1), (1024, 32), (8192, 1), (8192, 32)] {
        cases.push(case(64, LayerKind::Hca, entries, requests, 1));
    }
    for requests in [1, 32, 256] {
        cases.push(case(128, LayerKind::Csa, 1024, requests, 1));
    }
    for requests in [1, 32] {
        cases.push(case(128, LayerKind::Hca, 8192, requests, 1));
    }
    cases
}

pub(super) fn measure<B: Backend>(
    device: &Device<B>,
    only: &str,
    progress: &ProgressBar,
) -> Result<Vec<Measurement>> {
    let measure = |case: Case| {
        progress.set_message(format!("attend {}", case.name()));
        Layers::new(device, case)?.measure()
    };
    cases().into_iter().filter(|case| case.name().contains(only)).map(measure).collect()
}

impl Case {
    fn name(&self) -> String {
        let Self { heads, entries, requests, queries, kind } = self;
        let drafts = if *queries > 1 { format!(" x {queries} tokens") } else { String::new() };
        let kind = format!("{kind:?}").to_uppercase();
        format!("{kind}, {heads} heads, {WINDOW} + {entries} keys, {requests} requests{drafts}")
    }

    fn tokens(&self) -> u32 {
        self.requests * self.queries
    }

    /// Bytes that a launch must move: keys once a request, queries and results once.
    fn bytes(&self) -> u64 {
        let keys = u64::from(WINDOW + self.queries - 1) + u64::from(self.entries) * self.lists();
        let vectors = 2 * u64::from(self.tokens() * self.heads) * 2 * u64::from(HEAD_DIM);
        u64::from(self.requests) * keys * FORMAT.row_bytes() + vectors
    }

    /// Lists of a request, each of entries of its own.
    fn lists(&self) -> u64 {
        if self.kind == LayerKind::Csa { self.queries.into() } else { 1 }
    }

    fn is_listed(&self) -> bool {
        self.kind == LayerKind::Csa
    }

    /// Entries that a query sees.
    fn seen(&self) -> u32 {
        if self.is_listed() { self.entries * SEEN_PER_LISTED } else { self.entries }
    }

    /// Blocks of a request.
    fn blocks(&self) -> u32 {
        if self.entries == 0 { 1 } else { self.seen().div_ceil(self.kind.entries_per_block()) }
    }

    fn entries_per_block(&self) -> u32 {
        if self.entries == 0 { 1 } else { self.kind.entries_per_block() }
    }

    /// Position of a request's last query.
    fn position(&self) -> u32 {
        (self.blocks() * BLOCK_TOKENS - 1).max(WINDOW * 4 - 1)
    }
}

/// As many layers as the graph has nodes.
struct Layers<B: Backend> {
    device: Device<B>,
    stream: Stream<B>,
    case: Case,
    nodes: u64,
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
    index: Buffer<B, i32>,
    table: Buffer<B, i32>,
    lists: Buffer<B, i32>,
    ring: [Buffer<B, u8>; 2],
    entries: [Buffer<B, u8>; 2],
    query: Buffer<B, bf16>,
    out: Buffer<B, bf16>,
    sinks: Buffer<B, f32>,
    frequencies: Buffer<B, f32>,
    faults: Buffer<B, u32>,
}

impl<B: Backend> Layers<B> {
    fn new(device: &Device<B>, case: Case) -> Result<Self> {
        let stream = device.stream()?;
        let nodes = nodes_for(case.bytes());
        let (tokens, queries) = (case.tokens(), case.queries);
        let step =
            |of: &dyn Fn(u32) -> u32| -> Vec<i32> { (0..tokens).map(|t| of(t) as i32).collect() };
        let upload = |label, values: &[i32]| upload(&stream, label, values);
        let used = u64::from(case.requests * case.blocks());
        let entries = nodes * used * u64::from(case.entries_per_block());
        let vectors = nodes * u64::from(tokens * case.heads) * u64::from(HEAD_DIM);
        let heads: Vec<bf16> = random_bf16(1 << 20);
        Ok(Self {
            position: upload("positions", &step(&|t| case.position() + 1 + t % queries - queries))?,
            slot: upload("slots", &step(&|t| t / queries))?,
            index: upload("indices", &step(&|t| t % queries))?,
            table: upload("block table", &shuffled(used))?,
            lists: upload("lists", &lists(&case, nodes * u64::from(tokens)))?,
            ring: planes(&stream, nodes * u64::from(case.requests * RING))?,
            entries: planes(&stream, entries)?,
            query: repeated(&stream, "queries", vectors, &heads)?,
            out: device.allocate("results", vectors)?,
            sinks: device.allocate("sinks", case.heads.into())?,
            frequencies: device.allocate("frequencies", 32)?,
            faults: device.allocate("fault word", 1)?,
            device: device.clone(),
            stream,
            case,
            nodes,
        })
    }

    fn measure(&self) -> Result<Measurement> {
        let Self { stream, case, nodes, .. } = self;
        let graph = stream
            .capture(self.retained(), || (0..*nodes).try_for_each(|node| self.launch(node)))?;
        let name = (format!("attend_{}", FORMAT.name()), case.name());
        let result = measurement(&self.device, name, (case.bytes(), *nodes), &graph)?;
        ensure_none_refused(stream, &self.faults)?;
        Ok(result)
    }

    fn retained(&self) -> Vec<dsv4_kv::device::Memory<B>> {
        let Self { position, slot, index, table, lists, ring, entries, .. } = self;
        let mut retained = [position, slot, index, table, lists].map(Buffer::memory).to_vec();
        retained.extend(ring.iter().chain(entries).map(Buffer::memory));
        retained.extend([&self.query, &self.out].map(Buffer::memory));
        retained.extend([&self.sinks, &self.frequencies].map(Buffer::memory));
        retained.push(self.faults.memory());
        retained
    }

    fn launch(&self, node: u64) -> Result<(), DeviceError> {
        let Self { case, nodes, position, slot, index, .. } = self;
        let [ring, entries] = [&self.ring, &self.entries]
            .map(|of| of.each_ref().map(|plane| part(plane, node, *nodes)));
        let (query, out) = (part(&self.query, node, *nodes), part(&self.out, node, *nodes));
        let list = part(&self.lists, node, *nodes);
        let entries = Entries {
            data: &entries[0],
            scale: &entries[1],
            format: FORMAT,
            entries_per_block: case.entries_per_block(),
            num_blocks: case.requests * case.blocks(),
        };
        let table =
            BlockTable { table: &self.table, slots: case.requests, max_blocks: case.blocks() };
        let which = if case.is_listed() { Attended::List(&list) } else { Attended::All };
        let attended =
            AttendedEntries { entries: &entries, table: &table, which, rows: case.entries };
        let (ring_data, ring_scale) = (&ring[0], &ring[1]);
        let attention = Attention {
            queries: &GatherQueries { position, slot, index, first: 0, count: case.tokens() },
            query: &query,
            heads: case.heads,
            sinks: &self.sinks,
            frequencies: &self.frequencies,
            ring: &SwaRing {
                data: ring_data,
                scale: ring_scale,
                format: FORMAT,
                ring: RING,
                slots: case.requests,
            },
            own: None,
            entries: (case.entries > 0).then_some(attended),
            out: &out,
            lse: None,
            faults: &self.faults,
        };
        ops::attend(&self.stream, &attention)
    }
}

/// `count` lists of different entries in random order.
fn lists(case: &Case, count: u64) -> Vec<i32> {
    if !case.is_listed() {
        return vec![-1];
    }
    let mut random = SmallRng::seed_from_u64(1);
    // Of a request's queries the first sees the fewest.
    let seen = case.seen() - case.queries.div_ceil(4);
    let list = |_| index::sample(&mut random, seen as usize, case.entries as usize);
    (0..count).flat_map(list).map(|entry| entry as i32).collect()
}

/// `count` blocks in random order.
fn shuffled(count: u64) -> Vec<i32> {
    let mut blocks: Vec<i32> = (0..count as i32).collect();
    blocks.shuffle(&mut SmallRng::seed_from_u64(4));
    blocks
}

fn random_bf16(count: usize) -> Vec<bf16> {
    let mut random = SmallRng::seed_from_u64(2);
    (0..count).map(|_| bf16::from_f32(random.random_range(-4.0..4.0))).collect()
}

/// Planes of `rows` random rows, such as rows of a model are: no NaN, scales about 1.
fn planes<B: Backend>(stream: &Stream<B>, rows: u64) -> Result<[Buffer<B, u8>; 2], DeviceError> {
    let mut random = SmallRng::seed_from_u64(3);
    let pattern = PATTERN_ROWS.min(rows);
    let (mut data, mut scale) = (Vec::new(), Vec::new());
    for _ in 0..pattern {
        data.extend((0..ROPE_OFFSET).map(|_| random.random::<u8>() & 0xBF));
        data.extend(random_rotary(&mut random));
        scale.extend((0..UE8M0_GROUPS).map(|_| random.random_range(122..127_u8)));
        scale.push(0);
    }
    Ok([
        repeated(stream, "data plane", rows * DATA_BYTES, &data)?,
        repeated(stream, "scale plane", rows * FORMAT.scale_bytes(), &scale)?,
    ])
}

/// The rotary channels of a row.
fn random_rotary(random: &mut SmallRng) -> impl Iterator<Item = u8> {
    let channels = (DATA_BYTES - ROPE_OFFSET) / 2;
    let values: Vec<_> =
        (0..channels).map(|_| bf16::from_f32(random.random_range(-1.0..1.0)).to_bits()).collect();
    values.into_iter().flat_map(u16::to_le_bytes)
}

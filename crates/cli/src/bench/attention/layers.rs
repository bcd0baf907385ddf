//! One layer per node of a graph. Layers share no rings, entries, lists, queries or results. A list names one entry in
//! eight, at random.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, WINDOW};
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat, ROPE_OFFSET, UE8M0_GROUPS};
use dsv4_kv::ops::{
    self, Attended, AttendedEntries, Attention, AttentionExchange, BlockTable, Entries, OwnRows,
    SplitWorkspace, StepQueries, SwaRing,
};
use rand::rngs::SmallRng;
use rand::seq::{SliceRandom, index};
use rand::{Rng, SeedableRng};

use super::super::inputs::{ensure_none_refused, part, repeated};
use super::super::timing::{Measurement, measurement, nodes_for};
use super::case::{Case, Queries};

/// Rows of a ring: a window, and four drafts.
const RING: u32 = WINDOW + 4;
/// Number of random rows, which the planes repeat.
const PATTERN_ROWS: u64 = 64 << 10;

/// One layer per node of the graph.
pub struct Layers<B: Backend> {
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
    /// The own rows of a chunk.
    own: Option<[Buffer<B, u8>; 2]>,
    entries: [Buffer<B, u8>; 2],
    query: Buffer<B, bf16>,
    out: Buffer<B, bf16>,
    sinks: Buffer<B, f32>,
    frequencies: Buffer<B, f32>,
    /// Partial results, in a case whose queries are cut into parts.
    splits: Option<SplitWorkspace<B>>,
    exchange: AttentionExchange<B>,
    faults: Buffer<B, u32>,
}

impl<B: Backend> Layers<B> {
    /// Random rows and queries, with one layer per node of a graph.
    pub fn new(device: &Device<B>, case: Case) -> Result<Self> {
        let nodes = nodes_for(case.bytes());
        Self::of(device, case, nodes)
    }

    /// As `Self::new`, with one layer.
    pub fn one(device: &Device<B>, case: Case) -> Result<Self> {
        Self::of(device, case, 1)
    }

    fn of(device: &Device<B>, case: Case, nodes: u64) -> Result<Self> {
        let stream = device.stream()?;
        let (tokens, queries) = (u64::from(case.tokens()), case.queries.count());
        // As in StepMeta: padding has position 0, no slot, and index 0.
        let step = |label, of: &dyn Fn(u32) -> u32, padding: i32| {
            let live = (0..case.live()).map(|query| of(query) as i32);
            let padding = (case.live()..case.tokens()).map(|_| padding);
            stream.upload_new(label, &live.chain(padding).collect::<Vec<_>>())
        };
        let used = u64::from(case.requests * case.blocks());
        let entries = nodes * used * u64::from(entries_per_block(&case));
        let vectors = nodes * tokens * u64::from(case.heads) * u64::from(HEAD_DIM);
        let heads: Vec<bf16> = random_bf16(1 << 20);
        let has_own = matches!(case.queries, Queries::Chunk(_));
        Ok(Self {
            position: step("positions", &|query| case.context() - queries + query % queries, 0)?,
            slot: step("slots", &|query| query / queries, -1)?,
            index: step("indices", &|query| query % queries, 0)?,
            table: stream.upload_new("block table", &table(&case))?,
            lists: stream.upload_new("lists", &lists(&case, nodes * tokens))?,
            ring: planes(&stream, case.format, nodes * u64::from(case.requests * RING))?,
            own: has_own.then(|| planes(&stream, case.format, nodes * tokens)).transpose()?,
            entries: planes(&stream, case.format, entries)?,
            query: repeated(&stream, "queries", vectors, &heads)?,
            out: device.allocate("results", vectors)?,
            sinks: device.allocate("sinks", case.heads.into())?,
            frequencies: device.allocate("frequencies", 32)?,
            splits: (case.clusters() > 0)
                .then(|| SplitWorkspace::new(device, case.clusters()))
                .transpose()?,
            exchange: AttentionExchange::new(device, ops::SPREAD_CLUSTERS)?,
            faults: device.allocate("fault word", 1)?,
            device: device.clone(),
            stream,
            case,
            nodes,
        })
    }

    /// Times a launch.
    pub fn measure(&self) -> Result<Measurement> {
        let Self { stream, case, nodes, .. } = self;
        let graph = stream.capture(self.retained(), || {
            (0..*nodes).try_for_each(|node| self.launch(stream, node))
        })?;
        let name = (format!("attend_{}", case.format.name()), case.name());
        let result = measurement(&self.device, name, (case.bytes(), *nodes), &graph)?;
        self.ensure_none_refused()?;
        Ok(result)
    }

    /// The stream in which the layers were filled.
    pub fn stream(&self) -> &Stream<B> {
        &self.stream
    }

    /// Checks that no launch refused a query or a key.
    pub fn ensure_none_refused(&self) -> Result<()> {
        ensure_none_refused(&self.stream, &self.faults)
    }

    fn retained(&self) -> Vec<dsv4_kv::device::Memory<B>> {
        let Self { position, slot, index, table, lists, ring, entries, .. } = self;
        let mut retained = [position, slot, index, table, lists].map(Buffer::memory).to_vec();
        let planes = ring.iter().chain(entries).chain(self.own.iter().flatten());
        retained.extend(planes.map(Buffer::memory));
        retained.extend([&self.query, &self.out].map(Buffer::memory));
        retained.extend([&self.sinks, &self.frequencies].map(Buffer::memory));
        let splits = self.splits.iter();
        retained.extend(splits.flat_map(SplitWorkspace::memory));
        retained.extend([self.exchange.memory(), self.faults.memory()]);
        retained
    }

    /// Queues the launch of layer `node`.
    pub fn launch(&self, stream: &Stream<B>, node: u64) -> Result<(), DeviceError> {
        let Self { case, nodes, position, slot, index, .. } = self;
        let planes = |of: &[Buffer<B, u8>; 2]| of.each_ref().map(|of| part(of, node, *nodes));
        let [ring, entries] = [&self.ring, &self.entries].map(planes);
        let own = self.own.as_ref().map(planes);
        let (query, out) = (part(&self.query, node, *nodes), part(&self.out, node, *nodes));
        let list = part(&self.lists, node, *nodes);
        let entries = Entries {
            data: &entries[0],
            scale: &entries[1],
            format: case.format,
            entries_per_block: entries_per_block(case),
            num_blocks: case.requests * case.blocks(),
        };
        let table =
            BlockTable { table: &self.table, slots: case.requests, max_blocks: case.max_blocks() };
        let which = if case.is_listed() { Attended::List(&list) } else { Attended::All };
        let (rows, splits) = (case.entry_rows(), self.splits.as_ref());
        let attended = AttendedEntries { entries: &entries, table: &table, which, rows, splits };
        let (ring_data, ring_scale) = (&ring[0], &ring[1]);
        let attention = Attention {
            queries: &StepQueries { position, slot, index, first: 0, count: case.tokens() },
            query: &query,
            form: case.form,
            heads: case.heads,
            cluster: case.cluster,
            multiprocessors: ops::MULTIPROCESSORS,
            exchange: Some(&self.exchange),
            sinks: &self.sinks,
            frequencies: &self.frequencies,
            ring: &SwaRing {
                data: ring_data,
                scale: ring_scale,
                format: case.format,
                ring: RING,
                slots: case.requests,
            },
            own: own.as_ref().map(|[data, scale]| OwnRows { data, scale, rows: case.tokens() }),
            entries: (case.entries > 0).then_some(attended),
            out: &out,
            lse: None,
            faults: &self.faults,
        };
        // SAFETY: the step's arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::attend(stream, &attention) }
    }
}

/// Entries per block; 1 in a layer without entries, where it is never read.
fn entries_per_block(case: &Case) -> u32 {
    case.kind.entries_per_block().max(1)
}

/// `count` lists of different entries, in random order.
fn lists(case: &Case, count: u64) -> Vec<i32> {
    if !case.is_listed() {
        return vec![-1];
    }
    let mut random = SmallRng::seed_from_u64(1);
    let seen = case.seen_by_all() as usize;
    let list = |_| index::sample(&mut random, seen, case.entries as usize);
    (0..count).flat_map(list).map(|entry| entry as i32).collect()
}

/// A row of blocks in random order for each request, as long as the graph requires.
fn table(case: &Case) -> Vec<i32> {
    let mut blocks: Vec<i32> = (0..(case.requests * case.blocks()) as i32).collect();
    blocks.shuffle(&mut SmallRng::seed_from_u64(4));
    let room = vec![-1; (case.max_blocks() - case.blocks()) as usize];
    blocks.chunks(case.blocks() as usize).flat_map(|row| [row, &room].concat()).collect()
}

fn random_bf16(count: usize) -> Vec<bf16> {
    let mut random = SmallRng::seed_from_u64(2);
    (0..count).map(|_| bf16::from_f32(random.random_range(-4.0..4.0))).collect()
}

/// Planes of `rows` random rows that are like a model's: no NaN, and scales of about 1.
fn planes<B: Backend>(
    stream: &Stream<B>,
    format: MainFormat,
    rows: u64,
) -> Result<[Buffer<B, u8>; 2], DeviceError> {
    let mut random = SmallRng::seed_from_u64(3);
    let pattern = PATTERN_ROWS.min(rows);
    let (mut data, mut scale) = (Vec::new(), Vec::new());
    for _ in 0..pattern {
        data.extend((0..ROPE_OFFSET).map(|_| random.random::<u8>() & 0xBF));
        data.extend(random_rotary(&mut random));
        match format {
            MainFormat::Ue8m0 => {
                scale.extend((0..UE8M0_GROUPS).map(|_| random.random_range(122..127_u8)));
                scale.push(0);
            }
            MainFormat::F32 => scale.extend(random.random_range(0.03..0.5_f32).to_le_bytes()),
        }
    }
    Ok([
        repeated(stream, "data plane", rows * DATA_BYTES, &data)?,
        repeated(stream, "scale plane", rows * format.scale_bytes(), &scale)?,
    ])
}

/// The rotary channels of a row.
fn random_rotary(random: &mut SmallRng) -> impl Iterator<Item = u8> {
    let channels = (DATA_BYTES - ROPE_OFFSET) / 2;
    let values: Vec<_> =
        (0..channels).map(|_| bf16::from_f32(random.random_range(-1.0..1.0)).to_bits()).collect();
    values.into_iter().flat_map(u16::to_le_bytes)
}

//! The indexer: scores, selections, and both together, at decode sizes and with long contexts.
//!
//! Every node of a graph is a layer of its own, which shares no keys or scores with other nodes.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream};
use dsv4_kv::kv_layout::config::CompressRope;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, INDEX_DIM};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::ops::{
    self, BlockTable, EntrySelection, IndexKeys, IndexQueries, KeyScores, ScoreSelection, Scores,
    StepQueries, maxima_len,
};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv_oracle::index::KeyFormat;
use half::bf16;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use super::inputs::{ensure_none_refused, part, repeated};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

const HEADS: u32 = 64;
/// Entries per block of the cache.
const TILE: u32 = BLOCK_TOKENS / CSA_RATIO;
/// Number of scores of a random pattern, which rows repeat.
const PATTERN: usize = 16 << 20;
/// Number of keys of a random pattern, which layers repeat.
const PATTERN_KEYS: usize = 1 << 16;
/// Bytes of a score, an index or a weight.
const WORD_BYTES: u64 = 4;

/// Pairs: entries that a query sees, number of queries.
const SCORES: [(u32, u32); 6] =
    [(2048, 32), (2048, 256), (32_768, 1), (32_768, 32), (1 << 18, 1), (1 << 18, 32)];
/// Entries that a query sees, number of requests, queries of each: chunks of a prompt, and steps with one, three and four
/// drafts a request.
const CHUNKS: [(u32, u32, u32); 5] =
    [(8192, 1, 2048), (32_768, 1, 2048), (32_768, 32, 2), (32_768, 32, 4), (1 << 18, 1, 5)];
/// Pairs: scores per row, number of rows.
const ROWS: [(u32, u32); 5] = [(2048, 256), (32_768, 1), (32_768, 32), (1 << 18, 1), (1 << 18, 32)];
/// As `ROWS`, with hundreds of equal scores.
const CROWDED: [(u32, u32); 2] = [(2048, 256), (32_768, 32)];
/// Lengths of lists.
const LISTS: [u32; 2] = [512, 1024];
/// Pairs: entries that a query sees, number of queries. Scores and lists are computed by two launches.
const LISTED: [(u32, u32); 6] =
    [(1024, 128), (2048, 96), (2048, 256), (32_768, 32), (1 << 18, 1), (1 << 18, 32)];

/// The kernels of a node.
#[derive(Clone, Copy)]
pub(super) enum Node {
    /// `index_score`.
    Scores,
    /// `index_score_chunk`.
    Chunk,
    /// `index_score` and `index_topk`, with lists of this length.
    Two(u32),
    /// `index_score_topk`, with lists of this length, over MXFP4 keys.
    One(u32),
}

impl Node {
    fn name(self, format: IndexFormat) -> String {
        let format = format.name();
        match self {
            Self::Scores => format!("index_score_{format}"),
            Self::Chunk => format!("index_score_chunk_{format}"),
            Self::Two(k) => format!("index_score_{format} + index_topk {k}"),
            Self::One(k) => format!("index_score_topk {k}"),
        }
    }

    /// Length of a list.
    fn k(self) -> u32 {
        match self {
            Self::Scores | Self::Chunk => 0,
            Self::Two(k) | Self::One(k) => k,
        }
    }
}

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for format in [IndexFormat::Mxfp4, IndexFormat::Nvfp4, IndexFormat::Fp8] {
        for size in SCORES {
            let name = format!("index_score {} {size:?}", format.name());
            let size = (size.0, size.1, 1);
            works.push(Work::row(name, move || scores(device, format, size, Node::Scores)));
        }
        for size in CHUNKS {
            let name = format!("index_score_chunk {} {size:?}", format.name());
            works.push(Work::row(name, move || scores(device, format, size, Node::Chunk)));
        }
    }
    for k in LISTS {
        for size in ROWS {
            let name = format!("topk_select {k} of {size:?}");
            works.push(Work::row(name, move || selection(device, size, k, false)));
        }
    }
    for size in CROWDED {
        let name = format!("topk_select, crowded {size:?}");
        works.push(Work::row(name, move || selection(device, size, LISTS[0], true)));
    }
    for size in LISTED {
        let mut nodes = vec![Node::Two(512)];
        if ops::one_launch_is_faster(IndexFormat::Mxfp4, size.0, size.1, 1) {
            nodes.push(Node::One(512));
        }
        for node in nodes {
            let name = format!("index_score and index_topk {size:?}");
            let size = (size.0, size.1, 1);
            let measure = move || scores(device, IndexFormat::Mxfp4, size, node);
            works.push(Work::row(name, measure));
        }
    }
    works
}

/// Times scores, alone or with lists.
pub(super) fn scores<B: Backend>(
    device: &Device<B>,
    format: IndexFormat,
    (entries, requests, each): (u32, u32, u32),
    node: Node,
) -> Result<Measurement> {
    let k = node.k();
    let queries = requests * each;
    let keys = u64::from(entries) * u64::from(requests);
    let pairs = u64::from(entries) * u64::from(queries);
    let vectors = u64::from(queries) * u64::from(HEADS);
    let query_bytes = u64::from(queries) * u64::from(format.query_bytes()) + vectors * WORD_BYTES;
    let list_bytes = u64::from(k) * u64::from(queries) * WORD_BYTES;
    let score_bytes = if let Node::One(_) = node { 0 } else { WORD_BYTES };
    let bytes = keys * format.row_bytes() + pairs * score_bytes + query_bytes + list_bytes;
    let nodes = nodes_for(bytes);
    let layers = Layers::new(device, format, (entries, requests, each), nodes)?;
    let selected = device.allocate("lists", u64::from(queries) * u64::from(k.max(1)))?;
    let Layers { stream, position, slot, table, query, weight, faults, .. } = &layers;
    let (max_blocks, slots) = (entries / TILE, requests);
    let num_blocks = slots * max_blocks;
    let record = |layer: u64| -> Result<(), DeviceError> {
        let (code, scale) = (part(&layers.code, layer, nodes), part(&layers.scale, layer, nodes));
        let (all, maxima) =
            (part(&layers.scores, layer, nodes), part(&layers.maxima, layer, nodes));
        let to = Scores { scores: &all, maxima: &maxima, columns: entries };
        let keys = &IndexKeys { code: &code, scale: &scale, format, hadamard: true, num_blocks };
        let queries = &StepQueries { position, slot, index: slot, first: 0, count: queries };
        let table = &BlockTable { table, slots, max_blocks };
        let from = &IndexQueries { query, weight, heads: HEADS };
        let (columns, selected, to) = (entries, &selected, &to);
        if let Node::One(_) = node {
            let lists = ScoreSelection { queries, from, table, keys, columns, k, selected, faults };
            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            return unsafe { ops::index_score_topk(stream, &lists) };
        }
        let launch = KeyScores { queries, from, table, keys, skip: k, to, faults };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe {
            match node {
                Node::Chunk => ops::index_score_chunk(stream, &launch, each)?,
                _ => ops::index_score(stream, &launch)?,
            }
        }
        if let Node::Two(_) = node {
            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::index_topk(stream, &EntrySelection { queries, from: to, k, selected }) }?;
        }
        Ok(())
    };
    let mut retained = [position, slot, table, &selected].map(Buffer::memory).to_vec();
    retained.extend([layers.code.memory(), layers.scale.memory(), query.memory()]);
    retained.extend([weight, &layers.scores, &layers.maxima].map(Buffer::memory));
    retained.push(faults.memory());
    let graph = stream.capture(retained, || (0..nodes).try_for_each(record))?;
    let of = if each > 1 { format!(" of {requests} requests") } else { String::new() };
    let names = (node.name(format), format!("{entries} entries x {queries} queries{of}"));
    let result = measurement(device, names, (bytes, nodes), &graph)?;
    ensure_none_refused(stream, faults)?;
    Ok(result)
}

/// Times the selection of the `k` largest of each row of random scores. The scores are multiples of a half if
/// `crowded`.
pub(super) fn selection<B: Backend>(
    device: &Device<B>,
    (columns, rows): (u32, u32),
    k: u32,
    crowded: bool,
) -> Result<Measurement> {
    let scores = u64::from(columns) * u64::from(rows);
    let bytes = (scores + u64::from(k) * u64::from(rows)) * WORD_BYTES;
    let nodes = nodes_for(bytes);
    let stream = device.stream()?;
    let mut random = SmallRng::seed_from_u64(4);
    // A sum of several random numbers has a distribution like that of real scores.
    let mut score = || {
        let score: f32 = (0..6).map(|_| random.random_range(-1.0..1.0_f32)).sum();
        if crowded { (2.0 * score).round() / 2.0 } else { score }
    };
    let pattern: Vec<f32> = (0..PATTERN.min(4 * scores as usize)).map(|_| score()).collect();
    let all = repeated(&stream, "scores", nodes * scores, &pattern)?;
    let maxima = device.allocate("maxima", u64::from(rows) * maxima_len(columns))?;
    let lengths = stream.upload_new("lengths", &vec![columns as i32; rows as usize])?;
    let selected = device.allocate("lists", u64::from(rows) * u64::from(k))?;
    let record = |node| {
        let scores = part(&all, node, nodes);
        let from = Scores { scores: &scores, maxima: &maxima, columns };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe {
            ops::topk_select(
                &stream,
                &ops::RowSelection { from: &from, lengths: &lengths, rows, k, selected: &selected },
            )
        }
    };
    let retained = vec![all.memory(), maxima.memory(), lengths.memory(), selected.memory()];
    let graph = stream.capture(retained, || (0..nodes).try_for_each(record))?;
    let name = if crowded { "topk_select, crowded" } else { "topk_select" };
    let name = (name.to_owned(), format!("{k} of {columns} scores, {rows} rows"));
    measurement(device, name, (bytes, nodes), &graph)
}

/// One layer per node of the graph, and a step with as many queries of each request.
struct Layers<B: Backend> {
    stream: Stream<B>,
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
    table: Buffer<B, i32>,
    query: Buffer<B, u8>,
    weight: Buffer<B, f32>,
    code: Buffer<B, u8>,
    scale: Buffer<B, u8>,
    scores: Buffer<B, f32>,
    maxima: Buffer<B, f32>,
    faults: Buffer<B, u32>,
}

impl<B: Backend> Layers<B> {
    fn new(
        device: &Device<B>,
        format: IndexFormat,
        (entries, requests, each): (u32, u32, u32),
        nodes: u64,
    ) -> Result<Self> {
        let queries = requests * each;
        let stream = device.stream()?;
        let mut random = SmallRng::seed_from_u64(5);
        let blocks = requests * (entries / TILE);
        let mut table: Vec<i32> = (0..blocks as i32).collect();
        table.shuffle(&mut random);
        let rows = nodes * u64::from(blocks) * u64::from(TILE);
        let (codes, scales) = keys(format, &mut random);
        let vectors = queries * HEADS;
        let bytes = u64::from(queries) * u64::from(IndexFormat::MAX_QUERY_BYTES);
        let pairs = nodes * u64::from(queries) * u64::from(entries);
        let groups = nodes * u64::from(queries) * maxima_len(entries);
        let positions = vec![(entries * CSA_RATIO) as i32 - 1; queries as usize];
        let layers = Self {
            position: stream.upload_new("positions", &positions)?,
            slot: stream
                .upload_new("slots", &Vec::from_iter((0..queries).map(|i| (i / each) as i32)))?,
            table: stream.upload_new("block table", &table)?,
            query: device.allocate("queries", bytes)?,
            weight: device.allocate("head weights", vectors.into())?,
            code: repeated(&stream, "key codes", rows * format.code_bytes(), &codes)?,
            scale: repeated(&stream, "key scales", rows * format.scale_bytes(), &scales)?,
            scores: device.allocate("scores", pairs)?,
            maxima: device.allocate("maxima", groups)?,
            faults: device.allocate("fault word", 1)?,
            stream,
        };
        layers.make_queries(format, queries, &mut random)?;
        Ok(layers)
    }

    /// Computes queries and weights from random projections.
    fn make_queries(&self, format: IndexFormat, queries: u32, random: &mut SmallRng) -> Result<()> {
        let Self { stream, position, slot, query, weight, .. } = self;
        let heads = (queries * HEADS) as usize;
        let projected: Vec<f32> = normal(random).take(heads * INDEX_DIM as usize).collect();
        let projected = stream.upload_new("projections", &projected)?;
        let weights: Vec<f32> = normal(random).take(heads).collect();
        let weights = stream.upload_new("projected weights", &weights)?;
        let frequencies =
            stream.upload_new("frequencies", &compress_frequencies(&CompressRope::RELEASED))?;
        let of = StepQueries { position, slot, index: slot, first: 0, count: queries };
        let to = IndexQueries { query, weight, heads: HEADS };
        ops::index_query(
            stream,
            &ops::QueryQuantisation {
                queries: &of,
                projected: &projected,
                projected_weight: &weights,
                frequencies: &frequencies,
                format,
                to: &to,
            },
        )?;
        stream.synchronize()?;
        Ok(())
    }
}

/// Random numbers with the distribution of a vector's channels after a Hadamard transform.
fn normal(random: &mut SmallRng) -> impl Iterator<Item = f32> {
    random.sample_iter(StandardNormal)
}

/// Codes and scales of `PATTERN_KEYS` random keys.
fn keys(format: IndexFormat, random: &mut SmallRng) -> (Vec<u8>, Vec<u8>) {
    let encoder = KeyFormat::from_name(format.name()).expect("the oracle knows every format");
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for _ in 0..PATTERN_KEYS {
        let key = normal(random).take(INDEX_DIM as usize);
        let key = encoder.encode(&key.map(|x| bf16::from_f32(x).to_bits()).collect::<Vec<_>>());
        codes.extend(key.codes);
        scales.extend(key.scale);
    }
    (codes, scales)
}

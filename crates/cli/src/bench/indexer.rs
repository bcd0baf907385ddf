//! The indexer: scores, selections, and both together, at decode sizes and over long contexts.
//!
//! Every node is a layer of its own: its keys and its scores are no other node's.

use anyhow::{Result, ensure};
use dsv4_kv::device::ops::{
    self, BlockTable, GatherQueries, IndexKeys, IndexQueries, Scores, maxima_len,
};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use indicatif::ProgressBar;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};

use super::gather::{repeated, upload};
use super::{Measurement, measurement, nodes_for};

const HEADS: u32 = 64;
/// Entries of a block of the cache.
const TILE: u32 = BLOCK_TOKENS / CSA_RATIO;
/// Elements of a random pattern; buffers repeat it.
const PATTERN: usize = 16 << 20;
/// Bytes of a score, an index, a weight.
const WORD_BYTES: u64 = 4;

/// Entries that a query sees, and queries.
const SCORES: [(u32, u32); 6] =
    [(2048, 32), (2048, 256), (32_768, 1), (32_768, 32), (1 << 18, 1), (1 << 18, 32)];
/// Scores of a row, and rows.
const ROWS: [(u32, u32); 5] = [(2048, 256), (32_768, 1), (32_768, 32), (1 << 18, 1), (1 << 18, 32)];
/// Scores of a row, and rows, in which hundreds of scores are equal.
const CROWDED: [(u32, u32); 2] = [(2048, 256), (32_768, 32)];
/// Lengths of lists.
const LISTS: [u32; 2] = [512, 1024];

pub(super) fn measure<D: Device>(device: &D, progress: &ProgressBar) -> Result<Vec<Measurement>> {
    let mut results = Vec::new();
    for format in [IndexFormat::Mxfp4, IndexFormat::Nvfp4, IndexFormat::Fp8] {
        for size in SCORES {
            progress.set_message(format!("index_score {} {size:?}", format.name()));
            results.push(scores(device, format, size, None)?);
        }
    }
    for k in LISTS {
        for size in ROWS {
            progress.set_message(format!("topk_select {k} of {size:?}"));
            results.push(selection(device, size, k, false)?);
        }
    }
    for size in CROWDED {
        progress.set_message(format!("topk_select, crowded {size:?}"));
        results.push(selection(device, size, LISTS[0], true)?);
    }
    for size in [(32_768, 32), (1 << 18, 1), (1 << 18, 32)] {
        progress.set_message(format!("index_score and index_topk {size:?}"));
        results.push(scores(device, IndexFormat::Mxfp4, size, Some(512))?);
    }
    Ok(results)
}

/// Times scores alone, or with the lists of `k` entries in the same node.
fn scores<D: Device>(
    device: &D,
    format: IndexFormat,
    (entries, queries): (u32, u32),
    k: Option<u32>,
) -> Result<Measurement> {
    let pairs = u64::from(entries) * u64::from(queries);
    let vectors = u64::from(queries) * u64::from(HEADS);
    let query_bytes = u64::from(queries) * u64::from(format.query_bytes()) + vectors * WORD_BYTES;
    let list_bytes = u64::from(k.unwrap_or(0)) * u64::from(queries) * WORD_BYTES;
    let bytes = pairs * (format.row_bytes() + WORD_BYTES) + query_bytes + list_bytes;
    let nodes = nodes_for(bytes);
    let layers = Layers::new(device, format, (entries, queries), nodes)?;
    let selected = device.allocate("lists", u64::from(queries) * u64::from(k.unwrap_or(1)))?;
    let Layers { stream, position, slot, table, query, weight, faults, .. } = &layers;
    let (max_blocks, slots) = (entries / TILE, queries);
    let num_blocks = slots * max_blocks;
    let record = |node: u64| -> Result<(), DeviceError> {
        let (code, scale) = (part(&layers.code, node, nodes), part(&layers.scale, node, nodes));
        let (all, maxima) = (part(&layers.scores, node, nodes), part(&layers.maxima, node, nodes));
        let to = Scores { scores: &all, maxima: &maxima, columns: entries };
        let keys = IndexKeys { code: &code, scale: &scale, format, rotate: true };
        let queries = GatherQueries { position, slot, index: slot, first: 0, count: slots };
        let table = BlockTable { table, slots, max_blocks };
        let from = IndexQueries { query, weight, heads: HEADS };
        let planes = (&keys, num_blocks);
        let skip = k.unwrap_or(0);
        ops::index_score(device, stream, &queries, &from, &table, planes, skip, &to, faults)?;
        match k {
            Some(k) => ops::index_topk(device, stream, &queries, &to, k, &selected),
            None => Ok(()),
        }
    };
    let mut retained = [position, slot, table, &selected].map(Buffer::memory).to_vec();
    retained.extend([layers.code.memory(), layers.scale.memory(), query.memory()]);
    retained.extend([weight, &layers.scores, &layers.maxima].map(Buffer::memory));
    retained.push(faults.memory());
    let graph = device.capture(stream, retained, || (0..nodes).try_for_each(record))?;
    let name = match k {
        Some(k) => format!("index_score_{} + index_topk {k}", format.name()),
        None => format!("index_score_{}", format.name()),
    };
    let size = format!("{entries} entries x {queries} queries");
    let result = measurement(device, (name, size), (bytes, nodes), &graph)?;
    let mut refused = [0];
    device.download(stream, faults, 0, &mut refused)?;
    ensure!(refused == [0], "the kernel refused {} of its inputs", refused[0]);
    Ok(result)
}

/// Times the selection of `k` out of rows of random scores, which are multiples of a half if `crowded`.
fn selection<D: Device>(
    device: &D,
    (columns, rows): (u32, u32),
    k: u32,
    crowded: bool,
) -> Result<Measurement> {
    let scores = u64::from(columns) * u64::from(rows);
    let bytes = (scores + u64::from(k) * u64::from(rows)) * WORD_BYTES;
    let nodes = nodes_for(bytes);
    let stream = device.stream()?;
    let mut random = SmallRng::seed_from_u64(4);
    // The sum of several has a distribution like that of real scores.
    let mut score = || {
        let score: f32 = (0..6).map(|_| random.random_range(-1.0..1.0_f32)).sum();
        if crowded { (2.0 * score).round() / 2.0 } else { score }
    };
    let pattern: Vec<f32> = (0..PATTERN.min(4 * scores as usize)).map(|_| score()).collect();
    let all = repeated(device, &stream, "scores", nodes * scores, &pattern)?;
    let maxima = device.allocate("maxima", u64::from(rows) * maxima_len(columns))?;
    let lengths = upload(device, &stream, "lengths", &vec![columns as i32; rows as usize])?;
    let selected = device.allocate("lists", u64::from(rows) * u64::from(k))?;
    let record = |node| {
        let scores = part(&all, node, nodes);
        let from = Scores { scores: &scores, maxima: &maxima, columns };
        ops::topk_select(device, &stream, &from, &lengths, rows, k, &selected)
    };
    let retained = vec![all.memory(), maxima.memory(), lengths.memory(), selected.memory()];
    let graph = device.capture(&stream, retained, || (0..nodes).try_for_each(record))?;
    let name = if crowded { "topk_select, crowded" } else { "topk_select" };
    let name = (name.to_owned(), format!("{k} of {columns} scores, {rows} rows"));
    measurement(device, name, (bytes, nodes), &graph)
}

/// As many layers as the graph has nodes, and a step of one query for each of the requests.
struct Layers<D: Device> {
    stream: D::Stream,
    position: Buffer<D, i32>,
    slot: Buffer<D, i32>,
    table: Buffer<D, i32>,
    query: Buffer<D, u8>,
    weight: Buffer<D, f32>,
    code: Buffer<D, u8>,
    scale: Buffer<D, u8>,
    scores: Buffer<D, f32>,
    maxima: Buffer<D, f32>,
    faults: Buffer<D, u32>,
}

impl<D: Device> Layers<D> {
    fn new(
        device: &D,
        format: IndexFormat,
        (entries, queries): (u32, u32),
        nodes: u64,
    ) -> Result<Self> {
        let stream = device.stream()?;
        let mut random = SmallRng::seed_from_u64(5);
        let blocks = queries * (entries / TILE);
        let mut table: Vec<i32> = (0..blocks as i32).collect();
        table.shuffle(&mut random);
        let rows = nodes * u64::from(blocks) * u64::from(TILE);
        let mut codes = vec![0; PATTERN];
        random.fill_bytes(&mut codes);
        if format == IndexFormat::Fp8 {
            // No NaN.
            codes.iter_mut().filter(|code| **code & 0x7F == 0x7F).for_each(|code| *code ^= 1);
        }
        let scales: Vec<u8> = match format {
            IndexFormat::Mxfp4 => (0..PATTERN).map(|_| random.random_range(124..129)).collect(),
            IndexFormat::Nvfp4 => (0..PATTERN).map(|_| random.random_range(40..70)).collect(),
            IndexFormat::Fp8 => {
                let mut scale = |_| random.random_range(0.001..0.01_f32).to_le_bytes();
                (0..PATTERN / 4).flat_map(&mut scale).collect()
            }
        };
        let vectors = (queries * HEADS) as usize;
        // Numbers of either sign as BF16 and as E4M3.
        let bytes = (queries * IndexFormat::MOST_QUERY_BYTES) as usize;
        let mut value = |_| random.random_range(0x30..0x48_u8) | random.random_range(0..2) << 7;
        let query: Vec<u8> = (0..bytes).map(&mut value).collect();
        let weight: Vec<f32> = (0..vectors).map(|_| random.random_range(-0.02..0.02)).collect();
        let pairs = nodes * u64::from(queries) * u64::from(entries);
        let groups = nodes * u64::from(queries) * maxima_len(entries);
        let positions = vec![(entries * CSA_RATIO) as i32 - 1; queries as usize];
        Ok(Self {
            position: upload(device, &stream, "positions", &positions)?,
            slot: upload(device, &stream, "slots", &(0..queries as i32).collect::<Vec<_>>())?,
            table: upload(device, &stream, "block table", &table)?,
            query: upload(device, &stream, "queries", &query)?,
            weight: upload(device, &stream, "head weights", &weight)?,
            code: repeated(device, &stream, "key codes", rows * format.code_bytes(), &codes)?,
            scale: repeated(device, &stream, "key scales", rows * format.scale_bytes(), &scales)?,
            scores: device.allocate("scores", pairs)?,
            maxima: device.allocate("maxima", groups)?,
            faults: device.allocate("fault word", 1)?,
            stream,
        })
    }
}

/// What of `buffer` is the node's.
fn part<D: Device, T: bytemuck::Pod>(buffer: &Buffer<D, T>, node: u64, nodes: u64) -> Buffer<D, T> {
    let len = buffer.len() / nodes;
    buffer.slice(node * len, len).expect("a part for every node")
}

//! Gathers of compressed entries: those of a top-k list at decode sizes, and all entries of an HCA layer.
//!
//! Every node of a graph is a layer of its own, which shares no entry planes, tile or lists with other nodes. A list
//! names one entry in eight, at random, so that the 32-byte sector of a row's scales rarely holds the scales of another
//! gathered row.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, LayerKind};
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat};
use dsv4_kv::ops::{self, BlockTable, Entries, StepQueries};
use rand::rngs::SmallRng;
use rand::seq::{SliceRandom, index};
use rand::{RngCore, SeedableRng};

use super::inputs::{ensure_none_refused, part, repeated};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

/// Bytes of a BF16 row.
const ROW_BYTES: u64 = 2 * HEAD_DIM as u64;
/// Bytes of StepMeta that a gather reads per query.
const META_BYTES: u64 = 8;
/// Bytes of an index, a length or an element of the block table.
const WORD_BYTES: u64 = 4;
/// Ratio of the entries that a query sees to the entries in its list.
const SEEN_PER_LISTED: u32 = 8;
/// Bytes of random rows, which the planes repeat.
const PATTERN_BYTES: u64 = 64 << 20;

/// Pairs: entries of a query's list, number of queries.
const LISTS: [(u32, u32); 4] = [(512, 32), (512, 256), (1024, 32), (1024, 256)];
/// Pairs: entries that a query sees, number of queries.
const ALL: [(u32, u32); 3] = [(1024, 32), (8192, 1), (8192, 32)];

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for format in MainFormat::ALL {
        for (rows, requests) in LISTS {
            let name = format!("gather_entries {} {rows} x {requests}", format.name());
            works.push(Work::row(name, move || gather_entries(device, format, rows, requests)));
        }
        for (rows, requests) in ALL {
            let name = format!("gather_all {} {rows} x {requests}", format.name());
            works.push(Work::row(name, move || gather_all(device, format, rows, requests)));
        }
    }
    works
}

pub(super) fn gather_entries<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    rows: u32,
    requests: u32,
) -> Result<Measurement> {
    let seen = rows * SEEN_PER_LISTED;
    let blocks = seen / LayerKind::Csa.entries_per_block();
    let per_row = format.row_bytes() + WORD_BYTES + ROW_BYTES;
    let per_query = META_BYTES + u64::from(blocks) * WORD_BYTES + u64::from(rows) * per_row;
    let bytes = u64::from(requests) * per_query;
    let nodes = nodes_for(bytes);
    let layers = Layers::new(device, format, LayerKind::Csa, [requests, seen, rows], nodes)?;
    let list_elements = u64::from(requests * rows);
    let lists = lists(nodes * u64::from(requests), seen, rows);
    let selected = layers.upload("selected entries", &lists)?;
    let launch = |node: &Node<'_, B>| {
        let Node { index, queries, table, entries, tile } = node;
        let list = selected.slice(index * list_elements, list_elements).expect("a list a query");
        let (stream, faults) = (&layers.stream, &layers.faults);
        ops::gather_entries(
            stream,
            &ops::EntryGather { queries, rows, table, entries, tile, faults },
            &list,
        )
    };
    let name = format!("gather_entries_{}", format.name());
    let size = format!("{requests} queries, {rows} of {seen} entries");
    layers.measure((name, size), bytes, &selected, launch)
}

pub(super) fn gather_all<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    rows: u32,
    requests: u32,
) -> Result<Measurement> {
    let per_row = format.row_bytes() + WORD_BYTES + ROW_BYTES;
    let per_query = META_BYTES + WORD_BYTES + u64::from(rows) * per_row;
    let bytes = u64::from(requests) * per_query;
    let nodes = nodes_for(bytes);
    let layers = Layers::new(device, format, LayerKind::Hca, [requests, rows, rows], nodes)?;
    let lengths = layers.upload("lengths", &vec![0; requests as usize])?;
    let launch = |node: &Node<'_, B>| {
        let Node { queries, table, entries, tile, .. } = node;
        let (stream, faults) = (&layers.stream, &layers.faults);
        ops::gather_all(
            stream,
            &ops::EntryGather { queries, rows, table, entries, tile, faults },
            &lengths,
        )
    };
    let name = format!("gather_all_{}", format.name());
    let size = format!("{requests} queries, {rows} entries");
    layers.measure((name, size), bytes, &lengths, launch)
}

/// `lists` lists, each of `rows` different entries below `seen`, in random order.
fn lists(lists: u64, seen: u32, rows: u32) -> Vec<i32> {
    let mut random = SmallRng::seed_from_u64(1);
    let list = |_| index::sample(&mut random, seen as usize, rows as usize);
    (0..lists).flat_map(list).map(|entry| entry as i32).collect()
}

/// One layer per node of the graph, and a step with one query per request. All layers share a block table.
struct Layers<B: Backend> {
    device: Device<B>,
    stream: Stream<B>,
    format: MainFormat,
    entries_per_block: u32,
    requests: u32,
    /// Blocks per request; each layer has as many for each request.
    blocks: u32,
    nodes: u64,
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
    table: Buffer<B, i32>,
    data: Buffer<B, u8>,
    scale: Buffer<B, u8>,
    tiles: Buffer<B, bf16>,
    faults: Buffer<B, u32>,
}

/// One launch of a graph.
struct Node<'a, B: Backend> {
    index: u64,
    queries: StepQueries<'a, B>,
    table: BlockTable<'a, B>,
    entries: Entries<'a, B>,
    tile: Buffer<B, bf16>,
}

impl<B: Backend> Layers<B> {
    /// Requests that see `seen` entries each, and a tile of `rows` rows per query.
    fn new(
        device: &Device<B>,
        format: MainFormat,
        kind: LayerKind,
        [requests, seen, rows]: [u32; 3],
        nodes: u64,
    ) -> Result<Self> {
        let entries_per_block = kind.entries_per_block();
        let blocks = seen / entries_per_block;
        let entries = nodes * u64::from(requests) * u64::from(seen);
        let tile_elements = u64::from(requests) * u64::from(rows) * u64::from(HEAD_DIM);
        let stream = device.stream()?;
        let upload = |label, values: &[i32]| stream.upload_new(label, values);
        let position = (blocks * BLOCK_TOKENS) as i32 - 1;
        let mut table: Vec<i32> = (0..(requests * blocks) as i32).collect();
        table.shuffle(&mut SmallRng::seed_from_u64(2));
        Ok(Self {
            position: upload("positions", &vec![position; requests as usize])?,
            slot: upload("slots", &(0..requests as i32).collect::<Vec<_>>())?,
            table: upload("block table", &table)?,
            data: random_plane(&stream, "entry data", entries * DATA_BYTES)?,
            scale: random_plane(&stream, "entry scales", entries * format.scale_bytes())?,
            tiles: device.allocate("tiles", nodes * tile_elements)?,
            faults: device.allocate("fault word", 1)?,
            device: device.clone(),
            stream,
            format,
            entries_per_block,
            requests,
            blocks,
            nodes,
        })
    }

    fn upload(&self, label: &'static str, values: &[i32]) -> Result<Buffer<B, i32>> {
        Ok(self.stream.upload_new(label, values)?)
    }

    /// Times a graph with one launch per layer. `extra` is further memory that `launch` accesses.
    fn measure(
        &self,
        name: (String, String),
        bytes: u64,
        extra: &Buffer<B, i32>,
        launch: impl Fn(&Node<'_, B>) -> Result<(), DeviceError>,
    ) -> Result<Measurement> {
        let Self { position, slot, table, data, scale, tiles, faults, .. } = self;
        let mut retained = [position, slot, table, extra].map(Buffer::memory).to_vec();
        retained.extend([data, scale].map(Buffer::memory));
        retained.extend([tiles.memory(), faults.memory()]);
        let (slots, max_blocks) = (self.requests, self.blocks);
        let record = |index| {
            launch(&Node {
                index,
                queries: StepQueries { position, slot, index: slot, first: 0, count: slots },
                table: BlockTable { table, slots, max_blocks },
                entries: Entries {
                    data: &part(data, index, self.nodes),
                    scale: &part(scale, index, self.nodes),
                    format: self.format,
                    entries_per_block: self.entries_per_block,
                    num_blocks: slots * max_blocks,
                },
                tile: part(tiles, index, self.nodes),
            })
        };
        let record_all = || (0..self.nodes).try_for_each(record);
        let graph = self.stream.capture(retained, record_all)?;
        let result = measurement(&self.device, name, (bytes, self.nodes), &graph)?;
        ensure_none_refused(&self.stream, faults)?;
        Ok(result)
    }
}

/// `bytes` bytes: a random pattern, repeated. With constant rows the memory would need less power than with real ones.
fn random_plane<B: Backend>(
    stream: &Stream<B>,
    label: &'static str,
    bytes: u64,
) -> Result<Buffer<B, u8>, DeviceError> {
    let mut values = vec![0; PATTERN_BYTES.min(bytes) as usize];
    SmallRng::seed_from_u64(3).fill_bytes(&mut values);
    repeated(stream, label, bytes, &values)
}

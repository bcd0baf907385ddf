//! The sliding window: append at decode and prefill sizes, gather at decode sizes.
//!
//! Every node of a graph is a layer of its own, which shares no rings, rows or tile with other nodes.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Memory, Stream};
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, WINDOW, swa_ring_rows};
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat};
use dsv4_kv::ops::{self, StepQueries, SwaRing};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::{ensure_none_refused, part};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

/// Bytes of a BF16 row.
const ROW_BYTES: u64 = 2 * HEAD_DIM as u64;
/// Bytes of StepMeta that append reads per token, and that gather reads per query.
const APPEND_META_BYTES: u64 = 4;
const GATHER_META_BYTES: u64 = 16;
/// Most tokens in one of the launches that fill the rings.
const FILL_TOKENS: u32 = 8192;
/// Rows of a ring.
const RING: u32 = swa_ring_rows(1);

/// Pairs: requests of the step, tokens per request.
const APPENDS: [(u32, u32); 5] = [(1, 1), (32, 1), (256, 1), (4096, 1), (32, 128)];
/// Requests of the step, with one query each.
const GATHERS: [u32; 3] = [1, 32, 256];

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for format in MainFormat::ALL {
        for (requests, tokens) in APPENDS {
            let name = format!("append {} {requests} x {tokens}", format.name());
            works.push(Work::row(name, move || append(device, format, requests, tokens)));
        }
        for requests in GATHERS {
            let name = format!("gather {} {requests}", format.name());
            works.push(Work::row(name, move || gather(device, format, requests)));
        }
    }
    works
}

pub(super) fn append<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    requests: u32,
    tokens: u32,
) -> Result<Measurement> {
    let rows = u64::from(requests * tokens);
    let bytes = rows * (ROW_BYTES + format.row_bytes() + APPEND_META_BYTES);
    let layers = Layers::new(device, format, nodes_for(bytes), requests, tokens)?;
    let name = format!("append_swa_{}", format.name());
    let size = format!("{requests} x {tokens} tokens");
    layers.measure((name, size), bytes, Vec::new(), |node| {
        let Node { kv, rings, .. } = node;
        let Layers { stream, ring_row, faults, .. } = &layers;
        ops::append_swa(
            stream,
            &ops::WindowAppend {
                kv,
                row: ring_row,
                ring: rings,
                faults,
                tokens: requests * tokens,
            },
        )
    })
}

pub(super) fn gather<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    requests: u32,
) -> Result<Measurement> {
    let window = u64::from(WINDOW);
    let read = (window - 1) * format.row_bytes() + ROW_BYTES + GATHER_META_BYTES;
    let bytes = u64::from(requests) * (read + window * ROW_BYTES + 4);
    let nodes = nodes_for(bytes);
    let layers = Layers::new(device, format, nodes, requests, 1)?;
    let tile_elements = u64::from(requests) * window * u64::from(HEAD_DIM);
    let tiles = device.allocate::<bf16>("tiles", nodes * tile_elements)?;
    let lengths = device.allocate::<i32>("lengths", u64::from(requests))?;
    let retained = vec![tiles.memory(), lengths.memory()];
    let name = format!("gather_swa_{}", format.name());
    layers.measure((name, format!("{requests} queries")), bytes, retained, |node| {
        let Node { index, kv, rings } = node;
        let Layers { stream, position, slot, index_in_step, faults, .. } = &layers;
        let (first, count) = (0, requests);
        let queries = StepQueries { position, slot, index: index_in_step, first, count };
        let tile = part(&tiles, *index, nodes);
        ops::gather_swa(
            stream,
            &ops::WindowGather {
                kv,
                queries: &queries,
                ring: rings,
                tile: &tile,
                lengths: &lengths,
                faults,
            },
        )
    })
}

/// One layer per node of the graph, every ring full of random rows, and a step with the tokens that follow them.
struct Layers<B: Backend> {
    device: Device<B>,
    stream: Stream<B>,
    format: MainFormat,
    requests: u32,
    nodes: u64,
    /// Position and slot of each token, `[step]`.
    position: Buffer<B, i32>,
    slot: Buffer<B, i32>,
    index_in_step: Buffer<B, i32>,
    ring_row: Buffer<B, i32>,
    /// `[nodes * step, 512]` BF16, or more.
    kv: Buffer<B, bf16>,
    /// Elements of `kv` that belong to one node.
    kv_elements: u64,
    /// `[nodes * requests * RING, 576]`
    data: Buffer<B, u8>,
    /// `[nodes * requests * RING, scale_bytes]`
    scale: Buffer<B, u8>,
    faults: Buffer<B, u32>,
}

/// One launch of a graph.
struct Node<'a, B: Backend> {
    index: u64,
    /// `[step, 512]` BF16.
    kv: Buffer<B, bf16>,
    rings: SwaRing<'a, B>,
}

impl<B: Backend> Layers<B> {
    fn new(
        device: &Device<B>,
        format: MainFormat,
        nodes: u64,
        requests: u32,
        tokens: u32,
    ) -> Result<Self> {
        let stream = device.stream()?;
        let of_tokens = |value: fn(u32, u32) -> u32| {
            let tokens = (0..requests).flat_map(|slot| (0..tokens).map(move |index| (slot, index)));
            let values: Vec<i32> = tokens.map(|(slot, index)| value(slot, index) as i32).collect();
            stream.upload_new("step", &values)
        };
        let step = u64::from(requests * tokens);
        let rings = nodes * u64::from(requests) * u64::from(RING);
        let layers = Self {
            position: of_tokens(|_, index| WINDOW + index)?,
            slot: of_tokens(|slot, _| slot)?,
            index_in_step: of_tokens(|_, index| index)?,
            ring_row: of_tokens(|slot, index| slot * RING + (WINDOW + index) % RING)?,
            kv: random_rows(&stream, (nodes * step).max(FILL_TOKENS.into()))?,
            kv_elements: step * u64::from(HEAD_DIM),
            data: device.allocate("ring data", rings * DATA_BYTES)?,
            scale: device.allocate("ring scales", rings * format.scale_bytes())?,
            faults: device.allocate("fault word", 1)?,
            device: device.clone(),
            stream,
            format,
            requests,
            nodes,
        };
        layers.fill_rings()?;
        Ok(layers)
    }

    /// Fills the window of every request in every layer.
    fn fill_rings(&self) -> Result<()> {
        let rows = self.requests * RING;
        let all: Vec<i32> = (0..rows as i32).collect();
        let all = self.stream.upload_new("ring rows", &all)?;
        for index in 0..self.nodes {
            let (data, scale) = self.planes(index);
            let rings = self.rings(&data, &scale);
            for first in (0..rows).step_by(FILL_TOKENS as usize) {
                let tokens = FILL_TOKENS.min(rows - first);
                let row = all.slice(first.into(), tokens.into()).expect("rows of the rings");
                ops::append_swa(
                    &self.stream,
                    &ops::WindowAppend {
                        kv: &self.kv,
                        row: &row,
                        ring: &rings,
                        faults: &self.faults,
                        tokens,
                    },
                )?;
            }
        }
        Ok(self.stream.synchronize()?)
    }

    /// The planes of the rings of a node.
    fn planes(&self, index: u64) -> (Buffer<B, u8>, Buffer<B, u8>) {
        (part(&self.data, index, self.nodes), part(&self.scale, index, self.nodes))
    }

    fn rings<'p>(&self, data: &'p Buffer<B, u8>, scale: &'p Buffer<B, u8>) -> SwaRing<'p, B> {
        SwaRing { data, scale, format: self.format, ring: RING, slots: self.requests }
    }

    /// Times a graph with one launch per layer. `retained` is further memory that `launch` accesses.
    fn measure(
        &self,
        name: (String, String),
        bytes: u64,
        mut retained: Vec<Memory<B>>,
        launch: impl Fn(&Node<'_, B>) -> Result<(), DeviceError>,
    ) -> Result<Measurement> {
        let Self { position, slot, index_in_step, ring_row, kv, data, scale, faults, .. } = self;
        retained.extend([position, slot, index_in_step, ring_row].map(Buffer::memory));
        retained.extend([kv.memory(), data.memory(), scale.memory(), faults.memory()]);
        let record = |index| {
            let kv = kv.slice(index * self.kv_elements, self.kv_elements);
            let (data, scale) = self.planes(index);
            let rings = self.rings(&data, &scale);
            launch(&Node { index, kv: kv.expect("rows for every node"), rings })
        };
        let graph = self.stream.capture(retained, || (0..self.nodes).try_for_each(record))?;
        let result = measurement(&self.device, name, (bytes, self.nodes), &graph)?;
        ensure_none_refused(&self.stream, faults)?;
        Ok(result)
    }
}

/// `[rows, 512]` BF16, uniform in [-4, 4).
fn random_rows<B: Backend>(stream: &Stream<B>, rows: u64) -> Result<Buffer<B, bf16>> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut value = || bf16::from_f32(random.random_range(-4.0..4.0));
    let values: Vec<bf16> = (0..rows * u64::from(HEAD_DIM)).map(|_| value()).collect();
    Ok(stream.upload_new("kv rows", &values)?)
}

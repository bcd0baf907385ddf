//! The sampled requests: what is remembered of them, kept of each step, and fetched for checking.

use std::collections::HashMap;

use anyhow::{Context, Result};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, WINDOW};
use dsv4_kv::kv_layout::main_row::DATA_BYTES;
use dsv4_kv::{KvCacheManager, LayerCacheHandle, LayerId, RequestId, StepRequest};

use super::verify::{Place, RingPlanes, Token, Verification, Verifier};

/// Elements of one query's tile.
const TILE: u64 = (WINDOW * HEAD_DIM) as u64;

/// Bytes of device memory that watching needs.
pub fn bytes(sample: u32, layers: u32) -> u64 {
    u64::from(sample.max(1)) * u64::from(layers) * (2 * TILE + 4)
}

/// The requests that are followed, and the memory for what is kept of a step.
pub struct Watch<D: Device> {
    /// Places in the load of the sampled requests.
    sample: Vec<usize>,
    live: HashMap<RequestId, Watched>,
    checks: Vec<Check>,
    /// `[layers, sample, 128, 512]` BF16: tiles of the step's last queries.
    tiles: Buffer<D, u16>,
    /// `[layers, sample]`: their lengths.
    lengths: Buffer<D, i32>,
    verifier: Verifier,
}

/// A sampled request that is running.
struct Watched {
    request: usize,
    history: Vec<Token>,
}

/// A sampled request that takes part in the step: its last query is kept.
#[derive(Clone, Copy)]
struct Check {
    id: RequestId,
    /// The query's row in the step.
    query: u32,
}

impl<D: Device> Watch<D> {
    /// Follows the requests at the places `sample` of the load.
    pub fn new(
        device: &D,
        sample: Vec<usize>,
        layers: u32,
        verifier: Verifier,
    ) -> Result<Self, DeviceError> {
        let kept = sample.len().max(1) as u64 * u64::from(layers);
        Ok(Self {
            live: HashMap::new(),
            checks: Vec::new(),
            tiles: device.allocate("kept tiles", kept * TILE)?,
            lengths: device.allocate("kept lengths", kept)?,
            sample,
            verifier,
        })
    }

    /// A request was admitted.
    pub fn admit(&mut self, id: RequestId, request: usize) {
        if self.sample.contains(&request) {
            self.live.insert(id, Watched { request, history: Vec::new() });
        }
    }

    /// A request ended.
    pub fn release(&mut self, id: RequestId) {
        if self.live.remove(&id).is_some() {
            self.verifier.count_request();
        }
    }

    /// Remembers which tokens the sampled requests get in step `number`.
    pub fn begin_step(&mut self, number: u64, step: &[StepRequest]) {
        self.checks.clear();
        let mut row = 0;
        for part in step {
            let rows = row..row + part.tokens;
            row = rows.end;
            if let Some(watched) = self.live.get_mut(&part.id) {
                watched.history.extend(rows.map(|row| Token { step: number, row }));
                self.checks.push(Check { id: part.id, query: row - 1 });
            }
        }
    }

    /// Queues copies of those tiles of `layer` that will be checked. `tile` and `lengths` hold the
    /// queries from `first` on, `count` of them.
    pub fn keep(
        &self,
        device: &D,
        stream: &D::Stream,
        layer: LayerId,
        (first, count): (u32, u32),
        (tile, lengths): (&Buffer<D, u16>, &Buffer<D, i32>),
    ) -> Result<()> {
        const INSIDE: &str = "one place per layer and sampled request";
        for (place, check) in self.checks.iter().enumerate() {
            let Some(query) = check.query.checked_sub(first).filter(|&query| query < count) else {
                continue;
            };
            let (from, to) = (u64::from(query), self.kept(layer, place));
            let kept = self.tiles.slice(to * TILE, TILE).context(INSIDE)?;
            device.copy(stream, &tile.slice(from * TILE, TILE).context(INSIDE)?, &kept)?;
            let kept = self.lengths.slice(to, 1).context(INSIDE)?;
            device.copy(stream, &lengths.slice(from, 1).context(INSIDE)?, &kept)?;
        }
        Ok(())
    }

    /// Compares the kept tiles, and the rings of the requests that took part in the step.
    pub fn check_step(&mut self, manager: &KvCacheManager<D>, stream: &D::Stream) -> Result<()> {
        if self.checks.is_empty() {
            return Ok(());
        }
        let device = manager.device();
        let mut tile = vec![0; TILE as usize];
        let mut ring = (Vec::new(), Vec::new());
        for layer in manager.schema().layers.iter().map(|schema| schema.layer) {
            let handle = manager.layer(layer)?;
            for (place, check) in self.checks.iter().enumerate() {
                let watched = &self.live[&check.id];
                let at = Place { request: watched.request, layer, history: &watched.history };
                let kept = self.kept(layer, place);
                device.download(stream, &self.tiles, kept * TILE, &mut tile)?;
                let mut length = [0];
                device.download(stream, &self.lengths, kept, &mut length)?;
                self.verifier.check_window(at, watched.history.len() - 1, &tile, length[0]);
                let rows = download_ring(device, stream, &handle, check.id, &mut ring)?;
                let planes = RingPlanes { rows, data: &ring.0, scale: &ring.1 };
                self.verifier.check_ring(at, planes);
            }
        }
        Ok(())
    }

    /// What was found.
    pub fn into_found(self) -> Verification {
        self.verifier.into_found()
    }

    /// The rows that the cache is fed with.
    pub fn verifier(&self) -> &Verifier {
        &self.verifier
    }

    fn kept(&self, layer: LayerId, place: usize) -> u64 {
        (layer.0 as usize * self.sample.len() + place) as u64
    }
}

/// Fetches the ring planes of a request in a layer; the rows of the ring.
fn download_ring<D: Device>(
    device: &D,
    stream: &D::Stream,
    handle: &LayerCacheHandle<'_, D>,
    id: RequestId,
    (data, scale): &mut (Vec<u8>, Vec<u8>),
) -> Result<usize> {
    let ring = handle.swa();
    let first = u64::from(id.slot.0) * u64::from(ring.ring);
    let planes = [(ring.data, DATA_BYTES, data), (ring.scale, ring.format.scale_bytes(), scale)];
    for (pool, row_bytes, plane) in planes {
        plane.resize((u64::from(ring.ring) * row_bytes) as usize, 0);
        device.download(stream, pool, first * row_bytes, plane)?;
    }
    Ok(ring.ring as usize)
}

//! The sampled requests: what is remembered of them, kept of each step, and fetched for checking.

use std::collections::HashMap;

use anyhow::{Context, Result};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::kv_layout::geometry::{LayerKind, StateStream, WINDOW};
use dsv4_kv::kv_layout::main_row::DATA_BYTES;
use dsv4_kv::{CacheConfig, KvCacheManager, LayerCacheHandle, LayerId, RequestId, StepRequest};
use dsv4_kv_oracle::compressor::visible;

use super::entries::{self, Planes, Rows};
use super::kept::{self, Gathered, Kept};
use super::select::{Batch, Selection};
use super::source::shape;
use super::verify::{Place, RingPlanes, Token, Verification, Verifier};

/// Bytes of device memory that watching `sample` requests needs.
pub fn bytes(config: &CacheConfig, sample: u32) -> u64 {
    let places = places(config, sample as usize);
    kept::bytes(places, WINDOW) + kept::bytes(places, config.model.index_topk)
}

/// Tiles that are kept at once: one for each layer and sampled request.
fn places(config: &CacheConfig, sample: usize) -> u64 {
    sample.max(1) as u64 * config.model.layers.len() as u64
}

/// What a step gathers for a query.
#[derive(Clone, Copy)]
pub enum Tile {
    /// Its window.
    Window,
    /// Its compressed entries.
    Entries,
}

/// The requests that are followed, and the memory for what is kept of a step.
pub struct Watch<D: Device> {
    /// Places in the load of the sampled requests.
    sample: Vec<usize>,
    live: HashMap<RequestId, Watched>,
    checks: Vec<Check>,
    /// Windows of the step's last queries.
    windows: Kept<D>,
    /// Their gathered entries, of each as many rows as an indexer picks.
    gathered: Kept<D>,
    verifier: Verifier,
}

/// A sampled request that is running.
struct Watched {
    request: usize,
    history: Vec<Token>,
    /// What was found in its blocks when it was new.
    rows: HashMap<(LayerId, StateStream), Rows>,
}

/// A sampled request that takes part in the step: its last query is kept.
#[derive(Clone, Copy)]
struct Check {
    id: RequestId,
    /// The query's row in the step.
    query: u32,
    /// Tokens of the request before the step.
    start: usize,
}

/// Where the request of a check is checked.
struct At<'a, D: Device> {
    manager: &'a KvCacheManager<D>,
    stream: &'a D::Stream,
    handle: &'a LayerCacheHandle<'a, D>,
    layer: LayerId,
}

impl<D: Device> Watch<D> {
    /// Follows the requests at the places `sample` of the load.
    pub fn new(
        device: &D,
        config: &CacheConfig,
        sample: Vec<usize>,
        verifier: Verifier,
    ) -> Result<Self, DeviceError> {
        let places = places(config, sample.len());
        Ok(Self {
            live: HashMap::new(),
            checks: Vec::new(),
            windows: Kept::new(device, places, WINDOW)?,
            gathered: Kept::new(device, places, config.model.index_topk)?,
            sample,
            verifier,
        })
    }

    /// A request was admitted.
    pub fn admit(&mut self, id: RequestId, request: usize) {
        if self.sample.contains(&request) {
            let watched = Watched { request, history: Vec::new(), rows: HashMap::new() };
            self.live.insert(id, watched);
        }
    }

    /// A request ends: what its blocks hold must still be what they held when it was written.
    pub fn release(
        &mut self,
        manager: &KvCacheManager<D>,
        stream: &D::Stream,
        id: RequestId,
    ) -> Result<()> {
        let Some(watched) = self.live.remove(&id) else { return Ok(()) };
        let blocks = blocks(manager, id)?;
        let Watched { request, history, rows } = &watched;
        for (&(layer, which), then) in rows {
            let handle = manager.layer(layer)?;
            let planes = Planes::of(&handle, which)?;
            let now = planes.fetch(manager.device(), stream, &blocks, 0..then.count())?;
            let place = Place { request: *request, layer, history };
            self.verifier.check_unchanged(place, which, &now, then);
        }
        self.verifier.count_request();
        Ok(())
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
                let start = part.start as usize;
                self.checks.push(Check { id: part.id, query: row - 1, start });
            }
        }
    }

    /// Queues copies of those tiles of `layer` that will be checked.
    /// `queries`: the first that `gathered` holds, and their number.
    pub fn keep(
        &self,
        tile: Tile,
        device: &D,
        stream: &D::Stream,
        layer: LayerId,
        (first, count): (u32, u32),
        gathered: &Gathered<'_, D>,
    ) -> Result<()> {
        let kept = match tile {
            Tile::Window => &self.windows,
            Tile::Entries => &self.gathered,
        };
        for (check, of) in self.checks.iter().enumerate() {
            let query = of.query.checked_sub(first).filter(|&query| query < count);
            if let Some(query) = query {
                kept.keep(device, stream, self.place(layer, check), gathered, query)?;
            }
        }
        Ok(())
    }

    /// Compares what the step gathered, the rings of the requests that took part in it, and the
    /// entries that closed in it.
    pub fn check_step(
        &mut self,
        manager: &KvCacheManager<D>,
        stream: &D::Stream,
        selection: &Selection,
    ) -> Result<()> {
        for place in 0..self.checks.len() {
            let blocks = blocks(manager, self.checks[place].id)?;
            for schema in &manager.schema().layers {
                let handle = &manager.layer(schema.layer)?;
                let at = &At { manager, stream, handle, layer: schema.layer };
                self.check_swa(at, place)?;
                for &which in entries::compressors(schema.kind) {
                    self.check_closed(at, place, which, &blocks)?;
                }
                self.check_gathered(at, place, schema.kind, selection)?;
            }
        }
        Ok(())
    }

    /// The window of the request's last query, and its ring.
    fn check_swa(&mut self, at: &At<'_, D>, check: usize) -> Result<()> {
        let At { manager, stream, handle, layer } = *at;
        let (device, id) = (manager.device(), self.checks[check].id);
        let (tile, length) =
            self.windows.fetch(device, stream, self.place(layer, check), WINDOW)?;
        let (data, scale) = download_ring(device, stream, handle, id)?;
        let rows = handle.swa().ring as usize;
        let Watched { request, history, .. } = &self.live[&id];
        let place = Place { request: *request, layer, history };
        self.verifier.check_window(place, history.len() - 1, &tile, length);
        self.verifier.check_ring(place, RingPlanes { rows, data: &data, scale: &scale });
        Ok(())
    }

    /// The rows of a compressor's windows that the step closed.
    fn check_closed(
        &mut self,
        at: &At<'_, D>,
        check: usize,
        which: StateStream,
        blocks: &[u32],
    ) -> Result<()> {
        let At { manager, stream, handle, layer } = *at;
        let Check { id, start, .. } = self.checks[check];
        let Some(Watched { request, history, rows }) = self.live.get_mut(&id) else {
            return Ok(());
        };
        let ratio = shape(which).ratio;
        let closed = start / ratio..history.len() / ratio;
        if closed.is_empty() {
            return Ok(());
        }
        let planes = Planes::of(handle, which)?;
        let new = planes.fetch(manager.device(), stream, blocks, closed.clone())?;
        let place = Place { request: *request, layer, history };
        self.verifier.check_closed(place, which, closed.start, &new);
        rows.entry((layer, which)).or_insert_with(|| Rows::new(new.codec())).extend(&new);
        Ok(())
    }

    /// The entries gathered for the request's last query.
    fn check_gathered(
        &mut self,
        at: &At<'_, D>,
        check: usize,
        kind: LayerKind,
        selection: &Selection,
    ) -> Result<()> {
        let At { manager, stream, layer, .. } = *at;
        let Check { id, query, .. } = self.checks[check];
        let of_query = |batch: &&Batch| batch.queries.contains(&query);
        let batch = selection.batches.iter().find(of_query);
        let batch = batch.context("the last query of a request gathers")?;
        let Watched { request, history, rows } = &self.live[&id];
        let position = history.len() - 1;
        let list: Vec<i32>;
        let (which, picked) = match kind {
            LayerKind::Swa => return Ok(()),
            LayerKind::Csa => (StateStream::CsaMain, selection.list(batch, query)),
            LayerKind::Hca => {
                list = (0..visible(position, shape(StateStream::Hca).ratio) as i32).collect();
                (StateStream::Hca, &list[..])
            }
        };
        let place = self.place(layer, check);
        let device = manager.device();
        let (tile, length) = self.gathered.fetch(device, stream, place, picked.len() as u32)?;
        let place = Place { request: *request, layer, history };
        if kind == LayerKind::Hca {
            self.verifier.check_length(place, position, length, picked.len());
        }
        let rows = rows.get(&(layer, which));
        self.verifier.check_gathered(place, position, picked, &tile, rows);
        Ok(())
    }

    /// What was found.
    pub fn into_found(self) -> Verification {
        self.verifier.into_found()
    }

    /// The values that the cache is fed with.
    pub fn verifier(&self) -> &Verifier {
        &self.verifier
    }

    fn place(&self, layer: LayerId, check: usize) -> u64 {
        (layer.0 as usize * self.sample.len() + check) as u64
    }
}

/// The blocks of a request, in the order of its tokens.
fn blocks<D: Device>(manager: &KvCacheManager<D>, id: RequestId) -> Result<Vec<u32>> {
    Ok(manager.block_table(id)?.map(|block| block.0).collect())
}

/// The data and scale planes of the ring of a request in a layer.
fn download_ring<D: Device>(
    device: &D,
    stream: &D::Stream,
    handle: &LayerCacheHandle<'_, D>,
    id: RequestId,
) -> Result<(Vec<u8>, Vec<u8>), DeviceError> {
    let ring = handle.swa();
    let first = u64::from(id.slot.0) * u64::from(ring.ring);
    let download = |pool: &Buffer<D, u8>, row_bytes: u64| -> Result<Vec<u8>, DeviceError> {
        let mut plane = vec![0; (u64::from(ring.ring) * row_bytes) as usize];
        device.download(stream, pool, first * row_bytes, &mut plane)?;
        Ok(plane)
    };
    Ok((download(ring.data, DATA_BYTES)?, download(ring.scale, ring.format.scale_bytes())?))
}

//! The sampled requests: their histories, the rows that are kept of each step, and their verification.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, DeviceError, Stream};
use dsv4_kv::kv_layout::geometry::{CompressorKind, HEAD_DIM, LayerKind, WINDOW};
use dsv4_kv::{CacheConfig, KvCacheManager, LayerGroup, LayerId, PoolKind, RequestId, StepRequest};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::rope::Table;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::attend::{self, Head, HeadSource};
use super::entries::{self, Planes, Rows};
use super::history::{Place, Prefix};
use super::kept::{self, Gathered, Kept, Shape};
use super::select::{Batch, Queries};
use super::source::shape;
use super::verification::Verification;
use super::verify::{Batched, RingPlanes, Verifier};

/// Bytes of device memory that watching `sample` requests needs.
pub fn bytes(config: &CacheConfig, sample: u32, heads: Option<u32>) -> u64 {
    let places = places(config, sample as usize);
    let attended = heads.map_or(0, |heads| kept::bytes(places, attend::results(heads)));
    kept::bytes(places, WINDOW_SHAPE) + kept::bytes(places, list_shape(config)) + attended
}

/// The shape of a window and its length.
pub const WINDOW_SHAPE: Shape = Shape { rows: WINDOW, words: 1 };

/// The shape of the entries that an indexer selects, and of its list.
pub fn list_shape(config: &CacheConfig) -> Shape {
    Shape { rows: config.model.index_topk, words: config.model.index_topk }
}

/// Number of tiles that are kept at once: one per layer and sampled request.
fn places(config: &CacheConfig, sample: usize) -> u64 {
    sample.max(1) as u64 * config.model.layers.len() as u64
}

/// A kind of tile that a step produces for a query.
#[derive(Clone, Copy)]
pub enum Tile {
    /// Its window.
    Window,
    /// Its compressed entries.
    Entries,
    /// Its attention results.
    Attended,
}

/// The sampled requests, and memory for the rows that are kept of a step.
pub struct Watch<B: Backend> {
    /// Indices in the load of the sampled requests.
    sample: Vec<usize>,
    /// The layers of each kind: those with only a window, CSA, HCA.
    layers: [Vec<LayerId>; 3],
    live: HashMap<RequestId, Watched>,
    /// Requests that have ended at least once. A preempted request ends more than once.
    ended: HashSet<usize>,
    checks: Vec<Check>,
    /// The step, from 0.
    step: u64,
    /// The range of draft layers.
    drafts: Range<u32>,
    /// The window of one query of each request.
    windows: Kept<B>,
    /// The gathered entries of these queries, each with as many rows as an indexer selects, and with its list or a
    /// length.
    gathered: Kept<B>,
    /// The attention results of these queries, and the heads, if they attend.
    attended: Option<(Kept<B>, HeadSource)>,
    verifier: Verifier,
}

/// A sampled request that is running.
struct Watched {
    request: usize,
    history: Vec<Prefix>,
    /// Number of tokens that it did not compute.
    reused: usize,
    /// The rows of its blocks when they were new.
    rows: HashMap<(LayerId, CompressorKind), Rows>,
}

/// A sampled request that takes part in the step, and the query of it that is kept.
#[derive(Clone, Copy)]
struct Check {
    id: RequestId,
    /// The query's row in the step.
    query: u32,
    /// The query's position.
    position: usize,
    /// Tokens of the request before the step.
    start: usize,
    /// The layer in which the query's list is compared. Recomputing scores in every layer would cost too much.
    listed: Option<LayerId>,
    /// The layers in which attention is compared, one of each kind, for the same reason.
    attended: [Option<LayerId>; 3],
}

/// The layer in which a request is checked.
struct At<'a, B: Backend> {
    manager: &'a KvCacheManager<B>,
    stream: &'a Stream<B>,
    layer: LayerId,
}

impl<B: Backend> Watch<B> {
    /// Watches the requests with the indices `sample`.
    pub fn new(
        device: &Device<B>,
        config: &CacheConfig,
        sample: Vec<usize>,
        verifier: Verifier,
        heads: Option<HeadSource>,
    ) -> Result<Self, DeviceError> {
        let places = places(config, sample.len());
        let room = |heads: HeadSource| {
            let results = attend::results(heads.heads());
            Ok::<_, DeviceError>((Kept::new(device, places, results)?, heads))
        };
        let attended = heads.map(room).transpose()?;
        let of = |kind| {
            let layers = (0..).map(LayerId).zip(&config.model.layers);
            layers.filter(|(_, of)| **of == kind).map(|(layer, _)| layer).collect()
        };
        Ok(Self {
            layers: [LayerKind::Swa, LayerKind::Csa, LayerKind::Hca].map(of),
            live: HashMap::new(),
            ended: HashSet::new(),
            checks: Vec::new(),
            step: 0,
            drafts: config.group_layers(LayerGroup::Draft),
            windows: Kept::new(device, places, WINDOW_SHAPE)?,
            gathered: Kept::new(device, places, list_shape(config))?,
            attended,
            sample,
            verifier,
        })
    }

    /// Records that a request was admitted and reuses the tokens of `history`. Compares its reused rows with those that
    /// it would have computed.
    pub fn admit(
        &mut self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        id: RequestId,
        request: usize,
        history: impl Iterator<Item = Prefix>,
    ) -> Result<()> {
        if !self.sample.contains(&request) {
            return Ok(());
        }
        let history: Vec<_> = history.collect();
        let reused = history.len();
        self.live.insert(id, Watched { request, history, reused, rows: HashMap::new() });
        if reused == 0 {
            return Ok(());
        }
        for schema in &manager.schema().layers {
            self.check_ring(&At { manager, stream, layer: schema.layer }, id)?;
        }
        self.check_blocks(manager, stream, id)?;
        self.verifier.count_reused(reused);
        Ok(())
    }

    /// Records that a request arrived from another cache with the tokens of `history`, of which it reused some there.
    /// Compares its entries and keys with those that it would have computed here. Its windows are compared in the first
    /// step, when they have all rows.
    pub fn arrive(
        &mut self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        (id, request): (RequestId, usize),
        history: impl Iterator<Item = Prefix>,
        reused: usize,
    ) -> Result<()> {
        if !self.sample.contains(&request) {
            return Ok(());
        }
        let (history, rows) = (history.collect(), HashMap::new());
        self.live.insert(id, Watched { request, history, reused, rows });
        self.check_blocks(manager, stream, id)
    }

    /// Compares all entries and keys of a request that is new here.
    fn check_blocks(
        &mut self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        id: RequestId,
    ) -> Result<()> {
        let blocks = blocks(manager, id)?;
        for schema in &manager.schema().layers {
            let at = &At { manager, stream, layer: schema.layer };
            for &which in entries::compressors(schema.kind) {
                self.check_closed(at, id, which, 0, &blocks)?;
            }
        }
        Ok(())
    }

    /// Records that a request ends. Its blocks must still hold the rows that they held when they were new.
    pub fn release(
        &mut self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        id: RequestId,
    ) -> Result<()> {
        let Some(watched) = self.live.remove(&id) else { return Ok(()) };
        let blocks = blocks(manager, id)?;
        for (&(layer, which), then) in &watched.rows {
            let planes = Planes::of(manager, layer, which)?;
            let now = planes.fetch(stream, &blocks, 0..then.count())?;
            let place = place_of(&watched, layer, &self.drafts);
            self.verifier.check_unchanged(place, which, &now, then);
        }
        // A preempted request ends more than once.
        if self.ended.insert(watched.request) {
            self.verifier.count_request();
        }
        Ok(())
    }

    /// Adds the step's tokens to the histories of the sampled requests; `prefixes` are those of the step, in its order.
    /// Chooses one query of each request to keep, among `queries`, and the layers in which its list and its attention
    /// results are compared: at random, but the same for the same `seed`.
    pub fn begin_step(
        &mut self,
        number: u64,
        step: &[StepRequest],
        prefixes: &[Prefix],
        queries: Queries,
        seed: u64,
    ) {
        self.step = number;
        self.checks.clear();
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ number);
        let mut first = 0;
        for part in step {
            let rows = first..first + part.tokens;
            first = rows.end;
            if let Some(watched) = self.live.get_mut(&part.id) {
                let (start, query) = (part.start, rng.random_range(queries.of(rows.clone())));
                let position = (start + query - rows.start) as usize;
                watched.history.extend(&prefixes[rows.start as usize..rows.end as usize]);
                let [_, csa, _] = &self.layers;
                let (start, listed) = (start as usize, csa.choose(&mut rng).copied());
                let attended = self.layers.each_ref().map(|of| of.choose(&mut rng).copied());
                self.checks.push(Check { id: part.id, query, position, start, listed, attended });
            }
        }
    }

    /// Queues copies of the tiles of `layer` that will be checked. `queries` are the queries in `gathered`.
    pub fn keep(
        &self,
        tile: Tile,
        stream: &Stream<B>,
        layer: LayerId,
        queries: Range<u32>,
        gathered: &Gathered<'_, B>,
    ) -> Result<()> {
        let kept = match tile {
            Tile::Window => &self.windows,
            Tile::Entries => &self.gathered,
            Tile::Attended => &self.attended.as_ref().context("requests attend")?.0,
        };
        for (check, of) in self.checks.iter().enumerate() {
            if queries.contains(&of.query) {
                let query = of.query - queries.start;
                kept.keep(stream, self.place(layer, check), gathered, query)?;
            }
        }
        Ok(())
    }

    /// Compares the gathered rows of the step, the rings of its requests, and the entries that closed in it.
    pub fn check_step(
        &mut self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        batches: &[Batch],
    ) -> Result<()> {
        for place in 0..self.checks.len() {
            let blocks = blocks(manager, self.checks[place].id)?;
            for schema in &manager.schema().layers {
                let at = &At { manager, stream, layer: schema.layer };
                self.check_swa(at, place)?;
                let Check { id, start, .. } = self.checks[place];
                for &which in entries::compressors(schema.kind) {
                    self.check_closed(at, id, which, start, &blocks)?;
                }
                let query = self.checks[place].query;
                let batch = batches.iter().find(|batch| batch.queries.contains(&query));
                let first = batch.context("a query that is kept gathers")?.queries.start;
                let list = match schema.kind {
                    LayerKind::Swa => Vec::new(),
                    LayerKind::Csa => self.check_listed(at, place, first)?,
                    LayerKind::Hca => self.check_all(at, place)?,
                };
                self.check_attended(at, place, (schema.kind, first), &list)?;
            }
        }
        Ok(())
    }

    /// Compares the window of the request's query, and its ring.
    fn check_swa(&mut self, at: &At<'_, B>, check: usize) -> Result<()> {
        let At { stream, layer, .. } = *at;
        let Check { id, position, .. } = self.checks[check];
        let kept = self.place(layer, check);
        let tile = self.windows.fetch_tile(stream, kept, WINDOW)?;
        let length = self.windows.fetch_names(stream, kept)?[0];
        let place = place_of(&self.live[&id], layer, &self.drafts);
        self.verifier.check_window(place, position, &tile, length);
        self.check_ring(at, id)
    }

    /// Compares the ring of a request.
    fn check_ring(&mut self, at: &At<'_, B>, id: RequestId) -> Result<()> {
        let (rows, data) = download_ring(at, PoolKind::SwaData, id)?;
        let (_, scale) = download_ring(at, PoolKind::SwaScale, id)?;
        let place = place_of(&self.live[&id], at.layer, &self.drafts);
        self.verifier.check_ring(place, RingPlanes { rows, data: &data, scale: &scale });
        Ok(())
    }

    /// Compares the rows of a compressor's windows that closed since the request had `start` tokens.
    fn check_closed(
        &mut self,
        at: &At<'_, B>,
        id: RequestId,
        which: CompressorKind,
        start: usize,
        blocks: &[u32],
    ) -> Result<()> {
        let At { manager, stream, layer } = *at;
        let Some(watched) = self.live.get_mut(&id) else {
            return Ok(());
        };
        let ratio = shape(which).ratio;
        let closed = start / ratio..watched.history.len() / ratio;
        if closed.is_empty() {
            return Ok(());
        }
        let planes = Planes::of(manager, layer, which)?;
        let new = planes.fetch(stream, blocks, closed.clone())?;
        let place = place_of(watched, layer, &self.drafts);
        self.verifier.check_closed(place, which, closed.start, &new);
        let rows = watched.rows.entry((layer, which));
        rows.or_insert_with(|| Rows::new(new.codec())).extend(&new);
        Ok(())
    }

    /// Compares the list of the request's query and the entries gathered for it. The query's batch begins with query
    /// `first`. Returns the list.
    fn check_listed(&mut self, at: &At<'_, B>, check: usize, first: u32) -> Result<Vec<i32>> {
        let At { stream, layer, .. } = *at;
        let Check { id, query, position, listed, .. } = self.checks[check];
        let kept = self.place(layer, check);
        let list = self.gathered.fetch_names(stream, kept)?;
        let tile = self.gathered.fetch_tile(stream, kept, list.len() as u32)?;
        let watched = &self.live[&id];
        let place = place_of(watched, layer, &self.drafts);
        let of = |which| watched.rows.get(&(layer, which));
        if listed == Some(layer) {
            let query = Batched { step: self.step, first, query };
            self.verifier.check_list(place, position, query, &list, of(CompressorKind::CsaIndex));
        }
        self.verifier.check_gathered(place, position, &list, &tile, of(CompressorKind::CsaMain));
        Ok(list)
    }

    /// Compares the gathered entries of the request's query, which are all that it sees. Returns their indices.
    fn check_all(&mut self, at: &At<'_, B>, check: usize) -> Result<Vec<i32>> {
        let At { stream, layer, .. } = *at;
        let Check { id, position, .. } = self.checks[check];
        let kept = self.place(layer, check);
        let all: Vec<i32> =
            (0..visible(position, shape(CompressorKind::Hca).ratio) as i32).collect();
        let tile = self.gathered.fetch_tile(stream, kept, all.len() as u32)?;
        let length = self.gathered.fetch_names(stream, kept)?[0];
        let watched = &self.live[&id];
        let place = place_of(watched, layer, &self.drafts);
        self.verifier.check_length(place, position, length, all.len());
        let rows = watched.rows.get(&(layer, CompressorKind::Hca));
        self.verifier.check_gathered(place, position, &all, &tile, rows);
        Ok(all)
    }

    /// Compares the attention results of some heads of the request's query. Its entries are those of `list`.
    fn check_attended(
        &mut self,
        at: &At<'_, B>,
        check: usize,
        (kind, first): (LayerKind, u32),
        list: &[i32],
    ) -> Result<()> {
        let At { stream, layer, .. } = *at;
        let Check { id, position, query, attended: layers, .. } = self.checks[check];
        let kept = self.place(layer, check);
        let Some((attended, source)) = &self.attended else { return Ok(()) };
        if !layers.contains(&Some(layer)) {
            return Ok(());
        }
        let out = attended.fetch_tile(stream, kept, source.heads())?;
        let mut rng = ChaCha8Rng::seed_from_u64(self.step << 20 ^ kept);
        let heads = (0..attend::CHECKED).map(|_| {
            let number = rng.random_range(0..source.heads());
            let (heads, sink) = source.head((self.step, layer), (first, query), number);
            let got = &out[(number * HEAD_DIM) as usize..][..HEAD_DIM as usize];
            Head { number, query: heads, sink, got }
        });
        let (which, table) = match kind {
            LayerKind::Swa => (None, Table::Main),
            LayerKind::Csa => (Some(CompressorKind::CsaMain), Table::Compress),
            LayerKind::Hca => (Some(CompressorKind::Hca), Table::Compress),
        };
        let watched = &self.live[&id];
        let place = place_of(watched, layer, &self.drafts);
        let rows = which.and_then(|which| watched.rows.get(&(layer, which)));
        let heads: Vec<_> = heads.collect();
        self.verifier.check_attended(place, (position, table), (list, rows), &heads);
        Ok(())
    }

    /// The result.
    pub fn into_found(self) -> Verification {
        self.verifier.into_found()
    }

    /// The verifier.
    pub fn verifier(&self) -> &Verifier {
        &self.verifier
    }

    fn place(&self, layer: LayerId, check: usize) -> u64 {
        (layer.0 as usize * self.sample.len() + check) as u64
    }
}

/// The place of a request's rows in a comparison. Rows of a draft layer may be zero for tokens that the request did not
/// compute.
fn place_of<'w>(watched: &'w Watched, layer: LayerId, drafts: &Range<u32>) -> Place<'w> {
    let Watched { request, history, reused, .. } = watched;
    let without_rows = if drafts.contains(&layer.0) { *reused } else { 0 };
    Place { request: *request, layer, history, without_rows }
}

/// The blocks of a request, in the order of its tokens.
fn blocks<B: Backend>(manager: &KvCacheManager<B>, id: RequestId) -> Result<Vec<u32>> {
    Ok(manager.block_table(id)?.into_iter().map(|block| block.0).collect())
}

/// The number of rows of a request's ring, and one of its planes.
fn download_ring<B: Backend>(
    at: &At<'_, B>,
    plane: PoolKind,
    id: RequestId,
) -> Result<(usize, Vec<u8>)> {
    let At { manager, stream, layer } = *at;
    let schema = manager.schema().layers[layer.0 as usize].pool(plane);
    let ring = schema.context("every layer has a window")?;
    let mut bytes = vec![0; ring.unit_bytes() as usize];
    let first = u64::from(id.slot().0) * ring.unit_bytes();
    stream.download(&manager.pool(layer, plane)?, first, &mut bytes)?;
    Ok((ring.rows as usize, bytes))
}

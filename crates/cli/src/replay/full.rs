//! A step with its kernels: in every layer the windows of all queries, the compressors, the append,
//! and the gathers of compressed entries, in a CSA layer of those that its indexer picks.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, Event, Stream};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::geometry::{
    CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, StateStream, WINDOW,
};
use dsv4_kv::{
    CacheConfig, IndexerWorkspace, KvCacheManager, KvError, LayerCacheHandle, LayerId, Ledger,
    RequestId, StepRequest, WorkspaceSize,
};

use super::execute::{Execute, KernelWork};
use super::kept::{Gathered, Shape};
use super::select::{Batch, MOST_QUERIES, Queries, batches};
use super::source::{Source, shape};
use super::verify::Verifier;
use super::watch::{self, Tile, WINDOW_SHAPE, Watch};

/// Steps between two looks at the fault words.
const FAULT_CHECK_STEPS: u64 = 256;
const IN_POOL: &str = "a step's tensors lie inside the pools";

/// Rows of the buffer that gathers write to.
const TILE_ROWS: u32 = 1 << 15;

const _: () = assert!(MOST_QUERIES * WINDOW <= TILE_ROWS);

/// The cache on a device, and what a step reads and writes besides.
pub struct Full<B: Backend> {
    manager: KvCacheManager<B>,
    stream: Stream<B>,
    begin: Event<B>,
    end: Event<B>,
    /// `[rows, 512]` BF16: the source of every step's KV rows.
    kv: Buffer<B, u16>,
    /// The source of projections and of weights.
    floats: Buffer<B, f32>,
    /// Of a model that has CSA layers.
    indexer: Option<IndexerWorkspace<B>>,
    /// `[MOST_QUERIES, index_topk]`: lists of a batch.
    selected: Buffer<B, i32>,
    /// `[TILE_ROWS, 512]` BF16.
    tile: Buffer<B, u16>,
    /// `[MOST_QUERIES]`
    lengths: Buffer<B, i32>,
    /// Which queries gather entries.
    queries: Queries,
    /// The step's.
    batches: Vec<Batch>,
    seed: u64,
    watch: Watch<B>,
    steps: u64,
    entries: u64,
    kernel_ms: f64,
}

/// Bytes of device memory that a replay needs beside its cache.
pub fn working_bytes(config: &CacheConfig, indexer: Option<&WorkspaceSize>, sample: u32) -> u64 {
    let (row, step_tokens) = (2 * u64::from(HEAD_DIM), config.max_step_tokens);
    let source = u64::from(Source::rows(step_tokens)) * row + 4 * Source::floats(step_tokens);
    let tile = u64::from(TILE_ROWS) * row + 4 * u64::from(MOST_QUERIES);
    let indexer = indexer.map_or(0, |indexer| indexer.bytes) + 4 * selected(config);
    source + tile + indexer + watch::bytes(config, sample)
}

/// Elements of the lists of the largest batch.
fn selected(config: &CacheConfig) -> u64 {
    u64::from(MOST_QUERIES) * u64::from(config.model.index_topk)
}

/// The tensors of one compressor.
struct Tensors<B: Backend> {
    kv: Buffer<B, f32>,
    gate: Buffer<B, f32>,
    ape: Buffer<B, f32>,
    norm: Buffer<B, f32>,
}

impl<B: Backend> Tensors<B> {
    fn projected(&self) -> Projected<'_, B> {
        Projected { kv: &self.kv, gate: &self.gate, ape: &self.ape, norm: &self.norm }
    }
}

impl<B: Backend> Full<B> {
    /// Allocates the cache and the buffers; follows the requests at the places `sample`.
    pub fn new(
        device: Device<B>,
        config: CacheConfig,
        indexer: Option<&WorkspaceSize>,
        seed: u64,
        sample: Vec<usize>,
        queries: Queries,
    ) -> Result<Self, KvError> {
        let layers = config.model.layers.len() as u32;
        let source = Source::new(seed, config.max_step_tokens, layers);
        let stream = device.stream()?;
        let kv = device.allocate("KV rows", source.as_slice().len() as u64)?;
        stream.upload(source.as_slice(), &kv, 0)?;
        let floats = device.allocate("projections", source.as_floats().len() as u64)?;
        stream.upload(source.as_floats(), &floats, 0)?;
        let tile = u64::from(TILE_ROWS) * u64::from(HEAD_DIM);
        let verifier = Verifier::new(&config, source);
        let workspace = |size: &WorkspaceSize| {
            let (model, context) = (&config.model, config.max_context);
            IndexerWorkspace::new(&device, model, context, size.queries, size.bytes)
        };
        Ok(Self {
            indexer: indexer.map(workspace).transpose()?,
            kv,
            floats,
            selected: device.allocate("selected entries", selected(&config))?,
            tile: device.allocate("gathered rows", tile)?,
            lengths: device.allocate("gathered lengths", u64::from(MOST_QUERIES))?,
            queries,
            batches: Vec::new(),
            seed,
            watch: Watch::new(&device, &config, sample, verifier)?,
            begin: device.event()?,
            end: device.event()?,
            stream,
            manager: KvCacheManager::new(device, config)?,
            steps: 0,
            entries: 0,
            kernel_ms: 0.0,
        })
    }

    /// Queues the kernels of one layer.
    fn layer(&self, layer: LayerId) -> Result<()> {
        let handle = self.manager.layer(layer)?;
        let row = u64::from(HEAD_DIM);
        let first = u64::from(self.watch.verifier().source().first_row(self.steps, layer.0));
        let kv = self.kv.slice(first * row, u64::from(handle.tokens()) * row).context(IN_POOL)?;
        self.gather_windows(&handle, &kv)?;
        self.update(&handle)?;
        handle.append_swa(&self.stream, &kv)?;
        self.batches.iter().try_for_each(|batch| match handle.schema().kind {
            LayerKind::Swa => Ok(()),
            LayerKind::Csa => self.gather_listed(&handle, batch),
            LayerKind::Hca => self.gather_all(&handle, batch),
        })
    }

    fn gather_windows(&self, handle: &LayerCacheHandle<'_, B>, kv: &Buffer<B, u16>) -> Result<()> {
        let (tokens, layer) = (handle.tokens(), handle.schema().layer);
        let (tile, lengths) = (&self.tile, &self.lengths);
        for first in (0..tokens).step_by(MOST_QUERIES as usize) {
            let queries = first..tokens.min(first + MOST_QUERIES);
            handle.gather_swa(&self.stream, kv, queries.clone(), tile, lengths)?;
            let gathered = Gathered { tile, names: lengths, shape: WINDOW_SHAPE };
            self.watch.keep(Tile::Window, &self.stream, layer, queries, &gathered)?;
        }
        Ok(())
    }

    /// Queues the compressors of a layer that has any.
    fn update(&self, handle: &LayerCacheHandle<'_, B>) -> Result<()> {
        let tensors = |which| self.tensors(handle, which);
        match handle.schema().kind {
            LayerKind::Swa => {}
            LayerKind::Csa => {
                let (main, index) =
                    (tensors(StateStream::CsaMain)?, tensors(StateStream::CsaIndex)?);
                handle.update_csa(&self.stream, &main.projected(), &index.projected())?;
            }
            LayerKind::Hca => {
                handle.update_hca(&self.stream, &tensors(StateStream::Hca)?.projected())?;
            }
        }
        Ok(())
    }

    fn tensors(&self, handle: &LayerCacheHandle<'_, B>, which: StateStream) -> Result<Tensors<B>> {
        let source = self.watch.verifier().source();
        let at = source.offsets(self.steps, handle.schema().layer.0, which);
        let (shape, tokens) = (shape(which), handle.tokens() as usize);
        let columns = shape.columns();
        let slice =
            |start: usize, len: usize| self.floats.slice(start as u64, len as u64).context(IN_POOL);
        Ok(Tensors {
            kv: slice(at.kv, tokens * columns)?,
            gate: slice(at.gate, tokens * columns)?,
            ape: slice(at.ape, shape.ratio * columns)?,
            norm: slice(at.norm, shape.channels)?,
        })
    }

    /// Queues the indexer of a CSA layer for a batch of queries, as many at once as its workspace
    /// holds, and the gather of the entries that it picks.
    fn gather_listed(&self, handle: &LayerCacheHandle<'_, B>, batch: &Batch) -> Result<()> {
        let stream = &self.stream;
        let (layer, model) = (handle.schema().layer, &self.manager.config().model);
        let workspace = self.indexer.as_ref().context("a model with CSA layers has an indexer")?;
        let (first, k) = (batch.queries.start, model.index_topk);
        let at = self.watch.verifier().source().query_offsets(self.steps, layer.0, first);
        let of = |queries: u32, columns: u32| u64::from(queries) * u64::from(columns);
        let floats = |start: usize, columns: u32| {
            let len = of(batch.queries.len() as u32, columns);
            self.floats.slice(start as u64, len).context(IN_POOL)
        };
        let query = floats(at.query, model.index_heads * INDEX_DIM)?;
        let weight = floats(at.weight, model.index_heads)?;
        let (queries, selected) = (batch.queries.clone(), &self.selected);
        handle.select_entries(stream, workspace, queries, &query, &weight, k, selected)?;
        for queries in batch.tiles(k, TILE_ROWS) {
            let (begin, len) = (of(queries.start - first, k), of(queries.len() as u32, k));
            let lists = selected.slice(begin, len).context("a list for each query")?;
            handle.gather_kv(stream, queries.clone(), &lists, k, &self.tile)?;
            let shape = Shape { rows: k, words: k };
            let gathered = Gathered { tile: &self.tile, names: &lists, shape };
            self.watch.keep(Tile::Entries, stream, layer, queries, &gathered)?;
        }
        Ok(())
    }

    /// Queues the gather of all entries of an HCA layer for a batch of queries.
    fn gather_all(&self, handle: &LayerCacheHandle<'_, B>, batch: &Batch) -> Result<()> {
        let (stream, layer) = (&self.stream, handle.schema().layer);
        let (tile, lengths, rows) = (&self.tile, &self.lengths, batch.hca_rows);
        for queries in batch.tiles(rows, TILE_ROWS) {
            handle.gather_all(stream, queries.clone(), rows, tile, lengths)?;
            let gathered = Gathered { tile, names: lengths, shape: Shape { rows, words: 1 } };
            self.watch.keep(Tile::Entries, stream, layer, queries, &gathered)?;
        }
        Ok(())
    }

    /// Entries that a step writes, over all layers.
    fn entries_of(&self, step: &[StepRequest]) -> u64 {
        let model = &self.manager.config().model;
        let kinds = [(LayerKind::Csa, CSA_RATIO), (LayerKind::Hca, HCA_RATIO)];
        let of_kind = |(kind, ratio): (LayerKind, u32)| {
            let closed =
                |part: &StepRequest| (part.start + part.tokens) / ratio - part.start / ratio;
            let closed: u64 = step.iter().map(|part| u64::from(closed(part))).sum();
            closed * u64::from(model.count(kind))
        };
        kinds.into_iter().map(of_kind).sum()
    }
}

impl<B: Backend> Execute for Full<B> {
    fn admit(&mut self, index: usize) -> Result<RequestId> {
        let id = self.manager.admit()?;
        self.watch.admit(id, index);
        Ok(id)
    }

    fn step(&mut self, step: &[StepRequest]) -> Result<Duration> {
        let started = Instant::now();
        self.manager.prepare_forward(&self.stream, step)?;
        let prepare = started.elapsed();
        self.watch.begin_step(self.steps, step, self.queries, self.seed);
        self.batches = batches(self.queries, step);
        self.stream.record(&self.begin)?;
        self.manager.build_plan(&self.stream)?;
        for layer in 0..self.manager.schema().layers.len() as u32 {
            self.layer(LayerId(layer))?;
        }
        self.stream.record(&self.end)?;
        self.kernel_ms += f64::from(self.end.milliseconds_since(&self.begin)?);
        self.entries += self.entries_of(step);
        self.watch.check_step(&self.manager, &self.stream, &self.batches)?;
        for part in step {
            self.manager.commit(part.id, part.tokens)?;
        }
        self.steps += 1;
        if self.steps.is_multiple_of(FAULT_CHECK_STEPS) {
            self.manager.check_faults(&self.stream)?;
        }
        Ok(prepare)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        self.watch.release(&self.manager, &self.stream, id)?;
        Ok(self.manager.release(id)?)
    }

    fn ledger(&self) -> &Ledger {
        self.manager.ledger()
    }

    fn finish(self) -> Result<KernelWork> {
        self.manager.check_faults(&self.stream)?;
        Ok(KernelWork {
            kernel_ms: Some(self.kernel_ms),
            entries: self.entries,
            verification: self.watch.into_found(),
        })
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;
    use crate::replay::verify::Verification;

    const LAYER: LayerId = LayerId(1);

    /// Prefills 130 tokens of one sampled request, lets `spoil` have its way with the cache and the
    /// request's first block, decodes one token, and says what verification found.
    fn replay(queries: Queries, spoil: impl FnOnce(&Full<Emulator>, u64)) -> Verification {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = CacheConfig { max_step_tokens: 130, ..CacheConfig::smallest(model) };
        let config = CacheConfig { max_requests: 2, max_context: 1024, ..config };
        let memory = 1 << 27;
        let indexer = WorkspaceSize::new(&config.model, 1024, 3, u64::MAX).expect("a size");
        let left = memory - working_bytes(&config, Some(&indexer), 1);
        let config = config.with_memory(left).expect("a block and two slots");
        let device = EmuDevice::new(EmuOptions { memory, ..EmuOptions::default() });
        let cache = Full::new(device, config, Some(&indexer), 5, vec![0], queries);
        let mut cache = cache.expect("what is left holds the cache");
        let id = cache.admit(0).expect("a slot is free");
        cache.step(&[StepRequest { id, start: 0, tokens: 130 }]).expect("prefill");
        let block = cache.manager.block_table(id).expect("it runs").next();
        spoil(&cache, block.expect("130 tokens close entries").0.into());
        cache.step(&[StepRequest { id, start: 130, tokens: 1 }]).expect("decode");
        cache.release(id).expect("it runs");
        let work = cache.finish().expect("no kernel refused a row");
        // Two CSA layers with 32 entries, one HCA layer with one.
        assert_eq!(work.entries, 65);
        work.verification
    }

    /// Flips a bit of a byte in device memory.
    fn flip(cache: &Full<Emulator>, plane: &Buffer<Emulator, u8>, at: u64) {
        let mut byte = [0];
        cache.stream.download(plane, at, &mut byte).expect("one byte");
        byte[0] ^= 0x80;
        cache.stream.upload(&byte, plane, at).expect("one byte");
    }

    #[test]
    fn an_untouched_cache_matches_the_reference() {
        // Of all queries of the prompt, one is kept that sees fewer entries than a list has and none
        // of an HCA layer; the last three see 31 or 32, and one.
        for (queries, scored, hca_rows) in [(Queries::All, 1, 1), (Queries::Last(3), 2, 2)] {
            let found = replay(queries, |_, _| {});
            assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
            // Entries of two CSA layers and an HCA layer; the CSA layers' keys as well.
            assert_eq!(found.entries, 2 * (32 + 32) + 1);
            assert_eq!((found.lists, found.scored, found.near), (2, scored, 0));
            let gathered = 2 * 2 * 16 + hca_rows;
            assert_eq!(found.rows, 2 * 5 * (128 + 128) + gathered + found.entries);
        }
    }

    #[test]
    fn a_byte_changed_on_the_device_is_found_in_the_ring_and_in_the_window() {
        // Position 50 lies in row 50 of the first slot; its channel 3 in byte 3.
        let found = replay(Queries::Last(16), |cache, _| {
            flip(cache, cache.manager.layer(LAYER).expect("a layer").swa().data, 50 * 576 + 3);
        });
        assert_eq!(found.mismatches, 2, "{:?}", found.examples);
        let expected = ["window of 130, position 50, channel 3", "ring, position 50, channel 3"];
        for (example, expected) in found.examples.iter().zip(expected) {
            assert!(
                example.contains("request 0, layer 1") && example.contains(expected),
                "{example}"
            );
        }
    }

    #[test]
    fn a_byte_of_every_entry_changed_on_the_device_is_found_where_it_is_gathered_and_in_the_end() {
        let found = replay(Queries::Last(16), |cache, block| {
            let handle = cache.manager.layer(LAYER).expect("a layer");
            let data = handle.entries().expect("a CSA layer").data;
            (0..32).for_each(|row| flip(cache, data, (block * 32 + row) * 576 + 449));
        });
        assert_eq!(found.mismatches, 16 + 32, "{:?}", found.examples);
        let gathered = &found.examples[0];
        assert!(gathered.contains("layer 1, entries of 130, entry "), "{gathered}");
        assert!(gathered.contains("channel 448"), "{gathered}");
    }

    #[test]
    fn a_byte_of_every_key_changed_on_the_device_is_found_in_the_list_and_in_the_end() {
        let found = replay(Queries::Last(16), |cache, block| {
            for layer in [LAYER, LayerId(3)] {
                let handle = cache.manager.layer(layer).expect("a layer");
                let code = handle.index_keys().expect("a CSA layer").code;
                (0..32).for_each(|row| flip(cache, code, (block * 32 + row) * 64 + 5));
            }
        });
        assert_eq!(found.mismatches, 1 + 2 * 32, "{:?}", found.examples);
        let [list, key] = [&found.examples[0], &found.examples[1]];
        assert!(list.contains("list of 130: entry ") && list.contains("before entry"), "{list}");
        assert!(key.contains("CsaIndex row 0 has changed"), "{key}");
    }
}

//! A step with its kernels: in every layer the windows of all queries, the compressors, the append,
//! and the gathers of compressed entries.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv::device::{Buffer, Device};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::geometry::{
    CSA_RATIO, HCA_RATIO, HEAD_DIM, LayerKind, StateStream, WINDOW,
};
use dsv4_kv::{
    CacheConfig, KvCacheManager, KvError, LayerCacheHandle, LayerId, Ledger, RequestId, StepRequest,
};

use super::execute::{Execute, KernelWork};
use super::kept::Gathered;
use super::select::{Batch, Queries, Selection, TILE_QUERIES, TILE_ROWS};
use super::source::{Source, shape};
use super::verify::Verifier;
use super::watch::{self, Tile, Watch};

/// Steps between two looks at the fault words.
const FAULT_CHECK_STEPS: u64 = 256;
const IN_POOL: &str = "a step's tensors lie inside the pools";

const _: () = assert!(TILE_QUERIES * WINDOW <= TILE_ROWS);

/// The cache on a device, and what a step reads and writes besides.
pub struct Full<D: Device> {
    manager: KvCacheManager<D>,
    stream: D::Stream,
    begin: D::Event,
    end: D::Event,
    /// `[rows, 512]` BF16: the source of every step's KV rows.
    kv: Buffer<D, u16>,
    /// The source of projections and of weights.
    floats: Buffer<D, f32>,
    /// `[queries, rows]`: the step's lists of entries.
    selected: Buffer<D, i32>,
    /// `[TILE_ROWS, 512]` BF16.
    tile: Buffer<D, u16>,
    /// `[TILE_QUERIES]`
    lengths: Buffer<D, i32>,
    /// Which queries gather entries.
    queries: Queries,
    selection: Selection,
    seed: u64,
    watch: Watch<D>,
    steps: u64,
    entries: u64,
    kernel_ms: f64,
}

/// Bytes of device memory that a replay needs beside its cache.
pub fn working_bytes(config: &CacheConfig, sample: u32) -> u64 {
    let (row, step_tokens) = (2 * u64::from(HEAD_DIM), config.max_step_tokens);
    let source = u64::from(Source::rows(step_tokens)) * row + 4 * Source::floats(step_tokens);
    let tile = u64::from(TILE_ROWS) * row + 4 * u64::from(TILE_QUERIES);
    source + tile + 4 * selected(config) + watch::bytes(config, sample)
}

/// Elements of the longest lists of entries.
fn selected(config: &CacheConfig) -> u64 {
    u64::from(config.max_step_tokens) * u64::from(config.model.index_topk)
}

/// The tensors of one compressor.
struct Tensors<D: Device> {
    kv: Buffer<D, f32>,
    gate: Buffer<D, f32>,
    ape: Buffer<D, f32>,
    norm: Buffer<D, f32>,
}

impl<D: Device> Tensors<D> {
    fn projected(&self) -> Projected<'_, D> {
        Projected { kv: &self.kv, gate: &self.gate, ape: &self.ape, norm: &self.norm }
    }
}

impl<D: Device> Full<D> {
    /// Allocates the cache and the buffers; follows the requests at the places `sample`.
    pub fn new(
        device: D,
        config: CacheConfig,
        seed: u64,
        sample: Vec<usize>,
        queries: Queries,
    ) -> Result<Self, KvError> {
        let layers = config.model.layers.len() as u32;
        let source = Source::new(seed, config.max_step_tokens, layers);
        let stream = device.stream()?;
        let kv = device.allocate("KV rows", source.as_slice().len() as u64)?;
        device.upload(&stream, source.as_slice(), &kv, 0)?;
        let floats = device.allocate("projections", source.as_floats().len() as u64)?;
        device.upload(&stream, source.as_floats(), &floats, 0)?;
        let tile = u64::from(TILE_ROWS) * u64::from(HEAD_DIM);
        let verifier = Verifier::new(config.main_format, source);
        Ok(Self {
            kv,
            floats,
            selected: device.allocate("selected entries", selected(&config))?,
            tile: device.allocate("gathered rows", tile)?,
            lengths: device.allocate("gathered lengths", u64::from(TILE_QUERIES))?,
            queries,
            selection: Selection::default(),
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
        self.selection.batches.iter().try_for_each(|batch| self.gather_entries(&handle, batch))
    }

    fn gather_windows(&self, handle: &LayerCacheHandle<'_, D>, kv: &Buffer<D, u16>) -> Result<()> {
        let (tokens, layer) = (handle.tokens(), handle.schema().layer);
        let (tile, lengths) = (&self.tile, &self.lengths);
        for first in (0..tokens).step_by(TILE_QUERIES as usize) {
            let end = tokens.min(first + TILE_QUERIES);
            handle.gather_swa(&self.stream, kv, first..end, tile, lengths)?;
            let gathered = Gathered { tile, lengths, rows: WINDOW };
            let (device, queries) = (self.manager.device(), (first, end - first));
            self.watch.keep(Tile::Window, device, &self.stream, layer, queries, &gathered)?;
        }
        Ok(())
    }

    /// Queues the compressors of a layer that has any.
    fn update(&self, handle: &LayerCacheHandle<'_, D>) -> Result<()> {
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

    fn tensors(&self, handle: &LayerCacheHandle<'_, D>, which: StateStream) -> Result<Tensors<D>> {
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

    /// Queues the gather of entries for a batch of queries, in a layer that has any.
    fn gather_entries(&self, handle: &LayerCacheHandle<'_, D>, batch: &Batch) -> Result<()> {
        let (stream, tile, lengths) = (&self.stream, &self.tile, &self.lengths);
        let (queries, count) = (batch.queries.clone(), batch.queries.len() as u32);
        let rows = match handle.schema().kind {
            LayerKind::Swa => return Ok(()),
            LayerKind::Csa => {
                let rows = batch.csa_rows;
                let len = u64::from(count) * u64::from(rows);
                let selected = self.selected.slice(batch.first as u64, len);
                let selected = selected.context("the lists lie inside their buffer")?;
                handle.gather_kv(stream, queries, &selected, rows, tile)?;
                rows
            }
            LayerKind::Hca => {
                handle.gather_all(stream, queries, batch.hca_rows, tile, lengths)?;
                batch.hca_rows
            }
        };
        let (device, layer) = (self.manager.device(), handle.schema().layer);
        let gathered = Gathered { tile, lengths, rows };
        self.watch.keep(
            Tile::Entries,
            device,
            stream,
            layer,
            (batch.queries.start, count),
            &gathered,
        )
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

impl<D: Device> Execute for Full<D> {
    fn admit(&mut self, index: usize) -> Result<RequestId> {
        let id = self.manager.admit()?;
        self.watch.admit(id, index);
        Ok(id)
    }

    fn step(&mut self, step: &[StepRequest]) -> Result<Duration> {
        let started = Instant::now();
        self.manager.prepare_forward(&self.stream, step)?;
        let prepare = started.elapsed();
        self.watch.begin_step(self.steps, step);
        let topk = self.manager.config().model.index_topk;
        self.selection.fill(self.queries, step, topk, self.seed ^ self.steps);
        let device = self.manager.device();
        device.upload(&self.stream, &self.selection.lists, &self.selected, 0)?;
        device.record(&self.begin, &self.stream)?;
        self.manager.build_plan(&self.stream)?;
        for layer in 0..self.manager.schema().layers.len() as u32 {
            self.layer(LayerId(layer))?;
        }
        device.record(&self.end, &self.stream)?;
        self.kernel_ms += f64::from(device.elapsed_ms(&self.begin, &self.end)?);
        self.entries += self.entries_of(step);
        self.watch.check_step(&self.manager, &self.stream, &self.selection)?;
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
    use dsv4_kv::device::{EmuDevice, EmuOptions};
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;
    use crate::replay::verify::Verification;

    const LAYER: LayerId = LayerId(1);

    /// Prefills 130 tokens of one sampled request, lets `spoil` have its way with the cache and the
    /// request's first block, decodes one token, and says what verification found.
    fn replay(queries: Queries, spoil: impl FnOnce(&Full<EmuDevice>, u64)) -> Verification {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = CacheConfig { max_step_tokens: 130, ..CacheConfig::smallest(model) };
        let config = CacheConfig { max_requests: 2, max_context: 1024, ..config };
        let memory = 1 << 27;
        let left = memory - working_bytes(&config, 1);
        let config = config.with_memory(left).expect("a block and two slots");
        let device = EmuDevice::new(EmuOptions { memory, ..EmuOptions::default() });
        let cache = Full::new(device, config, 5, vec![0], queries);
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
    fn flip(cache: &Full<EmuDevice>, plane: &Buffer<EmuDevice, u8>, at: u64) {
        let (device, mut byte) = (cache.manager.device(), [0]);
        device.download(&cache.stream, plane, at, &mut byte).expect("one byte");
        byte[0] ^= 0x80;
        device.upload(&cache.stream, &byte, plane, at).expect("one byte");
    }

    #[test]
    fn an_untouched_cache_matches_the_reference() {
        for queries in [Queries::All, Queries::Last] {
            let found = replay(queries, |_, _| {});
            assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
            // Entries of two CSA layers and an HCA layer; the CSA layers' keys as well.
            assert_eq!(found.entries, 2 * (32 + 32) + 1);
            let gathered = 2 * (2 * 32 + 1);
            assert_eq!(found.rows, 2 * 5 * (128 + 128) + gathered + found.entries);
        }
    }

    #[test]
    fn a_byte_changed_on_the_device_is_found_in_the_ring_and_in_the_window() {
        // Position 50 lies in row 50 of the first slot; its channel 3 in byte 3.
        let found = replay(Queries::Last, |cache, _| {
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
        let found = replay(Queries::Last, |cache, block| {
            let handle = cache.manager.layer(LAYER).expect("a layer");
            let data = handle.entries().expect("a CSA layer").data;
            (0..32).for_each(|row| flip(cache, data, (block * 32 + row) * 576 + 449));
        });
        assert_eq!(found.mismatches, 32 + 32, "{:?}", found.examples);
        let gathered = &found.examples[0];
        assert!(gathered.contains("layer 1, entries of 130, entry "), "{gathered}");
        assert!(gathered.contains("channel 448"), "{gathered}");
    }

    #[test]
    fn a_byte_of_an_indexer_key_changed_on_the_device_is_found_in_the_end() {
        let found = replay(Queries::Last, |cache, block| {
            let handle = cache.manager.layer(LAYER).expect("a layer");
            let code = handle.index_keys().expect("a CSA layer").code;
            flip(cache, code, (block * 32 + 7) * 64 + 5);
        });
        assert_eq!(found.mismatches, 1, "{:?}", found.examples);
        assert!(found.examples[0].contains("CsaIndex row 7 has changed"), "{found:?}");
    }
}

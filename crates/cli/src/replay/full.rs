//! A step with its kernels: in every layer the windows of all queries, then the append.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv::device::{Buffer, Device};
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, WINDOW};
use dsv4_kv::plan::StepLayout;
use dsv4_kv::{CacheConfig, KvCacheManager, KvError, LayerId, Ledger, RequestId, StepRequest};

use super::execute::{Execute, KernelWork};
use super::source::Source;
use super::verify::Verifier;
use super::watch::{self, Watch};

/// Queries whose windows are gathered by one launch.
const TILE_QUERIES: u32 = 256;
/// Steps between two looks at the fault words.
const FAULT_CHECK_STEPS: u64 = 256;

/// The cache on a device, and what a step reads and writes besides.
pub struct Full<D: Device> {
    manager: KvCacheManager<D>,
    stream: D::Stream,
    begin: D::Event,
    end: D::Event,
    /// `[rows, 512]` BF16: the source of every step's KV rows.
    kv: Buffer<D, u16>,
    /// `[TILE_QUERIES, 128, 512]` BF16.
    tile: Buffer<D, u16>,
    /// `[TILE_QUERIES]`
    lengths: Buffer<D, i32>,
    watch: Watch<D>,
    steps: u64,
    kernel_ms: f64,
}

/// Bytes of device memory that a replay needs beside slots and blocks.
pub fn working_bytes(step_tokens: u32, requests: u32, layers: u32, sample: u32) -> u64 {
    let row = 2 * u64::from(HEAD_DIM);
    let kv = u64::from(Source::rows(step_tokens)) * row;
    let tile = u64::from(TILE_QUERIES) * (u64::from(WINDOW) * row + 4);
    let step = 4 * StepLayout::new(step_tokens, requests).elements() as u64;
    // One MiB for the fault words and for rounding up every allocation.
    kv + tile + step + watch::bytes(sample, layers) + (1 << 20)
}

impl<D: Device> Full<D> {
    /// Allocates the cache and the buffers; follows the requests at the places `sample`.
    pub fn new(
        device: D,
        config: CacheConfig,
        seed: u64,
        sample: Vec<usize>,
    ) -> Result<Self, KvError> {
        let layers = config.model.layers.len() as u32;
        let source = Source::new(seed, config.max_step_tokens, layers);
        let stream = device.stream()?;
        let kv = device.allocate("KV rows", source.as_slice().len() as u64)?;
        device.upload(&stream, source.as_slice(), &kv, 0)?;
        let tile = u64::from(TILE_QUERIES * WINDOW * HEAD_DIM);
        let verifier = Verifier::new(config.main_format, source);
        Ok(Self {
            kv,
            tile: device.allocate("gathered windows", tile)?,
            lengths: device.allocate("window lengths", u64::from(TILE_QUERIES))?,
            watch: Watch::new(&device, sample, layers, verifier)?,
            begin: device.event()?,
            end: device.event()?,
            stream,
            manager: KvCacheManager::new(device, config)?,
            steps: 0,
            kernel_ms: 0.0,
        })
    }

    /// Queues the kernels of one layer.
    fn layer(&self, layer: LayerId) -> Result<()> {
        let handle = self.manager.layer(layer)?;
        let tokens = handle.tokens();
        let row = u64::from(HEAD_DIM);
        let first = u64::from(self.watch.verifier().source().first_row(self.steps, layer.0));
        let kv = self.kv.slice(first * row, u64::from(tokens) * row);
        let kv = kv.context("a step's rows lie inside the pool")?;
        let outputs = (&self.tile, &self.lengths);
        for first in (0..tokens).step_by(TILE_QUERIES as usize) {
            let end = tokens.min(first + TILE_QUERIES);
            handle.gather_swa(&self.stream, &kv, first..end, outputs.0, outputs.1)?;
            let queries = (first, end - first);
            self.watch.keep(self.manager.device(), &self.stream, layer, queries, outputs)?;
        }
        Ok(handle.append_swa(&self.stream, &kv)?)
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
        let device = self.manager.device();
        device.record(&self.begin, &self.stream)?;
        for layer in 0..self.manager.schema().layers.len() as u32 {
            self.layer(LayerId(layer))?;
        }
        device.record(&self.end, &self.stream)?;
        self.kernel_ms += f64::from(device.elapsed_ms(&self.begin, &self.end)?);
        self.watch.check_step(&self.manager, &self.stream)?;
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
        self.watch.release(id);
        Ok(self.manager.release(id)?)
    }

    fn ledger(&self) -> &Ledger {
        self.manager.ledger()
    }

    fn finish(self) -> Result<KernelWork> {
        self.manager.check_faults(&self.stream)?;
        Ok(KernelWork { kernel_ms: Some(self.kernel_ms), verification: self.watch.into_found() })
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::device::{EmuDevice, EmuOptions};
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;
    use crate::replay::verify::Verification;

    /// Prefills 130 tokens of one sampled request, lets `spoil` have its way with the ring of layer
    /// 1, decodes one token, and says what verification found.
    fn replay(spoil: impl FnOnce(&Full<EmuDevice>, &Buffer<EmuDevice, u8>)) -> Verification {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = CacheConfig::for_memory(model, 1 << 23, 2).expect("8 MiB hold two slots");
        let config = CacheConfig { max_step_tokens: 130, ..config };
        let device = EmuDevice::new(EmuOptions { memory: 1 << 27, ..EmuOptions::default() });
        let mut cache = Full::new(device, config, 5, vec![0]).expect("128 MiB hold the buffers");
        let id = cache.admit(0).expect("a slot is free");
        cache.step(&[StepRequest { id, start: 0, tokens: 130 }]).expect("prefill");
        spoil(&cache, cache.manager.layer(LayerId(1)).expect("a layer").swa().data);
        cache.step(&[StepRequest { id, start: 130, tokens: 1 }]).expect("decode");
        cache.release(id).expect("it runs");
        cache.finish().expect("no kernel refused a row").verification
    }

    #[test]
    fn an_untouched_cache_matches_the_reference() {
        let found = replay(|_, _| {});
        assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
        assert_eq!(found.rows, 2 * 5 * (128 + 128));
    }

    #[test]
    fn a_byte_changed_on_the_device_is_found_in_the_ring_and_in_the_window() {
        // Position 50 lies in row 50 of the first slot; its channel 3 in byte 3.
        let found = replay(|cache, ring| {
            let (device, mut byte) = (cache.manager.device(), [0]);
            device.download(&cache.stream, ring, 50 * 576 + 3, &mut byte).expect("one byte");
            byte[0] ^= 0x80;
            device.upload(&cache.stream, &byte, ring, 50 * 576 + 3).expect("one byte");
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
}

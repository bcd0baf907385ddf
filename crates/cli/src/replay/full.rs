//! A step with its kernels, in the trunk and in the draft layers; see [`super::tensors`].

use std::ops::Deref;
use std::time::{Duration, Instant};

use anyhow::Result;
use dsv4_kv::device::{Backend, Device, Event, Stream};
use dsv4_kv::kv_layout::geometry::{CSA_RATIO, HCA_RATIO, LayerKind};
use dsv4_kv::{
    Admission, CacheConfig, KvCacheManager, KvError, Launches, Ledger, Prompt, RequestId, Step,
    StepRequest, TierStats, WorkspaceSize,
};

use super::execute::{Execute, KernelWork, accept_all, is_out_of_blocks};
use super::history::Prefix;
use super::select::Queries;
use super::source::Source;
use super::tensors::Tensors;

/// Steps between two checks of the fault words.
const FAULT_CHECK_STEPS: u64 = 256;

/// The cache on a device, and the other tensors that a step reads and writes.
pub struct Full<B: Backend> {
    cache: KvCacheManager<B>,
    tensors: Tensors<B>,
    stream: Stream<B>,
    begin: Event<B>,
    end: Event<B>,
    steps: u64,
    entries: u64,
    kernel_ms: f64,
}

impl<B: Backend> Full<B> {
    /// Allocates the cache and the tensors. `sample` are the indices of the requests to verify. `queries` are the
    /// queries that gather, and the number of heads if they attend.
    pub fn new(
        device: Device<B>,
        config: CacheConfig,
        indexer: Option<&WorkspaceSize>,
        seed: u64,
        sample: Vec<usize>,
        queries: (Queries, Option<u32>),
    ) -> Result<Self, KvError> {
        let stream = device.stream()?;
        Ok(Self {
            tensors: Tensors::new(&stream, &config, indexer, seed, sample, queries)?,
            stream,
            begin: device.event()?,
            end: device.event()?,
            cache: KvCacheManager::new(device, config)?,
            steps: 0,
            entries: 0,
            kernel_ms: 0.0,
        })
    }

    /// The cache.
    pub fn cache(&self) -> &KvCacheManager<B> {
        &self.cache
    }

    /// The cache, mutable, and the stream of its steps.
    pub fn parts(&mut self) -> (&mut KvCacheManager<B>, &Stream<B>) {
        (&mut self.cache, &self.stream)
    }

    /// Enters request `index` of the load, which was computed in another process, with the tokens of its prompt, of
    /// which it reused some there. `enter` imports it into the cache.
    pub fn arrive(
        &mut self,
        index: usize,
        (tokens, reused): (&[u32], u32),
        enter: impl FnOnce(&mut KvCacheManager<B>, &Stream<B>) -> Result<RequestId>,
    ) -> Result<RequestId> {
        let Self { cache, tensors, stream, .. } = self;
        let id = enter(cache, stream)?;
        let history = || Prefix::EMPTY.each(tokens);
        tensors.inputs.admit(id, history().last().unwrap_or(Prefix::EMPTY));
        tensors.watch.arrive(cache, stream, (id, index), history(), reused as usize)?;
        Ok(id)
    }

    /// The stream of its steps.
    pub fn stream(&self) -> &Stream<B> {
        &self.stream
    }

    /// The pools from which the cache's inputs come.
    pub fn source(&self) -> &Source {
        self.tensors.watch.verifier().source()
    }

    /// Begins a step of every layer group, queues all of its layers and commits all of its tokens. Returns the time
    /// that beginning took.
    fn run(&mut self, requests: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let Self { cache, tensors, stream, begin, end, .. } = self;
        let started = Instant::now();
        let groups = cache.groups().into_iter();
        let begun = groups.map(|group| group.into_step(stream, Launches::Eager, requests));
        let mut steps = begun.collect::<Result<Vec<Step<'_, B>>, KvError>>()?;
        let took = started.elapsed();
        tensors.begin_step(stream, self.steps, requests, tokens)?;
        stream.record(begin)?;
        for step in &mut steps {
            for (layer, kind) in step.layer_kinds() {
                tensors.run_layer(step, layer, kind)?;
            }
        }
        stream.record(end)?;
        let accepted = accept_all(requests, tokens);
        for step in steps {
            step.commit(&accepted)?;
        }
        cache.save_wanted(stream)?;
        cache.advance_tier(stream)?;
        Ok(took)
    }

    /// Number of entries that a step writes, over all layers.
    fn entries_of(&self, step: &[StepRequest]) -> u64 {
        let model = &self.cache.config().model;
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
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)> {
        let Self { cache, tensors, stream, .. } = self;
        let tokens = prompt.unwrap_or_default();
        let (id, reused) = match prompt {
            None => (cache.admit()?, 0),
            Some(_) => {
                let prompt = Prompt { tokens, ..Prompt::default() };
                let Admission { id, reused, .. } = cache.admit_waiting(stream, &prompt)?;
                (id, reused)
            }
        };
        let history = || Prefix::EMPTY.each(&tokens[..reused as usize]);
        tensors.inputs.admit(id, history().last().unwrap_or(Prefix::EMPTY));
        tensors.watch.admit(cache, stream, id, index, history())?;
        Ok((id, reused))
    }

    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let begin = match self.run(step, tokens) {
            Err(error) if is_out_of_blocks(&error) && self.cache.config().host_bytes > 0 => {
                // Prefixes that are being copied to host memory cannot be evicted before the transfer ends.
                self.cache.settle_tier(&self.stream)?;
                self.run(step, tokens)
            }
            begin => begin,
        }?;
        self.kernel_ms += f64::from(self.end.milliseconds_since(&self.begin)?);
        self.entries += self.entries_of(step);
        self.tensors.check_step(&self.cache, &self.stream)?;
        self.steps += 1;
        if self.steps.is_multiple_of(FAULT_CHECK_STEPS) {
            self.cache.check_faults(&self.stream)?;
        }
        Ok(begin)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        self.tensors.watch.release(&self.cache, &self.stream, id)?;
        self.tensors.inputs.release(id);
        Ok(self.cache.release(id)?)
    }

    fn ledger(&self) -> impl Deref<Target = Ledger> {
        self.cache.ledger()
    }

    fn tier(&self) -> TierStats {
        self.cache.tier_stats()
    }

    fn kernel_ms(&self) -> f64 {
        self.kernel_ms
    }

    fn reads_tokens(&self) -> bool {
        true
    }

    fn finish(self) -> Result<KernelWork> {
        self.cache.check_faults(&self.stream)?;
        Ok(KernelWork {
            kernel_ms: Some(self.kernel_ms),
            entries: self.entries,
            tier: self.cache.tier_stats(),
            verification: self.tensors.watch.into_found(),
            moved: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};
    use dsv4_kv::kv_layout::config::ModelConfig;
    use dsv4_kv::{LayerId, PoolKind};

    use dsv4_kv::WorkspaceLimits;

    use super::*;
    use crate::replay::tensors::working_bytes;
    use crate::replay::verification::Verification;

    const LAYER: LayerId = LayerId(1);

    /// A cache for requests of up to 1,024 tokens. The request with index `sample` is verified.
    fn cache(queries: Queries, sample: usize, num_checkpoints: u32) -> Full<Emulator> {
        cache_with((queries, None), sample, num_checkpoints)
    }

    fn cache_with(
        (queries, heads): (Queries, Option<u32>),
        sample: usize,
        num_checkpoints: u32,
    ) -> Full<Emulator> {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let config = CacheConfig { max_step_tokens: 130, ..CacheConfig::new(model) };
        let config = CacheConfig { max_requests: 2, max_context: 1024, num_checkpoints, ..config };
        let memory = 1 << 27;
        let indexer = WorkspaceSize::new(
            &config.model,
            WorkspaceLimits { context: 1024, queries: 3, bytes: u64::MAX },
        )
        .expect("a size");
        let working = working_bytes(&config, Some(&indexer), 1, heads);
        let left = memory - working - dsv4_kv::transfer::transfer_staging_bytes(&config);
        let config = config.with_memory(left).expect("a block and two slots");
        let device = EmuDevice::new(EmuOptions { memory, ..EmuOptions::default() });
        let cache = Full::new(device, config, Some(&indexer), 5, vec![sample], (queries, heads));
        cache.expect("what is left holds the cache")
    }

    /// The first block of a request.
    fn first_block(cache: &Full<Emulator>, id: RequestId) -> u64 {
        let block = cache.cache.block_table(id).expect("it runs").first().copied();
        block.expect("its tokens close entries").0.into()
    }

    /// Prefills 130 tokens of a sampled request, lets `spoil` change the cache (it gets the request's first block), and
    /// decodes one token. Returns the result of the verification.
    fn replay(queries: Queries, spoil: impl FnOnce(&Full<Emulator>, u64)) -> Verification {
        replay_with((queries, None), spoil)
    }

    /// As `replay`; with a number of heads, queries also attend.
    fn replay_with(
        queries: (Queries, Option<u32>),
        spoil: impl FnOnce(&Full<Emulator>, u64),
    ) -> Verification {
        let mut cache = cache_with(queries, 0, 0);
        let tokens: Vec<u32> = (0..131).collect();
        let id = cache.admit(0, Some(&tokens[..130])).expect("a slot is free").0;
        let prefill = [StepRequest { id, start: 0, tokens: 130 }];
        cache.step(&prefill, &tokens[..130]).expect("prefill");
        spoil(&cache, first_block(&cache, id));
        cache.step(&[StepRequest { id, start: 130, tokens: 1 }], &tokens[130..]).expect("decode");
        cache.release(id).expect("it runs");
        let work = cache.finish().expect("no kernel refused a row");
        // Two CSA layers with 32 entries, one HCA layer with one.
        assert_eq!(work.entries, 65);
        work.verification
    }

    /// Prefills 130 tokens of a request that is not sampled, lets `spoil` change the cache (it gets the first block),
    /// and then admits a sampled request with the same tokens.
    fn reuse(spoil: impl FnOnce(&Full<Emulator>, u64)) -> Verification {
        let mut cache = cache(Queries::Last(16), 1, 2);
        let tokens: Vec<u32> = (0..130).collect();
        let (first, reused) = cache.admit(0, Some(&tokens)).expect("a slot is free");
        assert_eq!(reused, 0);
        let prefill = [StepRequest { id: first, start: 0, tokens: 130 }];
        cache.step(&prefill, &tokens).expect("prefill");
        spoil(&cache, first_block(&cache, first));
        let (second, reused) = cache.admit(1, Some(&tokens)).expect("a slot is free");
        assert_eq!(reused, 128);
        let rest = [StepRequest { id: second, start: 128, tokens: 2 }];
        cache.step(&rest, &tokens[128..]).expect("the rest");
        cache.release(second).expect("it runs");
        cache.finish().expect("no kernel refused a row").verification
    }

    #[test]
    fn what_is_reused_is_compared_like_what_is_computed() {
        let found = reuse(|_, _| {});
        assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
        assert_eq!((found.reused, found.entries), (128, 2 * (32 + 32) + 1));
        // In 5 layers the rings after the admission and after the step, and a window; the gathered rows; the entries at
        // the end.
        assert_eq!(found.rows, 5 * 3 * 128 + 2 * 16 + 1 + found.entries);
    }

    /// Prefills 130 tokens in one cache, moves the request to another cache with its bytes changed by `spoil`, and
    /// decodes one token there.
    fn moves(spoil: impl FnOnce(&mut [u8])) -> Verification {
        let [mut source, mut target] = [(); 2].map(|()| cache(Queries::Last(16), 0, 0));
        let tokens: Vec<u32> = (0..131).collect();
        let id = source.admit(0, Some(&tokens[..130])).expect("a slot is free").0;
        let prefill = [StepRequest { id, start: 0, tokens: 130 }];
        source.step(&prefill, &tokens[..130]).expect("prefill");
        let mut staging = source.cache().new_transfer_staging().expect("there is memory");
        let (cache, stream) = source.parts();
        let mut export = cache.export(stream, &mut staging, id).expect("it is between steps");
        let at = export.positions();
        let mut payload = vec![0; export.layout().bytes(at) as usize];
        export.all(&mut payload).expect("the device works");
        spoil(&mut payload);
        let mut staging = target.cache().new_transfer_staging().expect("there is memory");
        let enter = |cache: &mut KvCacheManager<_>, stream: &Stream<_>| {
            Ok(cache.import(stream, &mut staging, (at, &payload))?)
        };
        let moved = target.arrive(0, (&tokens[..130], 0), enter).expect("a slot is free");
        let decode = [StepRequest { id: moved, start: 130, tokens: 1 }];
        target.step(&decode, &tokens[130..]).expect("decode");
        target.release(moved).expect("it runs");
        target.finish().expect("no kernel refused a row").verification
    }

    #[test]
    fn what_moved_is_compared_with_the_reference() {
        let found = moves(|_| {});
        assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
        assert_eq!(found.entries, 2 * (32 + 32) + 1);
        // The first entry of the first block; then window rows in the state after the blocks.
        let found = moves(|bytes| bytes[3] ^= 0x80);
        assert!(found.examples[0].contains("entry 0"), "{:?}", found.examples);
        let found = moves(|bytes| {
            let state = bytes.len() - 3 * 576;
            bytes[state..].fill(0x55);
        });
        assert!(found.mismatches > 0, "{:?}", found.examples);
    }

    #[test]
    fn a_request_that_is_computed_again_counts_once() {
        let mut cache = cache(Queries::Last(1), 0, 0);
        let tokens: Vec<u32> = (0..8).collect();
        for _ in 0..2 {
            let id = cache.admit(0, Some(&tokens)).expect("a slot is free").0;
            cache.step(&[StepRequest { id, start: 0, tokens: 8 }], &tokens).expect("prefill");
            cache.release(id).expect("it runs");
        }
        let found = cache.finish().expect("no kernel refused a row").verification;
        assert_eq!((found.requests, found.mismatches), (1, 0), "{:?}", found.examples);
    }

    /// An entry in the reused block is found to be wrong when the request is admitted.
    #[test]
    fn a_byte_changed_in_what_is_reused_is_found() {
        let found = reuse(|cache, block| {
            flip(cache, LAYER, PoolKind::EntryData, [(block * 32 + 7) * 576 + 449].into_iter());
        });
        assert!(found.examples[0].contains("request 1, layer 1, entry 7"), "{:?}", found.examples);
        let found = reuse(|cache, block| {
            flip(cache, LAYER, PoolKind::IndexCode, [(block * 32 + 9) * 64 + 5].into_iter());
        });
        assert!(found.examples[0].contains("request 1, layer 1, key 9"), "{:?}", found.examples);
    }

    /// Flips one bit in each of these bytes of a pool.
    fn flip(cache: &Full<Emulator>, layer: LayerId, kind: PoolKind, at: impl Iterator<Item = u64>) {
        let pool = cache.cache.pool(layer, kind).expect("the layer has the pool");
        // SAFETY: no work is queued, and kernels take whatever bytes a pool holds.
        let pool = unsafe { pool.writable() };
        for at in at {
            let mut byte = [0];
            cache.stream.download(&pool, at, &mut byte).expect("one byte");
            byte[0] ^= 0x80;
            cache.stream.upload(&byte, &pool, at).expect("one byte");
        }
    }

    #[test]
    fn an_untouched_cache_matches_the_reference() {
        // With all queries of the prompt, the sampled one sees fewer entries than a list can name, and none in an HCA
        // layer. The last three queries see 31 or 32 entries, and one in an HCA layer.
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
    fn what_queries_attend_to_is_recomputed() {
        let found = replay_with((Queries::Last(2), Some(3)), |_, _| {});
        // Two heads of one query in each of two steps, in one layer of each kind.
        assert_eq!((found.attended, found.mismatches), (2 * 2 * 3, 0), "{:?}", found.examples);
        // In the ring of the only HCA layer: flips the sign of channel 3 in every row of the window.
        let found = replay_with((Queries::Last(2), Some(3)), |cache, _| {
            flip(cache, LayerId(2), PoolKind::SwaData, (0..130).map(|row| row * 576 + 3));
        });
        // All rows but the newest of the ring and of the window, and both heads.
        assert_eq!(found.mismatches, 127 + 127 + 2, "{:?}", found.examples);
    }

    #[test]
    fn a_byte_changed_on_the_device_is_found_in_the_ring_and_in_the_window() {
        // Position 50 is in row 50 of the first slot, and channel 3 is byte 3 of the row.
        let found = replay(Queries::Last(16), |cache, _| {
            flip(cache, LAYER, PoolKind::SwaData, [50 * 576 + 3].into_iter());
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
            let rows = (0..32).map(|row| (block * 32 + row) * 576 + 449);
            flip(cache, LAYER, PoolKind::EntryData, rows);
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
                let rows = (0..32).map(|row| (block * 32 + row) * 64 + 5);
                flip(cache, layer, PoolKind::IndexCode, rows);
            }
        });
        assert_eq!(found.mismatches, 1 + 2 * 32, "{:?}", found.examples);
        let [list, key] = [&found.examples[0], &found.examples[1]];
        assert!(list.contains("list of 130: entry ") && list.contains("before entry"), "{list}");
        assert!(key.contains("CsaIndex row 0 has changed"), "{key}");
    }
}

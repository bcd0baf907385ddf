//! The capacity planner compared with admission: exactly the requests that it says fit are admitted.

use kv_layout::attention::KeyCluster;
use std::cell::Cell;

use dsv4_kv::capacity::{self, Capacity};
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::schema::{PoolUnit, Schema};
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, LayerGroup, Ledger, RequestId, StepRequest,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;

/// Number of random configurations and mixes for each property.
const CASES: u32 = 10_000;

/// Longest request tried, in tokens. Configured contexts are shorter, longer or equal.
const LONGEST: u32 = 1500;

fn model() -> impl Strategy<Value = ModelConfig> {
    let kinds = select(vec![LayerKind::Swa, LayerKind::Csa, LayerKind::Hca]);
    prop::collection::vec(kinds, 1..6).prop_map(|layers| {
        // The last layer may be a draft layer, which has a window alone.
        let mtp_layers = u32::from(layers.len() > 1 && layers.last() == Some(&LayerKind::Swa));
        ModelConfig { layers, mtp_layers, ..ModelConfig::preset("tiny").unwrap() }
    })
}

fn config() -> impl Strategy<Value = CacheConfig> {
    let formats =
        (select(MainFormat::ALL.as_slice()), select(IndexFormat::ALL.as_slice()), 0..8u32);
    let steps = (1..2 * LONGEST, 30..600u32);
    // Without checkpoints and suspended requests: a cache without reuse.
    let state = (select(vec![0, 0, 1, 5]), select(vec![0, 0, 1, 3]));
    (model(), formats, 1..10u32, 1..25u32, steps, state).prop_map(
        |(model, formats, max_requests, num_blocks, steps, state)| CacheConfig {
            model,
            main_format: formats.0,
            index_format: formats.1,
            max_draft: formats.2,
            max_requests,
            num_blocks,
            max_context: steps.0,
            max_step_tokens: steps.1,
            num_checkpoints: state.0,
            max_suspended: state.1,
            checkpoint_interval: 0,
            keep_outputs: true,
            lease_bytes: 0,
            host_bytes: 0,
            event_capacity: 0,
            attention_cluster: KeyCluster::TwoBlocks,
            poison: false,
        },
    )
}

/// A ledger to which requests are admitted.
struct Cache {
    ledger: Ledger,
    array: Vec<i32>,
    chunk: u32,
}

impl Cache {
    fn new(config: &CacheConfig) -> Self {
        let ledger = Ledger::new(config).unwrap();
        let array = vec![0; ledger.largest_layout().elements()];
        Self { ledger, array, chunk: config.max_step_tokens }
    }

    /// Admits a request; `None` if there is no free slot.
    fn admit(&mut self) -> Option<RequestId> {
        match self.ledger.admit() {
            Ok(id) => Some(id),
            Err(KvError::NoFreeSlot { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Runs the request's next chunk on the way to `tokens` tokens. Returns whether it was accepted.
    fn advance(&mut self, id: RequestId, tokens: u32) -> bool {
        let start = self.ledger.committed(id).unwrap();
        let tokens = self.chunk.min(tokens - start);
        if tokens == 0 {
            return true;
        }
        let step = [StepRequest { id, start, tokens }];
        match self.ledger.begin_step(LayerGroup::Trunk, &step, &mut self.array) {
            Ok(_) => {
                let all = [Accepted::count(id, tokens)];
                self.ledger.commit_step(LayerGroup::Trunk, &all).unwrap();
            }
            Err(KvError::OutOfBlocks { .. } | KvError::ContextTooLong { .. }) => return false,
            Err(error) => panic!("{error}"),
        }
        true
    }

    /// Runs the request up to `tokens` tokens. Returns whether it reached them.
    fn grow(&mut self, id: RequestId, tokens: u32) -> bool {
        while self.ledger.committed(id).unwrap() < tokens {
            if !self.advance(id, tokens) {
                return false;
            }
        }
        true
    }
}

/// Whether all requests of the mix are admitted and reach their lengths, all growing in turns.
fn admits(config: &CacheConfig, mix: &[(u32, u32)]) -> bool {
    let mut cache = Cache::new(config);
    let mut growing = Vec::new();
    for &(tokens, count) in mix {
        for _ in 0..count {
            let Some(id) = cache.admit() else { return false };
            growing.push((id, tokens));
        }
    }
    while !growing.is_empty() {
        if !growing.iter().all(|&(id, tokens)| cache.advance(id, tokens)) {
            return false;
        }
        growing.retain(|&(id, tokens)| cache.ledger.committed(id).unwrap() < tokens);
    }
    true
}

/// Number of requests of `tokens` tokens that are admitted, one after the other, before the first refusal.
fn admitted(config: &CacheConfig, tokens: u32) -> u32 {
    let mut cache = Cache::new(config);
    let mut requests = 0;
    while let Some(id) = cache.admit() {
        if !cache.grow(id, tokens) {
            break;
        }
        requests += 1;
    }
    requests
}

#[test]
fn a_mix_fits_exactly_when_it_is_admitted() {
    let mix = prop::collection::vec((0..LONGEST, 0..4u32), 0..5);
    let fitting = Cell::new(0);
    let source_file = Some(file!());
    let mut runner =
        TestRunner::new(ProptestConfig { source_file, ..ProptestConfig::with_cases(CASES) });
    let result = runner.run(&(config(), mix), |(config, mix)| {
        let fits = Capacity::new(&config).fits(&mix);
        prop_assert_eq!(fits, admits(&config, &mix));
        fitting.set(fitting.get() + u32::from(fits));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let share = CASES / 10..CASES - CASES / 10;
    assert!(share.contains(&fitting.get()), "{} of {CASES} mixes fit", fitting.get());
}

#[test]
fn no_count_overflows() {
    let model = ModelConfig { max_context: 1 << 30, ..ModelConfig::preset("pro").unwrap() };
    let config = CacheConfig {
        max_requests: CacheConfig::MAX_REQUESTS,
        num_blocks: CacheConfig::MAX_BLOCKS,
        ..CacheConfig::new(model)
    };
    let capacity = Capacity::new(&config);
    assert!(!capacity.fits(&[(1 << 30, u32::MAX); 1000]), "2^65 blocks");
    assert!(capacity.fits(&[(1 << 20, 4096)]), "4096 requests of 2^13 blocks");
    assert!(!capacity.fits(&[(1 << 20, 4096), (4, 1)]));
    let others = CacheConfig::MAX_REQUESTS - 4096;
    assert!(capacity.fits(&[(1 << 20, 4096), (3, others), (u32::MAX, 0)]));
    assert!(!capacity.fits(&[(1 << 20, 4096), (3, others + 1)]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn requests_of_a_length_are_admitted_until_refusal(
        config in config(),
        tokens in 0..LONGEST,
    ) {
        prop_assert_eq!(Capacity::new(&config).requests_of(tokens), admitted(&config, tokens));
    }

    #[test]
    fn the_longest_request_is_admitted_and_no_longer_one(config in config()) {
        let longest = Capacity::new(&config).longest_request();
        prop_assert!(admits(&config, &[(longest, 1)]));
        prop_assert!(!admits(&config, &[(longest + 1, 1)]));
    }

    /// Memory for some slots and some blocks, and a part of a block.
    #[test]
    fn no_number_of_slots_admits_more_than_the_planned(
        config in config(),
        tokens in 1..LONGEST,
        slots in 0..6u64,
        blocks in 0..40u64,
        part in 0..100u64,
    ) {
        let tokens = tokens.min(config.max_context);
        let schema = Schema::new(&config);
        let (slot_bytes, block_bytes) = (schema.slot_bytes(), schema.block_bytes());
        let with_slots = |max_requests| CacheConfig { max_requests, ..config.clone() };
        let fixed = Capacity::new(&with_slots(slots.max(1) as u32));
        let working = fixed.working_bytes + fixed.all_checkpoint_bytes();
        let slots = slots + u64::from(config.max_suspended);
        let pools = slots * slot_bytes + blocks * block_bytes + part * block_bytes / 100;
        let memory = working + pools;
        let caches = (1..).map_while(|slots| with_slots(slots).with_memory(memory).ok());
        let best = caches.map(|cache| admitted(&cache, tokens)).max().unwrap_or(0);
        match capacity::most_requests(config.clone(), memory, tokens) {
            Ok(planned) => {
                prop_assert_eq!(admitted(&planned, tokens), best);
                prop_assert_eq!(planned.max_requests, best, "no slot is idle");
                prop_assert!(Capacity::new(&planned).bytes() <= memory);
            }
            Err(error) => {
                prop_assert!(matches!(error, KvError::MemoryTooSmall { .. }), "{}", error);
                prop_assert_eq!(best, 0);
            }
        }
    }

    #[test]
    fn bytes_are_those_of_the_schema(config in config()) {
        let (schema, capacity) = (Schema::new(&config), Capacity::new(&config));
        let slots = u64::from(config.max_requests) + u64::from(config.max_suspended);
        let units = [slots, u64::from(config.num_blocks)];
        let all = [schema.slot_bytes(), schema.block_bytes()];
        prop_assert_eq!([capacity.slot_bytes, capacity.block_bytes], all);
        prop_assert_eq!(capacity.pool_bytes(), units[0] * all[0] + units[1] * all[1]);
        prop_assert_eq!(capacity.bytes_per_token * 128.0, all[1] as f64);
        let by_layer = |of: fn(&capacity::LayerBytes) -> u64| capacity.layers.iter().map(of).sum::<u64>();
        prop_assert_eq!([by_layer(|kind| kind.slot_bytes), by_layer(|kind| kind.block_bytes)], all);
        prop_assert_eq!(by_layer(|kind| u64::from(kind.layers)), config.model.layers.len() as u64);
        let by_pool = |unit| {
            let pools = capacity.pools.iter().filter(|pool| pool.unit == unit);
            pools.map(|pool| pool.unit_bytes).sum::<u64>()
        };
        prop_assert_eq!([by_pool(PoolUnit::Slot), by_pool(PoolUnit::Block)], all);
        prop_assert_eq!(capacity.pools.iter().map(|pool| pool.bytes).sum::<u64>(), capacity.pool_bytes());
    }
}

/// Rounded bytes per token of context, as published for the released models.
#[test]
fn bytes_per_token_are_those_published() {
    for (main_format, index_format, flash, pro) in [
        (MainFormat::Ue8m0, IndexFormat::Fp8, 3850.0, 5511.0),
        (MainFormat::Ue8m0, IndexFormat::Mxfp4, 3514.0, 5031.0),
        (MainFormat::F32, IndexFormat::Nvfp4, 3514.0, 5030.0),
    ] {
        for (name, published) in [("flash", flash), ("pro", pro)] {
            let model = ModelConfig::preset(name).unwrap();
            let config = CacheConfig { main_format, index_format, ..CacheConfig::new(model) };
            let bytes = Capacity::new(&config).bytes_per_token;
            assert_eq!(bytes.round(), published, "{name} {config:?}");
        }
    }
}

#[test]
fn plenty_of_memory_is_limited_by_ids_alone() {
    let config = CacheConfig::new(ModelConfig::preset("tiny").unwrap());
    let plan = |tokens| capacity::most_requests(config.clone(), 1 << 50, tokens).unwrap();
    assert_eq!(plan(3).max_requests, CacheConfig::MAX_REQUESTS);
    assert_eq!(plan(128).max_requests, CacheConfig::MAX_REQUESTS);
    assert_eq!(plan(1 << 20).max_requests, CacheConfig::MAX_BLOCKS / (1 << 13));
    assert_eq!(plan(1 << 20).num_blocks, CacheConfig::MAX_BLOCKS);
}

/// In a model without entries blocks take no memory: all of it goes to slots.
#[test]
fn a_model_without_entries_needs_no_memory_for_blocks() {
    let layers = vec![LayerKind::Swa; 3];
    let model = ModelConfig { layers, ..ModelConfig::preset("tiny").unwrap() };
    let slot_bytes = 3 * 128 * 584;
    let with_slots = |max_requests| CacheConfig {
        max_requests,
        max_context: 640,
        ..CacheConfig::new(model.clone())
    };
    let working = |slots| Capacity::new(&with_slots(slots)).working_bytes;
    let plan = |memory| capacity::most_requests(with_slots(1), memory, 640);
    let config = plan(working(7) + 7 * slot_bytes).unwrap();
    assert_eq!((config.max_requests, config.num_blocks), (7, 1));
    assert_eq!(Capacity::new(&config).pool_bytes(), 7 * slot_bytes);
    assert_eq!(Capacity::new(&config).requests_of(640), 7);
    let error = plan(working(1) + slot_bytes - 1).unwrap_err();
    assert!(matches!(&error, KvError::MemoryTooSmall(error) if error.slots == 1), "{error}");
}

#[test]
fn a_length_out_of_range_is_named() {
    let config = || CacheConfig {
        max_context: 5000,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    for tokens in [0, 5001] {
        let error = capacity::most_requests(config(), 1 << 30, tokens).unwrap_err();
        let KvError::Config { setting: "tokens", value, least: 1, most: 5000 } = error else {
            panic!("{error}")
        };
        assert_eq!(value, u64::from(tokens));
    }
    assert_eq!(Capacity::new(&config()).requests_of(5001), 0);
}

#[test]
fn a_cache_takes_the_planned_bytes() {
    for (num_checkpoints, max_suspended, host_bytes) in
        [(0, 0, 0), (5, 0, 0), (3, 2, 0), (5, 1, 4 << 20)]
    {
        let memory = 64 << 20;
        let smallest = CacheConfig::new(ModelConfig::preset("tiny").unwrap());
        let config = CacheConfig {
            max_draft: 3,
            num_checkpoints,
            max_suspended,
            host_bytes,
            max_context: 4096,
            ..smallest
        };
        let config = capacity::most_requests(config, memory, 4096).unwrap();
        let planned = Capacity::new(&config);
        assert!(planned.bytes() <= memory && memory < planned.bytes() + planned.block_bytes);
        let device = EmuDevice::new(EmuOptions { memory, ..EmuOptions::default() });
        let cache = KvCacheManager::new(device.clone(), config).unwrap();
        assert_eq!(memory - device.free_memory().unwrap(), planned.bytes());
        let pools: Vec<_> = planned.pools.iter().map(|pool| (pool.kind, pool.bytes)).collect();
        assert_eq!(cache.pool_bytes(), pools);
        let unit = planned.host_bytes.checked_div(cache.host_units().1.into()).unwrap_or(0);
        assert!(planned.host_bytes <= host_bytes && host_bytes < planned.host_bytes + unit.max(1));
        assert_eq!(planned.staging_bytes > 0, host_bytes > 0);
    }
}

/// A host tier that is too small for one prefix, or has nothing to hold, is refused with the size that it needs at
/// least.
#[test]
fn a_host_tier_that_is_too_small_is_named() {
    let smallest = CacheConfig::new(ModelConfig::preset("tiny").unwrap());
    let with = |num_checkpoints, host_bytes| CacheConfig {
        num_checkpoints,
        host_bytes,
        ..smallest.clone()
    };
    let made = |config: CacheConfig| {
        let device = EmuDevice::new(EmuOptions { memory: 64 << 20, ..EmuOptions::default() });
        let planned = config.compute_block_budget(1 << 30).map(|_| ());
        let made =
            KvCacheManager::new(device, CacheConfig { max_context: 640, ..config }).map(|_| ());
        assert_eq!(planned.is_ok(), made.is_ok());
        made
    };
    let error = made(with(0, 1 << 20)).unwrap_err();
    assert!(matches!(error, KvError::Config { setting: "num_checkpoints", .. }), "{error}");
    let error = made(with(1, 1)).unwrap_err();
    let KvError::Config { setting: "host_bytes", value: 1, least, .. } = error else {
        panic!("{error}")
    };
    made(with(1, least)).unwrap();
    let error = made(with(1, least - 1)).unwrap_err();
    assert!(matches!(error, KvError::Config { setting: "host_bytes", .. }), "{error}");
}

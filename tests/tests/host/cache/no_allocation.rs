//! A step between block boundaries allocates nothing on the host, as far as it is no launch: shown by
//! counting.

use allocation_counter::measure;
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, LayerGroup, StepRequest};

/// Allocations of this thread while `action` runs.
fn allocations(action: impl FnOnce()) -> u64 {
    measure(action).count_total
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
}

/// Decode steps between two block boundaries, through the cache: beginning the step, its layers'
/// handles and the commit reuse what they have. Launches are not counted: the emulator allocates.
#[test]
fn a_decode_step_allocates_nothing() {
    let device = EmuDevice::new(EmuOptions::default());
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig::for_memory(model, 1 << 28, 4).unwrap();
    let mut cache = KvCacheManager::new(device, config).unwrap();
    let stream = cache.device().stream().unwrap();
    let id = cache.admit().unwrap();
    let mut step = |start, tokens| {
        let parts = [StepRequest { id, start, tokens }];
        let mut step = cache.begin_step(&stream, Launches::Eager, &parts).unwrap();
        for (layer, kind) in step.ids() {
            let schema = match kind {
                LayerKind::Swa => step.swa(layer).unwrap().schema().kind,
                LayerKind::Csa => step.csa(layer).unwrap().schema().kind,
                LayerKind::Hca => step.hca(layer).unwrap().schema().kind,
            };
            std::hint::black_box(schema);
        }
        step.skip_kernels();
        step.commit(&[Accepted::count(id, tokens)]).unwrap();
    };
    step(0, 20);
    assert_eq!(allocations(|| (20..120).for_each(|start| step(start, 1))), 0);
}

/// The same of the ledger alone.
#[test]
fn a_decode_step_in_the_ledger_allocates_nothing() {
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig::for_memory(model, 1 << 28, 4).unwrap();
    let mut ledger = dsv4_kv::Ledger::new(&config).unwrap();
    let mut array = vec![0; ledger.largest_layout().elements()];
    let id = ledger.admit().unwrap();
    let group = LayerGroup::Trunk;
    let mut step = |start, tokens| {
        ledger.begin_step(group, &[StepRequest { id, start, tokens }], &mut array).unwrap();
        ledger.commit_step(group, &[Accepted::count(id, tokens)]).unwrap();
    };
    step(0, 20);
    assert_eq!(allocations(|| (20..120).for_each(|start| step(start, 1))), 0);
}

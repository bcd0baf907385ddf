//! What runs inside a step allocates nothing on the host: shown by counting.

use allocation_counter::measure;
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{CacheConfig, KvCacheManager, LayerId, StepRequest};

/// Allocations of this thread while `action` runs.
fn allocations(action: impl FnOnce()) -> u64 {
    measure(action).count_total
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
}

#[test]
fn a_layer_handle_allocates_nothing() {
    let device = EmuDevice::new(EmuOptions::default());
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig::for_memory(model, 1 << 28, 4).unwrap();
    let manager = KvCacheManager::new(device, config).unwrap();
    let count = allocations(|| {
        for layer in 0..5 {
            let handle = manager.layer(LayerId(layer)).unwrap();
            std::hint::black_box(handle.swa().data.ptr());
        }
    });
    assert_eq!(count, 0);
}

/// Decode steps between two block boundaries: the ledger and StepMeta reuse what they have.
#[test]
fn preparing_a_decode_step_allocates_nothing() {
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig::for_memory(model, 1 << 28, 4).unwrap();
    let mut ledger = dsv4_kv::Ledger::new(&config).unwrap();
    let mut array = vec![0; ledger.layout().elements()];
    let id = ledger.admit().unwrap();
    let mut step = |start, tokens| {
        ledger.prepare_forward(&[StepRequest { id, start, tokens }], &mut array).unwrap();
        ledger.commit(id, tokens).unwrap();
    };
    step(0, 20);
    let count = allocations(|| (20..120).for_each(|start| step(start, 1)));
    assert_eq!(count, 0);
}

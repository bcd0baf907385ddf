//! A step that cannot have all its blocks gets none, and leaves the whole cache as it was, byte for byte, wherever the
//! blocks run out.

use dsv4_kv::device::{DeviceError, EmuDevice, EmuOptions, Emulator};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, RequestId, StepPlan,
    StepRequest,
};
use dsv4_kv_tests::inputs::download;

/// Number of requests in the step.
const REQUESTS: u32 = 64;

/// The tokens of a request before the step, and its tokens in the step: prompts, chunks that end inside a block, at its
/// end and after it, drafts, and single tokens on both sides of a boundary.
fn part(request: u32) -> (u32, u32) {
    match request % 8 {
        0 => (0, 300),
        1 => (128, 4),
        2 => (131, 1),
        3 => (130, 1),
        4 => (250, 9),
        5 => (5, 200),
        6 => (0, 3),
        _ => (259, 1),
    }
}

/// A cache of `REQUESTS` requests, ready for the step, and one more request that holds all but `free` blocks.
fn cache(free: u32, blocks: u32) -> (KvCacheManager<Emulator>, Vec<StepRequest>) {
    let device = EmuDevice::new(EmuOptions::default());
    let config = CacheConfig {
        max_requests: REQUESTS + 1,
        num_blocks: blocks,
        max_draft: 8,
        max_context: 128 * 400,
        max_step_tokens: 128 * 400,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    let mut cache = KvCacheManager::new(device, config).unwrap();
    let ids: Vec<RequestId> = (0..=REQUESTS).map(|_| cache.admit().unwrap()).collect();
    (0..REQUESTS).for_each(|request| grow(&mut cache, ids[request as usize], part(request).0));
    let left = cache.ledger().free_blocks() - free;
    grow(&mut cache, ids[REQUESTS as usize], 128 * left);
    let step = (0..REQUESTS).map(|request| {
        let (start, tokens) = part(request);
        StepRequest { id: ids[request as usize], start, tokens }
    });
    let step = step.collect();
    (cache, step)
}

/// Gives a request its first tokens. No kernel runs.
fn grow(cache: &mut KvCacheManager<Emulator>, id: RequestId, tokens: u32) {
    if tokens > 0 {
        let stream = cache.device().stream().unwrap();
        let step = [StepRequest { id, start: 0, tokens }];
        let mut step = cache.begin_step(&stream, Launches::Eager, &step).unwrap();
        step.skip_kernels();
        step.commit(&[Accepted::count(id, tokens)]).unwrap();
    }
}

/// The state of the cache: its ledger as bytes, and StepMeta and the block table on the device.
fn state(cache: &mut KvCacheManager<Emulator>) -> (Vec<u8>, Vec<i32>, Vec<i32>) {
    let stream = cache.device().stream().unwrap();
    let step_meta = cache.writable_step_meta(LayerGroup::Trunk).unwrap();
    let table = download(&stream, &cache.device_block_table());
    (serde_json::to_vec(&*cache.ledger()).unwrap(), download(&stream, &step_meta), table)
}

/// Begins a step and leaves it open, so that the test can examine its effect. The next step rejects it.
fn begin(cache: &mut KvCacheManager<Emulator>, step: &[StepRequest]) -> Result<StepPlan, KvError> {
    let stream = cache.device().stream().unwrap();
    let step = cache.begin_step(&stream, Launches::Eager, step)?;
    let plan = step.plan();
    std::mem::forget(step);
    Ok(plan)
}

#[test]
fn a_step_gets_all_its_blocks_or_none() {
    const BLOCKS: u32 = 400;
    let (mut enough, step) = cache(300, BLOCKS);
    let before = state(&mut enough);
    let needed = begin(&mut enough, &step).unwrap().new_blocks;
    assert_ne!(state(&mut enough), before, "a step that runs is seen in the bytes");
    assert!(needed > 40, "a mixed step takes blocks of many requests: {needed}");

    for free in 0..needed {
        let (mut cache, step) = cache(free, BLOCKS);
        let before = state(&mut cache);
        let error = begin(&mut cache, &step).unwrap_err();
        assert!(
            matches!(error, KvError::OutOfBlocks { needed: n, free: f } if (n, f) == (needed, free)),
            "{error}"
        );
        assert_eq!(state(&mut cache), before, "the step failed at block {free} of {needed}");
    }
    let (mut cache, step) = cache(needed, BLOCKS);
    let plan = begin(&mut cache, &step).unwrap();
    assert_eq!((plan.new_blocks, cache.ledger().free_blocks()), (needed, 0));
}

/// Each allocation of a new cache fails in turn. The error names the allocation that did not fit, and all memory that
/// was taken is free again.
#[test]
fn a_cache_is_made_whole_or_not_at_all() {
    let config = CacheConfig {
        max_requests: 2,
        num_blocks: 2,
        max_step_tokens: 16,
        max_context: 256,
        num_checkpoints: 1,
        poison: true,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    let mut refused = std::collections::BTreeSet::new();
    let mut memory = 0;
    loop {
        let device = EmuDevice::new(EmuOptions { memory, seed: 0 });
        let lacking = match KvCacheManager::new(device.clone(), config.clone()) {
            Ok(_) => break,
            Err(KvError::Device(DeviceError::OutOfMemory { label, requested, free })) => {
                refused.insert(label);
                requested - free
            }
            Err(other) => panic!("{other}"),
        };
        assert_eq!(device.free_memory().unwrap(), memory, "with {memory} bytes");
        // Enough memory for the allocation that failed; the next one fails then.
        memory += lacking;
    }
    let labels =
        ["the pools of the layers", "checkpoints", "poison records", "step metadata", "entries"];
    for label in labels {
        assert!(refused.contains(label), "{label} of {refused:?}");
    }
}

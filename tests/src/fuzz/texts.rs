//! Texts from outside: a model's `config.json`, traces, the manifest of the PTX.

use std::path::Path;

use dsv4_kv::error::MemoryTooSmall;
use dsv4_kv::{CacheConfig, KvError, Ledger, ptx};
use dsv4_kv_checkpoint::Config;
use dsv4_kv_router::RouterConfig;
use dsv4_kv_trace::TraceReader;
use kernels_gpu::table::ABI_HASH;
use kv_layout::config::ModelConfig;

/// A `config.json` must be refused with a reason, or give a model for which a cache can be planned.
///
/// # Panics
/// If an accepted model cannot be planned, or changes when it is written to JSON and read again.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let whole = Config::from_json(text);
    let model = match ModelConfig::from_json(text) {
        Ok(model) => model,
        Err(error) => {
            let error = error.to_string();
            assert!(!error.is_empty());
            assert_eq!(whole.expect_err("the cache's part is refused").to_string(), error);
            return;
        }
    };
    if let Ok(whole) = whole {
        assert_eq!(whole.cache, model);
        assert_eq!(whole.experts.routing.len(), model.layers.len());
        RouterConfig::from(&whole).validate().expect("what is read is valid");
    }
    let json = serde_json::to_string(&model).expect("a model is JSON");
    assert_eq!(serde_json::from_str::<ModelConfig>(&json).expect("and back"), model);
    let config = CacheConfig { max_context: 4096, ..CacheConfig::new(model) };
    if config.validate().is_err() {
        return;
    }
    let Err(KvError::MemoryTooSmall(error)) = config.compute_block_budget(0) else {
        panic!("a cache in no memory")
    };
    let MemoryTooSmall { slot_bytes, block_bytes, working_bytes, .. } = *error;
    let memory = working_bytes + slot_bytes + 3 * block_bytes;
    let blocks = config.compute_block_budget(memory).expect("a slot and three blocks fit");
    assert!(blocks == 3 || block_bytes == 0, "{blocks} blocks");
    let mut ledger = Ledger::new(&config).expect("a valid configuration");
    let id = ledger.admit().expect("an empty cache has a slot");
    ledger.release(id).expect("it was admitted");
}

/// A trace must give requests in order, or an error that names the bad line.
///
/// # Panics
/// If a request has no tokens, or if time goes backwards.
pub fn trace(bytes: &[u8]) {
    let name = Path::new("fuzz.jsonl");
    match TraceReader::new(name, bytes).read(1000) {
        Ok(requests) => {
            assert!(requests.iter().all(|request| request.input > 0 && request.output > 0));
            assert!(requests.is_sorted_by(|a, b| a.at_ms <= b.at_ms));
            for request in requests {
                assert!(request.cached_tokens() >= request.input);
                let small = request.shrunk(64.0, 2.0).expect("it does not grow");
                assert!(small.input > 0 && small.output > 0);
                if let Ok(large) = request.shrunk(0.5, 2.0) {
                    assert_eq!(large.cached_tokens(), 2 * (request.input + request.output) - 1);
                }
            }
        }
        Err(error) => assert!(error.to_string().starts_with("fuzz.jsonl:")),
    }
}

/// A PTX manifest must have the hash of this kernel table, or be refused.
///
/// # Panics
/// If a manifest with another hash is accepted.
pub fn manifest(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match ptx::check_manifest(text) {
        Ok(()) => {
            let manifest: serde_json::Value = serde_json::from_str(text).expect("it was read");
            assert_eq!(manifest["abi_hash"].as_u64(), Some(ABI_HASH));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

//! Texts from outside: a model's `config.json`, traces, the manifest of the PTX.

use std::path::Path;

use dsv4_kv::error::MemoryTooSmall;
use dsv4_kv::{CacheConfig, KvError, Ledger, ptx};
use dsv4_kv_model_files::Config;
use dsv4_kv_router::RouterConfig;
use dsv4_kv_trace::{Arrival, HASH_TOKENS, Prompt, TraceReader};
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

/// A trace must give requests in order, or an error that names the bad line; with and without their prompts the same.
///
/// # Panics
/// If a request has no tokens, if time goes backwards, or if the ways to read a trace disagree about what both read.
pub fn trace(bytes: &[u8]) {
    let _ = readings(bytes);
}

/// As [`trace`]; returns in how many of three ways the trace can be read: as arrivals, as requests with the prompts
/// that there are, as prompts.
///
/// # Panics
/// As [`trace`].
#[must_use]
pub fn readings(bytes: &[u8]) -> usize {
    let reader = || TraceReader::new(Path::new("fuzz.jsonl"), bytes);
    let arrivals = reader().read(1000).map_err(|error| error.to_string());
    let requests = reader().read_requests(1000).map_err(|error| error.to_string());
    let prompts = reader().read_prompts(1000).map_err(|error| error.to_string());
    match &arrivals {
        Ok(arrivals) => check_arrivals(arrivals),
        Err(error) => assert!(error.starts_with("fuzz.jsonl:")),
    }
    match (&arrivals, &requests) {
        (Ok(arrivals), Ok(requests)) => {
            assert!(requests.iter().map(|(arrival, _)| arrival).eq(arrivals));
        }
        (Err(of_arrival), Err(error)) if line_of(of_arrival) == line_of(error) => {}
        // Arrivals are read without a look at each id.
        (_, Err(error)) => assert!(has_bad_ids(bytes, error), "{error}"),
        (Err(error), Ok(_)) => panic!("requests are read, arrivals are not: {error}"),
    }
    match (&requests, &prompts) {
        (Ok(requests), Ok(prompts)) => check_prompts(requests, prompts),
        (Ok(requests), Err(error)) => {
            let request = requests.iter().position(|(_, prompt)| prompt.is_none());
            let request = request.expect("every request has a prompt");
            let lines = (1..).zip(bytes.split(|&byte| byte == b'\n'));
            let mut lines = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
            let (line, _) = lines.nth(request).expect("its line");
            assert!(error.starts_with(&format!("fuzz.jsonl:{line}: it has no hash_ids")));
        }
        // A line without ids may come first.
        (Err(of_request), Err(error)) => {
            assert!(of_request == error || error.contains("it has no hash_ids"));
        }
        (Err(error), Ok(_)) => panic!("prompts are read, requests are not: {error}"),
    }
    [arrivals.is_ok(), requests.is_ok(), prompts.is_ok()].into_iter().filter(|&ok| ok).count()
}

fn check_arrivals(arrivals: &[Arrival]) {
    assert!(arrivals.iter().all(|request| request.input > 0 && request.output > 0));
    assert!(arrivals.is_sorted_by(|a, b| a.at_ms <= b.at_ms));
    for request in arrivals {
        assert!(request.context_tokens() >= request.input);
        let small = request.shrunk(64.0, 2.0).expect("it does not grow");
        assert!(small.input > 0 && small.output > 0);
        if let Ok(large) = request.shrunk(0.5, 2.0) {
            assert_eq!(large.context_tokens(), 2 * (request.input + request.output) - 1);
        }
    }
}

fn check_prompts(requests: &[(Arrival, Option<Prompt>)], prompts: &[Prompt]) {
    assert!(requests.iter().map(|(_, prompt)| prompt.as_ref()).eq(prompts.iter().map(Some)));
    for ((arrival, _), prompt) in requests.iter().zip(prompts) {
        assert_eq!(prompt.tokens, arrival.input);
        assert_eq!(prompt.hash_ids.len(), arrival.input.div_ceil(HASH_TOKENS) as usize);
    }
}

/// The line that an error names; none if it is one of the whole trace.
fn line_of(error: &str) -> Option<usize> {
    error.strip_prefix("fuzz.jsonl:")?.split(':').next()?.parse().ok()
}

/// Whether the line that the error names has ids that are no u64. A line that is no [`serde_json::Value`] may have
/// such ids.
fn has_bad_ids(bytes: &[u8], error: &str) -> bool {
    let line = line_of(error).expect("a line");
    let line = bytes.split(|&byte| byte == b'\n').nth(line - 1).expect("a line of the trace");
    let Ok(line) = serde_json::from_slice::<serde_json::Value>(line) else { return true };
    // The fields of a line may also come as an array.
    let ids = line.get("hash_ids").or(line.get(3)).and_then(|ids| ids.as_array());
    ids.is_some_and(|ids| ids.iter().any(|id| !id.is_u64()))
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

//! Tests that need the private state of a tier: a tier is dropped, or its thread ends, while work is under way.

use std::time::Instant;

use dsv4_kv::device::{Null, NullDevice};
use dsv4_kv::{Accepted, CacheConfig, Launches, StepRequest};
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_tests::stories::config;
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use super::*;
use crate::queue::Shared;

mod asking;
mod closing;
mod failing;
mod listing;

const TOKENS: usize = 300;

fn cache() -> Fed<Null> {
    cache_with(64 << 20)
}

fn cache_with(host_bytes: u64) -> Fed<Null> {
    let layers = [Swa, Csa, Hca];
    let base = config(&layers, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 2);
    let settings = CacheConfig { num_checkpoints: 4, host_bytes, ..base };
    Fed::new(&NullDevice::null(1 << 34), settings)
}

fn tier(fed: &mut Fed<Null>, directory: &tempfile::TempDir) -> ColdTier<Null> {
    let url = directory.path().to_str().unwrap();
    ColdTier::open(&mut fed.manager, url, b"weights", &ColdOptions::default()).unwrap()
}

/// Computes a prompt, and waits until it is in host memory.
fn compute(fed: &mut Fed<Null>, prompt: &Prompt<'_>) {
    let id = fed.manager.admit_with(&fed.stream, prompt).unwrap().id;
    let step = [StepRequest { id, start: 0, tokens: TOKENS as u32 }];
    let mut step = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).unwrap();
    step.skip_kernels();
    step.commit(&[Accepted { id, accepted: TOKENS as u32, tokens: prompt.tokens }]).unwrap();
    fed.manager.settle_tier(&fed.stream).unwrap();
    fed.manager.release(id).unwrap();
}

/// Computes the prompt and stores it.
fn store(tokens: &[u32], directory: &tempfile::TempDir) {
    let mut fed = cache();
    let mut cold = tier(&mut fed, directory);
    compute(&mut fed, &Prompt { tokens, salt: b"", adapter: b"" });
    cold.settle(&mut fed.manager);
    assert_eq!(cold.stats().stored, 1);
}

/// A tier that is dropped while host memory is being filled ends all of its reservations there.
#[test]
fn a_tier_that_is_dropped_gives_everything_back() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"", adapter: b"" };
    store(&tokens, &directory);
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    let (free, all) = fed.manager.host_units();
    assert_eq!(free, all);
    cold.fetch(&fed.manager, &prompt).unwrap().expect("the store has it");
    cold.take_done(&mut fed.manager, Duration::MAX);
    assert!(fed.manager.host_units().0 < all, "it is filled");
    drop(cold);
    fed.manager.advance_tier(&fed.stream).unwrap();
    assert_eq!(fed.manager.host_units().0, all);
    fed.manager.audit_tier().unwrap();
    // The next tier reads the prefix.
    let mut cold = tier(&mut fed, &directory);
    cold.fetch(&fed.manager, &prompt).unwrap().expect("the store has it");
    cold.settle(&mut fed.manager);
    assert_eq!((cold.stats().restored, cold.stats().restored_tokens), (1, 256));
}

/// If the store's thread ends, no call waits for it, and the error is reported once.
#[test]
fn a_thread_that_ends_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"", adapter: b"" };
    store(&tokens, &directory);
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    cold.store.work(|| panic!("the thread of the test ends"));
    let id = cold.fetch(&fed.manager, &prompt).unwrap().expect("the store has it");
    cold.settle(&mut fed.manager);
    cold.settle(&mut fed.manager);
    assert!(!cold.is_fetching(id));
    let errors = cold.take_errors();
    assert!(matches!(errors[..], [ColdError::ThreadEnded]), "{errors:?}");
    assert_eq!(cold.stats().failed, 1);
    let refused = cold.fetch(&fed.manager, &prompt);
    assert!(matches!(refused, Err(ColdError::ThreadEnded)), "{refused:?}");
}

/// While two prompts are being fetched, the first finds an object missing. The second one is then not read: the store
/// has no more of it.
#[test]
fn what_another_prompt_found_missing_is_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32 + 128).collect();
    let prompt = |tokens| Prompt { tokens, salt: b"", adapter: b"" };
    store(&tokens[..TOKENS], &directory);
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    let (go, wait) = channel::<()>();
    cold.store.work(move || wait.recv().unwrap());
    cold.pending += 1;
    // Both begin with the two blocks that the store has.
    for tokens in [&tokens[..TOKENS], &tokens] {
        cold.fetch(&fed.manager, &prompt(tokens)).unwrap().expect("the store has some of it");
    }
    std::fs::remove_dir_all(directory.path().join("v1")).unwrap();
    go.send(()).unwrap();
    cold.settle(&mut fed.manager);
    let errors = cold.take_errors();
    assert!(matches!(errors[..], [ColdError::Store(_), ColdError::NotThere]), "{errors:?}");
    let stats = cold.stats();
    assert_eq!((stats.failed, stats.not_there, cold.fetching()), (0, 2, 0));
}

/// Blocks the store's thread until the result is sent to, and computes prompts of so many salts meanwhile.
fn compute_while_blocked(fed: &mut Fed<Null>, cold: &mut ColdTier<Null>, salts: u8) -> Sender<()> {
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let (go, wait) = channel();
    cold.store.work(move || wait.recv().unwrap());
    cold.pending += 1;
    for salt in 0..salts {
        compute(fed, &Prompt { tokens: &tokens, salt: &[salt], adapter: b"" });
        cold.advance(&mut fed.manager);
    }
    go
}

/// Waits until another thread has closed a queue.
fn wait_until_closed(queue: &Shared) {
    let begin = Instant::now();
    while !queue.queue().is_closed {
        assert!(begin.elapsed() < Duration::from_secs(60), "nobody closes the queue");
        std::thread::yield_now();
    }
}

/// With a slow store, only the prefixes that wait in its queue keep host memory from eviction. The others wait as
/// places, and are stored in their turn.
#[test]
fn a_slow_store_loses_nothing() {
    const PROMPTS: usize = 70;
    let directory = tempfile::tempdir().unwrap();
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    let go = compute_while_blocked(&mut fed, &mut cold, PROMPTS as u8);
    assert_eq!(cold.pending, 65, "the one that waits, and those behind it");
    go.send(()).unwrap();
    cold.settle(&mut fed.manager);
    assert_eq!((cold.stats().stored, cold.pending), (PROMPTS as u64, 0));
    assert_eq!(fed.manager.tier_stats().lost_offers, 0);
    fed.manager.audit_tier().unwrap();
}

/// A store that does not answer keeps no more than half of host memory, and one prefix, from eviction: new prefixes
/// still arrive there. What has been evicted meanwhile is not stored.
#[test]
fn a_store_that_hangs_keeps_half_of_host_memory() {
    const PROMPTS: u64 = 30;
    let directory = tempfile::tempdir().unwrap();
    let (block, checkpoint) = cache().manager.host_image_bytes().unwrap();
    // Two blocks and a checkpoint, ten times.
    let host_bytes = 10 * (2 + checkpoint.div_ceil(block)) * block;
    let mut fed = cache_with(host_bytes);
    let mut cold = tier(&mut fed, &directory);
    let go = compute_while_blocked(&mut fed, &mut cold, PROMPTS as u8);
    assert_eq!(cold.pending, 1 + 6, "the work, and those that wait");
    let stats = fed.manager.tier_stats();
    assert_eq!((stats.stored_checkpoints, stats.lost_offers), (PROMPTS, 0), "{stats:?}");
    go.send(()).unwrap();
    cold.settle(&mut fed.manager);
    assert_eq!((cold.stats().stored, cold.pending), (10, 0), "what is in host memory");
    fed.manager.audit_tier().unwrap();
}

/// A read does not wait for stores that were queued before it.
#[test]
fn reads_come_before_writes() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let prompt = |salt| Prompt { tokens: &tokens, salt, adapter: b"" };
    store(&tokens, &directory);
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    let (go, wait) = channel::<()>();
    cold.store.work(move || wait.recv().unwrap());
    cold.pending += 1;
    for salt in [b"a", b"b", b"c"] {
        compute(&mut fed, &prompt(salt));
        cold.advance(&mut fed.manager);
    }
    cold.fetch(&fed.manager, &prompt(b"")).unwrap().expect("the store has it");
    assert_eq!(cold.pending, 5, "all of them wait");
    go.send(()).unwrap();
    let mut done = Vec::new();
    while cold.pending > 0 {
        let next = cold.store.next(Duration::MAX).unwrap().expect("nothing ends the wait");
        done.push(match &next {
            Done::Worked => "worked",
            Done::Read(..) => "read",
            Done::Stored(..) => "stored",
            Done::GivenUp => "given up",
        });
        cold.take(&mut fed.manager, next);
    }
    assert_eq!(done[..2], ["worked", "read"], "{done:?}");
    assert_eq!(done.iter().filter(|&&done| done == "stored").count(), 3, "{done:?}");
    cold.settle(&mut fed.manager);
    assert_eq!((cold.stats().restored, cold.stats().stored), (1, 3));
}

/// A store gets the environment variables for stores, and no others.
#[test]
fn variables_of_stores_are_options() {
    let variables =
        [("HOME", "/"), ("AWS_REGION", "eu-west-1"), ("AZURE_X", "1"), ("NOT_AWS_KEY", "secret")];
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let options = ColdOptions::of(variables.map(owned).into_iter());
    assert_eq!(options.store, [variables[1], variables[2]].map(owned));
    assert_eq!(format!("{options:?}"), r#"ColdOptions { store: ["AWS_REGION", "AZURE_X"] }"#);
}

/// No more than [`MAX_FETCHES`] prompts are being fetched, and of those that were read no more than two are held in
/// memory. A call of `wait` waits no longer than its limit.
#[test]
fn a_slow_store_is_not_asked_for_everything() {
    const PROMPTS: u8 = 65;
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let prompt = |salt: &'static [u8]| Prompt { tokens: &tokens, salt, adapter: b"" };
    let salts: Vec<&'static [u8]> = (0..PROMPTS).map(|salt| &*Vec::leak(vec![salt])).collect();
    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    for salt in &salts {
        compute(&mut fed, &prompt(salt));
        cold.settle(&mut fed.manager);
    }
    assert_eq!(cold.stats().stored, u64::from(PROMPTS));
    drop(cold);

    let mut fed = cache();
    let mut cold = tier(&mut fed, &directory);
    let (go, wait) = channel::<()>();
    cold.store.work(move || wait.recv().unwrap());
    cold.pending += 1;
    assert_eq!(cold.fetch(&fed.manager, &prompt(b"another")).unwrap(), None, "the store has none");
    let ids: Vec<FetchId> = salts[..64]
        .iter()
        .map(|salt| cold.fetch(&fed.manager, &prompt(salt)).unwrap().expect("the store has it"))
        .collect();
    let refused = cold.fetch(&fed.manager, &prompt(salts[64]));
    assert!(matches!(refused, Err(ColdError::TooManyFetches { most: 64 })), "{refused:?}");
    let begin = Instant::now();
    cold.wait(&mut fed.manager, Duration::from_millis(30));
    assert!(begin.elapsed() >= Duration::from_millis(30) && cold.fetching() == 64);
    go.send(()).unwrap();
    // No prefix that was read is taken: after two of them the thread waits, although 62 others are requested.
    while cold.store.found() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(60), "two are read");
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(cold.store.found(), 2);
    // A prompt whose requests are all cancelled is not read. Of two requests, cancelling one leaves the other.
    assert_eq!(cold.fetch(&fed.manager, &prompt(salts[63])).unwrap(), Some(ids[63]));
    cold.cancel(&fed.manager, ids[63]);
    assert!(cold.is_fetching(ids[63]));
    cold.cancel(&fed.manager, ids[63]);
    assert!(!cold.is_fetching(ids[63]) && cold.fetching() == 63);
    cold.cancel(&fed.manager, ids[63]);
    while ids.iter().any(|&id| cold.is_fetching(id)) {
        cold.wait(&mut fed.manager, Duration::MAX);
        assert!(cold.store.found() <= 2);
    }
    cold.settle(&mut fed.manager);
    let stats = cold.stats();
    assert_eq!((stats.restored + stats.no_room, stats.not_there, cold.pending), (63, 1, 0));
    assert_eq!(cold.store.found(), 0);
    fed.manager.audit_tier().unwrap();
}

//! Prefixes that completions share, in host memory and in a store that outlives the server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use dsv4_kv_device::{Backend, Device, EmuOptions, Emulator};
use dsv4_kv_model::EngineLimits;
use dsv4_kv_model::sequence::{Continuation, Finish, Generated};
use dsv4_kv_server::error::ServerError;
use dsv4_kv_server::metrics::Metrics;
use dsv4_kv_server::queue::{Event, Submission};
use dsv4_kv_server::scheduler::{Progress, Scheduler, SchedulerLimits};
use dsv4_kv_server::{ColdCache, ColdError, ColdOptions, Settings};
use dsv4_kv_tests::failing::{self, Failing};
use serde_json::json;

use crate::client::{self, Running};
use crate::scheduler::{LIMITS, milliseconds, received, submit, value};
use crate::small::{self, HASH};

/// How long completions wait for a store.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Prompts of 142 tokens that differ in the last ten, so they share one block of 128.
fn long_prompt(last: u32) -> Vec<u32> {
    (0..142).map(|at| if at < 132 { at * at % 251 } else { last }).collect()
}

/// The first `tokens` of the eight tokens that the model alone answers to a long prompt. Computed once for all tests.
fn alone_to_long(last: u32, tokens: usize) -> Vec<Generated> {
    static ANSWERS: Mutex<BTreeMap<u32, Vec<Generated>>> = Mutex::new(BTreeMap::new());
    let mut answers = ANSWERS.lock().expect("no test has failed");
    let all = answers.entry(last).or_insert_with(|| {
        let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, 3));
        let (prompt, continuation) = (long_prompt(last), small::continuation(8));
        small::alone(&mut engine, &Submission { prompt, continuation, salt: Vec::new() }).0
    });
    all[..tokens].to_vec()
}

/// The device has room for the prefix of one completion. The prefix of another comes back from host memory, and its
/// completion answers as alone.
#[test]
fn a_prefix_comes_back_from_host_memory() {
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits { checkpoints: 1, host_bytes: 16 << 20, ..small::limits(2, 6) };
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    let submission = |last: u32, salt: &[u8]| Submission {
        prompt: long_prompt(last),
        continuation: small::continuation(4),
        salt: salt.to_vec(),
    };
    for (last, salt, reused) in [(1, b"a", 0), (2, b"b", 0), (2, b"a", 128), (1, b"b", 2 * 128)] {
        let new = submission(last, salt);
        let mut events = submit(&queue, &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        assert_eq!(value(&metrics, "dsv4_kv_prefix_cache_hits_total"), reused, "{last}");
        let (tokens, end) = received(&mut events);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
        assert_eq!(tokens, alone_to_long(last, 4), "{last}");
    }
    let stats = scheduler.engine().cache().tier_stats();
    assert_eq!((stats.restored_checkpoints, stats.restored_tokens), (2, 256));
    scheduler.engine().cache().audit_tier().expect("a right tier");
}

/// The last step of a completion passes a block boundary: the next turn continues from there.
#[test]
fn what_the_last_step_passes_is_saved() {
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits { checkpoints: 2, ..small::limits(1, 6) };
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let mut prompt: Vec<u32> = (0..127).map(|at| at * at % 251).collect();
    // The second token is sampled after position 127, the last one of the block.
    for reused in [0, 128] {
        let continuation = small::continuation(2);
        let new = Submission { prompt: prompt.clone(), continuation, salt: Vec::new() };
        let mut events = submit(&scheduler.queue(), &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        let (tokens, end) = received(&mut events);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
        assert_eq!(value(&metrics, "dsv4_kv_prefix_cache_hits_total"), reused);
        prompt.extend(tokens.iter().map(|token| token.picked.token));
    }
}

/// A cache with as many blocks as the longest completion. The prefix tree keeps the blocks that the completion shares,
/// in addition to blocks that it computes again. If these do not fit together, it is computed without sharing.
#[test]
fn what_fits_alone_is_answered_where_sharing_takes_more() {
    const BLOCKS: u32 = 3;
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits {
        checkpoints: 4,
        max_step_tokens: 128,
        context: 128 * BLOCKS,
        ..small::limits(1, BLOCKS)
    };
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let limits = SchedulerLimits { chunk: 128, waiting: 4 };
    let mut scheduler = Scheduler::new(engine, limits, metrics.clone()).expect("a scheduler");
    // The prefix tree has two blocks of the first prompt, and a checkpoint at their end. The second prompt shares one of
    // the blocks.
    let first = |at: u32| at * at % 251;
    let second = |at: u32| if at < 128 { first(at) } else { at % 251 };
    let prompts = [(0..257).map(first).collect(), (0..319).map(second).collect::<Vec<u32>>()];
    let mut answers = Vec::new();
    for prompt in prompts.clone() {
        let new = Submission { prompt, continuation: small::continuation(1), salt: Vec::new() };
        let mut events = submit(&scheduler.queue(), &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        let (tokens, end) = received(&mut events);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
        answers.push(tokens);
    }
    assert_eq!(value(&metrics, "dsv4_num_preemptions_total"), 1);
    scheduler.engine().cache().ledger().audit().expect("a right tree");
    drop(scheduler);
    let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, BLOCKS));
    let [_, prompt] = prompts;
    let new = Submission { prompt, continuation: small::continuation(1), salt: Vec::new() };
    assert_eq!(small::alone(&mut engine, &new).0, answers[1]);
}

/// Settings of a cold tier in a directory, for weights `identity`.
fn in_directory(directory: &Path, identity: &[u8], report: fn(&ColdError, u64)) -> ColdCache {
    ColdCache {
        url: directory.to_str().expect("a name").to_owned(),
        options: ColdOptions::default(),
        timeout: TIMEOUT,
        identity: identity.to_vec(),
        report,
    }
}

/// A scheduler with a cold tier.
fn above(cold: &ColdCache) -> (Scheduler<Emulator>, Metrics) {
    above_on(&small::emulated(), cold)
}

fn above_on<B: Backend>(device: &Device<B>, cold: &ColdCache) -> (Scheduler<B>, Metrics) {
    let limits = EngineLimits { checkpoints: 2, host_bytes: 16 << 20, ..small::limits(2, 6) };
    let metrics = Metrics::new().expect("metrics");
    let engine = small::engine(device, &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    scheduler.open_cold(cold).expect("a directory");
    (scheduler, metrics)
}

/// Prefixes of a completion are stored, and counted, while no other request runs.
#[test]
fn an_idle_server_stores() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut scheduler, metrics) =
        above(&in_directory(directory.path(), b"a", |error, _| panic!("{error}")));
    let (queue, stored) = (scheduler.queue(), "dsv4_kv_cold_stored_prefixes_total");
    let (prompt, continuation) = (long_prompt(1), small::continuation(1));
    let _events = submit(&queue, &Submission { prompt, continuation, salt: Vec::new() });
    let while_idle = thread::scope(|scope| {
        let running = scope.spawn(|| scheduler.run());
        let begin = Instant::now();
        while value(&metrics, stored) == 0 && begin.elapsed() < TIMEOUT {
            thread::sleep(Duration::from_millis(10));
        }
        // A server that shuts down also stores waiting prefixes.
        let while_idle = value(&metrics, stored);
        queue.close();
        running.join().expect("no panic").expect("no step fails");
        while_idle
    });
    assert_eq!(while_idle, 1);
}

/// Prefixes outlive a server: the next one with the same weights continues from the files, and answers as without.
/// Other weights and other salts find nothing.
#[test]
fn a_prefix_outlives_its_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let start = |identity: &[u8]| {
        above(&in_directory(directory.path(), identity, |error, _| panic!("{error}")))
    };
    let submission = |last: u32, salt: &[u8]| Submission {
        prompt: long_prompt(last),
        continuation: small::continuation(4),
        salt: salt.to_vec(),
    };
    let cases =
        [("a", 1, b"s", 0, 1), ("a", 2, b"s", 128, 1), ("a", 3, b"t", 0, 2), ("b", 4, b"s", 0, 3)];
    for (identity, last, salt, reused, files) in cases {
        let (mut scheduler, metrics) = start(identity.as_bytes());
        let new = submission(last, salt);
        let mut events = submit(&scheduler.queue(), &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        assert_eq!(value(&metrics, "dsv4_kv_prefix_cache_hits_total"), reused, "{last}");
        assert_eq!(value(&metrics, "dsv4_kv_cold_restored_tokens_total"), reused, "{last}");
        let (tokens, end) = received(&mut events);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
        assert_eq!(tokens, alone_to_long(last, 4), "{last}");
        scheduler.engine().cache().audit_tier().expect("a right tier");
        // Waiting prefixes are stored before the server ends.
        drop(scheduler);
        let folder = std::fs::read_dir(directory.path().join("v1")).expect("a folder");
        assert_eq!(folder.count(), files, "{last}");
        assert_eq!(value(&metrics, "dsv4_kv_cold_failures_total"), 0);
    }
    let engine = small::engine(&small::emulated(), &HASH, small::limits(2, 6));
    let mut scheduler =
        Scheduler::new(engine, LIMITS, Metrics::new().expect("metrics")).expect("a scheduler");
    let cold = in_directory(Path::new("/nowhere"), b"a", |_, _| ());
    let refused = scheduler.open_cold(&cold).map_err(|error| error.to_string());
    assert!(matches!(&refused, Err(why) if why.contains("no host tier")), "{refused:?}");
}

/// A damaged file is a miss, is counted, and is reported with its reason.
#[test]
fn a_damaged_file_is_told() {
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let directory = tempfile::tempdir().expect("a directory");
    let report = |error: &ColdError, others: u64| {
        TOLD.lock().expect("no panic").push(format!("{error}, {others} others"));
    };
    let mut failures = 0;
    for last in 1..=2 {
        let (mut scheduler, metrics) = above(&in_directory(directory.path(), b"a", report));
        let (prompt, continuation) = (long_prompt(last), small::continuation(4));
        let mut events =
            submit(&scheduler.queue(), &Submission { prompt, continuation, salt: Vec::new() });
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        assert_eq!(received(&mut events).1, Some(Event::Finished(Finish::Length)));
        drop(scheduler);
        failures = value(&metrics, "dsv4_kv_cold_failures_total");
        for file in std::fs::read_dir(directory.path().join("v1")).expect("a folder") {
            let path = file.expect("a file").path();
            let mut bytes = std::fs::read(&path).expect("its bytes");
            bytes.truncate(bytes.len() / 2);
            std::fs::write(&path, bytes).expect("half of it");
        }
    }
    assert!(failures > 0);
    let told = TOLD.lock().expect("no panic").clone();
    assert!(
        told.len() == 1 && told[0].starts_with("v1/") && told[0].ends_with(", 0 others"),
        "{told:?}"
    );
}

/// Completions with the same beginning: others continue from what one has computed, and each answers as alone. Under
/// another salt nothing is shared.
#[test]
fn completions_that_share_a_prefix_equal_each_alone() {
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits { checkpoints: 4, ..small::limits(3, 9) };
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    let submission = |last: u32, salt: &[u8]| Submission {
        prompt: long_prompt(last),
        continuation: Continuation { drafts: 2, ..small::continuation(8) },
        salt: salt.to_vec(),
    };
    // One first, so that there is something to share; then two at once; then another salt.
    let batches = [
        (vec![submission(1, b"a")], 0),
        (vec![submission(2, b"a"), submission(3, b"a")], 2 * 128),
        (vec![submission(2, b"b")], 2 * 128),
    ];
    let mut answers = Vec::new();
    for (submissions, reused) in batches {
        let mut events: Vec<_> = submissions.iter().map(|new| submit(&queue, new)).collect();
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        assert_eq!(value(&metrics, "dsv4_kv_prefix_cache_hits_total"), reused);
        for events in &mut events {
            let (tokens, end) = received(events);
            assert_eq!(end, Some(Event::Finished(Finish::Length)));
            answers.push(tokens);
        }
    }
    for (last, answer) in [1, 2, 3].into_iter().zip(&answers) {
        assert_eq!(*answer, alone_to_long(last, 8), "{last}");
    }
    assert_eq!(answers[3], answers[1]);
    let ledger = scheduler.engine().cache().ledger();
    assert_eq!(ledger.free_blocks() + ledger.evictable_blocks(), ledger.total_blocks());
    ledger.audit().expect("a right tree");
}

/// A request takes no blocks for a prefix that running requests hold, so more of them run at once: also if the prefix
/// was evictable before the first of them.
#[test]
fn a_held_prefix_takes_no_room() {
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits { checkpoints: 4, ..small::limits(6, 6) };
    let engine = small::engine(&small::without_kernels(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    // Two blocks that all share, and a part of a third one.
    let submission = |last: u32, most| small::sharing(260, (last, 10), most);
    let mut first = submit(&queue, &submission(0, 20));
    while received(&mut first).0.is_empty() {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    let mut others: Vec<_> = (1..=4).map(|last| submit(&queue, &submission(last, 6))).collect();
    assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    // The first one holds three of the six blocks, and each other one takes one.
    let running = || value(&metrics, "dsv4_num_requests_running");
    assert_eq!((running(), value(&metrics, "dsv4_num_requests_waiting")), (4, 1));
    while scheduler.step().expect("no step fails") == Progress::Ran {}
    for events in others.iter_mut().chain([&mut first]) {
        assert_eq!(received(events).1, Some(Event::Finished(Finish::Length)));
    }
    assert_eq!(value(&metrics, "dsv4_num_preemptions_total"), 0);
    // Four blocks are free, and two evictable: the prefix and four others.
    let _events: Vec<_> = (1..=5).map(|last| submit(&queue, &submission(last, 6))).collect();
    assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    assert_eq!(running(), 4);
}

/// On drop, lets a reader that opens a FIFO read nothing, so that no thread hangs.
struct Unblock(std::path::PathBuf);

impl Drop for Unblock {
    fn drop(&mut self) {
        // Opening in both directions does not block.
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&self.0);
        thread::sleep(Duration::from_millis(100));
        drop(opened);
    }
}

/// A completion waits for a store that does not answer only until the timeout; then its prompt is computed. A client
/// that has disconnected delays nobody.
#[test]
fn a_store_that_hangs_holds_nobody_up() {
    let directory = tempfile::tempdir().expect("a directory");
    let start = |timeout: Duration| {
        let cold = in_directory(directory.path(), b"a", |_, _| ());
        above(&ColdCache { timeout, ..cold })
    };
    let submission = |last| Submission {
        prompt: long_prompt(last),
        continuation: small::continuation(4),
        salt: Vec::new(),
    };
    let prompt = long_prompt(1).into_iter().rev().collect();
    let other = Submission { prompt, ..submission(1) };
    let (mut first, _) = start(TIMEOUT);
    let _events = [&submission(1), &other].map(|new| submit(&first.queue(), new));
    while first.step().expect("no step fails") == Progress::Ran {}
    drop(first);

    let short = Duration::from_secs(3);
    let (mut scheduler, metrics) = start(short);
    let folder = std::fs::read_dir(directory.path().join("v1")).expect("a folder");
    let objects = Vec::from_iter(folder.map(|object| object.expect("a file").path()));
    assert_eq!(objects.len(), 2, "both were stored");
    let unblock = objects.into_iter().map(|object| {
        std::fs::remove_file(&object).expect("a file");
        // Opening it blocks until there is a writer.
        let made = std::process::Command::new("mkfifo").arg(&object).status().expect("mkfifo");
        assert!(made.success());
        Unblock(object)
    });
    let unblock = Vec::from_iter(unblock);
    let begin = Instant::now();
    // Without tokens to generate, there is no prompt to compute.
    let continuation = small::continuation(0);
    let mut nothing = submit(&scheduler.queue(), &Submission { continuation, ..submission(4) });
    assert_eq!(scheduler.step().ok(), Some(Progress::Idle));
    assert_eq!(received(&mut nothing), (Vec::new(), Some(Event::Finished(Finish::Length))));
    assert!(begin.elapsed() < short, "it waited for the store");
    let begin = Instant::now();
    drop(submit(&scheduler.queue(), &submission(3)));
    let mut events = submit(&scheduler.queue(), &submission(2));
    while scheduler.step().expect("no step fails") == Progress::Ran {}
    assert!(begin.elapsed() >= short, "it was waited for");
    assert!(begin.elapsed() < Duration::from_secs(120), "but not longer");
    let (tokens, end) = received(&mut events);
    assert_eq!((tokens, end), (alone_to_long(2, 4), Some(Event::Finished(Finish::Length))));
    // The store has read nothing since, so that the next completion does not wait for it.
    let waited = || milliseconds(&metrics, "dsv4_request_queue_time_seconds_sum");
    let before = waited();
    let mut events = submit(&scheduler.queue(), &other);
    while scheduler.step().expect("no step fails") == Progress::Ran {}
    assert!(received(&mut events).1.is_some());
    assert!(waited() - before < short.as_millis() as u64, "{before} and {} ms", waited());
    // Dropping the scheduler waits for the store's thread, which ends after an empty write.
    drop(unblock);
    drop(scheduler);
}

/// A server whose scheduler ends with an error or a panic reports that, also while its store hangs: it waits for the
/// store, but not long.
#[test]
fn a_server_says_why_it_ends_while_its_store_hangs() {
    let prompts = [long_prompt(1), long_prompt(1).into_iter().rev().collect::<Vec<u32>>()];
    let directory = tempfile::tempdir().expect("a directory");
    let mut objects = Vec::new();
    for prompt in &prompts {
        let cold = in_directory(directory.path(), b"a", |_, _| ());
        let (mut scheduler, _) = above_on(&small::without_kernels(), &cold);
        let (prompt, continuation) = (prompt.clone(), small::continuation(1));
        let _events =
            submit(&scheduler.queue(), &Submission { prompt, continuation, salt: Vec::new() });
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        drop(scheduler);
        let folder = std::fs::read_dir(directory.path().join("v1")).expect("a folder");
        let paths = folder.map(|object| object.expect("a file").path());
        let new: Vec<_> = paths.filter(|path| !objects.contains(path)).collect();
        objects.extend(new);
    }
    // The first object is damaged, and the report of that panics; reading the second one hangs.
    let [damaged, hangs] = &objects[..] else { panic!("{objects:?}") };
    std::fs::write(damaged, b"").expect("nothing");
    let whole = std::fs::read(hangs).expect("an object");
    for panics in [false, true] {
        std::fs::write(hangs, &whole).expect("room");
        let device = small::without_kernels();
        let limits = EngineLimits { checkpoints: 2, host_bytes: 16 << 20, ..small::limits(2, 6) };
        let cold = in_directory(directory.path(), b"a", |error, _| panic!("told: {error}"));
        let cold = Some(ColdCache { timeout: Duration::from_millis(300), ..cold });
        let settings = Settings { cold, ..client::settings() };
        let server = Running::of(small::engine(&device, &HASH, limits), settings);
        // The server has already listed it, so it can be replaced by a FIFO now.
        std::fs::remove_file(hangs).expect("a file");
        let made = std::process::Command::new("mkfifo").arg(hangs).status().expect("mkfifo");
        assert!(made.success());
        let unblock = Unblock(hangs.clone());
        let body = |prompts: &[Vec<u32>]| {
            json!({ "model": "small/hash", "prompt": prompts, "max_tokens": 2 }).to_string()
        };
        let mut statuses = Vec::new();
        for _ in 0..if panics { 1 } else { 3 } {
            let asked = if panics { &prompts[..] } else { &prompts[1..] };
            if !panics {
                device.backend().fail(20, failing::Failure::Instead);
            }
            statuses.push(server.send("POST", "/v1/completions", &body(asked)).status);
        }
        let end = server.ended_within(Duration::from_secs(60));
        if panics {
            assert!(matches!(end, Err(ServerError::Panicked)), "{end:?}");
            assert_eq!(statuses, [500]);
        } else {
            assert!(matches!(end, Err(ServerError::StepsFail { steps: 3, .. })), "{end:?}");
            assert_eq!(statuses, [500; 3]);
        }
        drop(unblock);
        std::fs::remove_file(hangs).expect("a FIFO");
    }
}

/// A device error during a transfer to host memory, while nothing runs, counts as one failed step. If the device always
/// fails, the server ends.
#[test]
fn a_device_that_fails_between_steps_counts_as_one_that_fails() {
    let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
    let limits = EngineLimits { checkpoints: 2, host_bytes: 16 << 20, ..small::limits(2, 6) };
    let engine = small::engine(&device, &HASH, limits);
    let metrics = Metrics::new().expect("metrics");
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let submission = |last| Submission {
        prompt: long_prompt(last),
        continuation: small::continuation(4),
        salt: last.to_le_bytes().to_vec(),
    };
    // A client that disconnects while the checkpoint of its prompt is being transferred.
    let leave = |scheduler: &mut Scheduler<_>, last| {
        let events = submit(&scheduler.queue(), &submission(last));
        while !scheduler.engine().cache().has_tier_transfers() {
            assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        }
        drop(events);
    };
    leave(&mut scheduler, 1);
    device.backend().fail(0, failing::Failure::Instead);
    assert_eq!(scheduler.step().ok(), Some(Progress::Idle));
    assert!(device.backend().failed().is_some(), "nothing failed");
    assert_eq!(value(&metrics, "dsv4_steps_failed_total"), 1);
    let mut events = submit(&scheduler.queue(), &submission(2));
    while scheduler.step().expect("no step fails any more") == Progress::Ran {}
    assert_eq!(received(&mut events).0, alone_to_long(2, 4));

    leave(&mut scheduler, 3);
    let mut failed = Vec::new();
    for _ in 0..3 {
        device.backend().fail(0, failing::Failure::Instead);
        failed.extend(scheduler.step().err());
    }
    assert!(matches!(failed[..], [ServerError::StepsFail { steps: 3, .. }]), "{failed:?}");
}

//! Compares with Dynamo's own indexer: it has the same blocks as the cache, whatever messages it misses.
//!
//! The indexer is a program of the Python package `ai-dynamo-runtime`, version 1.6.1, of 200 MB. `cargo xtask
//! scale-test` installs it into target/ and runs these tests. To run them by hand, with a trace:
//!
//! ```bash
//! python3 -m venv target/dynamo && target/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
//! export DSV4_DYNAMO_PYTHON=$PWD/target/dynamo/bin/python DSV4_TRACE=FILE
//! cargo test --release -p dsv4-kv-events --test wire -- --ignored
//! ```

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dsv4_kv_events::{Published, Publisher, PublisherOptions};
use serde_json::{Value, json};

use crate::at_same_endpoints;
use crate::cache::Cache;
use crate::http::ask;
use crate::relay::Relay;
use crate::requests::Requests;
use crate::source::Source;

const TIMEOUT: Duration = Duration::from_secs(20);

/// The indexer's process, which is killed on drop.
pub struct Indexer {
    program: Child,
    port: u16,
}

impl Drop for Indexer {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

impl Indexer {
    pub fn start() -> Self {
        let python = std::env::var("DSV4_DYNAMO_PYTHON");
        let python = python.expect("DSV4_DYNAMO_PYTHON names a python that has ai-dynamo-runtime");
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(python);
        command.args(["-m", "dynamo.indexer", "--port", &free.to_string()]);
        let program = command.stderr(Stdio::inherit()).spawn().expect("the indexer starts");
        let indexer = Self { program, port: free };
        wait_for("the indexer", || ask(free, "GET", "/workers", None).is_ok());
        indexer
    }

    /// Connects it to a publisher.
    pub fn register(&self, publisher: &Publisher) {
        self.register_at(publisher.endpoint(), Some(publisher.replay_endpoint()));
    }

    /// Connects it to an endpoint of messages, and to one for missed messages.
    fn register_at(&self, endpoint: &str, replay_endpoint: Option<&str>) {
        let body = json!({
            "instance_id": 1,
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "model_name": "model",
            "block_size": 128,
        });
        ask(self.port, "POST", "/register", Some(&body)).expect("registers");
        // It answers before it has subscribed.
        std::thread::sleep(Duration::from_millis(300));
    }

    fn signal(&self, signal: &str) {
        let process = self.program.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }

    /// The blocks that it has, each with its parent.
    fn dump(&self) -> BTreeMap<u64, Option<u64>> {
        let dump = ask(self.port, "GET", "/dump", None).expect("dumps");
        let mut blocks = BTreeMap::new();
        for event in dump["model:default"]["events"].as_array().into_iter().flatten() {
            let stored = &event["event"]["data"]["stored"];
            let mut parent = stored["parent_hash"].as_u64();
            for block in stored["blocks"].as_array().into_iter().flatten() {
                let hash = block["block_hash"].as_u64().expect("a hash");
                assert_eq!(blocks.insert(hash, parent), None, "{hash} is there twice");
                parent = Some(hash);
            }
        }
        blocks
    }

    /// The part of a prompt that it finds in the cache.
    fn query(&self, tokens: &[u32]) -> Value {
        let body = json!({"model_name": "model", "token_ids": tokens});
        ask(self.port, "POST", "/query", Some(&body)).expect("answers")
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < TIMEOUT, "{what} is not there in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn options() -> PublisherOptions {
    let any_port = "tcp://127.0.0.1:0".to_owned();
    let replay_endpoint = any_port.clone();
    let heartbeat = Duration::from_millis(100);
    PublisherOptions {
        endpoint: any_port,
        replay_endpoint,
        heartbeat,
        ..PublisherOptions::default()
    }
}

/// Compares until nothing differs. The cache does not change meanwhile; the publisher's next message tells the indexer
/// that it has missed others.
pub fn compare(
    indexer: &Indexer,
    cache: &mut impl Source,
    publisher: &mut Publisher,
) -> Result<(), String> {
    wait_for("the publisher", || {
        cache.publish(publisher) == Published::Nothing
            && publisher.stats().resident == u64::from(cache.blocks())
    });
    let dump = cache.dump().0;
    let want: BTreeMap<_, _> = dump.iter().map(|(&hash, block)| (hash, block.parent)).collect();
    let since = Instant::now();
    loop {
        let got = indexer.dump();
        if got == want {
            return Ok(());
        }
        if since.elapsed() > Duration::from_secs(10) {
            let missing = want.keys().filter(|hash| !got.contains_key(hash)).count();
            let (has, should, stats) = (got.len(), want.len(), publisher.stats());
            return Err(format!("{has} of {should} blocks, {missing} are missing: {stats:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn traffic(cache: &mut impl Source, publisher: &mut Publisher, steps: u32) {
    for _ in 0..steps {
        cache.operation();
        cache.publish(publisher);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Dynamo identifies a block by its tokens and its adapter, not by its salt. So each list has one salt.
const ROOTS: [&[(&str, &str)]; 3] = [&[("", "")], &[("", ""), ("", "adapter")], &[("tenant", "")]];

#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamos_index_is_the_caches() {
    for roots in ROOTS {
        let indexer = Indexer::start();
        let mut cache = Cache::new(1, (300, 4000), roots);
        (0..20).for_each(|_| cache.operation());
        let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
        // The indexer connects late.
        traffic(&mut cache, &mut publisher, 50);
        indexer.register(&publisher);
        for _ in 0..10 {
            traffic(&mut cache, &mut publisher, 50);
            compare(&indexer, &mut cache, &mut publisher).unwrap();
        }
        // Queries a prompt of one cached block. The result has the instance, the rank and the number of tokens.
        let dump = cache.dump().0;
        let mut at_root = dump.values().filter(|block| block.parent.is_none());
        let tokens = at_root.find(|block| block.keys.as_deref() != Some(&["adapter".to_owned()]));
        let score = indexer.query(&tokens.expect("a first block").tokens);
        assert_eq!(score["scores"]["1"]["0"], json!(128), "{score}");
    }
}

/// The log overflows, and few messages are kept for a late indexer.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_starts_anew_with_a_snapshot() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(2, (300, 16), ROOTS[1]);
    let options =
        PublisherOptions { replay_bytes: 30_000, snapshot_interval: Duration::ZERO, ..options() };
    let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
    traffic(&mut cache, &mut publisher, 200);
    indexer.register(&publisher);
    for _ in 0..10 {
        traffic(&mut cache, &mut publisher, 50);
        compare(&indexer, &mut cache, &mut publisher).unwrap();
    }
    assert!(publisher.stats().snapshots > 10, "{:?}", publisher.stats());
}

/// A publisher ends and another one starts at the same ports, 100 times.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_notices_restarts() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(3, (300, 4000), ROOTS[1]);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    indexer.register(&publisher);
    for _ in 0..100 {
        traffic(&mut cache, &mut publisher, 20);
        let again = at_same_endpoints(&publisher, options());
        drop(publisher);
        (0..5).for_each(|_| cache.operation());
        publisher = Publisher::start(&mut cache.tree, again).unwrap();
        // The indexer connects again by itself.
        compare(&indexer, &mut cache, &mut publisher).unwrap();
    }
}

/// The same with numbers that start at 0 again: the indexer takes all messages for old ones.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_would_be_frozen_by_numbers_from_zero() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(4, (300, 4000), ROOTS[0]);
    let options = PublisherOptions { first_sequence: Some(0), ..options() };
    let mut publisher = Publisher::start(&mut cache.tree, options.clone()).unwrap();
    indexer.register(&publisher);
    traffic(&mut cache, &mut publisher, 200);
    compare(&indexer, &mut cache, &mut publisher).unwrap();
    let again = at_same_endpoints(&publisher, options);
    drop(publisher);
    publisher = Publisher::start(&mut cache.tree, again).unwrap();
    traffic(&mut cache, &mut publisher, 20);
    let compared = compare(&indexer, &mut cache, &mut publisher);
    assert!(compared.is_err_and(|difference| !difference.contains(", 0 are missing")));
}

/// A limit of this indexer. If a later version lifts it, this test fails, and the documentation must change.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_takes_blocks_of_two_salts_for_one() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(1, (300, 4000), &[("", ""), ("tenant", "")]);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    indexer.register(&publisher);
    traffic(&mut cache, &mut publisher, 120);
    let compared = compare(&indexer, &mut cache, &mut publisher);
    println!("{compared:?}");
    assert!(compared.is_err_and(|difference| !difference.contains(", 0 are missing")));
}

/// A cache on a device runs requests, and some of its messages to the indexer are lost. With replay, its index equals
/// the cache; an indexer without replay differs.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamos_index_is_the_managers_whatever_is_lost() {
    let mut cache = Requests::new(1);
    let mut publisher = Publisher::start(&mut cache.fed.manager, options()).unwrap();
    let [relay, lossy] = [1, 1].map(|seed| Relay::start(publisher.endpoint(), seed));
    let [asks, cannot] = [(); 2].map(|()| Indexer::start());
    asks.register_at(&relay.endpoint, Some(publisher.replay_endpoint()));
    cannot.register_at(&lossy.endpoint, None);
    for _ in 0..8 {
        traffic(&mut cache, &mut publisher, 40);
        compare(&asks, &mut cache, &mut publisher).unwrap();
    }
    let (stats, (passed, lost)) = (publisher.stats(), relay.counts());
    println!(
        "{} requests, {} tokens reused, {passed} messages passed and {lost} lost, {stats:?}",
        cache.ended, cache.reused
    );
    assert!(lost > 50 && stats.removed > 50 && stats.replays > 10, "{lost} lost, {stats:?}");
    assert!(cache.ended > 50 && cache.reused > 1000, "{}, {}", cache.ended, cache.reused);
    // There was only the first snapshot, so only replay has repaired the losses.
    assert_eq!(stats.snapshots, 1);
    let compared = compare(&cannot, &mut cache, &mut publisher);
    assert!(compared.is_err(), "without replay {lost} messages are missing");
}

/// The indexer is stopped until the publisher's limit of unsent bytes is reached and it is disconnected. When it
/// continues, it asks for the messages that it missed.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_that_was_stopped_catches_up() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(8, (300, 4000), ROOTS[1]);
    let stall = Duration::from_millis(100);
    let options = PublisherOptions { unsent_bytes: 1 << 20, stall, ..options() };
    let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
    indexer.register(&publisher);
    traffic(&mut cache, &mut publisher, 50);
    compare(&indexer, &mut cache, &mut publisher).unwrap();
    for round in 1..=3 {
        let replays = publisher.stats().replays;
        indexer.signal("-STOP");
        wait_for("the end of its connection", || {
            (0..50).for_each(|_| {
                cache.operation();
                Source::publish(&mut cache, &mut publisher);
            });
            publisher.stats().disconnects >= round
        });
        indexer.signal("-CONT");
        compare(&indexer, &mut cache, &mut publisher).unwrap();
        let stats = publisher.stats();
        assert!(stats.replays > replays && stats.snapshots == 1, "round {round}: {stats:?}");
    }
}
